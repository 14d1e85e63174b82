"""Log-softmax of raw logits at given tokens, their ranks, and the likeliest other tokens.

Nothing is sorted and no row of log-probabilities is written. The first kernel passes over the row in blocks of `BLOCK`
ids for the sum of exponentials, the number of larger logits (the rank) and the largest logit of each group of 64 ids.
In the second, one program per row combines these and takes the k likeliest tokens one by one: first the k groups with
the largest heads, then k tokens from these groups. The k likeliest tokens cannot be in any other group.
The floor is memory: V * 4 bytes of each row with logprobs, read once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.kernels.launch import cdiv, early_launch, next_power_of_2, runs_triton, tl, triton, wait_for_inputs
from localllm.kernels.sampling import selection
from localllm.kernels.sampling.nucleus import order_key, value_of
from localllm.kernels.sampling.selection import GROUP
from localllm.kernels.sampling.tables import SlotTables

BLOCK = 4096  # ids per program
ROOMS = (0, 1, 5, 20)  # numbers of likeliest tokens for which kernels are compiled: any k uses the next larger one


def token_logprobs(
    logits: Tensor, token_ids: Tensor, k: int, slots: Tensor | None = None, tables: SlotTables | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logprobs of given tokens and of the k likeliest others. logits [R, V] raw; token_ids [R] int64;
    k may be 0.

    Returns ids [R, 1 + k] int64 and logprobs [R, 1 + k] float32, the given token first, and its rank [R] int64. k is at
    most V. With slots [R] and tables, the kernels read from each row's slot how many it wants, and skip rows that want
    none: entries of skipped rows, and entries beyond the wanted number, are undefined.
    """
    k = min(k, logits.shape[-1])
    if not runs_triton(logits, "sampling"):
        return token_logprobs_reference(logits, token_ids, k)
    num_rows, vocab_size = logits.shape
    room = min(next((room for room in ROOMS if room >= k), k), vocab_size)
    num_blocks, num_groups, device = cdiv(vocab_size, BLOCK), cdiv(vocab_size, GROUP), logits.device
    # Not views of one tensor: the divisibility of the second one's address would depend on the number of rows.
    best, sums = (torch.empty(num_rows, num_blocks, device=device) for _ in range(2))
    above = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=device)
    heads = torch.empty(num_rows, num_groups, device=device)
    ids = torch.zeros(num_rows, 1 + room, dtype=torch.int64, device=device)
    logprobs = torch.zeros(num_rows, 1 + room, device=device)
    ranks = torch.zeros(num_rows, dtype=torch.int64, device=device)
    asked = (token_ids, token_ids) if slots is None or tables is None else (slots, tables.num_logprobs)
    by_slot = asked[0] is not token_ids
    _sum_kernel[(num_rows, num_blocks)](
        logits, token_ids, *asked, best, sums, above, heads, logits.stride(0), vocab_size, BY_SLOT=by_slot, BLOCK=BLOCK,
        num_warps=4, **early_launch(device),
    )  # fmt: skip
    _logprobs_kernel[(num_rows,)](
        logits, token_ids, *asked, best, sums, above, heads, ids, logprobs, ranks, logits.stride(0), vocab_size,
        num_blocks, BY_SLOT=by_slot, K=room, NEAR=next_power_of_2(room), BLOCKS=next_power_of_2(num_blocks),
        GROUPS=next_power_of_2(num_groups), num_warps=8, **early_launch(device),
    )  # fmt: skip
    return ids[:, : 1 + k], logprobs[:, : 1 + k], ranks


def token_logprobs_reference(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    logits, ids = logits.float(), token_ids.unsqueeze(-1)
    heads = selection.group_heads(logits)
    values = logits.gather(-1, ids)
    sums, ranks = _sums_and_ranks(logits, heads.amax(-1, keepdim=True), values)
    if k:
        top_values, top_ids = selection.top(logits, heads, k)
        values, ids = torch.cat((values, top_values), -1), torch.cat((ids, top_ids), -1)
    return ids, values - sums, ranks


def _sums_and_ranks(logits: Tensor, largest: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log of the sum of exponentials [R, 1], and one plus the number of tokens with a larger logit [R]."""
    sums, ranks = torch.empty_like(own), torch.empty(len(own), dtype=torch.int64, device=own.device)
    for rows in selection.row_slices(logits):
        part = logits[rows]
        scratch = (part - largest[rows]).exp_()
        sums[rows] = largest[rows] + scratch.sum(-1, keepdim=True).log_()
        # counted as float, exact up to 2**24 tokens: summing booleans is five times slower
        ranks[rows] = 1 + torch.gt(part, own[rows], out=scratch).sum(-1).long()
    return sums, ranks


@triton.jit
def _num_asked(row, slots_ptr, counts_ptr, BY_SLOT: tl.constexpr, K: tl.constexpr):
    """Return how many likeliest tokens a row wants; -1: no logprobs at all."""
    num = tl.full([], K, tl.int64)
    if BY_SLOT:
        slot = tl.load(slots_ptr + row)
        num = tl.where(slot >= 0, tl.minimum(tl.load(counts_ptr + tl.maximum(slot, 0)), K), -1)
    return num


@triton.jit
def _sum_kernel(
    logits_ptr, token_ids_ptr, slots_ptr, counts_ptr, best_ptr, sums_ptr, above_ptr, heads_ptr, row_stride, V,
    BY_SLOT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One block of one row: its largest logit, the sum of exponentials relative to it,
    the logits above the token's own."""
    wait_for_inputs(PDL)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if _num_asked(row, slots_ptr, counts_ptr, BY_SLOT, 0) < 0:
        return
    row_ptr = logits_ptr + row * row_stride
    own = tl.load(row_ptr + tl.load(token_ids_ptr + row)).to(tl.float32)
    GROUPS: tl.constexpr = BLOCK // 64
    groups = block * GROUPS + tl.arange(0, GROUPS)
    ids = groups[:, None] * 64 + tl.arange(0, 64)[None, :]
    x = tl.load(row_ptr + ids, mask=ids < V, other=-float("inf")).to(tl.float32)
    heads = tl.max(x, 1)
    num_groups = (V + 63) // 64
    tl.store(heads_ptr + row * num_groups + groups, heads, mask=groups < num_groups)
    largest = tl.max(heads, 0)
    level = tl.where(largest == -float("inf"), 0.0, largest)
    at = row * tl.num_programs(1) + block
    tl.store(best_ptr + at, largest)
    tl.store(sums_ptr + at, tl.sum(tl.sum(tl.exp(x - level), 1), 0))
    tl.store(above_ptr + at, tl.sum(tl.sum((x > own).to(tl.int32), 1), 0))


@triton.jit
def _logprobs_kernel(
    logits_ptr, token_ids_ptr, slots_ptr, counts_ptr, best_ptr, sums_ptr, above_ptr, heads_ptr, ids_ptr,
    logprobs_ptr, ranks_ptr, row_stride, V, num_blocks, BY_SLOT: tl.constexpr, K: tl.constexpr, NEAR: tl.constexpr,
    BLOCKS: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: the token's own logprob and rank, then the likeliest in order."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    num = _num_asked(row, slots_ptr, counts_ptr, BY_SLOT, K)
    if num < 0:
        return
    GONE: tl.constexpr = -2147483648  # below the key of any number
    row_ptr = logits_ptr + row * row_stride
    blocks = tl.arange(0, BLOCKS)
    at, is_block = row * num_blocks + blocks, blocks < num_blocks
    best = tl.load(best_ptr + at, mask=is_block, other=-float("inf"))
    sums = tl.load(sums_ptr + at, mask=is_block, other=0.0)
    above = tl.load(above_ptr + at, mask=is_block, other=0)
    largest = tl.max(best, 0)
    level = tl.where(largest == -float("inf"), 0.0, largest)
    log_sum = level + tl.log(tl.sum(sums * tl.exp(best - level), 0))
    own_id = tl.load(token_ids_ptr + row)
    tl.store(ids_ptr + row * (1 + K), own_id)
    tl.store(logprobs_ptr + row * (1 + K), tl.load(row_ptr + own_id).to(tl.float32) - log_sum)
    tl.store(ranks_ptr + row, 1 + tl.sum(above, 0).to(tl.int64))
    if K > 0:
        num_groups = (V + 63) // 64
        groups = tl.arange(0, GROUPS)
        heads = tl.load(heads_ptr + row * num_groups + groups, mask=groups < num_groups, other=0.0)
        heads = tl.where(groups < num_groups, order_key(heads), GONE)
        places = tl.arange(0, NEAR)
        near = tl.full([NEAR], -1, tl.int32)
        for i in range(num):
            key, group = tl.max(heads, 0, return_indices=True)
            near = tl.where((places == i) & (key > GONE), group, near)
            heads = tl.where(groups == group, GONE, heads)
        ids = near[:, None] * 64 + tl.arange(0, 64)[None, :]
        exists = (near >= 0)[:, None] & (ids < V)
        x = tl.load(row_ptr + ids, mask=exists, other=0.0).to(tl.float32)
        keys = tl.where(exists, order_key(x), GONE)
        for i in range(num):
            key = tl.max(tl.max(keys, 1), 0)
            token = tl.min(tl.min(tl.where(keys == key, ids, V), 1), 0)
            tl.store(ids_ptr + row * (1 + K) + 1 + i, token.to(tl.int64))
            tl.store(logprobs_ptr + row * (1 + K) + 1 + i, value_of(key) - log_sum)
            keys = tl.where(ids == token, GONE, keys)
