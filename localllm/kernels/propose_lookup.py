"""Proposes drafts on the device by lookup: what followed when the end of a slot's text occurred before.

    proposed = propose_lookup(slots, most, known, valid, token_ids, matches)

The longest end of the text, of at least LEAST_MATCH and at most LONGEST_MATCH tokens, that occurred before is looked
up; of equally long ones the latest counts, and the tokens behind it are the drafts, never more than the match is long.
runner/host_drafts.py does the same on a CPU, where nothing is launched. The text of a slot is read once for each token
of the longest match, out of the cache but for the first: 128 KB for 32,000 tokens.
Idea: prompt lookup decoding (Saxena 2023); matches as long as possible as in SAM decoding (Hu et al. 2024,
arXiv:2411.10666).
"""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.kernels.launch import cdiv, early_launch, runs_triton, tl, triton, wait_for_inputs

LEAST_MATCH = 3
LONGEST_MATCH = 64
MOST_DRAFTS = 16  # places for drafts in a row of the result
PLACES = 1024  # places of the text that one program compares


def propose_lookup(
    slots: Tensor, most: Tensor, known: Tensor, valid: Tensor, token_ids: Tensor, matches: Tensor
) -> Tensor:
    """Write drafts behind the known tokens of the rows' slots, and their number to `valid`.

    slots [R] int64: -1 for a row without drafts; most [slots] int32: drafts that a slot may have, at most MOST_DRAFTS;
    known [slots] int64; valid [slots] int32; token_ids [slots, max_model_len + 1] int32: drafts end before
    max_model_len; matches [>= R] int64: zeros, and zeros again afterwards. Returns [R, 1 + MOST_DRAFTS] int32: how many
    drafts a row has, then the drafts.
    """
    out = torch.empty((len(slots), 1 + MOST_DRAFTS), dtype=torch.int32, device=slots.device)
    if not runs_triton(slots, "steps"):
        propose_lookup_reference(slots, most, known, valid, token_ids, out.zero_())
        return out
    rows, width = len(slots), token_ids.shape[1]
    _match_kernel[(rows, cdiv(width, PLACES))](
        slots, most, known, token_ids, matches, slots.stride(0), token_ids.stride(0),
        LEAST=LEAST_MATCH, LONGEST=LONGEST_MATCH, BLOCK=PLACES, **early_launch(slots.device),
    )  # fmt: skip
    _copy_drafts_kernel[(rows,)](
        slots, most, known, valid, token_ids, matches, out, slots.stride(0), token_ids.stride(0), width - 1,
        MOST=MOST_DRAFTS, num_warps=1, **early_launch(slots.device),
    )  # fmt: skip
    return out


def propose_lookup_reference(
    slots: Tensor, most: Tensor, known: Tensor, valid: Tensor, token_ids: Tensor, out: Tensor
) -> None:
    """The definition in plain torch. out [R, 1 + MOST_DRAFTS]: zeros, then the result."""
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        count = int(known[slot])
        text, end, length = token_ids[slot, :count], 0, 0
        for place in range(1, count if most[slot] > 0 else 0):
            limit = min(place, count - 1, LONGEST_MATCH)
            is_same = text[place - limit : place] == text[count - limit :]
            common = int(is_same.flip(0).long().cumprod(0).sum())
            if common >= max(LEAST_MATCH, length):
                end, length = place, common
        drafts = text[end : end + min(int(most[slot]), length, token_ids.shape[1] - 1 - count)].clone()
        token_ids[slot, count : count + len(drafts)] = drafts
        valid[slot] = out[row, 0] = len(drafts)
        out[row, 1 : 1 + len(drafts)] = drafts


@triton.jit(do_not_specialize=["slots_stride"])
def _match_kernel(
    slots_ptr, most_ptr, known_ptr, tokens_ptr, matches_ptr, slots_stride, tokens_stride,
    LEAST: tl.constexpr, LONGEST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, part): the longest match that ends at one of BLOCK places, the latest of equals. Its length and its
    end are one number, so that the largest number is the best match of all parts."""
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row * slots_stride)
    if slot < 0:
        return
    if tl.load(most_ptr + slot) <= 0:
        return
    count = tl.load(known_ptr + slot).to(tl.int32)
    first = 1 + tl.program_id(1) * BLOCK
    if first >= count:
        return
    text = tokens_ptr + slot * tokens_stride
    ends = first + tl.arange(0, BLOCK)
    same = ends < count
    length = tl.zeros([BLOCK], tl.int32)
    limit = tl.minimum(LONGEST, count - 1)
    place = 0
    any_same = 1
    while (place < limit) & (any_same > 0):
        last = tl.load(text + count - 1 - place)
        held = tl.load(text + ends - 1 - place, mask=same & (ends > place), other=-1)
        same = same & (held == last)
        length += same.to(tl.int32)
        any_same = tl.max(same.to(tl.int32), 0)
        place += 1
    found = tl.where(length >= LEAST, (length.to(tl.int64) << 32) | ends.to(tl.int64), 0)
    best = tl.max(found, 0)
    if best > 0:
        tl.atomic_max(matches_ptr + row, best)


@triton.jit(do_not_specialize=["slots_stride", "max_len"])
def _copy_drafts_kernel(
    slots_ptr, most_ptr, known_ptr, valid_ptr, tokens_ptr, matches_ptr, out_ptr, slots_stride, tokens_stride, max_len,
    MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row): copy the tokens behind the row's best match behind its known ones."""
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row * slots_stride)
    out = out_ptr + row * (MOST + 1)
    if slot < 0:
        tl.store(out, 0)
        return
    match = tl.load(matches_ptr + row)
    tl.store(matches_ptr + row, tl.zeros([], tl.int64))
    count = tl.load(known_ptr + slot).to(tl.int32)
    most = tl.load(most_ptr + slot)
    end = (match & 0x7FFFFFFF).to(tl.int32)
    length = (match >> 32).to(tl.int32)
    num_drafts = tl.maximum(tl.minimum(tl.minimum(most, length), tl.minimum(count - end, max_len - count)), 0)
    text = tokens_ptr + slot * tokens_stride
    lane = tl.arange(0, MOST)
    drafts = tl.load(text + end + lane, mask=lane < num_drafts, other=0)
    tl.store(text + count + lane, drafts, mask=lane < num_drafts)
    tl.store(valid_ptr + slot, num_drafts)
    tl.store(out, num_drafts)
    tl.store(out + 1 + lane, drafts)
