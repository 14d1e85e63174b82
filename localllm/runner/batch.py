"""The runner's state of every slot, and the `ForwardInputs` of one step built from it.

Token ids are stored on the device, one row per slot. A prompt is written there when its request enters, a sampled token
when it is sampled; the next step gathers its inputs from the same rows. A step can therefore be launched before the
host has read the last step's tokens. A pipeline stage that does not sample takes these tokens from the plan. Lengths
are stored on the host in numpy, since the host knows them in advance. An `InputMaker` makes tensors of both:
`HostInputs` in this module on a CPU, staging.py on a GPU.
Drafts are in the same row behind the known tokens, as many as `SlotState` has ready for the slot. A row that verifies
them begins at the last known token, and draws a token behind each of its positions.
Does not know: layers, sampling parameters, why rows were scheduled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localllm.engine.step import NewSlot, Row, StepPlan
from localllm.models.decoder.native_program import DecodeRows
from localllm.models.encoders.source import SourcePool
from localllm.models.inputs import ForwardInputs, GivenEmbeds, GroupInputs, SourceInputs, StateInputs
from localllm.models.prompt_embeds import PromptEmbedsTensor
from localllm.runner.pictures import GivenRows, SlotGiven, joined
from localllm.runner.upload import all_to_device, to_device

Ints = npt.NDArray[Any]
BlockIds = tuple[tuple[int, ...], ...]  # of each KV group equally many


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Consecutive prompt positions whose logits are needed for prompt_logprobs."""

    plan_row: int
    slot: int
    first_position: int  # its logits score the token at first_position + 1
    start: int  # index of the first row within `logits_indices`
    count: int
    num_logprobs: int


class HostPlaces(NamedTuple):
    """The places of recurrent states of a step's rows on the host (models/inputs.py, StateInputs)."""

    read: tuple[int, ...]  # [B]
    write: tuple[int, ...]
    save: tuple[int, ...]


def host_places(states: Ints) -> HostPlaces:
    """states: [3, B]."""
    read, write, save = (tuple(row) for row in states.tolist())
    return HostPlaces(read, write, save)


class StepRows(NamedTuple):
    """A plan's rows as arrays: first those that generate, without drafts and with drafts, then prompts, with one token
    and with more. B: requests."""

    slots: Ints  # [B] int64
    computed: Ints  # [B] int64     tokens whose KV exists before this step
    scheduled: Ints  # [B] int64    tokens that run now
    starts: Ints  # [B + 1] int64   start of each request in the flat batch
    samples: Ints  # [B] bool
    generates: Ints  # [B] bool     one token from the prompt's last one on, which has an id, and its drafts
    adapters: Ints  # [B] int64     -1: none
    drafts: Ints  # [B] int64       the last so many of the scheduled tokens are drafts
    states: Ints | None = None  # [3, B] int64 places of recurrent states that each row reads, writes and saves to
    reread: Ints | None = None  # [B] int64 the first so many of the scheduled tokens have KV and keep it; None: none
    are_bounds: Ints | None = None  # [B] bool: `computed` and `drafts` are upper bounds; None: of no row
    shifts: Ints | None = None  # [B] int64 what tokens rotate by, minus their positions; None: 0 of each row

    @property
    def context(self) -> Ints:
        """[B] tokens whose KV exists after the step."""
        return self.computed + self.scheduled

    @property
    def positions(self) -> Ints:
        """[T] position of each token within its request."""
        positions: Ints = np.arange(self.starts[-1]) - np.repeat(self.starts[:-1] - self.computed, self.scheduled)
        return positions

    @property
    def num_decodes(self) -> int:
        """Rows of one token before the first one with more."""
        return int(np.count_nonzero(np.maximum.accumulate(self.scheduled) == 1))

    @property
    def num_generating(self) -> int:
        return int(np.count_nonzero(self.generates))

    @property
    def draws(self) -> Ints:
        """[D] index of each token behind which a sampling row draws: its last known one and its drafts."""
        counts = 1 + self.drafts[self.samples]
        firsts = self.starts[1:][self.samples] - counts
        return np.repeat(firsts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())

    def begun_again(self, rows: Ints, scheduled: Ints) -> StepRows:
        """Return some rows with their first tokens, all of them known, which begin from the states at the places that
        they write. rows: indices. scheduled: tokens of each of them, at least 1."""
        assert self.states is not None, "rows without states have nothing to begin again from"
        write, none = self.states[1, rows], np.zeros(len(rows), np.int64)
        return StepRows(
            self.slots[rows], self.computed[rows], scheduled, np.concatenate([[0], np.cumsum(scheduled)]),
            np.zeros(len(rows), bool), self.generates[rows], self.adapters[rows], none,
            np.stack([write, write, none]), shifts=None if self.shifts is None else self.shifts[rows],
        )  # fmt: skip

    def part(self, rows: slice) -> StepRows:
        starts = self.starts[rows.start : rows.stop + 1]
        return StepRows(
            self.slots[rows], self.computed[rows], self.scheduled[rows], starts - starts[0], self.samples[rows],
            self.generates[rows], self.adapters[rows], self.drafts[rows],
            None if self.states is None else self.states[:, rows],
            None if self.reread is None else self.reread[rows],
            None if self.are_bounds is None else self.are_bounds[rows],
            None if self.shifts is None else self.shifts[rows],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One plan as arrays, with the mapping back to its rows. S: requests that sample. D: tokens that they draw, one
    each and one for each of their drafts."""

    rows: StepRows
    wanted: Ints  # [L] int64       flat positions whose logits are needed, ascending
    plan_rows: tuple[int, ...]  # [S] each sampling row's index in the plan
    slots: Ints  # [D] int64
    lengths: Ints  # [D] int64       tokens before the one that is drawn, which is its position
    counts: Ints  # [S] int64        tokens that each row draws, in turn
    prompt_spans: tuple[PromptSpan, ...]
    embeds: GivenEmbeds | None = None  # prompt embeddings on the host, or rows of pictures on the device
    draft_width: int = 0  # drafts of each row of a staged step, with padding; 0: it has none
    rotary: Ints | None = None  # [3, T] int64 positions to rotate by, if tokens of a picture's grid are among them
    key_limits: Ints | None = None  # [T] int32 first key that a token does not see, if some see more than earlier ones
    source: SourceInputs | None = None  # of an encoder-decoder

    @property
    def sample_index(self) -> Ints | None:
        """[D] rows of `wanted` to sample from; None: all."""
        return np.searchsorted(self.wanted, self.rows.draws) if self.prompt_spans else None

    @property
    def has_drafts(self) -> bool:
        return len(self.slots) > len(self.counts)

    @property
    def firsts(self) -> Ints:
        """[S] index of each row's first draw among the D."""
        firsts: Ints = np.cumsum(self.counts) - self.counts
        return firsts

    def part(self, rows: slice) -> StepBatch:
        """Return the batch of consecutive requests."""
        first, last = (int(self.rows.starts[place]) for place in (rows.start, rows.stop))
        wanted = slice(*np.searchsorted(self.wanted, (first, last)).tolist())
        sampling = slice(*(int(self.rows.samples[:place].sum()) for place in (rows.start, rows.stop)))
        drawing = slice(*(int(self.counts[:place].sum()) for place in (sampling.start, sampling.stop)))
        spans = tuple(
            replace(span, start=span.start - wanted.start)
            for span in self.prompt_spans
            if wanted.start <= span.start < wanted.stop
        )
        return StepBatch(
            self.rows.part(rows), self.wanted[wanted] - first, self.plan_rows[sampling], self.slots[drawing],
            self.lengths[drawing], self.counts[sampling], spans, _embeds_between(self.embeds, first, last),
            rotary=None if self.rotary is None else self.rotary[:, first:last],
            key_limits=None if self.key_limits is None else self.key_limits[first:last],
            source=None if self.source is None else self.source.part(first, last),
        )  # fmt: skip


class InputMaker(Protocol):
    """Makes a step's tensors, and keeps their sources by slot: token ids and block tables."""

    token_ids: Tensor  # [slots, max_model_len + 1] int32 on the device

    def enter(self, slot: int, token_ids: Ints) -> None:
        """Store a request's known tokens. token_ids: int32."""

    def add_blocks(self, slot: int, held: int, block_ids: BlockIds) -> None:
        """Append blocks, of each group equally many, to tables that hold `held` blocks."""

    def clear(self) -> None:
        """Drop updates that have not been sent with a step yet."""

    def make(self, batch: StepBatch) -> ForwardInputs: ...

    def write_tokens(self, slot: int, first: int, token_ids: Ints, known: int) -> None:
        """Write ids from position `first` on. The slot then has `known` tokens, and drafts behind them. int32"""


class SlotState:
    """Persistent state, one row per slot. `apply` changes it, `batch` reads it."""

    def __init__(
        self, inputs: InputMaker, *, max_num_seqs: int, max_model_len: int, num_blocks: tuple[int, ...],
        block_size: int, vocab_size: int, num_places: int = 0, accepts_on_device: bool = False,
    ) -> None:  # fmt: skip
        """num_places: of recurrent states, with the null place; 0: the model has none. accepts_on_device: the host does
        not wait for what the device accepts, so it counts tokens of requests with drafts from above."""
        self.sources: SourcePool | None = None  # of an encoder-decoder
        self._source_of = [b""] * max_num_seqs  # digest of each slot's source
        self._encoded: Mapping[bytes, Tensor] = {}  # rows of pictures by digest, of a model that sees
        self._deep_from: int | None = None  # column of these rows from which on they are added behind layers
        self.inputs, self._num_places, self._accepts_on_device = inputs, num_places, accepts_on_device
        self.max_model_len, self.block_size, self.num_blocks = max_model_len, block_size, num_blocks
        self._vocab_size = vocab_size
        self._num_blocks_held = np.zeros(max_num_seqs, np.int64)
        self._num_tokens = np.zeros(max_num_seqs, np.int64)  # known tokens: given or sampled; or an upper bound
        self._num_computed = np.zeros(max_num_seqs, np.int64)
        self._num_ready = np.zeros(max_num_seqs, np.int64)  # drafts behind the known tokens
        self._has_drafted = np.zeros(max_num_seqs, bool)  # a row of the request had drafts: C is an upper bound
        self._prompt_len = np.zeros(max_num_seqs, np.int64)
        self._prompt_logprobs = np.full(max_num_seqs, -1, np.int64)
        self._adapter = np.full(max_num_seqs, -1, np.int64)
        self._holder: list[str | None] = [None] * max_num_seqs
        self._given: dict[int, SlotGiven] = {}  # of slots with prompt embeddings or pictures
        self._shift = np.zeros(max_num_seqs, np.int64)  # of tokens behind the prompt, see StepRows
        self._generates_from = np.zeros(max_num_seqs, np.int64)  # position of the prompt's last token that has an id

    def see(self, encoded: Mapping[bytes, Tensor], hidden_size: int) -> None:
        """Look rows of pictures up in `encoded`, by digest."""
        self._encoded, self._deep_from = encoded, hidden_size

    def clear(self) -> None:
        """Free all slots. Buffers stay: an entering request overwrites what it reads."""
        self._holder = [None] * len(self._holder)
        self._given.clear()
        self.inputs.clear()

    def held(self) -> list[int]:
        return [slot for slot, holder in enumerate(self._holder) if holder is not None]

    # ---- who holds what ----------------------------------------------------------------------------------------------

    def apply(self, plan: StepPlan) -> None:
        """Apply freed slots, then new ones, then ids sampled by another stage and the rows' new blocks."""
        for slot in plan.freed_slots:
            assert self._holder[slot] is not None, f"slot {slot} freed and not held"
            self._holder[slot] = None
            self._given.pop(slot, None)
        for new in plan.new_slots:
            self._enter(new)
        sampled = dict(plan.known_token_ids)
        for row in plan.rows:
            assert self._holder[row.slot] == row.request_id, f"slot {row.slot} belongs to {self._holder[row.slot]}"
            if row.new_block_ids:
                assert all(map(all, row.new_block_ids)), f"the null block is handed out: {row.new_block_ids}"
                self._add_blocks(row.slot, row.new_block_ids)
            if row.num_drafts:
                self._has_drafted[row.slot] = True
            if row.draft_token_ids or row.slot in sampled:
                self._write_given(row, sampled.get(row.slot, ()))

    def _enter(self, new: NewSlot) -> None:
        slot, n = new.slot, len(new.token_ids)
        assert self._holder[slot] is None, f"slot {slot} given to {new.request_id} and held by {self._holder[slot]}"
        assert 1 <= new.prompt_len <= n <= self.max_model_len, (new.prompt_len, n, self.max_model_len)
        assert new.num_computed_tokens < n, "nothing left to compute"
        ids = np.array(new.token_ids, np.int32)  # a copy: the request's own array keeps growing
        assert ids.min() >= 0, "negative token id"
        assert ids.max() < self._vocab_size, f"token id {ids.max()} outside the vocabulary"
        self.inputs.enter(slot, ids)
        self._holder[slot] = new.request_id
        self._num_tokens[slot], self._prompt_len[slot] = n, new.prompt_len
        self._num_computed[slot], self._num_blocks_held[slot] = new.num_computed_tokens, 0
        self._num_ready[slot], self._has_drafted[slot] = 0, False
        asked = new.params.prompt_logprobs
        self._prompt_logprobs[slot] = -1 if asked is None else asked
        self._adapter[slot], self._generates_from[slot] = new.adapter, new.prompt_len - 1
        self._shift[slot], self._source_of[slot] = 0, new.source
        if new.prompt_embeds is not None:
            assert isinstance(new.prompt_embeds, PromptEmbedsTensor)
            self._given[slot] = SlotGiven((GivenRows(np.arange(new.prompt_len), new.prompt_embeds.values),))
        if new.media:
            self._given[slot] = given = SlotGiven.of_pictures(new.prompt_len, new.media)
            self._shift[slot] = given.shift
        if new.prompt_embeds is not None or (new.media and new.media[-1].end == new.prompt_len):
            self._generates_from[slot] = new.prompt_len
        if any(new.block_ids):
            self._add_blocks(slot, new.block_ids)

    def _add_blocks(self, slot: int, block_ids: BlockIds) -> None:
        held, count = self._num_blocks_held[slot], len(block_ids[0])
        for ids, num_blocks in zip(block_ids, self.num_blocks, strict=True):
            assert len(ids) == count, f"unlike numbers of blocks of the groups: {block_ids}"
            assert 0 <= min(ids) <= max(ids) < num_blocks, f"blocks {ids} of {num_blocks}"
        self.inputs.add_blocks(slot, held, block_ids)
        self._num_blocks_held[slot] = held + count

    def _write_given(self, row: Row, sampled: tuple[int, ...]) -> None:
        """Write the ids that come with a plan: drafts, and what another stage has sampled since the slot's last row.
        The stage that samples has the latter already."""
        slot, known, drafts = row.slot, row.num_computed_tokens + 1, row.draft_token_ids
        missing = max(0, known - int(self._num_tokens[slot]))
        assert missing in (0, len(sampled)), f"slot {slot} misses {missing} tokens, and {len(sampled)} come"
        assert len(drafts) in (0, row.num_drafts), "drafts of another number than planned"
        ids = (*sampled[len(sampled) - missing :], *drafts)
        if ids:
            self._write(slot, known - missing, np.array(ids, np.int32), known)
            self._num_tokens[slot] = known

    def _write(self, slot: int, first: int, token_ids: Ints, known: int) -> None:
        end = first + len(token_ids)
        assert end <= self.max_model_len, (first, len(token_ids), self.max_model_len)
        assert not len(token_ids) or 0 <= token_ids.min() <= token_ids.max() < self._vocab_size, token_ids
        self.inputs.write_tokens(slot, first, token_ids, known)
        self._num_ready[slot] = end - known

    def record_sampled(self, batch: StepBatch, accepted: Ints | None = None) -> None:
        """Count the accepted tokens of each sampling row as known, and its drafts as used up.
        accepted: [S]; None: not known, so all of them."""
        slots = batch.slots[batch.firsts]
        accepted = batch.counts if accepted is None else accepted
        self._num_tokens[slots] = batch.lengths[batch.firsts] + accepted
        self._num_ready[slots] = 0

    # ---- drafts ------------------------------------------------------------------------------------------------------

    def num_known(self, slot: int) -> int:
        """Return how many tokens are known: given or sampled."""
        return int(self._num_tokens[slot])

    def num_known_of(self, slots: Ints) -> Ints:
        known: Ints = self._num_tokens[slots]
        return known

    def num_places_of(self, slots: Ints) -> Ints:
        """Return how many token positions the blocks of each slot hold."""
        places: Ints = self._num_blocks_held[slots] * self.block_size
        return places

    def prompt_len(self, slot: int) -> int:
        return int(self._prompt_len[slot])

    def add_drafts(self, slot: int, token_ids: Ints) -> None:
        """Put drafts behind the known tokens of a slot, in place of others. token_ids: int32."""
        known = self.num_known(slot)
        self._write(slot, known, token_ids, known)

    # ---- one step ----------------------------------------------------------------------------------------------------

    def batch(self, plan: StepPlan, draft_width: int = 0) -> StepBatch:
        """Return the arrays of a plan, whose rows must not be empty, and count its tokens as computed.
        draft_width: see `StepBatch`."""
        slots, computed, scheduled, drafts = (_column(plan.rows, column) for column in (0, 2, 3, 8))
        samples = np.fromiter((row.samples for row in plan.rows), bool, len(plan.rows))
        generating = samples & (scheduled == 1 + drafts)
        bounded = generating & self._has_drafted[slots]  # P and C of the request may count rejected drafts
        self._check_computed(slots, computed, generating, bounded)
        if self._accepts_on_device:
            self._num_tokens[slots[bounded]] = computed[bounded] + 1  # what was settled since has lowered the bound
        else:
            drafts = np.where(generating, np.minimum(drafts, self._num_ready[slots]), drafts)
            scheduled = np.where(generating, 1 + drafts, scheduled)
            computed = np.where(generating, self._num_tokens[slots] - 1, computed)
        reread = _column(plan.rows, 9)
        computed, scheduled = computed - reread, scheduled + reread
        generates = (scheduled == 1 + drafts) & (computed >= self._generates_from[slots])
        order = np.lexsort((scheduled > 1, ~generates))  # as StepRows has them
        samples, slots = samples[order], slots[order]
        starts = np.zeros(len(order) + 1, np.int64)
        np.cumsum(scheduled[order], out=starts[1:])
        rows = StepRows(
            slots, computed[order], scheduled[order], starts, samples, generates[order], self._adapter[slots],
            drafts[order], self._states(plan.rows, order), reread[order] if reread.any() else None,
            bounded[order] if self._accepts_on_device else None,
            self._shift[slots] if self._shift[slots].any() else None,
        )  # fmt: skip
        self._check(plan, rows, samples)
        self._num_computed[rows.slots] = rows.context
        spans, wanted = self._wanted_logits(rows, order)
        counts = 1 + rows.drafts[samples]
        rotary, limits = self._pictured(rows)
        source = None
        if self.sources is not None:  # that each token of the step attends to
            source = self.sources.inputs([self._source_of[slot] for slot in np.repeat(rows.slots, rows.scheduled)])
        return StepBatch(
            rows, wanted, tuple(order[samples].tolist()), np.repeat(slots[samples], counts),
            rows.positions[rows.draws] + 1, counts, spans, self._given_embeds(rows), draft_width, rotary, limits,
            source,
        )  # fmt: skip

    def take_back(self, batch: StepBatch) -> None:
        """Count the tokens of a step that was not computed, and had no drafts, as not computed."""
        self._num_computed[batch.rows.slots] = batch.rows.computed

    def _check_computed(self, slots: Ints, computed: Ints, generating: Ints, bounded: Ints) -> None:
        """Check where rows begin. That of a bounded row, of a request with earlier drafts, is an upper bound."""
        if not self._accepts_on_device:
            assert (computed[bounded] >= self._num_tokens[slots][bounded] - 1).all(), "a position is left out"
        exact = ~bounded
        assert (computed == self._num_computed[slots])[exact].all(), (computed, self._num_computed[slots])
        last = self._num_tokens[slots] - 1
        assert (computed == last)[exact & generating].all(), "a row samples before its last known token"

    def _states(self, rows: tuple[Row, ...], order: Ints) -> Ints | None:
        """Return the places [3, B] of the rows' recurrent states."""
        if not self._num_places:
            assert all(row.state is None for row in rows), "a place for a state of a model without states"
            return None
        states = np.array([row.state for row in rows if row.state is not None], np.int64)
        assert len(states) == len(rows), "a row without a place for its recurrent state"
        read, write, save = states.T
        written = np.concatenate([write, save[save > 0]])
        assert len(np.unique(written)) == len(written), f"a place is written by two rows: {states.tolist()}"
        assert write.min() > 0, "a row writes the null place"
        assert max(written.max(), read.max()) < self._num_places, f"places {states.tolist()} of {self._num_places}"
        assert ((read == -1) | (read > 0)).all(), "a row reads the null place"
        assert not np.isin(read[read != write], written).any(), f"a row reads what another writes: {states.tolist()}"
        ordered: Ints = states[order].T
        return ordered

    def _given_embeds(self, rows: StepRows) -> GivenEmbeds | None:
        """Return the prompt embeddings and the rows of pictures at the positions of this step."""
        places, values = list[Ints](), list[Tensor]()
        for row, slot in enumerate(rows.slots.tolist() if self._given else ()):
            if slot in self._given and rows.computed[row] < self._prompt_len[slot]:
                at, held = self._given[slot].rows(int(rows.computed[row]), int(rows.context[row]), self._encoded)
                places.append(at + rows.starts[row] - rows.computed[row])
                values += held
        return joined(places, values, self._deep_from)

    def _pictured(self, rows: StepRows) -> tuple[Ints | None, Ints | None]:
        """Return the positions to rotate by, and the limits of what tokens see, if the step has tokens of pictures that
        differ from text in them."""
        rotary = limits = None
        for row, slot in enumerate(rows.slots.tolist() if self._given else ()):
            given, first = self._given.get(slot), int(rows.computed[row])
            if given is None or first >= self._prompt_len[slot]:
                continue
            end = min(int(rows.context[row]), int(self._prompt_len[slot]))
            at = slice(int(rows.starts[row]), int(rows.starts[row]) + end - first)
            if given.rotary is not None:
                if rotary is None:
                    shifts = 0 if rows.shifts is None else np.repeat(rows.shifts, rows.scheduled)
                    rotary = np.broadcast_to(rows.positions + shifts, (3, int(rows.starts[-1]))).copy()
                rotary[:, at] = given.rotary[:, first:end]
            if given.key_limits is not None:
                if limits is None:
                    limits = (rows.positions + 1).astype(np.int32)
                limits[at] = given.key_limits[first:end]
        return rotary, limits

    def _check(self, plan: StepPlan, rows: StepRows, samples: Ints) -> None:
        slots, context = rows.slots, rows.context
        known, given = self._num_tokens[slots], context - rows.drafts
        assert len(np.unique(slots)) == len(slots), "a slot twice in one step"
        assert self._accepts_on_device or (rows.drafts <= self._num_ready[slots]).all(), "a draft that does not exist"
        assert (context > rows.computed).all(), "a row without tokens"
        assert (given <= known).all(), "a position is scheduled before its token exists"
        assert (given[samples] == known[samples]).all(), "a row samples before its last known token"
        assert (context <= self._num_blocks_held[slots] * self.block_size).all(), "a position without a block"

    def _wanted_logits(self, rows: StepRows, order: Ints) -> tuple[tuple[PromptSpan, ...], Ints]:
        """Return the flat positions whose logits are needed, ascending:
        ends of sampling rows, and prompts with prompt_logprobs."""
        slots, computed, starts = rows.slots, rows.computed, rows.starts
        if rows.reread is not None:
            computed, starts = computed + rows.reread, starts[:-1] + rows.reread
        counts = np.minimum(rows.context - computed, self._prompt_len[slots] - 1 - computed)
        asking = np.flatnonzero((self._prompt_logprobs[slots] >= 0) & (counts > 0))
        if not len(asking):
            return (), rows.draws
        ranges = [np.arange(starts[i], starts[i] + counts[i]) for i in asking]
        wanted = np.unique(np.concatenate([rows.draws, *ranges]))
        spans = tuple(
            PromptSpan(int(order[i]), int(slots[i]), int(computed[i]), int(np.searchsorted(wanted, starts[i])),
                       int(counts[i]), int(self._prompt_logprobs[slots[i]]))
            for i in asking
        )  # fmt: skip
        return spans, wanted


class HostInputs:
    """`InputMaker` for a CPU, where tensors share memory with numpy and nothing is copied."""

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device, num_groups: int = 1
    ) -> None:
        self.block_size, self._device = block_size, device
        self._host_token_ids = np.zeros((max_num_seqs, max_model_len + 1), np.int32)  # those of `token_ids` on a CPU
        self.token_ids = to_device(self._host_token_ids, device)
        self._block_tables = np.zeros((num_groups, max_num_seqs, -(-max_model_len // block_size)), np.int32)

    def enter(self, slot: int, token_ids: Ints) -> None:
        self.token_ids[slot, : len(token_ids)] = to_device(token_ids, self._device)

    def clear(self) -> None:
        """Nothing to drop: blocks are written to the table at once."""

    def add_blocks(self, slot: int, held: int, block_ids: BlockIds) -> None:
        self._block_tables[:, slot, held : held + len(block_ids[0])] = block_ids

    def make(self, batch: StepBatch) -> ForwardInputs:
        rows, context, positions = batch.rows, batch.rows.context, batch.rows.positions
        slot_of_token = np.repeat(rows.slots, rows.scheduled)
        longs = all_to_device([positions, batch.wanted, slot_of_token], self._device)
        ints = all_to_device([context.astype(np.int32), rows.starts.astype(np.int32)], self._device)
        return ForwardInputs(
            token_ids=self.token_ids[longs[2], longs[0]].long(),
            positions=longs[0],
            groups=self._groups(rows.slots, context, self._writes(rows, slot_of_token, positions)),
            context_lens=ints[0],
            cu_seqlens_q=ints[1],
            logits_indices=longs[1],
            num_decodes=rows.num_decodes,
            query_lens=tuple(rows.scheduled.tolist()),
            context_lens_host=tuple(context.tolist()),
            adapters=self._adapters(rows),
            adapters_host=tuple(rows.adapters.tolist()),
            embeds=embeds_on(batch, self._device),
            rotary=rotary_on(batch, self._device),
            key_limits=limits_on(batch, self._device),
            source=batch.source,
            state=self._state_inputs(rows),
        )

    def decode_rows(self, rows: StepRows) -> DecodeRows:
        """Return the inputs of a step of a few tokens, each a row of its own. The tables stay where they are."""
        slots, positions, tables = rows.slots, rows.computed, self._block_tables
        if len(slots) < rows.starts[-1]:
            slots = np.repeat(slots, rows.scheduled)
            positions = rows.positions
        of_group = tables.ctypes.data + np.arange(len(tables))[:, None] * tables.strides[0]
        return DecodeRows(
            self._host_token_ids[slots, positions].astype(np.int64),
            positions,
            self._kv_slots(slots, positions),
            of_group + slots * tables.strides[1],
            rows.states,
            None if (rows.adapters < 0).all() else np.repeat(rows.adapters, rows.scheduled),
            rows.starts,
            None if rows.shifts is None else positions + np.repeat(rows.shifts, rows.scheduled),
        )

    def _state_inputs(self, rows: StepRows) -> StateInputs | None:
        if rows.states is None:
            return None
        read, write, save = to_device(rows.states.astype(np.int32), self._device)
        return StateInputs(read, write, save, *host_places(rows.states))

    def _kv_slots(self, slots: Ints, positions: Ints) -> Ints:
        """Return [G, T] int64: for each group where the K and V of these positions go."""
        blocks = self._block_tables[:, slots, positions // self.block_size].astype(np.int64)
        slots_of_groups: Ints = blocks * self.block_size + positions % self.block_size
        return slots_of_groups

    def _writes(self, rows: StepRows, slot_of_token: Ints, positions: Ints) -> Ints:
        """Return [G, T] int64: where the step's K and V go. Tokens that have their K and V already go to the null
        block, which nothing reads."""
        places = self._kv_slots(slot_of_token, positions)
        if rows.reread is not None:
            kept = np.repeat(rows.computed + rows.reread, rows.scheduled)
            places[:, positions < kept] = 0
        return places

    def _adapters(self, rows: StepRows) -> Tensor | None:
        if (rows.adapters < 0).all():
            return None
        return to_device(np.repeat(rows.adapters, rows.scheduled).astype(np.int32), self._device)

    def record_sampled(self, slots: Ints, lengths: Ints, sampled: Tensor) -> None:
        index = all_to_device([slots, lengths], self._device)
        self.token_ids.index_put_((index[0], index[1]), sampled.int())

    def write_tokens(self, slot: int, first: int, token_ids: Ints, known: int) -> None:
        self.token_ids[slot, first : first + len(token_ids)] = to_device(token_ids, self._device)

    def known_tokens(self, slot: int, count: int) -> Ints:
        """Return the first `count` tokens of a slot, valid until its next step. int32"""
        return self._host_token_ids[slot, :count]

    def are_drafts(self, slots: Ints, lengths: Ints, token_ids: Ints) -> Ints:
        """Return [D] bool: whether these ids are what the table has at positions `lengths`."""
        are: Ints = self._host_token_ids[slots, lengths] == token_ids
        return are

    def _groups(self, slots: Ints, context: Ints, kv_slots: Ints) -> tuple[GroupInputs, ...]:
        """Return the tables [B, width], with the null block beyond each row's context, since a slot may contain blocks
        of an earlier request, and the slots [G, T] on the device."""
        used = -(-context // self.block_size)
        width = int(used.max())
        held = np.where(np.arange(width) < used[:, None], self._block_tables[:, slots, :width], 0).astype(np.int32)
        return tuple(map(GroupInputs, to_device(held, self._device), to_device(kv_slots, self._device)))


def embeds_on(batch: StepBatch, device: torch.device) -> GivenEmbeds | None:
    """Return the batch's embeddings on the device; the copy is asynchronous."""
    if batch.embeds is None or device.type == "cpu":
        return batch.embeds
    places, values, deep = batch.embeds
    return GivenEmbeds(_moved(places, device), _moved(values, device), None if deep is None else _moved(deep, device))


def _moved(part: Tensor, device: torch.device) -> Tensor:
    return part if part.device.type == device.type else part.pin_memory().to(device, non_blocking=True)


def rotary_on(batch: StepBatch, device: torch.device) -> Tensor | None:
    """Return the positions to rotate by [3, T], or [T] if all three are equal, on the device; None: the tokens' own."""
    if batch.rotary is not None:
        return to_device(batch.rotary, device)
    if batch.rows.shifts is None:
        return None
    return to_device(batch.rows.positions + np.repeat(batch.rows.shifts, batch.rows.scheduled), device)


def limits_on(batch: StepBatch, device: torch.device) -> Tensor | None:
    return None if batch.key_limits is None else to_device(batch.key_limits, device)


def _embeds_between(embeds: GivenEmbeds | None, first: int, last: int) -> GivenEmbeds | None:
    """Return the embeddings of the step's tokens first .. last - 1, with places counted from the first one."""
    if embeds is None:
        return None
    inside = (embeds.places >= first) & (embeds.places < last)
    if not inside.any():
        return None
    deep = None if embeds.deep is None else embeds.deep[inside]
    return GivenEmbeds(embeds.places[inside] - first, embeds.values[inside], deep)


def _column(rows: tuple[Row, ...], index: int) -> Ints:
    return np.fromiter((row[index] for row in rows), np.int64, len(rows))
