"""Groups rows by expert into blocks of one size, the work list of a grouped GEMM, and sums a token's top-k outputs.

Grouping: count, prefix sum, scatter; no sort. Sizes depend on shapes alone and the host reads nothing, so the launch
can be part of a CUDA graph. Each program counts all ids (from L2) and places the rows of one expert in order: no
atomics, no buffer to clear, one launch. That reads the ids E times, 1 MiB at 128 experts and 2,048 ids; while decoding,
the launch is the cost.

The sum leaves out padding and reads each output once: limited by memory. It runs over k = 0, 1, ... in fp32 without
atomics, so its bits depend only on the token's own outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.kernels.launch import cdiv, early_launch, next_power_of_2, runs_triton, tl, triton, wait_for_inputs


@dataclass(frozen=True, slots=True)
class Alignment:
    """Blocks of block_m rows. An expert's blocks are consecutive, and only its last one has padding."""

    rows: Tensor | None  # [num_blocks * block_m] int32: an index into the flat ids, or -1 for padding
    experts: Tensor  # [num_blocks] int32: the block's expert, or -1 for an unused block
    block_m: int

    @property
    def is_single(self) -> bool:
        """True if block i holds only id i; `rows` is then None."""
        return self.rows is None

    @property
    def num_rows(self) -> int:
        return self.experts.numel() * self.block_m


def align_single(ids: Tensor, block_m: int) -> Alignment:
    """Align ids [1, top_k] without a launch: one token's experts are distinct, so each id has its own block."""
    return Alignment(None, ids.flatten(), block_m)


def align(ids: Tensor, num_experts: int, block_m: int) -> Alignment:
    """Align ids [T, top_k] int32; -1 is left out."""
    if not runs_triton(ids, "experts"):
        return align_reference(ids, num_experts, block_m)
    num_blocks = max_blocks(ids.numel(), num_experts, block_m)
    rows = torch.empty(num_blocks * block_m, dtype=torch.int32, device=ids.device)
    experts = torch.empty(num_blocks, dtype=torch.int32, device=ids.device)
    if num_blocks:
        # A constexpr, so that a prompt's odd number of ids does not recompile: the chunk covers a power of two.
        chunk = min(2048, max(32, next_power_of_2(ids.numel())))
        _align_kernel[(num_experts,)](
            ids,
            rows,
            experts,
            ids.numel(),
            num_blocks,
            NUM_EXPERTS=num_experts,
            NUM_BINS=next_power_of_2(num_experts + 1),
            BLOCK_M=block_m,
            CHUNK=chunk,
            num_warps=4,
            **early_launch(ids.device),
        )
    return Alignment(rows, experts, block_m)


def max_blocks(num_ids: int, num_experts: int, block_m: int) -> int:
    """Return the most blocks that num_ids can need in any distribution:
    an expert with c rows takes 1 + (c - 1) // block_m."""
    occupied = min(num_ids, num_experts)
    return occupied + (num_ids - occupied) // block_m


def align_reference(ids: Tensor, num_experts: int, block_m: int) -> Alignment:
    """The definition, with the same fixed sizes."""
    num_blocks = max_blocks(ids.numel(), num_experts, block_m)
    flat = ids.flatten().long()
    bins = torch.where(flat < 0, num_experts, flat)  # padding comes last
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device).index_add_(
        0, bins, torch.ones_like(bins)
    )
    blocks = (counts[:num_experts] + block_m - 1) // block_m
    ends = blocks.cumsum(0)
    experts = torch.searchsorted(ends, torch.arange(num_blocks, device=ids.device), right=True)
    experts = torch.where(experts < num_experts, experts, -1).int()

    order = bins.sort(stable=True).indices
    sorted_bins = bins[order]
    rank = torch.arange(flat.numel(), device=ids.device) - (counts.cumsum(0) - counts)[sorted_bins]
    starts = torch.cat((ends - blocks, ends.new_tensor([num_blocks]))) * block_m
    rows = torch.full((num_blocks * block_m + flat.numel(),), -1, dtype=torch.int32, device=ids.device)
    rows[starts[sorted_bins] + rank] = order.int()  # padding goes beyond the end
    return Alignment(rows[: num_blocks * block_m], experts, block_m)


@triton.jit(do_not_specialize=["num_ids", "num_blocks"])
def _align_kernel(
    ids_ptr,  # [num_ids] int32
    rows_ptr,  # [num_blocks * BLOCK_M] int32
    experts_ptr,  # [num_blocks] int32
    num_ids,
    num_blocks,
    NUM_EXPERTS: tl.constexpr,
    NUM_BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per expert; the last bins hold the ids -1 and those beyond the end."""
    wait_for_inputs(PDL)
    expert = tl.program_id(0)
    bins = tl.arange(0, NUM_BINS)
    offsets = tl.arange(0, CHUNK)
    counts = tl.zeros([NUM_BINS], tl.int32)
    for start in range(0, num_ids, CHUNK):
        ids = tl.load(ids_ptr + start + offsets, mask=start + offsets < num_ids, other=-1)
        counts += tl.histogram(tl.where(ids < 0, NUM_BINS - 1, ids), NUM_BINS)
    blocks = tl.where(bins < NUM_EXPERTS, (counts + BLOCK_M - 1) // BLOCK_M, 0)
    first = tl.sum(tl.where(bins < expert, blocks, 0), 0)
    own = tl.sum(tl.where(bins == expert, blocks, 0), 0)
    count = tl.sum(tl.where(bins == expert, counts, 0), 0)
    used = tl.sum(blocks, 0)

    placed = first * BLOCK_M
    for start in range(0, num_ids, CHUNK):
        ids = tl.load(ids_ptr + start + offsets, mask=start + offsets < num_ids, other=-1)
        mine = (ids == expert).to(tl.int32)
        tl.store(rows_ptr + placed + tl.cumsum(mine, 0) - 1, start + offsets, mask=mine == 1)
        placed += tl.sum(mine, 0)
    lane = tl.arange(0, BLOCK_M)
    padding = count + lane
    tl.store(rows_ptr + first * BLOCK_M + padding, -1, mask=padding < own * BLOCK_M)
    for block in range(first, first + own):
        tl.store(experts_ptr + block, expert)
    for block in range(used + expert, num_blocks, NUM_EXPERTS):  # unused blocks, divided among the programs
        tl.store(experts_ptr + block, -1)
        tl.store(rows_ptr + block * BLOCK_M + lane, -1)


def combine(partial: Tensor, ids: Tensor) -> Tensor:
    """Sum partial [T * top_k, N], already weighted; ids [T, top_k], -1 for rows to skip -> [T, N]"""
    if not runs_triton(partial, "experts"):
        return combine_reference(partial, ids)
    (num_tokens, top_k), width = ids.shape, partial.shape[1]
    out = torch.empty((num_tokens, width), dtype=partial.dtype, device=partial.device)
    if num_tokens:
        block = min(1024, next_power_of_2(width))
        _combine_kernel[(num_tokens, cdiv(width, block))](
            partial, ids, out, width, TOP_K=top_k, BLOCK=block, num_warps=4, **early_launch(partial.device)
        )
    return out


def combine_reference(partial: Tensor, ids: Tensor) -> Tensor:
    """The definition in plain torch."""
    answers = partial.view(*ids.shape, -1).float().masked_fill((ids < 0)[:, :, None], 0.0)
    total = torch.zeros_like(answers[:, 0])
    for k in range(ids.shape[1]):
        total += answers[:, k]
    return total.to(partial.dtype)


@triton.jit
def _combine_kernel(partial_ptr, ids_ptr, out_ptr, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program per token and block of columns."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        row = token * TOP_K + k
        mask = columns < tl.where(tl.load(ids_ptr + row) < 0, 0, width)
        total += tl.load(partial_ptr + row * width + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * width + columns, total.to(out_ptr.dtype.element_ty), mask=columns < width)
