"""Whisper: an encoder of 30 s of sound, and a decoder that writes text with timestamps (Radford et al. 2022).

The encoder is transformers' module. The decoder is localllm's own (families/encoder_decoder.py): keys and values of the
encoded sound are computed once for a window, the text's are kept for all rows of a batch. On a CPU, steps of a few
rows run in the native library. Rules of the paper decide what may be written next (`restrict`), and whether a window
is written again with more chance (`Attempt.is_accepted`).

    <|startofprev|> text before <|startoftranscript|><|en|><|transcribe|><|0.00|> a text<|1.24|><|1.24|> more<|2.00|>

Does not know: files, windows, words, queues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.files.json_file import read_json_object
from localllm.kernels.layer_cache import LayerKV
from localllm.kernels.paged_attention import kv_cache_shape
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.decoder.native_program import (
    MAX_ROWS,
    DecodeRows,
    NativeProgram,
    NotSupportedNatively,
    open_native_program,
)
from localllm.models.encoders.source import SourceEncoder, load_encoder
from localllm.models.inputs import ForwardInputs, GroupInputs, SourceInputs
from localllm.models.loader import load_model
from localllm.models.read_spec import read_spec
from localllm.models.transformers_backend.config_class import load_config

RATE, WINDOW_S, HOP, FFT = 16_000, 30, 160, 400
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Temperatures of the attempts at a window, until one is accepted."""
LEAST_LOGPROB, MOST_RATIO, SILENCE = -1.0, 2.4, 0.6
"""Least mean log probability and most compression ratio of an accepted text; least probability of no speech in a window
that is left empty if its text is not likely."""
FIRST_TIME_S = 1.0
"""Latest time of the first timestamp, unless generation_config.json has another one."""
LOOP_TOKENS, LOOP_TIMES = 8, 6
"""An attempt ends when at most so many tokens are repeated more often than that."""


class Decoding(NamedTuple):
    """The way in which a window is written."""

    language: str | None = None  # code, such as en; None: the model finds it
    translate: bool = False  # into English
    prompt: tuple[int, ...] = ()  # tokens of a text before the window: its names, its style
    temperatures: tuple[float, ...] = TEMPERATURES
    seed: int = 0
    words: bool = False  # with the times of tokens


class AlignedToken(NamedTuple):
    start_s: float  # within its window
    stop_s: float
    probability: float


class SpokenSegment(NamedTuple):
    token_ids: tuple[int, ...]  # of text, without timestamps
    start_s: float  # within its window
    stop_s: float
    tokens: tuple[AlignedToken, ...] = ()  # with times within the segment; none: they were not asked for


class SpokenText(NamedTuple):
    """The text of a window; no segments: no speech."""

    language: str
    segments: tuple[SpokenSegment, ...]
    temperature: float
    avg_logprob: float
    no_speech_prob: float


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Ids of the tokens that are not text, of generation_config.json."""

    start: int
    end: int
    no_timestamps: int
    languages: Mapping[str, int]  # by code; empty: a model of English alone
    tasks: Mapping[str, int]
    before: int | None  # before the text before a window
    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]
    latest_first: int  # steps of the latest first timestamp
    most_prompt: int  # tokens of the text before a window that are read, the last ones; 0: none
    alignment_heads: tuple[
        tuple[int, int], ...
    ] = ()  # (layer, head) that attend to the sound of a token; none: unknown

    @property
    def first_time(self) -> int:
        return self.no_timestamps + 1

    @property
    def no_speech(self) -> int:
        return self.no_timestamps - 1

    @staticmethod
    def of(config: Mapping[str, Any], positions: int, path: Path) -> SpecialTokens:
        """Read generation_config.json. positions: tokens of the decoder's context. Raises `UnsupportedModel` if
        Whisper's fields are missing."""
        needed = ("decoder_start_token_id", "eos_token_id", "no_timestamps_token_id")
        if missing := [name for name in needed if not isinstance(config.get(name), int)]:
            why = f"It lacks {', '.join(missing)}, as the first Whisper checkpoints on the hub did."
            raise UnsupportedModel(
                f"{path / 'generation_config.json'} is not complete.", why, "Download a newer revision of the model."
            )
        languages = {name.strip("<|>"): number for name, number in (config.get("lang_to_id") or {}).items()}
        return SpecialTokens(
            config["decoder_start_token_id"], config["eos_token_id"], config["no_timestamps_token_id"],
            languages if config.get("is_multilingual", bool(languages)) else {}, config.get("task_to_id") or {},
            config.get("prev_sot_token_id"),
            tuple(token for token in config.get("suppress_tokens") or () if token >= 0),  # -1 once meant none
            tuple(config.get("begin_suppress_tokens") or ()),
            int(config.get("max_initial_timestamp_index") or FIRST_TIME_S / 0.02),
            positions // 2 - 1 if config.get("prev_sot_token_id") is not None else 0,
            tuple((layer, head) for layer, head in config.get("alignment_heads") or ()),
        )  # fmt: skip

    def prompt(self, asked: Decoding, language: str) -> list[int]:
        """Return the tokens before a window's text."""
        before = [self.before, *asked.prompt[-self.most_prompt :]] if asked.prompt and self.before is not None else []
        task = [self.tasks["translate" if asked.translate else "transcribe"]] if self.languages else []
        return [*before, self.start, *([self.languages[language]] if self.languages else []), *task]


def restrict(logits: Tensor, written: Tensor, special: SpecialTokens) -> Tensor:
    """Return logits [B, V] fp32 in which a token that may not follow is -inf. written [B, n] int64: the text so far.

    Timestamps come in pairs, except before the end, and never go back. The first token is a timestamp. If timestamps
    together are likelier than each text token, a timestamp follows.
    """
    first, count = special.first_time, written.shape[1]
    logits = logits.clone()
    logits[:, [*special.suppressed, special.no_timestamps]] = float("-inf")
    if not count:
        logits[:, list(special.suppressed_first)] = float("-inf")
        logits[:, :first] = float("-inf")
        logits[:, first + special.latest_first + 1 :] = float("-inf")
        return logits
    is_time = written >= first
    last = is_time[:, -1]
    second_last = is_time[:, -2] if count > 1 else torch.ones_like(last)
    opened, closed = last & second_last, last & ~second_last
    logits[:, first:].masked_fill_(opened[:, None], float("-inf"))
    logits[:, : special.end].masked_fill_(closed[:, None], float("-inf"))
    newest = torch.where(is_time, written, first - 1).amax(dim=1)
    least = torch.where(closed, newest, newest + 1)
    ids = torch.arange(first, logits.shape[1], device=logits.device)
    logits[:, first:].masked_fill_((ids < least[:, None]) & is_time.any(dim=1)[:, None], float("-inf"))
    likely = logits.log_softmax(dim=-1)
    must = likely[:, first:].logsumexp(dim=-1) > likely[:, :first].amax(dim=-1)
    return logits.index_put_(
        (must.nonzero()[:, 0, None], torch.arange(first, device=logits.device)), logits.new_tensor(float("-inf"))
    )


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at a window."""

    token_ids: tuple[int, ...]  # with timestamps, without the end
    avg_logprob: float  # of the tokens and the end
    no_speech_prob: float
    temperature: float
    is_cut: bool  # it had not ended after the most tokens, or repeated itself

    def text_ids(self, special: SpecialTokens) -> list[int]:
        return [token for token in self.token_ids if token < special.end]

    @property
    def is_silent(self) -> bool:
        return self.no_speech_prob > SILENCE and self.avg_logprob < LEAST_LOGPROB

    def is_accepted(self, ratio: float) -> bool:
        """Return whether no further attempt is made. ratio: the compression ratio of the text."""
        if self.is_silent:
            return True
        return not self.is_cut and self.avg_logprob >= LEAST_LOGPROB and ratio <= MOST_RATIO


def repeats(token_ids: Sequence[int]) -> bool:
    """Return whether the tokens end with a few that are repeated too often."""
    for size in range(1, LOOP_TOKENS + 1):
        tail = list(token_ids[-size * (LOOP_TIMES + 1) :])
        if len(tail) == size * (LOOP_TIMES + 1) and tail == tail[:size] * (LOOP_TIMES + 1):
            return True
    return False


def segments_of(token_ids: Iterable[int], special: SpecialTokens, step_s: float, end_s: float) -> list[SpokenSegment]:
    """Return the texts between timestamps. end_s: of the window, where an open segment ends."""
    found, text, start_s = list[SpokenSegment](), list[int](), 0.0
    for token in token_ids:
        if token < special.first_time:
            text.append(token)
            continue
        time_s = min((token - special.first_time) * step_s, end_s)
        if text:
            found.append(SpokenSegment(tuple(text), start_s, time_s))
        text, start_s = [], time_s
    return [*found, SpokenSegment(tuple(text), start_s, max(start_s, end_s))] if text else found


def align(costs: npt.NDArray[np.float64]) -> list[int]:
    """Return for each row of costs [rows, columns] the column where it starts on the cheapest path from the first cell
    to the last, which never goes back (dynamic time warping)."""
    rows, columns = costs.shape
    steps = np.zeros((rows + 1, columns + 1), np.uint8)  # how a cell is reached: 0 from both, 1 from above, 2 from left
    steps[0], steps[:, 0] = 2, 1
    # Cells of an antidiagonal depend on the two before it alone. They are kept by row.
    older, old = np.full(rows + 1, np.inf, np.float32), np.full(rows + 1, np.inf, np.float32)
    older[0] = 0
    for diagonal in range(2, rows + columns + 1):
        i = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        j = diagonal - i
        both, above, left = older[i - 1], old[i - 1], old[i]
        steps[i, j] = np.where((both < above) & (both < left), 0, np.where((above < both) & (above < left), 1, 2))
        new = np.full(rows + 1, np.inf, np.float32)
        new[i] = costs[i - 1, j - 1] + np.choose(steps[i, j], (both, above, left))
        older, old = old, new
    starts, i, j = [0] * rows, rows, columns
    while i > 0:
        if j > 0:
            starts[i - 1] = j - 1
        step = int(steps[i, j])
        i, j = i - (step != 2), j - (step != 1)
    return starts


BLOCK_SIZE = 16  # positions of a block


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """Keys and values of all layers for the rows of a batch, each row in blocks of its own."""

    layers: list[LayerKV]
    table: Tensor  # [B, blocks] int32

    @staticmethod
    def of(model: DecoderModel, rows: int, length: int) -> RowBlocks:
        """Return blocks, not filled. length: positions of each row."""
        spec, blocks = model.spec, -(-length // BLOCK_SIZE)
        shape = kv_cache_shape(rows * blocks, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)

        def empty() -> Tensor:
            return torch.empty(shape, dtype=model.dtype, device=model.device)

        layers = [LayerKV(empty(), empty()) for _ in range(spec.num_layers)]
        return RowBlocks(layers, torch.arange(rows * blocks, dtype=torch.int32, device=model.device).view(rows, -1))

    def of_rows(self, rows: Sequence[int]) -> RowBlocks:
        return RowBlocks(self.layers, self.table[list(rows)])

    def slots(self, first: int, stop: int) -> Tensor:
        """Return the slots [B, stop - first] int64 of the positions."""
        at = torch.arange(first, stop, device=self.table.device)
        return self.table[:, at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE


class Passes:
    """The decoder's passes over a batch of texts, each beside its own window of sound."""

    def __init__(self, model: DecoderModel, sources: RowBlocks, source_len: int, length: int) -> None:
        """sources: what cross-attention reads. length: positions of each text."""
        self._model, self._sources, self._source_len = model, sources, source_len
        self._cache = RowBlocks.of(model, len(sources.table), length)
        self._program: NativeProgram | None = None
        self._may_be_native = model.device.type == "cpu" and len(sources.table) <= MAX_ROWS

    def __call__(
        self, tokens: Tensor, first: int, wanted: Sequence[int], watch: Callable[[int, Tensor], None] | None = None
    ) -> Tensor:
        """Return logits [B, wanted, V] fp32 at some of the tokens [B, n], whose positions are `first` and on; writes
        the keys and values of all. watch: called with each layer's queries [B * n, heads, head_dim] for the sound."""
        rows, count = tokens.shape
        if first and count == 1 and (program := self._native()) is not None:
            return program.forward(self._decode_rows(tokens, first))[:, None].clone()
        stop, ends = first + count, torch.arange(0, rows * count + 1, count, dtype=torch.int32, device=tokens.device)
        places = (torch.arange(rows, device=tokens.device)[:, None] * count + torch.tensor(wanted)).flatten()
        hidden = self._model.forward(
            ForwardInputs(
                token_ids=tokens.flatten(), positions=torch.arange(first, stop, device=tokens.device).repeat(rows),
                groups=(GroupInputs(self._cache.table, self._cache.slots(first, stop).flatten()),),
                context_lens=torch.full_like(ends[1:], stop), cu_seqlens_q=ends, logits_indices=places,
                num_decodes=rows if count == 1 else 0, query_lens=(count,) * rows, context_lens_host=(stop,) * rows,
                source=self._source(count)._replace(watch=watch),
            ),
            self._cache.layers,
        )  # fmt: skip
        logits = self._model.compute_logits(hidden.index_select(0, places))
        assert logits is not None, "the model is on one device"
        return logits.view(rows, len(wanted), -1)

    def _source(self, count: int) -> SourceInputs:
        """Return what `count` tokens of each row attend to."""
        table = self._sources.table.repeat_interleave(count, dim=0)
        lens = torch.full((len(table),), self._source_len, dtype=torch.int32, device=table.device)
        return SourceInputs(self._sources.layers, table, lens, (self._source_len,) * len(table))

    def _native(self) -> NativeProgram | None:
        if self._program is None and self._may_be_native:
            try:
                self._program = open_native_program(self._model, self._cache.layers, self._sources.layers)
            except NotSupportedNatively:
                self._may_be_native = False
        return self._program

    def _decode_rows(self, tokens: Tensor, position: int) -> DecodeRows:
        table, count = self._cache.table, len(tokens)
        addresses = table.data_ptr() + np.arange(count) * table.stride(0) * table.element_size()
        return DecodeRows(
            tokens[:, 0].numpy(), np.full(count, position), self._cache.slots(position, position + 1).numpy().T,
            addresses[None], source=self._source(1),
        )  # fmt: skip


class WhisperModel:
    """Whisper on one device. One call is one batch of windows."""

    kind = "whisper"

    def __init__(
        self, encoder: SourceEncoder, decoder: DecoderModel, special: SpecialTokens, device: torch.device
    ) -> None:
        from transformers.audio_utils import mel_filter_bank

        self.encoder, self.decoder, self.special, self.device = encoder, decoder, special, device
        config = self.config = encoder.module.config
        self.step_s: float = WINDOW_S / config.max_source_positions
        self._heads, self._most = config.decoder_attention_heads, config.max_target_positions
        filters = mel_filter_bank(1 + FFT // 2, config.num_mel_bins, 0.0, RATE / 2, RATE, "slaney", "slaney")
        layers = range(config.decoder_layers // 2, config.decoder_layers)
        all_upper = ((layer, head) for layer in layers for head in range(self._heads))
        self._aligned: dict[int, list[int]] = {}
        for layer, head in special.alignment_heads or all_upper:
            self._aligned.setdefault(layer, []).append(head)
        self._filters = torch.from_numpy(np.ascontiguousarray(filters.T.astype(np.float32))).to(device)  # [mels, bins]

    @property
    def translates(self) -> bool:
        """Return whether the model was trained to translate: neither distilled models nor models of English were."""
        config = self.config
        return bool(self.special.languages) and config.decoder_layers == config.encoder_layers

    @torch.inference_mode()
    def features(self, windows: Sequence[npt.NDArray[np.int16]]) -> Tensor:
        """Return log-mel features [B, mels, 3000] fp32 of samples at 16 kHz."""
        x = torch.zeros(len(windows), RATE * WINDOW_S)
        for row, each in zip(x, windows, strict=True):
            row[: len(each)] = torch.from_numpy(each[: x.shape[1]].astype(np.float32) / 32768)
        spectrum = torch.stft(
            x.to(self.device), FFT, HOP, window=torch.hann_window(FFT, device=self.device), return_complex=True
        )
        mels = (self._filters @ spectrum[..., :-1].abs().square()).clamp(min=1e-10).log10()
        return (torch.maximum(mels, mels.amax(dim=(1, 2), keepdim=True) - 8.0) + 4.0) / 4.0

    @torch.inference_mode()
    def transcribe(
        self, windows: Sequence[npt.NDArray[np.int16]], asked: Sequence[Decoding],
        ratio_of: Callable[[Sequence[int]], float],
    ) -> list[SpokenText]:  # fmt: skip
        """Return the text of each window, in order. ratio_of: the compression ratio of the text of some tokens."""
        sources = self._sources(self.states(self.features(windows)))
        languages = self._languages(sources, [each.language for each in asked])
        prompts = [self.special.prompt(*each) for each in zip(asked, languages, strict=True)]
        best: dict[int, Attempt] = {}
        for turn in range(max(len(each.temperatures) for each in asked)):
            left = [
                i for i, each in enumerate(asked)
                if turn < len(each.temperatures)
                and not (i in best and best[i].is_accepted(ratio_of(best[i].text_ids(self.special))))
            ]  # fmt: skip
            # Rows of one pass have prompts of one length.
            for size in sorted({len(prompts[i]) for i in left}):
                rows = [i for i in left if len(prompts[i]) == size]
                temperatures = [asked[i].temperatures[turn] for i in rows]
                seeds = [asked[i].seed * 64 + turn for i in rows]
                attempts = self._attempt(sources.of_rows(rows), [prompts[i] for i in rows], temperatures, seeds)
                best |= dict(zip(rows, attempts, strict=True))
        texts = list[SpokenText]()
        for i, window in enumerate(windows):
            found, end_s = best[i], min(WINDOW_S, len(window) / RATE)
            segments = [] if found.is_silent else segments_of(found.token_ids, self.special, self.step_s, end_s)
            if asked[i].words and segments:
                prompt = self.special.prompt(asked[i]._replace(prompt=()), languages[i])
                segments = self._with_times(segments, sources.of_rows([i]), prompt, end_s)
            texts.append(
                SpokenText(languages[i], tuple(segments), found.temperature, found.avg_logprob, found.no_speech_prob)
            )
        return texts

    @torch.inference_mode()
    def states(self, features: Tensor) -> Tensor:
        """Return the encoder's states [B, S, hidden] of features [B, mels, 3000]."""
        encoder = self.encoder.module.get_encoder()
        states: Tensor = encoder(features.to(self.encoder.module.dtype)).last_hidden_state
        return states.to(self.decoder.dtype)

    def _sources(self, states: Tensor) -> RowBlocks:
        """Return what the decoder's cross-attention reads of states [B, S, hidden]."""
        found = RowBlocks.of(self.decoder, *states.shape[:2])
        self.decoder.store_source(states.flatten(0, 1), found.layers, found.slots(0, states.shape[1]).flatten())
        return found

    def _passes(self, sources: RowBlocks, length: int) -> Passes:
        return Passes(self.decoder, sources, self.config.max_source_positions, length)

    def _languages(self, sources: RowBlocks, asked: Sequence[str | None]) -> list[str]:
        """Return the language of each window: what was asked, or the likeliest."""
        codes = list(self.special.languages)
        if not codes or all(asked):
            return [language or "en" for language in asked]
        start = torch.full((len(asked), 1), self.special.start, device=self.device)
        logits = self._passes(sources, 1)(start, 0, (0,))[:, 0]
        likeliest = logits[:, list(self.special.languages.values())].argmax(dim=-1).tolist()
        return [language or codes[best] for language, best in zip(asked, likeliest, strict=True)]

    def _with_times(
        self, segments: Sequence[SpokenSegment], source: RowBlocks, prompt: list[int], end_s: float
    ) -> list[SpokenSegment]:
        """Return the segments of a window with times of their tokens, by the attention of the alignment heads to the
        sound while the text is read once more, without timestamps. end_s: of the window."""
        ids = [token for segment in segments for token in segment.token_ids]
        tokens = torch.tensor([[*prompt, self.special.no_timestamps, *ids]], device=self.device)
        frames = min(max(1, round(end_s / self.step_s)), self.config.max_source_positions)
        weights, blocks = list[Tensor](), source.table[0].long()

        def watch(layer: int, queries: Tensor) -> None:
            if heads := self._aligned.get(layer):
                keys = source.layers[layer].k[heads][:, blocks].flatten(1, 2)[:, :frames]
                weights.append((queries[:, heads].transpose(0, 1) @ keys.mT / keys.shape[-1] ** 0.5).float())

        wanted = range(len(prompt), tokens.shape[1] - 1)
        logits = self._passes(source, tokens.shape[1])(tokens, 0, wanted, watch)[0]
        # A row attends to what it predicts. The first rows have read the prompt alone, the last one predicts the end.
        likely = torch.cat(weights).softmax(dim=-1)  # [heads, rows, frames]
        spread = likely.std(dim=1, keepdim=True, unbiased=False).clamp(min=1e-9)
        likely = _median((likely - likely.mean(dim=1, keepdim=True)) / spread, self.config.median_filter_width)
        starts = align(-likely.mean(dim=0)[len(prompt) :].cpu().double().numpy())
        chances = logits[:, : self.special.end].softmax(dim=-1)
        found = chances.gather(1, torch.tensor(ids, device=self.device)[:, None])[:, 0].tolist()
        times, at, timed = [start * self.step_s for start in starts], 0, list[SpokenSegment]()
        for segment in segments:
            stop, low, high = at + len(segment.token_ids), segment.start_s, segment.stop_s
            inside = [min(max(each, low), high) for each in times[at : stop + 1]]
            spoken = tuple(map(AlignedToken, inside, inside[1:], found[at:stop]))
            timed.append(segment._replace(tokens=spoken))
            at = stop
        return timed

    def _attempt(
        self, sources: RowBlocks, prompts: list[list[int]], temperatures: Sequence[float],
        seeds: Sequence[int],
    ) -> list[Attempt]:  # fmt: skip
        """Write all rows to their ends. prompts: of one length."""
        special, rows, width = self.special, len(prompts), len(prompts[0])
        most, at = self._most - width, prompts[0].index(special.start)
        passes = self._passes(sources, self._most)
        draws = [torch.Generator().manual_seed(seed) for seed in seeds]
        written = torch.zeros(rows, 0, dtype=torch.int64, device=self.device)
        sums, ended = torch.zeros(rows, device=self.device), [False] * rows
        lengths, cut, silence = [0] * rows, [False] * rows, [0.0] * rows
        tokens = torch.tensor(prompts, device=self.device)
        for step in range(most):
            logits = passes(tokens, width + step - 1, (0,)) if step else passes(tokens, 0, (at, width - 1))
            if not step:
                silence = logits[:, 0].softmax(dim=-1)[:, special.no_speech].tolist()
            allowed = restrict(logits[:, -1], written, special)
            tokens = _drawn(allowed, temperatures, draws)
            logprobs = allowed.log_softmax(dim=-1).gather(1, tokens)[:, 0]
            over = torch.tensor(ended, device=self.device)
            sums += logprobs.masked_fill(over, 0.0)
            written = torch.cat((written, tokens), dim=1)
            for row, token in enumerate(tokens[:, 0].tolist()):
                if ended[row]:
                    continue
                ended[row] = token == special.end
                if not ended[row]:
                    lengths[row] = step + 1
                    cut[row] = step + 1 == most or (step % 8 == 7 and repeats(written[row].tolist()))
                    ended[row] = cut[row]
            if all(ended):
                break
        return [
            Attempt(tuple(ids[:length]), total / (length + 1), quiet, temperature, was_cut)
            for ids, length, total, quiet, temperature, was_cut in zip(
                written.tolist(), lengths, sums.tolist(), silence, temperatures, cut, strict=True
            )
        ]


def _median(x: Tensor, width: int) -> Tensor:
    """Return the median of `width` values around each one along the last dimension; ends are mirrored."""
    if x.shape[-1] <= width // 2:
        return x
    padded: Tensor = F.pad(x, (width // 2, width // 2), mode="reflect")
    return padded.unfold(-1, width, 1).sort().values[..., width // 2]


def _drawn(logits: Tensor, temperatures: Sequence[float], draws: Sequence[torch.Generator]) -> Tensor:
    """Return a token for each row [B, 1]: the likeliest, or a draw that depends on the row alone."""
    chosen = logits.argmax(dim=-1)
    for row, (temperature, draw) in enumerate(zip(temperatures, draws, strict=True)):
        if temperature > 0:
            noise = torch.empty(logits.shape[1]).exponential_(generator=draw).to(logits.device)
            chosen[row] = (logits[row] / temperature - noise.log()).argmax()
    return chosen[:, None]


def load_whisper(path: Path, device: torch.device, dtype: torch.dtype, *, half_weights: bool = False) -> WhisperModel:
    """Load the model of folder `path`. half_weights: see `load_model`. Raises `CorruptModel`, `UnsupportedModel`."""
    config = load_config(path, trust_remote_code=False)
    file = path / "generation_config.json"
    generation = read_json_object(file) if file.is_file() else {}
    special = SpecialTokens.of(generation, config.max_target_positions, path)
    if special.first_time >= config.vocab_size or any(each >= config.vocab_size for each in special.languages.values()):
        raise CorruptModel(f"{file} names tokens beyond the vocabulary.", f"It has {config.vocab_size} tokens.")
    file = path / "preprocessor_config.json"
    mels = (read_json_object(file) if file.is_file() else {}).get("feature_size", config.num_mel_bins)
    if mels != config.num_mel_bins:
        raise CorruptModel(f"{file} has {mels} features.", f"The encoder reads {config.num_mel_bins}.")
    decoder = load_model(path, read_spec(path), device, dtype, half_weights=half_weights)
    assert isinstance(decoder, DecoderModel), "the decoder is localllm's own"
    return WhisperModel(load_encoder(path, device, dtype), decoder, special, device)
