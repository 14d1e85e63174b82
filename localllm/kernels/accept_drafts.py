"""Accepts a step's draws on the device: counts the right drafts, and records the accepted tokens.

    accepted = accept_drafts(slots, lengths, token_ids, drawn, best, known, valid)

A row draws a token at each of D consecutive positions: behind its last known token, and behind each of its drafts. The
drafts are in the table at the same positions. A draft is right if it is the token that was drawn at its position, so
the draws up to and including the first one that is not its draft are accepted: correction and bonus token are one case.
A draw that is not a number ends its row before it; a later step draws that position first and reports the error. Where
every row has one draw, the kernel that draws records it (sampling/draw.py, `Record`).
Not limited by memory: a step of 256 draws reads about 10 KB.
Idea: speculative decoding (Leviathan et al. 2023, arXiv:2211.17192) with draws in place of rejections
(docs/decisions/0020-a-draft-is-right-if-it-would-have-been-drawn.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.kernels.launch import cdiv, early_launch, runs_triton, tl, triton, wait_for_inputs

ROWS = 64  # rows of one program


def accept_drafts(
    slots: Tensor, lengths: Tensor, token_ids: Tensor, drawn: Tensor, best: Tensor, known: Tensor, valid: Tensor,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Accept draws: write them to the table, and advance `known` of their slots. `valid` of these slots becomes 0.

    slots [R, D] int64: -1 where the row has no such draw, which is in all places of a padding row; lengths [R, D]
    int64: the position that each draw fills; token_ids [slots, max_model_len + 1] int32: known tokens, then drafts;
    drawn [R, D] int64; best [R, D] float32: a draw's largest logit; known [slots] int64: tokens known of each slot;
    valid [slots] int32: drafts behind them. Returns [2, R] int64, in `out` if
    given: accepted draws, and drafts that were verified.
    """
    counts = torch.empty((2, len(slots)), dtype=torch.int64, device=slots.device) if out is None else out
    if not runs_triton(slots, "steps"):
        accept_drafts_reference(slots, lengths, token_ids, drawn, best, known, valid, counts)
        return counts
    rows, draws = slots.shape
    _accept_drafts_kernel[(cdiv(rows, ROWS),)](
        slots, lengths, token_ids, drawn, best, known, valid, counts, rows, draws, token_ids.stride(0), BLOCK=ROWS,
        **early_launch(slots.device),
    )  # fmt: skip
    return counts


def accept_drafts_reference(
    slots: Tensor, lengths: Tensor, token_ids: Tensor, drawn: Tensor, best: Tensor, known: Tensor, valid: Tensor,
    counts: Tensor,
) -> None:  # fmt: skip
    """The definition in plain torch. counts [2, R]: the result."""
    exists = slots >= 0
    right = token_ids[slots.clamp(min=0), torch.where(exists, lengths, 0)] == drawn
    goes_on = right[:, :-1] & exists[:, 1:] & best[:, 1:].isfinite()
    accepted = torch.cat([exists[:, :1], goes_on], -1).cumprod(-1).bool()  # a draw counts if all before it do
    token_ids[slots[accepted], lengths[accepted]] = drawn[accepted].int()
    counts[0], counts[1] = accepted.sum(-1), (exists.sum(-1) - 1).clamp(min=0)
    real = exists[:, 0]
    known[slots[real, 0]] = lengths[real, 0] + counts[0, real]
    valid[slots[real, 0]] = 0


@triton.jit(do_not_specialize=["rows", "draws"])
def _accept_drafts_kernel(
    slots_ptr, lengths_ptr, tokens_ptr, drawn_ptr, best_ptr, known_ptr, valid_ptr, counts_ptr, rows, draws,
    tokens_stride, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK rows, draw after draw: the next one counts if this one is the draft in the table."""
    wait_for_inputs(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    first = row * draws
    slot = tl.load(slots_ptr + first, mask=inside, other=-1)
    position = tl.load(lengths_ptr + first, mask=inside, other=0)
    table = tokens_ptr + slot * tokens_stride
    counts = slot >= 0
    accepted = tl.zeros([BLOCK], tl.int64)
    existing = tl.zeros([BLOCK], tl.int64)
    for draw in range(draws):
        exists = tl.load(slots_ptr + first + draw, mask=inside, other=-1) >= 0
        best = tl.load(best_ptr + first + draw, mask=inside, other=0.0)
        is_finite = (best == best) & (tl.abs(best) != float("inf"))
        counts = counts & exists & (is_finite | (draw == 0))
        drawn = tl.load(drawn_ptr + first + draw, mask=counts, other=0).to(tl.int32)
        draft = tl.load(table + position + draw, mask=counts, other=-1)
        tl.store(table + position + draw, drawn, mask=counts)
        accepted += counts.to(tl.int64)
        existing += exists.to(tl.int64)
        counts = counts & (draft == drawn)
    real = slot >= 0
    tl.store(known_ptr + slot, position + accepted, mask=real)
    tl.store(valid_ptr + slot, tl.zeros([BLOCK], tl.int32), mask=real)
    tl.store(counts_ptr + row, accepted, mask=inside)
    tl.store(counts_ptr + rows + row, tl.maximum(existing - 1, 0), mask=inside)
