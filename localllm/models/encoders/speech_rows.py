"""Texts of windows of sound that a decoder writes side by side, each beside the encoded sound of its window.

A model says how a window is written as a generator (`Writing`): it yields the tokens that are read next and is sent
their logits. `SpeechRows` runs the generators of all windows: new windows join between two steps. The next tokens of
all texts are one pass. The decoder is localllm's own (families/encoder_decoder.py); keys and values of a window's sound
are computed once, when it joins. On a CPU the passes of a token each run in the native library, eight rows at a time.
Does not know: how sound is encoded, which token follows another, queues.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from localllm.kernels.cpu.native.library import native
from localllm.kernels.layer_cache import LayerKV
from localllm.kernels.paged_attention import kv_cache_shape
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.decoder.native_program import (
    DecodeRows,
    NativeProgram,
    NotSupportedNatively,
    open_native_program,
)
from localllm.models.encoders.recipe import MOST_BEAMS
from localllm.models.inputs import ForwardInputs, GroupInputs, SourceInputs

BLOCK_SIZE = 16  # positions of a block
LOOP_TOKENS, LOOP_TIMES = 8, 6
"""A text ends when up to eight tokens are repeated more than six times."""

Watch = Callable[[int, Tensor, Tensor], None]
"""Called with a layer's number, its queries [n, heads, head_dim] and the keys of the sound [heads, S, head_dim]."""


class Read(NamedTuple):
    """Tokens that the rows of a window read next, from position `first` on."""

    token_ids: Sequence[Sequence[int]]  # of each row, as many
    first: int
    wanted: Sequence[int] = (-1,)  # the tokens whose logits are sent
    parents: Sequence[int] = ()  # for each row the one whose keys and values it continues; none: its own
    watch: Watch | None = None


Writing = Generator[Read, Tensor, Any]
"""A window that is written: is sent logits [rows, wanted, vocab] fp32 for what it yields, and returns its result."""


class SpeechModel(Protocol):
    """A model whose texts are written by rows."""

    decoder: DecoderModel
    device: torch.device
    source_len: int  # most states of a window
    text_len: int  # most tokens of a text, what is before it included

    def encode(self, samples: Any) -> Tensor:
        """Return the states [S, hidden] that the decoder attends to, of int16 samples [n] at 16 kHz."""
        ...

    def write(self, samples: Any, asked: Any, ratio_of: Callable[[Sequence[int]], float]) -> Writing:
        """Return how a window is written. ratio_of: the compression ratio of the text of some tokens."""
        ...


class RowBlocks(NamedTuple):
    """Keys and values of all layers for some rows, each in blocks of its own."""

    layers: list[LayerKV]
    table: Tensor  # [rows, blocks] int32

    @staticmethod
    def of(model: DecoderModel, rows: int, length: int, dtype: torch.dtype | None = None) -> RowBlocks:
        """Return blocks, not filled. length: positions of each row. dtype: None: the model's."""
        spec, blocks = model.spec, -(-length // BLOCK_SIZE)
        shape = kv_cache_shape(rows * blocks, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)

        def empty() -> Tensor:
            return torch.empty(shape, dtype=dtype or model.dtype, device=model.device)

        layers = [LayerKV(empty(), empty()) for _ in range(spec.num_layers)]
        return RowBlocks(layers, torch.arange(rows * blocks, dtype=torch.int32, device=model.device).view(rows, -1))

    def slots(self, row: int, first: int, stop: int) -> Tensor:
        """Return the slots [stop - first] int64 of positions of a row."""
        at = torch.arange(first, stop, device=self.table.device)
        return self.table[row, at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE

    def continue_rows(self, rows: Sequence[int], parents: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of each parent to its row. A parent may be one of the rows."""
        blocks = -(-length // BLOCK_SIZE)
        moved = [(row, parent) for row, parent in zip(rows, parents, strict=True) if row != parent]
        if not moved or not blocks:
            return
        to, start = (self.table[list(each), :blocks].flatten().long() for each in zip(*moved, strict=True))
        for layer in self.layers:
            for kept in (layer.k, layer.v):
                kept[:, to] = kept[:, start]


@dataclass(slots=True)
class _Text:
    """A window that is being written."""

    source: int  # row of the sources
    length: int  # states of its sound
    rows: list[int]  # rows of the texts
    writing: Writing
    read: Read


class SpeechRows:
    """The windows that one model writes, each under the key that it joined with."""

    def __init__(self, model: SpeechModel, num_sources: int, *, halves: bool = False) -> None:
        """num_sources: most windows at once. halves: keep what is read of the sound in 16 bits on a CPU."""
        self._model, self._decoder = model, model.decoder
        dtype = sources_dtype(model.decoder.dtype, model.decoder.device, halves=halves)
        self._sources = RowBlocks.of(model.decoder, num_sources, model.source_len, dtype)
        num_rows = max(num_sources, MOST_BEAMS)
        self._texts = RowBlocks.of(model.decoder, num_rows, model.text_len)
        self._free_sources, self._free_rows = list(range(num_sources)), list(range(num_rows))
        self._written: dict[Any, _Text] = {}
        self._program: NativeProgram | None = None
        self._may_be_native = model.decoder.device.type == "cpu"

    @property
    def keys(self) -> list[Any]:
        """The keys of the windows, in the order in which they joined."""
        return list(self._written)

    @property
    def num_free(self) -> int:
        """Return how many more windows of one row can join."""
        return min(len(self._free_sources), len(self._free_rows))

    def fits(self, beams: int) -> bool:
        """Return whether a window of `beams` rows can join."""
        return bool(self._free_sources) and beams <= len(self._free_rows)

    @torch.inference_mode()
    def join(self, key: Any, samples: Any, writing: Writing, beams: int = 1) -> None:
        """Encode a window's sound. Its text begins with the next step. If it fails, nothing is held."""
        assert self.fits(beams), "there is no room"
        states = self._model.encode(samples)
        source, rows = min(self._free_sources), sorted(self._free_rows)[:beams]
        self._decoder.store_source(states, self._sources.layers, self._sources.slots(source, 0, len(states)))
        text = _Text(source, len(states), rows, writing, next(writing))
        self._free_sources.remove(source)
        self._free_rows = [row for row in self._free_rows if row not in rows]
        self._written[key] = text

    @torch.inference_mode()
    def step(self) -> list[tuple[Any, Any]]:
        """Let every window read what it yields next. Return the keys of the windows that have ended, each with its
        result, or with its error if that window alone has failed. Raises the error of a pass; then nothing is held."""
        texts, logits = self._written, dict[Any, Tensor]()
        try:
            for text in texts.values():
                if text.read.parents:
                    parents = [text.rows[parent] for parent in text.read.parents]
                    self._texts.continue_rows(text.rows[: len(parents)], parents, text.read.first)
            alone = {key: text for key, text in texts.items() if not self._is_next_token(text.read)}
            logits |= {key: self._read(text) for key, text in alone.items()}
            logits |= self._next_tokens({key: text for key, text in texts.items() if key not in alone})
        except BaseException:
            for key in self.keys:
                self.drop(key)
            raise
        ended = list[tuple[Any, Any]]()
        for key, text in list(texts.items()):
            try:
                text.read = text.writing.send(logits[key])
                continue
            except StopIteration as end:
                ended.append((key, end.value))
            except Exception as error:
                ended.append((key, error))
            self.drop(key)
        return ended

    def drop(self, key: Any) -> None:
        """Forget a window."""
        text = self._written.pop(key)
        text.writing.close()
        self._free_sources.append(text.source)
        self._free_rows += text.rows

    @staticmethod
    def _is_next_token(read: Read) -> bool:
        return len(read.token_ids[0]) == 1 and read.first > 0 and read.watch is None

    def _next_tokens(self, texts: dict[Any, _Text]) -> dict[Any, Tensor]:
        """Return logits [rows, 1, V] of the next token of each row of some texts, in as few passes as possible."""
        rows = [(text, row, tokens[0]) for text in texts.values()
                for row, tokens in zip(text.rows, text.read.token_ids, strict=False)]  # fmt: skip
        program = self._native() if rows else None
        most = len(rows) if program is None else program.most_rows
        passes = [rows[first : first + most] for first in range(0, len(rows), max(1, most))]
        found = [self._decode(part) if program is None else self._decode_natively(program, part) for part in passes]
        parts = torch.cat(found).split([len(text.read.token_ids) for text in texts.values()]) if found else ()
        return {key: part[:, None] for key, part in zip(texts, parts, strict=True)}

    def _read(self, text: _Text) -> Tensor:
        """Return logits [rows, wanted, V] of a text that reads several tokens."""
        read, count = text.read, len(text.read.token_ids[0])
        used = list(zip(text.rows, read.token_ids, strict=False))
        stop, rows = read.first + count, len(used)
        ids = torch.tensor([token for _, tokens in used for token in tokens], device=self._decoder.device)
        places = [row * count + (place % count) for row in range(rows) for place in read.wanted]
        logits = self._forward(
            ids, [position for _ in used for position in range(read.first, stop)],
            torch.cat([self._texts.slots(row, read.first, stop) for row, _ in used]), [row for row, _ in used],
            [stop] * rows, [text.source] * (rows * count), [text.length] * (rows * count), places, read.watch,
        )  # fmt: skip
        return logits.view(rows, len(read.wanted), -1)

    def _decode(self, rows: Sequence[tuple[_Text, int, int]]) -> Tensor:
        """Return logits [R, V] of R rows, (text, row, token)."""
        firsts = [text.read.first for text, _, _ in rows]
        slots = torch.cat([self._texts.slots(row, text.read.first, text.read.first + 1) for text, row, _ in rows])
        ids = torch.tensor([token for _, _, token in rows], device=self._decoder.device)
        return self._forward(
            ids, firsts, slots, [row for _, row, _ in rows], [first + 1 for first in firsts],
            [text.source for text, _, _ in rows], [text.length for text, _, _ in rows], range(len(rows)),
        )  # fmt: skip

    def _forward(
        self, ids: Tensor, positions: Sequence[int], slots: Tensor, rows: Sequence[int], contexts: Sequence[int],
        sources: Sequence[int], lengths: Sequence[int], places: Iterable[int], watch: Watch | None = None,
    ) -> Tensor:  # fmt: skip
        """Return logits [places, V] fp32 of a pass over the tokens of B rows, as many of each.

        ids [T], positions, slots, sources and lengths: of each token. rows, contexts: of each row.
        """
        device, count = ids.device, len(ids) // len(rows)
        given = None
        if watch is not None:
            keys, length = self._sources.table[sources[0]].long(), lengths[0]

            def given(layer: int, queries: Tensor) -> None:
                kept = self._sources.layers[layer].k[:, keys].flatten(1, 2)[:, :length]
                watch(layer, queries, kept.to(queries.dtype))

        at = torch.tensor(list(places), device=device)
        hidden = self._decoder.forward(
            ForwardInputs(
                token_ids=ids, positions=torch.tensor(positions, device=device),
                groups=(GroupInputs(self._texts.table[list(rows)], slots),),
                context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
                cu_seqlens_q=torch.arange(0, len(ids) + 1, count, dtype=torch.int32, device=device),
                logits_indices=at, num_decodes=len(rows) if count == 1 else 0, query_lens=(count,) * len(rows),
                context_lens_host=tuple(contexts), source=self._source(sources, lengths)._replace(watch=given),
            ),
            self._texts.layers,
        )  # fmt: skip
        logits = self._decoder.compute_logits(hidden.index_select(0, at))
        assert logits is not None, "the model is on one device"
        return logits

    def _source(self, sources: Sequence[int], lengths: Sequence[int]) -> SourceInputs:
        """Return what tokens attend to. sources, lengths: of each token."""
        table = self._sources.table[list(sources)]
        lens = torch.tensor(lengths, dtype=torch.int32, device=table.device)
        return SourceInputs(self._sources.layers, table, lens, tuple(lengths))

    def _native(self) -> NativeProgram | None:
        if self._program is None and self._may_be_native:
            try:
                self._program = open_native_program(self._decoder, self._texts.layers, self._sources.layers)
            except NotSupportedNatively:
                self._may_be_native = False
        return self._program

    def _decode_natively(self, program: NativeProgram, rows: Sequence[tuple[_Text, int, int]]) -> Tensor:
        """Return logits [R, V] of R rows, (text, row, token)."""
        table = self._texts.table
        at = np.array([text.read.first for text, _, _ in rows])
        own = np.array([row for _, row, _ in rows])
        blocks = table.numpy()[own, at // BLOCK_SIZE].astype(np.int64)
        return program.forward(DecodeRows(
            np.array([token for _, _, token in rows]), at, (blocks * BLOCK_SIZE + at % BLOCK_SIZE)[None],
            (table.data_ptr() + own * table.stride(0) * table.element_size())[None],
            source=self._source([text.source for text, _, _ in rows], [text.length for text, _, _ in rows]),
        )).clone()  # fmt: skip


def sources_dtype(dtype: torch.dtype, device: torch.device, *, halves: bool) -> torch.dtype:
    """Return the type in which keys and values of the sound are kept: half of float32 where the native library reads
    them, which is bound by the memory."""
    return torch.float16 if halves and dtype == torch.float32 and device.type == "cpu" and native() else dtype


def looped_tokens(token_ids: Sequence[int]) -> int:
    """Return how many tokens the end repeats too often; 0: none."""
    for size in range(1, LOOP_TOKENS + 1):
        tail = list(token_ids[-size * (LOOP_TIMES + 1) :])
        if len(tail) == size * (LOOP_TIMES + 1) and tail == tail[:size] * (LOOP_TIMES + 1):
            return size
    return 0


class WrittenText(NamedTuple):
    """The text of one attempt."""

    token_ids: tuple[int, ...]  # without the end
    logprobs: tuple[float, ...]  # of each token
    avg_logprob: float  # of the tokens and the end
    is_cut: bool  # it had not ended after the most tokens, or repeated itself


Rule = Callable[[Tensor, Sequence[Sequence[int]]], Tensor]
"""Returns logits [rows, V] in which tokens that may not follow the texts so far are -inf."""


def draw_text(
    logits: Tensor, first: int, ends: Collection[int], most: int, rule: Rule, temperature: float = 0.0, seed: int = 0
) -> Generator[Read, Tensor, WrittenText]:
    """Write one text token by token: the likeliest, or at a temperature above 0 a draw that depends on seed and text
    alone. logits [V]: after the tokens before the text, which has positions from `first` on and at most `most` tokens.
    ends: tokens that end it."""
    draws, ids, chosen, total = torch.Generator().manual_seed(seed), list[int](), list[float](), 0.0
    while True:
        allowed = rule(logits[None], [ids])[0]
        token = int(allowed.argmax())
        if temperature > 0:
            noise = torch.empty(len(allowed)).exponential_(generator=draws).to(allowed.device)
            token = int((allowed / temperature - noise.log()).argmax())
        logprob = float(allowed[token] - allowed.logsumexp(dim=-1))
        total += logprob
        if token in ends:
            return WrittenText(tuple(ids), tuple(chosen), total / (len(ids) + 1), is_cut=False)
        ids.append(token)
        chosen.append(logprob)
        if len(ids) >= most or (len(ids) % 8 == 0 and looped_tokens(ids)):
            return WrittenText(tuple(ids), tuple(chosen), total / (len(ids) + 1), is_cut=True)
        logits = (yield Read([[token]], first + len(ids) - 1))[0, -1]


def search_text(
    logits: Tensor, first: int, ends: Collection[int], most: int, rule: Rule, beams: int
) -> Generator[Read, Tensor, WrittenText]:
    """Write the text with the largest mean log probability that a search over `beams` partial texts finds. It is over
    when as many texts have ended. Arguments: as of `draw_text`."""
    texts, ended = [WrittenText((), (), 0.0, is_cut=True)], list[WrittenText]()
    logits = logits[None]
    while True:
        allowed = rule(logits, [text.token_ids for text in texts])
        each = allowed.log_softmax(dim=-1)
        sums = each + torch.tensor([[sum(text.logprobs)] for text in texts], device=each.device)
        best, places = sums.flatten().topk(min(2 * beams, sums.numel()))
        parents, tokens = list[int](), list[int]()
        for rank, (score, place) in enumerate(zip(best.tolist(), places.tolist(), strict=True)):
            parent, token = divmod(place, sums.shape[1])
            if score == float("-inf") or len(tokens) == beams:
                break
            if token not in ends:
                parents.append(parent)
                tokens.append(token)
            elif rank < beams:
                text = texts[parent]
                ended.append(text._replace(avg_logprob=score / (len(text.token_ids) + 1), is_cut=False))
        texts = [
            WrittenText(
                (*texts[parent].token_ids, token), (*texts[parent].logprobs, float(each[parent, token])), 0.0, True
            )
            for parent, token in zip(parents, tokens, strict=True)
        ]
        length = len(texts[0].token_ids) if texts else 0
        if len(ended) >= beams or not texts:
            return max(ended, key=lambda text: text.avg_logprob)
        if length >= most or (length % 8 == 0 and looped_tokens(texts[0].token_ids)):
            cut = [text._replace(avg_logprob=sum(text.logprobs) / (length + 1)) for text in texts]
            return max(ended or cut, key=lambda text: text.avg_logprob)
        logits = (yield Read([[token] for token in tokens], first + length - 1, parents=parents))[:, -1]
