"""Sampling parameters of every slot as arrays, and the subset that one batch needs.

A slot's parameters are unpacked once, when its request enters. Per step, only rows that use a feature cost anything: a
batch of greedy requests without extras is one flag.
Does not know: logits (sampler.py, edits.py), blocks (batch.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localllm.engine.params import MAX_LOGPROBS, SamplingParams
from localllm.engine.step import NewSlot
from localllm.kernels.sampling.noise import mix_seeds, row_keys
from localllm.kernels.sampling.tables import (
    HAS_ALLOWED,
    HAS_BIAS,
    HAS_PENALTIES,
    HAS_STOPS,
    HAS_WORDS,
    INTS,
    MAX_BIAS,
    MAX_STOPS,
    MAX_WORDS,
    WORD_LEN,
    SlotTables,
)
from localllm.runner.edits import Allowed, BadWords, Bias, Edits, Penalties
from localllm.runner.sampler_chain import ChainRow, Chains
from localllm.runner.upload import to_device

Ints = npt.NDArray[np.int64]

GREEDY, PLAIN, TOP_K, NUCLEUS = range(4)
NO_WINDOW = 2**31 - 1  # longer than any context, and fits an int32
MAX_CANDIDATES = 256  # a top_k up to this is served from that many candidates


@dataclass(frozen=True, slots=True)
class KindRows:
    """Rows of the batch that are sampled by the same method. R: number of rows."""

    kind: int
    index: Tensor | None  # [R] int64 rows of the logits; None: all, in order
    keys: Tensor  # [R, 1] int64      keys of the noise
    temperature: Tensor  # [R, 1] float32
    top_k: Tensor  # [R, 1] int64      V if not requested
    top_p: Tensor  # [R, 1] float64
    min_p: Tensor  # [R, 1] float32
    max_top_k: int
    any_min_p: bool

    def part(self, rows: slice) -> KindRows:
        """Return some of these rows; the caller has already sliced the logits."""
        return replace(
            self, index=None, keys=self.keys[rows], temperature=self.temperature[rows], top_k=self.top_k[rows],
            top_p=self.top_p[rows], min_p=self.min_p[rows],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The S sampling rows of a step, in the order of their logits."""

    size: int
    kinds: tuple[KindRows, ...]  # empty: all greedy
    edits: Edits | None
    logprob_rows: Tensor | None  # [R] int64 rows with logprobs
    logprob_counts: tuple[tuple[int, int], ...]  # (row, k) of the same rows
    chains: Sequence[ChainRow] = ()  # rows with llama.cpp's samplers or functions of their own


@dataclass(frozen=True, slots=True)
class _SlotEdits:
    """One slot's edits, on the device."""

    bias_ids: Tensor | None = None
    bias_values: Tensor | None = None
    allowed_ids: Tensor | None = None
    stop_ids: Tensor | None = None  # only with min_tokens
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def is_empty(self) -> bool:
        return self.bias_ids is None and self.allowed_ids is None and self.stop_ids is None and not self.bad_words

    @property
    def flags(self) -> int:
        """Flags of `SlotTables.edits`, except penalties."""
        return (
            (self.bias_ids is not None) * HAS_BIAS
            + (self.allowed_ids is not None) * HAS_ALLOWED
            + (self.stop_ids is not None) * HAS_STOPS
            + bool(self.bad_words) * HAS_WORDS
        )


@dataclass(frozen=True, slots=True)
class SamplingFeatures:
    """Features that the rows of a batch use, taken together.
    They decide which method samples the batch on the device."""

    filters: bool = False  # top_k, top_p or min_p
    edits: bool = False
    logprobs: bool = False
    chains: bool = False  # samplers of sampler_chain.py, which are never recorded

    def covers(self, other: SamplingFeatures) -> bool:
        """Return whether a method with these features can serve `other`."""
        return (
            self.filters >= other.filters
            and self.edits >= other.edits
            and self.logprobs >= other.logprobs
            and self.chains >= other.chains
        )


class SamplingState:
    """Sampling parameters, one row per slot.
    `enter` fills a row; `sample` reads a `batch`, `sample_on_device` reads `tables`.

    with_tables: whether to keep tables for kernels; None: only on a GPU.
    """

    def __init__(
        self, max_num_seqs: int, vocab_size: int, device: torch.device, *, with_tables: bool | None = None
    ) -> None:
        self._vocab_size, self._device = vocab_size, device
        with_tables = device.type == "cuda" if with_tables is None else with_tables
        self.tables = SlotTables.empty(max_num_seqs, vocab_size, device) if with_tables else None
        self._fits = np.ones(max_num_seqs, bool)  # whether the slot's parameters fit into the tables
        self._kind = np.zeros(max_num_seqs, np.int64)
        self._mixed_seed = np.zeros(max_num_seqs, np.uint64)
        self._temperature = np.ones(max_num_seqs, np.float32)
        self._top_k = np.zeros(max_num_seqs, np.int64)
        self._top_p = np.ones(max_num_seqs, np.float64)
        self._min_p = np.zeros(max_num_seqs, np.float32)
        self._penalties = np.zeros((max_num_seqs, 3), np.float32)  # repetition, presence, frequency
        self._penalty_window = np.zeros(max_num_seqs, np.int64)  # tokens; NO_WINDOW: all
        self._has_penalties = np.zeros(max_num_seqs, bool)
        self._prompt_len = np.zeros(max_num_seqs, np.int64)
        self._min_tokens = np.zeros(max_num_seqs, np.int64)
        self._logprobs = np.full(max_num_seqs, -1, np.int64)
        self._edits: dict[int, _SlotEdits] = {}
        self._chains = Chains(vocab_size, device)

    def enter(self, new: NewSlot) -> None:
        params, slot = new.params, new.slot
        self._mixed_seed[slot] = mix_seeds(np.array([seed_of(params, new.request_id)], np.uint64))[0]
        self._temperature[slot] = params.temperature
        self._top_k[slot] = min(params.top_k or self._vocab_size, self._vocab_size)
        self._top_p[slot], self._min_p[slot] = params.top_p, params.min_p
        chain = self._chains.enter(new, int(self._mixed_seed[slot].view(np.int64)))
        if chain is not None and chain.orders:  # it filters and divides the row itself
            self._temperature[slot], self._top_k[slot] = 1.0, self._vocab_size
            self._top_p[slot], self._min_p[slot] = 1.0, 0.0
        self._kind[slot] = self._kind_of(slot, params.is_greedy)
        self._penalties[slot] = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        self._penalty_window[slot] = NO_WINDOW if params.repeat_last_n < 0 else min(params.repeat_last_n, NO_WINDOW)
        self._has_penalties[slot] = params.penalises
        self._prompt_len[slot], self._min_tokens[slot] = new.prompt_len, params.min_tokens
        self._logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        edits = self._edits_of(new)
        if not edits.is_empty:
            self._edits[slot] = edits
        if self.tables is not None:
            self._fits[slot] = fits = self.fits(new)
            if fits:
                self._write_tables(self.tables, slot, edits)

    def leave(self, slot: int) -> None:
        self._edits.pop(slot, None)
        self._chains.leave(slot)

    def _kind_of(self, slot: int, is_greedy: bool) -> int:
        if is_greedy:
            return GREEDY
        if self._top_k[slot] <= min(MAX_CANDIDATES, self._vocab_size - 1):
            return TOP_K
        return NUCLEUS if self._top_p[slot] < 1.0 or self._top_k[slot] < self._vocab_size else PLAIN

    def fits(self, new: NewSlot) -> bool:
        """Return whether a request's lists fit into the tables, here or where another shard draws."""
        words = self._words_of(new)
        return (
            len(new.params.logit_bias or {}) <= MAX_BIAS
            and len(self._stops_of(new)) <= MAX_STOPS
            and len(words) <= MAX_WORDS
            and all(len(word) <= WORD_LEN for word in words)
            and (new.params.logprobs or 0) <= MAX_LOGPROBS
        )

    def _stops_of(self, new: NewSlot) -> tuple[int, ...]:
        params = new.params
        if not params.min_tokens:
            return ()
        stops = (*params.stop_token_ids, *(() if params.ignore_eos else new.eos_token_ids))
        return tuple({token_id for token_id in stops if token_id < self._vocab_size})  # the rest never occur

    def _words_of(self, new: NewSlot) -> tuple[tuple[int, ...], ...]:
        return tuple(word for word in new.bad_words_token_ids if self._in_vocabulary(word))  # others never complete

    def _edits_of(self, new: NewSlot) -> _SlotEdits:
        params = new.params
        bias = params.logit_bias or {}
        return _SlotEdits(
            self._ids(tuple(bias)),
            to_device(np.fromiter(bias.values(), np.float32), self._device) if bias else None,
            self._ids(tuple(dict.fromkeys(params.allowed_token_ids or ()))),
            self._ids(self._stops_of(new)),
            self._words_of(new),
        )

    def _ids(self, token_ids: Sequence[int]) -> Tensor | None:
        if not token_ids:
            return None
        assert self._in_vocabulary(token_ids), f"token ids {token_ids} outside the vocabulary: admission checks this"
        return to_device(np.array(token_ids, np.int64), self._device)

    def _in_vocabulary(self, token_ids: Sequence[int]) -> bool:
        return bool(token_ids) and min(token_ids) >= 0 and max(token_ids) < self._vocab_size

    def _write_tables(self, tables: SlotTables, slot: int, edits: _SlotEdits) -> None:
        """Write all fields of one slot, so that nothing of the previous request remains.
        Lists are written only if used."""
        ints = np.zeros(len(INTS), np.int64)
        ints[:] = (
            self._mixed_seed[slot].view(np.int64), self._top_k[slot],
            edits.flags + self._has_penalties[slot] * HAS_PENALTIES, self._prompt_len[slot], self._min_tokens[slot],
            self._logprobs[slot], self._penalty_window[slot],
        )  # fmt: skip
        temperature = 0.0 if self._kind[slot] == GREEDY else self._temperature[slot]
        floats = np.array([temperature, self._top_p[slot], self._min_p[slot], *self._penalties[slot]], np.float64)
        tables.columns[:, slot] = self._send(np.concatenate((ints, floats.view(np.int64))))
        if edits.bias_ids is not None and edits.bias_values is not None:
            tables.bias_ids[slot] = -1
            tables.bias_ids[slot, : len(edits.bias_ids)] = edits.bias_ids.int()
            tables.bias_values[slot, : len(edits.bias_ids)] = edits.bias_values
        if edits.stop_ids is not None:
            tables.stop_ids[slot] = -1
            tables.stop_ids[slot, : len(edits.stop_ids)] = edits.stop_ids.int()
        if edits.bad_words:
            words = np.full((MAX_WORDS, WORD_LEN), -1, np.int32)
            for row, word in zip(words, edits.bad_words, strict=False):
                row[-len(word) :] = word
            tables.words[slot] = self._send(words)
        if edits.allowed_ids is not None:
            allowed = torch.zeros(tables.allowed.shape[1] * 32, dtype=torch.int64, device=self._device)
            allowed[edits.allowed_ids] = 1
            bits = allowed.view(-1, 32) << torch.arange(32, device=self._device)
            tables.allowed[slot] = bits.sum(-1).int()  # bit 31 is the sign: the sum wraps into it

    # ---- one step ----------------------------------------------------------------------------------------------------

    def batch(self, slots: Ints, lengths: Ints) -> SamplingBatch:
        """Return the batch's parameters. slots, lengths [S]:
        sampling slots, and the known tokens of each (the sampled position)."""
        kinds = self._kind[slots]
        counts = self._logprobs[slots]
        asking = np.flatnonzero(counts >= 0)
        return SamplingBatch(
            size=len(slots),
            kinds=self._split(kinds, slots, lengths) if kinds.any() else (),
            edits=self._edits_for(slots, lengths),
            logprob_rows=to_device(asking, self._device) if len(asking) else None,
            logprob_counts=tuple(zip(asking.tolist(), counts[asking].tolist(), strict=True)),
            chains=self._chains.rows(slots.tolist(), lengths.tolist()),
        )

    def chains(self, slots: Ints, lengths: Ints, places: Ints) -> list[ChainRow]:
        """Return the rows with a chain. places [S]: the rows among the logits. lengths: at least their lengths."""
        return self._chains.rows(slots.tolist(), lengths.tolist(), places.tolist())

    def num_logprobs(self, slots: Ints) -> Ints:
        """Return the number of logprobs of each slot, not counting the sampled token's own; -1: none at all."""
        return self._logprobs[slots]

    def features(self, slots: Ints) -> SamplingFeatures | None:
        """Return what `sample_on_device` must do for these slots;
        None if one has parameters that do not fit into the tables."""
        if self.tables is None or not self._fits[slots].all():
            return None
        drawn = slots[self._kind[slots] != GREEDY]
        return SamplingFeatures(
            filters=bool(((self._kind[drawn] != PLAIN) | (self._min_p[drawn] > 0)).any()),
            edits=bool(self._has_penalties[slots].any()) or any(slot in self._edits for slot in slots.tolist()),
            logprobs=bool((self._logprobs[slots] >= 0).any()),
            chains=self._chains.has(slots.tolist()),
        )

    def _split(self, kinds: Ints, slots: Ints, lengths: Ints) -> tuple[KindRows, ...]:
        present = np.unique(kinds)
        return tuple(self._rows(int(kind), np.flatnonzero(kinds == kind), slots, lengths) for kind in present)

    def _rows(self, kind: int, rows: Ints, slots: Ints, lengths: Ints) -> KindRows:
        s = slots[rows]
        return KindRows(
            kind,
            None if len(rows) == len(slots) else self._send(rows),
            self._send(row_keys(self._mixed_seed[s], lengths[rows])[:, None]),
            self._send(self._temperature[s, None]),
            self._send(self._top_k[s, None]),
            self._send(self._top_p[s, None]),
            self._send(self._min_p[s, None]),
            max_top_k=int(self._top_k[s].max()),
            any_min_p=bool(self._min_p[s].any()),
        )

    def _edits_for(self, slots: Ints, lengths: Ints) -> Edits | None:
        penalised = np.flatnonzero(self._has_penalties[slots])
        asking = [(row, self._edits[slot]) for row, slot in enumerate(slots.tolist()) if slot in self._edits]
        if not asking and not len(penalised):
            return None
        output_lens = lengths - self._prompt_len[slots]
        too_short = output_lens < self._min_tokens[slots]
        return Edits(
            self._bias(asking),
            self._allowed(asking),
            self._stops([(row, edit) for row, edit in asking if too_short[row]]),
            self._penalised(penalised, slots, lengths) if len(penalised) else None,
            self._bad_words(asking, slots, lengths, output_lens),
        )

    def _bias(self, asking: list[tuple[int, _SlotEdits]]) -> Bias | None:
        parts = [(row, e.bias_ids, e.bias_values) for row, e in asking if e.bias_ids is not None]
        if not parts:
            return None
        ids = [ids for _, ids, _ in parts]
        return Bias(
            self._repeat(parts), torch.cat(ids), torch.cat([values for *_, values in parts if values is not None])
        )

    def _allowed(self, asking: list[tuple[int, _SlotEdits]]) -> Allowed | None:
        parts = [(row, e.allowed_ids) for row, e in asking if e.allowed_ids is not None]
        if not parts:
            return None
        rows = self._send(np.array([row for row, _ in parts]))
        return Allowed(rows, self._repeat(parts), torch.cat([ids for _, ids in parts]))

    def _stops(self, asking: list[tuple[int, _SlotEdits]]) -> Bias | None:
        parts = [(row, e.stop_ids) for row, e in asking if e.stop_ids is not None]
        if not parts:
            return None
        rows, ids = self._repeat(parts), torch.cat([ids for _, ids in parts])
        return Bias(rows, ids, torch.full(ids.shape, -torch.inf, device=self._device))

    def _repeat(self, parts: Sequence[tuple[Any, ...]]) -> Tensor:
        """Return a row number for each id of each part (row, ids, ...)."""
        return self._send(np.repeat([part[0] for part in parts], [len(part[1]) for part in parts]))

    def _penalised(self, rows: Ints, slots: Ints, lengths: Ints) -> Penalties:
        s, n = slots[rows], lengths[rows]
        repetition, presence, frequency = (self._send(self._penalties[s, i : i + 1]) for i in range(3))
        begins = np.maximum(n - self._penalty_window[s], 0)
        output_begins = np.maximum(begins, self._prompt_len[s])
        return Penalties(
            self._send(rows),
            self._send(s),
            self._send(n[:, None]),
            self._send(begins[:, None]),
            self._send(output_begins[:, None]),
            repetition,
            presence,
            frequency,
            max_length=int((n - begins).max()),
            max_output_len=int((n - output_begins).max()),
        )

    def _bad_words(
        self, asking: list[tuple[int, _SlotEdits]], slots: Ints, lengths: Ints, output_lens: Ints
    ) -> BadWords | None:
        words = [(row, word) for row, e in asking for word in e.bad_words]
        if not words:
            return None
        rows = np.array([row for row, _ in words])
        width = max(1, max(len(word) for _, word in words) - 1)
        prefixes = np.array([(-1,) * (width + 1 - len(word)) + word[:-1] for _, word in words], np.int64)
        return BadWords(
            self._send(rows),
            self._send(slots[rows][:, None]),
            self._send(lengths[rows][:, None]),
            self._send(output_lens[rows]),
            self._send(prefixes),
            self._send(np.array([len(word) - 1 for _, word in words])),
            self._send(np.array([word[-1] for _, word in words])),
        )

    def _send(self, array: npt.NDArray[Any]) -> Tensor:
        return to_device(array, self._device)


def seed_of(params: SamplingParams, request_id: str) -> int:
    """Return the request's seed as 64 bits; derived from its id if the parameters have no seed."""
    if params.seed is not None:
        return params.seed % 2**64
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little")
