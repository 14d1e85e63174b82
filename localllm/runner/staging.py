"""A step's inputs on a GPU: one small copy per step; the rest is looked up on the device (kernels/prepare_step.py).

Token ids and block tables are stored on the device by slot. A step's buffer has the rows, their starts and their new
blocks. It is copied through pinned memory that is not reused before the copy is done (upload.py), so a second step can
be staged while the first one waits. The resulting tensors keep their addresses, since captured graphs read them.
On a CPU everything works the same, without pinned memory; tests use that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from localllm.kernels.launch import reads_lengths_on_device, runs_triton
from localllm.kernels.layer_cache import DraftedInputs, StateStep
from localllm.kernels.paged_attention import KVReads, WorkLists, splits_decodes, splitting
from localllm.kernels.prepare_step import (
    HEADER,
    ROW_FIELDS,
    SHIFT_FIELD,
    STATE_FIELDS,
    UPDATE_FIELDS,
    SlotTokens,
    StepInputs,
    prepare_step,
    staged_size,
    state_fields,
)
from localllm.models.inputs import ForwardInputs, GroupInputs, StateInputs
from localllm.runner.batch import BlockIds, HostPlaces, Ints, StepBatch, embeds_on, host_places, limits_on, rotary_on
from localllm.runner.upload import all_to_device, pinned, to_device


class StepShape(NamedTuple):
    """Layout of a step: decode rows of one token and `drafts` each, then prefill rows that share `prefill_tokens`. A
    step with drafts has no prefill rows."""

    decodes: int
    prefill_rows: int = 0
    prefill_tokens: int = 0
    drafts: int = 0

    @property
    def rows(self) -> int:
        return self.decodes + self.prefill_rows

    @property
    def tokens(self) -> int:
        return self.decodes * self.num_draws + self.prefill_tokens

    @property
    def num_draws(self) -> int:
        """Draws of each row."""
        return 1 + self.drafts

    def holds(self, other: StepShape) -> bool:
        return (
            self.drafts == other.drafts
            and self.decodes >= other.decodes
            and self.prefill_rows >= other.prefill_rows
            and self.prefill_tokens >= other.prefill_tokens
        )


def shape_of(batch: StepBatch) -> StepShape:
    """Return the shape that a batch fills: exactly, but for rows with fewer drafts than the step's width."""
    assert batch.draft_width or not batch.has_drafts, "a staged step with drafts of no width"
    if batch.draft_width:
        return StepShape(len(batch.rows.slots), drafts=batch.draft_width)
    decodes, rows, tokens = batch.rows.num_decodes, len(batch.rows.slots), int(batch.rows.starts[-1])
    return StepShape(decodes, rows - decodes, tokens - decodes)


def row_places(batch: StepBatch, shape: StepShape) -> Ints:
    """Return [B] the index of each of the batch's rows in a step of this shape."""
    places = np.arange(len(batch.rows.slots))
    if shape.drafts:
        return places
    decodes = batch.rows.num_decodes
    places[decodes:] += shape.decodes - decodes
    return places


def draw_places(batch: StepBatch, shape: StepShape) -> Ints:
    """Return [D] the index of each of the batch's draws among those of a step of this shape."""
    firsts = row_places(batch, shape)[batch.rows.samples] * shape.num_draws
    places: Ints = np.repeat(firsts - batch.firsts, batch.counts) + np.arange(len(batch.slots))
    return places


class StagedInputs:
    """`InputMaker` on a device. `stage` copies, `prepare` unpacks; `make` does both for a batch without padding."""

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, max_num_batched_tokens: int, block_size: int,
        device: torch.device, largest: StepShape | None = None, num_groups: int = 1, has_states: bool = False,
        most_draws: int = 0, reads: Sequence[KVReads] = (), ahead: int = 0, shifts: bool = False,
    ) -> None:  # fmt: skip
        """largest: the most rows and tokens of the shapes that batches will be padded to. has_states: whether the model
        has recurrent states. most_draws: of a step with drafts; 0: there are no drafts. reads: how
        the layers of each KV group read their cache. ahead: positions behind a step whose blocks a drafter writes to,
        if there are some; the null block if not. shifts: whether tokens may rotate by other numbers than positions."""
        self._shifts = shifts
        self.block_size, self._device = block_size, device
        self.max_num_seqs, self.max_batched_tokens = max_num_seqs, max_num_batched_tokens
        max_blocks = -(-max_model_len // block_size)
        self.token_ids = torch.zeros((max_num_seqs, max_model_len + 1), dtype=torch.int32, device=device)
        self.tables = torch.zeros((num_groups, max_num_seqs, max_blocks), dtype=torch.int32, device=device)
        self.slots = SlotTokens(
            self.token_ids,
            torch.zeros(max_num_seqs, dtype=torch.int64, device=device),
            torch.zeros(max_num_seqs, dtype=torch.int32, device=device),
        )
        self._reads, self._ahead = tuple(reads), ahead
        self.max_rows = max_rows = max(max_num_seqs, largest.rows if largest else 0)
        self.max_draws = max(max_rows, most_draws)
        self.max_tokens = max_tokens = max(max_num_batched_tokens, largest.tokens if largest else 0, most_draws)
        self._max_updates = num_groups * (max_rows + max_num_batched_tokens // block_size + max_blocks)
        self._inputs = StepInputs.empty(max_rows, max_tokens, max_blocks, device, num_groups, most_draws)
        size = staged_size(max_rows, self._max_updates)
        self._staged = torch.zeros(size, dtype=torch.int32, device=device)
        rows = -(-max_rows // 4) * 4  # so that each of the three is aligned
        self._states = torch.zeros((3, rows), dtype=torch.int32, device=device) if has_states else None
        self.has_states = has_states
        self._nowhere = torch.zeros(rows, dtype=torch.int32, device=device)
        self._drafted = DraftedInputs(most_draws)
        self._host_rows = _HostRows((), (), ())
        self._updates: list[Ints] = []  # [n, 4] (group, slot, place, block)
        self._given: list[tuple[int, int, Ints, int]] = []  # arguments of `write_tokens` since the last step

    # ---- what a slot holds -------------------------------------------------------------------------------------------

    def enter(self, slot: int, token_ids: Ints) -> None:
        if self._ahead:
            self.tables[:, slot].zero_()
        self.token_ids[slot, : len(token_ids)].copy_(to_device(token_ids, self._device), non_blocking=True)

    def add_blocks(self, slot: int, held: int, block_ids: BlockIds) -> None:
        groups, count = len(block_ids), len(block_ids[0])
        update = np.empty((groups, count, UPDATE_FIELDS), np.int32)
        update[..., 0], update[..., 1] = np.arange(groups)[:, None], slot
        update[..., 2], update[..., 3] = np.arange(held, held + count), block_ids
        self._updates.append(update.reshape(-1, UPDATE_FIELDS))

    def clear(self) -> None:
        self._updates, self._given = [], []
        self.slots.valid.zero_()

    def write_tokens(self, slot: int, first: int, token_ids: Ints, known: int) -> None:
        self._given.append((slot, first, token_ids, known))

    # ---- one step ----------------------------------------------------------------------------------------------------

    def make(self, batch: StepBatch) -> ForwardInputs:
        shape = shape_of(batch)
        self.stage(batch, shape)
        wanted = to_device(batch.wanted, self._device)
        return replace(self.prepare(shape)[0], logits_indices=wanted, **given_on(batch, self._device))

    def stage(self, batch: StepBatch, shape: StepShape) -> None:
        """Copy the batch, padded to `shape`, and the block-table updates since the last step."""
        self._write_given()
        updates = np.concatenate(self._updates) if self._updates else np.empty((0, UPDATE_FIELDS), np.int32)
        self._updates = []
        assert _are_distinct(updates), f"two blocks for one place: {updates.tolist()}"
        while len(updates) > self._max_updates:  # many long prompts were found in the prefix cache at once
            self._send(_packed(np.empty((ROW_FIELDS, 0), np.int32), updates[: self._max_updates], 0))
            prepare_step(
                self._staged, self.slots, self.tables, self._inputs.part(0, 0), self.block_size, max_query_len=0
            )
            updates = updates[self._max_updates :]
        fields, used = _row_fields(batch, shape)
        self._send(_packed(fields, updates, used))
        self._host_rows = _host_rows(batch, shape)

    def _write_given(self) -> None:
        """Write the ids that came with the plan of the step. A pipeline's steps have some, other steps none."""
        if not self._given:
            return
        tokens = [
            (np.full(len(ids), slot), np.arange(first, first + len(ids)), ids.astype(np.int64))
            for slot, first, ids, _ in self._given
        ]
        owners = [(slot, known, first + len(ids) - known) for slot, first, ids, known in self._given]
        columns = [*map(np.concatenate, zip(*tokens, strict=True)), *np.array(owners, np.int64).T]
        slots, positions, ids, owner, known, valid = all_to_device(columns, self._device)
        self.token_ids.index_put_((slots, positions), ids.int())
        self.slots.known.index_put_((owner,), known)
        self.slots.valid.index_put_((owner,), valid.int())
        self._given = []

    def stage_padding(self, shape: StepShape) -> None:
        """Stage a step of this shape that has only padding rows.
        It reads no block, and writes only to the null block."""
        used = shape.decodes * shape.num_draws
        fields = _padding(shape, used)
        self._send(_packed(fields, np.empty((0, UPDATE_FIELDS), np.int32), used))
        zeros, none = (0,) * shape.rows, (-1,) * shape.rows
        self._host_rows = _HostRows(tuple(fields[2].tolist()), zeros, none, HostPlaces(none, zeros, zeros))

    def prepare(self, shape: StepShape) -> tuple[ForwardInputs, StepInputs]:
        """Unpack the staged step. The launched kernels depend on the shape alone, so a graph can record them."""
        inputs, longest = self.part(shape), shape.prefill_tokens or shape.num_draws
        work = self._work_lists(shape)
        prepare_step(self._staged, self.slots, self.tables, inputs, self.block_size, longest, work, self._ahead)
        if self._states is not None:
            self._states[:, : shape.rows].copy_(state_fields(self._staged, shape.rows))
        return replace(self._forward_inputs(inputs, shape), work=work), inputs

    def _work_lists(self, shape: StepShape) -> WorkLists | None:
        """Return lists for the attention of decode rows, where there are any and kernels read them."""
        max_blocks = self.tables.shape[2]
        if not shape.decodes or not splits_decodes() or not self._reads:
            return None
        if not runs_triton(self.tables, "attention") or not runs_triton(self.tables, "steps"):
            return None
        ways = dict.fromkeys(splitting(reads, shape.num_draws, max_blocks, self._device) for reads in self._reads)
        return WorkLists.empty(tuple(ways), shape.decodes, self._device)

    @property
    def query_lens(self) -> tuple[int, ...]:
        """The tokens of each row of the staged step."""
        return self._host_rows.scheduled

    def slots_of_rows(self, shape: StepShape) -> Tensor:
        """Return a view [R] int32 of the staged rows' slots. -1: a padding row."""
        return self._staged[HEADER : HEADER + shape.rows]

    def part(self, shape: StepShape) -> StepInputs:
        """Return the buffers that `prepare` fills for a step of this shape."""
        return self._inputs.part(shape.rows, shape.tokens, shape.num_draws)

    def _forward_inputs(self, inputs: StepInputs, shape: StepShape) -> ForwardInputs:
        context = self._host_rows.context
        if not reads_lengths_on_device(inputs.context_lens):  # twins read them on the host, which knows bounds of them
            context = tuple(inputs.context_lens.tolist())
        return ForwardInputs(
            token_ids=inputs.token_ids,
            positions=inputs.positions,
            groups=tuple(map(GroupInputs, inputs.block_tables, inputs.slot_mapping)),
            context_lens=inputs.context_lens,
            cu_seqlens_q=inputs.cu_seqlens_q,
            logits_indices=inputs.last_tokens,
            num_decodes=shape.decodes,
            decode_queries=shape.num_draws,
            query_lens=self._host_rows.scheduled,
            context_lens_host=context,
            adapters=inputs.adapters,
            adapters_host=self._host_rows.adapters,
            rotary=inputs.rotary if self._shifts else None,
            state=self._state_inputs(shape),
        )

    def _state_inputs(self, shape: StepShape) -> StateInputs | None:
        if self._states is None:
            return None
        assert self._host_rows.states is not None, "a row without a place for its recurrent state"
        read, write, save = self._states[:, : shape.rows]
        if shape.drafts:
            nowhere, zeros = self._nowhere[: shape.rows], (0,) * shape.rows
            return StateInputs(read, nowhere, nowhere, self._host_rows.states.read, zeros, zeros, self._drafted)
        return StateInputs(read, write, save, *self._host_rows.states)

    def written_states(self, shape: StepShape) -> Tensor:
        """Return [2, R] int64 the places to which the staged rows write and save their states. 0: none. Can be
        recorded."""
        assert self._states is not None, "a model without recurrent states"
        return self._states[1:, : shape.rows].long()

    def advance_states(self, shape: StepShape, accepted: Tensor) -> None:
        """Let recurrent states come after the accepted tokens of a step with drafts. accepted [R] int64. Can be
        recorded."""
        if self._states is None:
            return
        rows, count = shape.rows, torch.arange(shape.tokens, device=self._device)
        starts = torch.nn.functional.pad(accepted.cumsum(0), (1, 0))
        row = torch.searchsorted(starts[1:], count, right=True).clamp_(max=rows - 1)
        tokens = (row * shape.num_draws + count - starts[row]).clamp_(max=shape.tokens - 1)  # the rest is not read
        read, write, _ = self._states[:, :rows]
        lens, host = (0,) * rows, HostPlaces((), (), ())
        if not runs_triton(accepted, "recurrent"):
            assert self._host_rows.states is not None
            lens, host = tuple(accepted.tolist()), self._host_rows.states._replace(save=(0,) * rows)
        self._drafted.advance(tokens, StateStep(starts.int(), read, write, self._nowhere[:rows], lens, *host, 0))

    def _send(self, packed: Ints) -> None:
        self._staged[: len(packed)].copy_(pinned(packed, self._device), non_blocking=True)


def given_on(batch: StepBatch, device: torch.device) -> dict[str, Any]:
    """Return the fields of `ForwardInputs` that a prompt with embeddings or pictures has."""
    given: dict[str, Any] = {
        "embeds": embeds_on(batch, device), "key_limits": limits_on(batch, device), "source": batch.source
    }  # fmt: skip
    return given if batch.rotary is None else given | {"rotary": rotary_on(batch, device)}


def _row_fields(batch: StepBatch, shape: StepShape) -> tuple[Ints, int]:
    """Return [ROW_FIELDS, R] int32 and the number of used tokens; see kernels/prepare_step.py."""
    rows, decodes = batch.rows, batch.rows.num_decodes
    used = shape.decodes * shape.num_draws + (0 if shape.drafts else int(rows.starts[-1]) - decodes)
    fields = _padding(shape, used)
    slot, computed, scheduled, start, samples, adapter, drafts, reread = fields[:STATE_FIELDS]
    places = row_places(batch, shape)
    slot[places], computed[places] = rows.slots, rows.computed
    if rows.are_bounds is not None:
        drafts[places] = np.where(rows.are_bounds, rows.drafts, -1)
    if not shape.drafts:
        scheduled[places] = rows.scheduled
        start[places[decodes:]] = rows.starts[decodes:-1] + shape.decodes - decodes
    samples[places], adapter[places] = rows.samples, rows.adapters
    if rows.reread is not None:
        reread[places] = rows.reread
    if rows.states is not None:
        fields[STATE_FIELDS:SHIFT_FIELD, places] = rows.states
    if rows.shifts is not None:
        fields[SHIFT_FIELD, places] = rows.shifts
    return fields, used


def _padding(shape: StepShape, used: int) -> Ints:
    """Return the fields of a step of padding rows: decode rows have one token for each of their draws, prefill rows
    none. A padding row reads and writes no recurrent state."""
    fields = np.zeros((ROW_FIELDS, shape.rows), np.int32)
    slot, _, scheduled, start, _, adapter, drafts, _, read = fields[: STATE_FIELDS + 1]
    slot[:] = adapter[:] = drafts[:] = read[:] = -1
    scheduled[: shape.decodes] = shape.num_draws
    start[: shape.decodes] = np.arange(shape.decodes) * shape.num_draws
    start[shape.decodes :] = used
    return fields


def _are_distinct(updates: Ints) -> bool:
    """Return whether no place is written twice: the kernel writes the updates in no particular order."""
    group, slot, place, _ = updates.astype(np.int64).T
    return len(updates) < 2 or len(np.unique((group << 24 | slot) << 32 | place)) == len(updates)


def _packed(fields: Ints, updates: Ints, used: int) -> Ints:
    header = np.array([len(updates), used], np.int32)
    assert len(header) == HEADER
    return np.concatenate([header, fields.ravel(), updates.ravel()])


class _HostRows(NamedTuple):
    """[R] values of the rows on the host, for the plain-torch twins."""

    scheduled: tuple[int, ...]
    context: tuple[int, ...]
    adapters: tuple[int, ...]
    states: HostPlaces | None = None


def _host_rows(batch: StepBatch, shape: StepShape) -> _HostRows:
    """Return the host values of a step. Padding rows have no context, no adapter and no state. Contexts of requests
    with drafts in flight are upper bounds."""
    scheduled, context, adapters = np.zeros((3, shape.rows), np.int64)
    scheduled[: shape.decodes], adapters[:] = shape.num_draws, -1
    places, rows = row_places(batch, shape), batch.rows
    context[places], adapters[places] = rows.context, rows.adapters
    if not shape.drafts:
        scheduled[places] = rows.scheduled
    states = None
    if rows.states is not None:
        padded = np.repeat([[-1], [0], [0]], shape.rows, axis=1)
        padded[:, places] = rows.states
        states = host_places(padded)
    return _HostRows(tuple(scheduled.tolist()), tuple(context.tolist()), tuple(adapters.tolist()), states)
