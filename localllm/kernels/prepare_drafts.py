"""The inputs of a drafter's passes on the device: the tokens that a step has made known, then one guess after another.

    drafts = prepare_pairs(...)     behind a step: its tokens shifted by one, since a drafter keeps its part in the
                                    place of the next token
    record_draft(..., place)        behind a draw: puts the draft behind the known tokens, and makes the next pass

How many tokens a step accepted is known to the device alone. The pass behind it therefore has the step's own shape: as
many rows, tokens a row and starts. Tokens that turned out wrong are padding.
Not limited by memory: a step of 256 rows moves about 100 KB.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from localllm.kernels.launch import cdiv, early_launch, runs_triton, tl, triton, wait_for_inputs
from localllm.kernels.prepare_step import SlotTokens, StepInputs

CHUNK = 128  # tokens of one row that one program writes
ROWS = 32  # rows of one program


class DraftRules(NamedTuple):
    """The limits of a drafter; fixed while serving."""

    block_size: int
    first_key: int  # first slot that has keys
    most_tokens: int  # positions that its layers have; it reads no further
    num_drafts: int  # at a time


class PairInputs(NamedTuple):
    """A pass over a step's tokens, or over one token of each row. R rows, T tokens. Persistent: graphs hold the
    addresses."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64     rotary ones: index of the token minus `first_key`
    slot_mapping: Tensor  # [T] int64  -1: not written
    context_lens: Tensor  # [R] int32  0: a padding row
    last_tokens: Tensor  # [R] int64   index of each row's newest token among the T
    draft_slots: Tensor  # [R] int64   slots whose rows draft; -1: none
    lengths: Tensor  # [R] int64       tokens before the one that is drawn, which is its position

    @staticmethod
    def empty(rows: int, tokens: int, device: torch.device) -> PairInputs:
        def longs(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        context = torch.zeros(rows, dtype=torch.int32, device=device)
        return PairInputs(
            longs(tokens), longs(tokens), longs(tokens), context, longs(rows), longs(rows) - 1, longs(rows)
        )  # fmt: skip

    def part(self, rows: int, tokens: int) -> PairInputs:
        """Return views of the same memory for fewer rows and tokens."""
        return PairInputs(
            self.token_ids[:tokens], self.positions[:tokens], self.slot_mapping[:tokens], self.context_lens[:rows],
            self.last_tokens[:rows], self.draft_slots[:rows], self.lengths[:rows],
        )  # fmt: skip


def prepare_pairs(
    staged_slots: Tensor, inputs: StepInputs, block_table: Tensor, slots: SlotTokens, most: Tensor, rules: DraftRules,
    out: PairInputs, max_query_len: int,
) -> None:  # fmt: skip
    """Fill `out` with the next token of each token of a step, once the step's draws are accepted.

    staged_slots [R] int32: of every row, -1: padding; inputs: of the step; block_table [R, W] int32: of the drafter's
    blocks, 0 where a slot has none; most [slots] int32: drafts that a slot may have. A row drafts if it samples, has no
    drafts from elsewhere (`slots.valid`), and if its newest token is kept. max_query_len: most tokens of a row.
    """
    if not runs_triton(staged_slots, "steps"):
        prepare_pairs_reference(staged_slots, inputs, block_table, slots, most, rules, out)
        return
    rows, tokens, width = len(out.context_lens), len(out.token_ids), slots.token_ids.shape[1]
    chunks = max(cdiv(max(max_query_len, 1), CHUNK), cdiv(tokens, CHUNK * 8))
    _prepare_pairs_kernel[(rows + 1, chunks)](
        staged_slots, inputs.positions, inputs.cu_seqlens_q, inputs.context_lens, inputs.slots, block_table,
        slots.token_ids, slots.known, slots.valid, most, *out, rows, tokens, inputs.num_draws, width,
        block_table.stride(0), BLOCK_SIZE=rules.block_size, FIRST_KEY=rules.first_key, MOST_TOKENS=rules.most_tokens,
        CHUNK=CHUNK, **early_launch(staged_slots.device),
    )  # fmt: skip


def prepare_pairs_reference(
    staged_slots: Tensor, inputs: StepInputs, block_table: Tensor, slots: SlotTokens, most: Tensor, rules: DraftRules,
    out: PairInputs,
) -> None:  # fmt: skip
    """The definition in plain torch."""
    out.token_ids.zero_(), out.positions.zero_(), out.slot_mapping.fill_(-1), out.last_tokens.zero_()
    out.context_lens.zero_(), out.draft_slots.fill_(-1), out.lengths.zero_()
    starts, width = inputs.cu_seqlens_q.tolist(), slots.token_ids.shape[1]
    for row, slot in enumerate(staged_slots.tolist()):
        if slot < 0:
            continue
        samples = int(inputs.slots[row * inputs.num_draws]) >= 0
        first = int(inputs.positions[starts[row]]) + 1
        end = int(slots.known[slot]) if samples else int(inputs.context_lens[row]) + 1
        drafts = False
        for place in range(starts[row], min(starts[row + 1], starts[row] + end - first)):
            position = first + place - starts[row]
            out.token_ids[place] = slots.token_ids[slot, position]
            block = int(block_table[row, min(position // rules.block_size, block_table.shape[1] - 1)])
            is_kept = block > 0 and position < rules.most_tokens
            out.positions[place] = min(position, rules.most_tokens - 1) - rules.first_key
            if is_kept:
                out.slot_mapping[place] = block * rules.block_size + position % rules.block_size
            out.last_tokens[row], drafts = place, is_kept and position == end - 1
        out.context_lens[row], out.lengths[row] = end, end
        if samples and drafts and most[slot] > 0 and slots.valid[slot] == 0 and end < width - 1:
            out.draft_slots[row] = slot


def record_draft(
    drawn: Tensor, best: Tensor, block_table: Tensor, slots: SlotTokens, most: Tensor, rules: DraftRules,
    out: PairInputs, proposed: Tensor, place: int,
) -> None:  # fmt: skip
    """Put the drafts number `place` (from 0) behind the known tokens of the rows that draft, and fill `out` with the
    next pass, one token a row.

    drawn [R] int64; best [R] fp32: a draw's largest logit: where it is not finite, the row drafts no more. proposed
    [R, 1 + places] int32: how many drafts a row has, and which; -1: its logits are not numbers.
    """
    if not runs_triton(drawn, "steps"):
        record_draft_reference(drawn, best, block_table, slots, most, rules, out, proposed, place)
        return
    rows = len(drawn)
    _record_draft_kernel[(cdiv(rows, ROWS),)](
        drawn, best, block_table, slots.token_ids, slots.known, slots.valid, most, *out, proposed, rows, place,
        slots.token_ids.shape[1], block_table.stride(0), proposed.stride(0), BLOCK_SIZE=rules.block_size,
        FIRST_KEY=rules.first_key, MOST_TOKENS=rules.most_tokens, NUM_DRAFTS=rules.num_drafts, ROWS=ROWS, num_warps=1,
        **early_launch(drawn.device),
    )  # fmt: skip


def record_draft_reference(
    drawn: Tensor, best: Tensor, block_table: Tensor, slots: SlotTokens, most: Tensor, rules: DraftRules,
    out: PairInputs, proposed: Tensor, place: int,
) -> None:  # fmt: skip
    """The definition in plain torch."""
    width = slots.token_ids.shape[1]
    out.token_ids.zero_(), out.positions.zero_(), out.slot_mapping.fill_(-1), out.context_lens.zero_()
    for row, slot in enumerate(out.draft_slots.tolist()):
        out.last_tokens[row] = row
        if slot < 0:
            continue
        position = int(slots.known[slot]) + place
        usable = bool(best[row].isfinite())
        if usable:
            slots.token_ids[slot, position] = out.token_ids[row] = drawn[row]
            slots.valid[slot] = proposed[row, 0] = place + 1
            proposed[row, 1 + place] = drawn[row]
        elif best[row] != -torch.inf:
            slots.valid[slot], proposed[row, 0] = 0, -1
        block = int(block_table[row, min(position // rules.block_size, block_table.shape[1] - 1)])
        goes_on = usable and place + 1 < min(int(most[slot]), rules.num_drafts)
        goes_on = goes_on and position + 1 < width - 1 and position < rules.most_tokens and block > 0
        if not goes_on:
            out.draft_slots[row], out.token_ids[row] = -1, 0
            continue
        out.positions[row] = position - rules.first_key
        out.slot_mapping[row] = block * rules.block_size + position % rules.block_size
        out.context_lens[row] = out.lengths[row] = position + 1


@triton.jit(do_not_specialize=["rows", "tokens", "draws", "width"])
def _prepare_pairs_kernel(
    staged_slots_ptr, step_positions_ptr, cu_seqlens_ptr, step_context_ptr, drawing_ptr, table_ptr, tokens_ptr,
    known_ptr, valid_ptr, most_ptr, token_ids_ptr, positions_ptr, slot_mapping_ptr, context_ptr, last_ptr,
    draft_slots_ptr, lengths_ptr, rows, tokens, draws, width, table_stride, BLOCK_SIZE: tl.constexpr,
    FIRST_KEY: tl.constexpr, MOST_TOKENS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): CHUNK of the row's tokens; chunk 0 also writes the row's scalars. Row R: the padding."""
    wait_for_inputs(PDL)
    row, chunk = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, CHUNK)
    if row == rows:
        used = tl.load(cu_seqlens_ptr + rows)
        for begin in range(used + chunk * CHUNK, tokens, tl.num_programs(1) * CHUNK):
            place = begin + lane
            tl.store(token_ids_ptr + place, tl.zeros([CHUNK], tl.int64), mask=place < tokens)
            tl.store(positions_ptr + place, tl.zeros([CHUNK], tl.int64), mask=place < tokens)
            tl.store(slot_mapping_ptr + place, tl.full([CHUNK], -1, tl.int64), mask=place < tokens)
        return
    slot = tl.load(staged_slots_ptr + row).to(tl.int64)
    owner = tl.maximum(slot, 0)
    start, stop = tl.load(cu_seqlens_ptr + row), tl.load(cu_seqlens_ptr + row + 1)
    samples = (slot >= 0) & (tl.load(drawing_ptr + row * draws) >= 0)
    first = tl.load(step_positions_ptr + start, mask=stop > start, other=0).to(tl.int32) + 1
    known = tl.load(known_ptr + owner).to(tl.int32)
    end = tl.where(samples, known, tl.load(step_context_ptr + row) + 1)
    end = tl.where(slot >= 0, end, 0)
    table = table_ptr + row.to(tl.int64) * table_stride
    if chunk == 0:
        newest = end - 1
        block = tl.load(table + tl.maximum(newest, 0) // BLOCK_SIZE, mask=(slot >= 0) & (newest < width - 1), other=0)
        drafts = samples & (block > 0) & (newest < MOST_TOKENS) & (end < width - 1)
        drafts = drafts & (tl.load(most_ptr + owner) > 0) & (tl.load(valid_ptr + owner) == 0)
        last = tl.where(slot >= 0, tl.minimum(tl.maximum(start + end - 1 - first, start), stop - 1), 0)
        tl.store(context_ptr + row, end)
        tl.store(last_ptr + row, last.to(tl.int64))
        tl.store(draft_slots_ptr + row, tl.where(drafts, slot, -1))
        tl.store(lengths_ptr + row, end.to(tl.int64))
    offset = chunk * CHUNK + lane
    inside = start + offset < stop
    position = first + offset
    real = inside & (position < end)
    token = tl.load(tokens_ptr + owner * width + position, mask=real, other=0)
    block = tl.load(table + position // BLOCK_SIZE, mask=real & (position < width - 1), other=0).to(tl.int64)
    is_kept = (block > 0) & (position < MOST_TOKENS)
    rotated = tl.where(real, tl.minimum(position, MOST_TOKENS - 1) - FIRST_KEY, 0)
    place = start + offset
    tl.store(token_ids_ptr + place, token.to(tl.int64), mask=inside)
    tl.store(positions_ptr + place, rotated.to(tl.int64), mask=inside)
    tl.store(slot_mapping_ptr + place, tl.where(is_kept, block * BLOCK_SIZE + position % BLOCK_SIZE, -1), mask=inside)


@triton.jit(do_not_specialize=["rows", "place", "width"])
def _record_draft_kernel(
    drawn_ptr, best_ptr, table_ptr, tokens_ptr, known_ptr, valid_ptr, most_ptr, token_ids_ptr, positions_ptr,
    slot_mapping_ptr, context_ptr, last_ptr, draft_slots_ptr, lengths_ptr, proposed_ptr, rows, place, width,
    table_stride, proposed_stride, BLOCK_SIZE: tl.constexpr, FIRST_KEY: tl.constexpr, MOST_TOKENS: tl.constexpr,
    NUM_DRAFTS: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per ROWS rows."""
    wait_for_inputs(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    slot = tl.load(draft_slots_ptr + row, mask=inside, other=-1)
    drafts = slot >= 0
    drawn = tl.load(drawn_ptr + row, mask=drafts, other=0)
    best = tl.load(best_ptr + row, mask=drafts, other=0.0)
    is_number = (best == best) & (best != float("inf"))
    usable = drafts & is_number & (best != float("-inf"))
    position = tl.load(known_ptr + slot, mask=drafts, other=0).to(tl.int32) + place
    most = tl.minimum(tl.load(most_ptr + slot, mask=drafts, other=0), NUM_DRAFTS)
    count = tl.zeros([ROWS], tl.int32) + place + 1
    proposed = proposed_ptr + row * proposed_stride
    tl.store(tokens_ptr + slot * width + position, drawn.to(tl.int32), mask=usable)
    tl.store(valid_ptr + slot, count, mask=usable)
    tl.store(proposed, count, mask=usable)
    tl.store(proposed + count, drawn.to(tl.int32), mask=usable)
    tl.store(valid_ptr + slot, tl.zeros([ROWS], tl.int32), mask=drafts & ~is_number)
    tl.store(proposed, tl.full([ROWS], -1, tl.int32), mask=drafts & ~is_number)
    blocks = table_ptr + row.to(tl.int64) * table_stride + position // BLOCK_SIZE
    block = tl.load(blocks, mask=usable & (position < width - 1), other=0).to(tl.int64)
    goes_on = usable & (place + 1 < most) & (position + 1 < width - 1) & (position < MOST_TOKENS) & (block > 0)
    tl.store(token_ids_ptr + row, tl.where(goes_on, drawn, 0), mask=inside)
    tl.store(positions_ptr + row, tl.where(goes_on, position - FIRST_KEY, 0).to(tl.int64), mask=inside)
    where = tl.where(goes_on, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(slot_mapping_ptr + row, where, mask=inside)
    tl.store(context_ptr + row, tl.where(goes_on, position + 1, 0), mask=inside)
    tl.store(last_ptr + row, row.to(tl.int64), mask=inside)
    tl.store(draft_slots_ptr + row, tl.where(goes_on, slot, -1), mask=inside)
    tl.store(lengths_ptr + row, (position + 1).to(tl.int64), mask=inside)
