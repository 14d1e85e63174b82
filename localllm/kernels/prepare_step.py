"""Expands one small buffer into all inputs of a step: token ids, positions, KV cache slots, lengths, block tables.

    staged                                  filled on the host, in pinned memory; one copy moves it to the device
    prepare_step(staged, slots, inputs)     on the device: replaces the host's look-ups in a dozen tensors

Token ids and block tables are stored on the device, one row per slot, tables once per KV group; the host only says
which slots run and from which position. The host therefore never waits for a token that the device has just sampled. A
captured graph can replay the kernel, since what changes from step to step is in the buffer, not in the launch.

The buffer, int32:

    U, T | slot x R | computed x R | scheduled x R | start x R | samples x R | adapter x R | drafts x R | reread x R |
    state x 3R | shift x R | update x U

R and the number of tokens are those of the `StepInputs` to fill, including padding. A padding row has slot -1: its
context is 0, and its tokens have cache slot -1, which is never written. T: tokens without padding. An update is four
numbers: a group, a slot, a place in its block table, and the block. The first `reread` tokens of a row have K and V
already, which stay: theirs have cache slot -1. The places of recurrent states that a row reads, writes and saves to are
copied by `state_fields`. A row's tokens rotate by their position plus the row's `shift`: it is not 0 behind a picture
whose tokens have a row and a column.

`drafts` is -1 where the host knows where a row begins: at `computed`. Otherwise drafts of the request were in flight
when the step was planned, so the row begins at the last token that the device knows, and runs as many of its `drafts`
as there are. In a step with drafts each row draws D times and has D tokens, so that shapes do not depend on what was
accepted; tokens and draws without a draft are padding.
Not limited by memory: a step of 256 rows moves about 100 KB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from localllm.kernels.launch import cdiv, early_launch, launch_options, runs_triton, tl, triton, wait_for_inputs
from localllm.kernels.paged_attention.device import SPLIT_ROWS, Splitting, WorkLists
from localllm.kernels.paged_attention.kernels import split_rows

HEADER = 2
ROW_FIELDS = 12
STATE_FIELDS = 8  # first of the three fields of recurrent states: read, write, save
SHIFT_FIELD = 11
UPDATE_FIELDS = 4
CHUNK = 128  # tokens of one row that one program writes
RULES = tl.constexpr(len(Splitting._fields))  # of a list of decode rows' work
UPDATES = 512  # updates that a program reads at once


class SlotTokens(NamedTuple):
    """The tokens of every slot: first the known ones, then drafts."""

    token_ids: Tensor  # [slots, max_model_len + 1] int32
    known: Tensor  # [slots] int64  tokens known; not yet written for a slot that has sampled nothing
    valid: Tensor  # [slots] int32  drafts behind them


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of a step; R rows, T tokens, W blocks per row, G KV groups, D draws per row. Persistent: graphs hold the
    addresses."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [G, T] int64    -1: not written
    block_tables: Tensor  # [G, R, W] int32 only a row's own blocks are written; later entries are not read
    context_lens: Tensor  # [R] int32
    cu_seqlens_q: Tensor  # [R + 1] int32
    last_tokens: Tensor  # [R] int64        index of each row's last token among the T
    slots: Tensor  # [R * D] int64          -1: nothing is drawn here
    lengths: Tensor  # [R * D] int64        tokens before the drawn one, which is its position
    adapters: Tensor  # [T] int32           -1: none
    rotary: Tensor  # [T] int64             position to rotate by

    @staticmethod
    def empty(
        num_rows: int, num_tokens: int, max_blocks: int, device: torch.device, num_groups: int = 1, num_draws: int = 0
    ) -> StepInputs:
        """num_draws: of all rows, if they may be more than one of each."""

        def longs(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        rows, tokens, draws = num_rows, num_tokens, max(num_rows, num_draws)
        return StepInputs(
            longs(tokens), longs(tokens), longs(num_groups, tokens), ints(num_groups, rows, max_blocks), ints(rows),
            ints(rows + 1), longs(rows), longs(draws), longs(draws), ints(tokens),
            longs(tokens),
        )  # fmt: skip

    @property
    def num_draws(self) -> int:
        """Draws of each row."""
        return len(self.slots) // max(1, len(self.context_lens))

    def part(self, num_rows: int, num_tokens: int, num_draws: int = 1) -> StepInputs:
        """Return views of the same memory for fewer rows and tokens: a step of another shape.
        num_draws: of each row."""
        r, t, d = num_rows, num_tokens, num_rows * num_draws
        return StepInputs(
            self.token_ids[:t], self.positions[:t], self.slot_mapping[:, :t], self.block_tables[:, :r],
            self.context_lens[:r], self.cu_seqlens_q[: r + 1], self.last_tokens[:r], self.slots[:d], self.lengths[:d],
            self.adapters[:t], self.rotary[:t],
        )  # fmt: skip


def staged_size(num_rows: int, num_updates: int) -> int:
    """Return the size of a step's buffer in int32 numbers."""
    return HEADER + ROW_FIELDS * num_rows + UPDATE_FIELDS * num_updates


def state_fields(staged: Tensor, num_rows: int) -> Tensor:
    """Return a view [3, R] of the buffer of a step of R rows: the places of recurrent states that each row reads,
    writes and saves to."""
    return staged[HEADER : HEADER + ROW_FIELDS * num_rows].view(ROW_FIELDS, num_rows)[STATE_FIELDS:SHIFT_FIELD]


def prepare_step(
    staged: Tensor, slots: SlotTokens, block_tables: Tensor, inputs: StepInputs, block_size: int, max_query_len: int,
    work: WorkLists | None = None, ahead: int = 0,
) -> None:  # fmt: skip
    """Apply the buffer's block-table updates, then fill `inputs`. Drafts of rows without any become invalid. The
    kernel also sets the counters of split products (fused_epilogue.py) to zero.

    staged [>= staged_size] int32; block_tables [G, slots, W] int32, changed by the updates. max_query_len: upper bound
    of a row's tokens in this step. work: lists of the decode rows' attention, which the kernel fills as well. ahead:
    positions behind each row's context whose blocks are in `inputs`, too.
    """
    if not runs_triton(staged, "steps"):
        prepare_step_reference(staged, slots, block_tables, inputs, block_size, ahead)
        return
    rows, tokens, token_ids = len(inputs.context_lens), len(inputs.token_ids), slots.token_ids
    chunks = cdiv(max(max_query_len, 1), CHUNK)
    num_lists = 0 if work is None else len(work.splittings)
    counters = launch_options().counters
    _prepare_rows_kernel[(rows + 1 + num_lists, max(chunks, cdiv(tokens, CHUNK * 8)))](
        staged, token_ids, slots.known, slots.valid, block_tables, *_outputs(inputs), rows, tokens, inputs.num_draws,
        token_ids.stride(0), block_tables.stride(0), block_tables.stride(1), inputs.block_tables.stride(0),
        inputs.block_tables.stride(1), inputs.slot_mapping.stride(0),
        staged if work is None else work.buffer, staged if work is None else work.rules,  # without lists: not read
        0 if work is None else work.num_decodes, 0 if work is None else work.buffer.stride(0), counters, ahead,
        GROUPS=len(block_tables), BLOCK_SIZE=block_size, HEADER=HEADER, ROW_FIELDS=ROW_FIELDS,
        SHIFT_FIELD=SHIFT_FIELD, UPDATE_FIELDS=UPDATE_FIELDS, CHUNK=CHUNK, UPDATES=UPDATES, SPLIT_ROWS=SPLIT_ROWS,
        COUNTERS=0 if counters is None else len(counters),
        **early_launch(staged.device),
    )  # fmt: skip


def prepare_step_reference(
    staged: Tensor, slots: SlotTokens, block_tables: Tensor, inputs: StepInputs, block_size: int, ahead: int = 0
) -> None:
    """The definition in plain torch."""
    rows, tokens, draws = len(inputs.context_lens), len(inputs.token_ids), inputs.num_draws
    num_updates, used = staged[:HEADER].tolist()
    fields = staged[HEADER : HEADER + ROW_FIELDS * rows].view(ROW_FIELDS, rows).long()
    slot, computed, scheduled, start, samples, adapter, drafts, reread = fields[:STATE_FIELDS]
    updates = staged[HEADER + ROW_FIELDS * rows :][: UPDATE_FIELDS * num_updates].view(-1, UPDATE_FIELDS).long()
    block_tables[updates[:, 0], updates[:, 1], updates[:, 2]] = updates[:, 3].int()

    def count(end: int) -> Tensor:
        return torch.arange(end, device=staged.device)

    real = slot >= 0
    begins_here, owner = real & (drafts >= 0), slot.clamp(min=0)
    computed = torch.where(begins_here, slots.known[owner] - 1, computed)
    if draws > 1:
        scheduled = 1 + torch.where(begins_here, torch.minimum(drafts, slots.valid[owner]), 0)
    slots.valid[slot[real & (drafts < 0)]] = 0
    context = torch.where(real, computed + scheduled, 0)
    row_of_token = torch.repeat_interleave(count(rows), torch.where(real, scheduled, 0))
    places = start[row_of_token] + count(len(row_of_token)) - _first_of_run(row_of_token)
    positions = computed[row_of_token] + places - start[row_of_token]
    owners = slot[row_of_token]
    blocks = block_tables[:, owners, positions // block_size].long()
    for tensor in (inputs.token_ids, inputs.positions, inputs.rotary):
        tensor.zero_()
    for tensor in (inputs.slot_mapping, inputs.adapters):
        tensor.fill_(-1)
    inputs.token_ids[places] = slots.token_ids[owners, positions].long()
    inputs.positions[places] = positions
    inputs.rotary[places] = positions + fields[SHIFT_FIELD][row_of_token]
    is_new = places - start[row_of_token] >= reread[row_of_token]
    inputs.slot_mapping[:, places] = torch.where(is_new, blocks * block_size + positions % block_size, -1)
    inputs.adapters[places] = adapter[row_of_token].int()

    inputs.context_lens.copy_(context)
    inputs.cu_seqlens_q[:rows] = start.int()
    inputs.cu_seqlens_q[rows] = used
    inputs.last_tokens.copy_((start + scheduled - 1).clamp(0, max(0, tokens - 1)))
    existing, place = (scheduled if draws > 1 else torch.ones_like(scheduled))[:, None], count(draws)
    inputs.slots.copy_(torch.where((samples > 0)[:, None] & (place < existing), slot[:, None], -1).flatten())
    inputs.lengths.copy_((context[:, None] - existing + 1 + place).flatten())
    held = count(block_tables.shape[2]) < -(-torch.where(real, context + ahead, 0) // block_size)[:, None]
    inputs.block_tables.copy_(torch.where(held, block_tables[:, slot.clamp(min=0)], 0))


def _first_of_run(row_of_token: Tensor) -> Tensor:
    """Return, for tokens grouped by row, the index of the first token of each token's row."""
    index = torch.arange(len(row_of_token), device=row_of_token.device)
    begins = torch.ones_like(index, dtype=torch.bool)
    begins[1:] = row_of_token[1:] != row_of_token[:-1]
    return torch.cummax(torch.where(begins, index, 0), 0).values if len(index) else index


def _outputs(inputs: StepInputs) -> tuple[Tensor, ...]:
    return (
        inputs.token_ids, inputs.positions, inputs.slot_mapping, inputs.block_tables, inputs.context_lens,
        inputs.cu_seqlens_q, inputs.last_tokens, inputs.slots, inputs.lengths, inputs.adapters, inputs.rotary,
    )  # fmt: skip


@triton.jit
def _update_tables(
    updates_ptr, num_updates, slot, tables_ptr, group_stride, stride, FIELDS: tl.constexpr, UPDATES: tl.constexpr,
):  # fmt: skip
    """Apply the updates of one slot, of all slots if it is negative. The program then reads what it has written."""
    for begin in range(0, num_updates, UPDATES):
        update = begin + tl.arange(0, UPDATES)
        fields = updates_ptr + FIELDS * update
        owner = tl.load(fields + 1, mask=update < num_updates, other=0).to(tl.int64)
        live = (update < num_updates) & (owner == tl.where(slot < 0, owner, slot))
        group = tl.load(fields, mask=live, other=0).to(tl.int64)
        place = tl.load(fields + 2, mask=live, other=0)
        block = tl.load(fields + 3, mask=live, other=0)
        tl.store(tables_ptr + group * group_stride + owner * stride + place, block, mask=live)
    tl.debug_barrier()


@triton.jit
def _extent(fields, rows, row, is_row, known_ptr, valid_ptr, draws):
    """Return where rows begin and end: their slot, first position, tokens with padding, draws that are not padding,
    tokens that are not padding, and context. `valid` of a slot changes in this kernel only where it is not read."""
    slot = tl.load(fields + row, mask=is_row, other=-1).to(tl.int64)
    computed = tl.load(fields + rows + row, mask=is_row, other=0)
    scheduled = tl.load(fields + 2 * rows + row, mask=is_row, other=0)
    drafts = tl.load(fields + 6 * rows + row, mask=is_row, other=-1)
    begins_here = (slot >= 0) & (drafts >= 0)
    known_tokens = tl.load(known_ptr + slot, mask=begins_here, other=0).to(tl.int32)
    ready = tl.load(valid_ptr + slot, mask=begins_here, other=0)
    computed = tl.where(begins_here, known_tokens - 1, computed)
    existing = 1 + tl.where(begins_here & (draws > 1), tl.minimum(drafts, ready), 0)
    num_known = tl.where(slot >= 0, tl.where(draws > 1, existing, scheduled), 0)
    return slot, computed, scheduled, existing, num_known, tl.where(slot >= 0, computed + num_known, 0)


@triton.jit
def _fill_work_list(
    work_ptr, rules_ptr, fields, rows, context_ptr, known_ptr, valid_ptr, draws, num_decodes, ROWS: tl.constexpr,
):  # fmt: skip
    """Fill one list of `WorkLists` by its rules. All decode rows' lengths are written first, to the same values as by
    the rows' programs."""
    tile_bits, window, min_tiles = tl.load(rules_ptr), tl.load(rules_ptr + 1), tl.load(rules_ptr + 2)
    queries, spare_items = tl.load(rules_ptr + 3), tl.load(rules_ptr + 4)
    most_parts, counters = tl.load(rules_ptr + 5), tl.load(rules_ptr + 6)
    for begin in range(0, num_decodes, ROWS):
        some = begin + tl.arange(0, ROWS)
        _, _, _, _, _, length = _extent(fields, rows, some, some < num_decodes, known_ptr, valid_ptr, draws)
        tl.store(context_ptr + some, length, mask=some < num_decodes)
    tl.debug_barrier()
    max_items = tl.minimum(num_decodes + spare_items, num_decodes * most_parts)
    starts_ptr = work_ptr + tl.cdiv(max_items * 3, 4) * 4
    split_rows(
        work_ptr, starts_ptr, starts_ptr + tl.cdiv(num_decodes + 1, 4) * 4, context_ptr, num_decodes, max_items,
        spare_items, num_decodes * counters, tile_bits, window, min_tiles, queries, ROWS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "tokens", "draws", "num_decodes", "work_stride", "ahead"])
def _prepare_rows_kernel(
    staged_ptr, tokens_ptr, known_ptr, valid_ptr, tables_ptr, token_ids_ptr, positions_ptr, slot_mapping_ptr,
    block_tables_ptr, context_ptr, cu_seqlens_ptr, last_ptr, slots_ptr, lengths_ptr, adapters_ptr, rotary_ptr, rows,
    tokens, draws, tokens_stride, tables_group_stride, tables_stride, block_tables_group_stride, block_tables_stride,
    slot_mapping_stride, work_ptr, rules_ptr, num_decodes, work_stride, counters_ptr, ahead, GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEADER: tl.constexpr, ROW_FIELDS: tl.constexpr, SHIFT_FIELD: tl.constexpr,
    UPDATE_FIELDS: tl.constexpr, CHUNK: tl.constexpr, UPDATES: tl.constexpr, SPLIT_ROWS: tl.constexpr,
    COUNTERS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): CHUNK of the row's tokens; chunk 0 also writes the row's scalars. Row R: the padding, the
    updates of slots that have no row, and zeros in all COUNTERS counters, a power of two. Behind it, for each row
    of the rules [lists, RULES]: the list of the decode rows' work.

    Programs do not wait for each other: each applies the updates that it reads, and several write the same numbers.
    """
    wait_for_inputs(PDL)
    row, chunk = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, CHUNK)
    num_updates, used = tl.load(staged_ptr), tl.load(staged_ptr + 1)
    fields = staged_ptr + HEADER
    updates = fields + ROW_FIELDS * rows
    if row > rows:
        if chunk == 0:
            number = row - rows - 1
            _fill_work_list(
                work_ptr + number * work_stride, rules_ptr + number * RULES, fields, rows, context_ptr, known_ptr,
                valid_ptr, draws, num_decodes, SPLIT_ROWS,
            )  # fmt: skip
        return
    if row == rows:
        if chunk == 0:
            tl.store(cu_seqlens_ptr + rows, used)
            if counters_ptr is not None:
                tl.store(counters_ptr + tl.arange(0, COUNTERS), tl.zeros([COUNTERS], tl.int32))
            every_slot = tl.full([], -1, tl.int64)
            _update_tables(
                updates, num_updates, every_slot, tables_ptr, tables_group_stride, tables_stride, UPDATE_FIELDS, UPDATES
            )
        for begin in range(used + chunk * CHUNK, tokens, tl.num_programs(1) * CHUNK):
            place = begin + lane
            tl.store(token_ids_ptr + place, tl.zeros([CHUNK], tl.int64), mask=place < tokens)
            tl.store(positions_ptr + place, tl.zeros([CHUNK], tl.int64), mask=place < tokens)
            tl.store(rotary_ptr + place, tl.zeros([CHUNK], tl.int64), mask=place < tokens)
            for group in range(GROUPS):
                slots = slot_mapping_ptr + group * slot_mapping_stride + place
                tl.store(slots, tl.full([CHUNK], -1, tl.int64), mask=place < tokens)
            tl.store(adapters_ptr + place, tl.full([CHUNK], -1, tl.int32), mask=place < tokens)
        return
    slot, computed, scheduled, existing, num_known, context = _extent(
        fields, rows, row, row < rows, known_ptr, valid_ptr, draws
    )
    if (chunk > 0) & (chunk * CHUNK >= scheduled):
        return
    start = tl.load(fields + 3 * rows + row)
    samples = tl.load(fields + 4 * rows + row)
    adapter = tl.load(fields + 5 * rows + row)
    drafts = tl.load(fields + 6 * rows + row)
    reread = tl.load(fields + 7 * rows + row)
    shift = tl.load(fields + SHIFT_FIELD * rows + row)
    owner = tl.maximum(slot, 0)
    _update_tables(updates, num_updates, owner, tables_ptr, tables_group_stride, tables_stride, UPDATE_FIELDS, UPDATES)
    if chunk == 0:
        tl.store(valid_ptr + owner, 0, mask=(slot >= 0) & (drafts < 0))
        tl.store(context_ptr + row, context)
        tl.store(cu_seqlens_ptr + row, start)
        tl.store(last_ptr + row, tl.minimum(tl.maximum(start + scheduled - 1, 0), tokens - 1).to(tl.int64))
        is_drawn = (lane < existing) & (samples > 0)
        tl.store(slots_ptr + row * draws + lane, tl.where(is_drawn, slot, -1), mask=lane < draws)
        tl.store(lengths_ptr + row * draws + lane, (context - existing + 1 + lane).to(tl.int64), mask=lane < draws)
        num_blocks = tl.minimum(tl.cdiv(tl.where(slot >= 0, context + ahead, 0), BLOCK_SIZE), block_tables_stride)
        for group in range(GROUPS):
            source = tables_ptr + group * tables_group_stride + owner * tables_stride
            target = block_tables_ptr + group * block_tables_group_stride + row.to(tl.int64) * block_tables_stride
            for begin in range(0, num_blocks, CHUNK):
                place = begin + lane
                held = tl.load(source + place, mask=place < num_blocks, other=0)
                tl.store(target + place, held, mask=place < num_blocks)
    offset = chunk * CHUNK + lane
    inside = offset < scheduled
    position = computed + offset
    known = offset < num_known
    token = tl.load(tokens_ptr + owner * tokens_stride + position, mask=known, other=0)
    for group in range(GROUPS):
        table = tables_ptr + group * tables_group_stride + owner * tables_stride
        block = tl.load(table + position // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
        where = tl.where(known & (offset >= reread), block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(slot_mapping_ptr + group * slot_mapping_stride + start + offset, where, mask=inside)
    tl.store(token_ids_ptr + start + offset, token.to(tl.int64), mask=inside)
    tl.store(positions_ptr + start + offset, tl.where(known, position, 0).to(tl.int64), mask=inside)
    tl.store(rotary_ptr + start + offset, tl.where(known, position + shift, 0).to(tl.int64), mask=inside)
    tl.store(adapters_ptr + start + offset, tl.zeros([CHUNK], tl.int32) + adapter, mask=inside)
