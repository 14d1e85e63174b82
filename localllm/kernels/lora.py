"""Low-rank adapters on a layer's output: y += (x A^T) B^T, each row with its own request's adapter or none (Hu et al.
2021, arXiv:2106.09685; several adapters in one batch: Chen et al. 2023, arXiv:2310.18547).

Each layer takes two launches. The first computes x A^T, split along K so that a few tokens still fill a GPU; the second
sums the parts in fp32, multiplies by B and adds to y. A program takes 16 consecutive tokens and one adapter, and ends
at once if none of the tokens has that adapter. Tokens of a prompt are consecutive, so sorting by adapter does not pay.
Sizes depend on shapes alone and the host reads nothing, so the launches can be part of a CUDA graph. A row's sums do
not depend on other rows. Limited by reading x and y once more; A and B are small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localllm.kernels.launch import cdiv, early_launch, next_power_of_2, runs_triton, tl, triton, wait_for_inputs
from localllm.kernels.moe.grouped_gemm import gpu_of, has_tensor_cores

BLOCK_M = 16
PART = 1024  # columns of x that one program takes


@dataclass(frozen=True, slots=True)
class LoraRows:
    """The adapter of each row: `ids` for the kernels, `groups` for the twin."""

    ids: Tensor  # [T] int32, -1: none
    groups: tuple[tuple[int, slice | Tensor], ...] = ()  # (adapter, its rows), on the host

    def part(self, first: int, count: int) -> LoraRows:
        """Return the part of rows first .. first + count - 1, counted from the first of them."""
        if first == 0 and count == len(self.ids):
            return self
        ids = self.ids[first : first + count]
        return LoraRows(ids, _groups(ids.tolist())) if self.groups else LoraRows(ids)


def lora_rows(ids: Tensor, adapters: Sequence[int], lengths: Sequence[int]) -> LoraRows:
    """Return the rows of ids [T]; adapters [B], the same per request, each with `lengths` consecutive rows."""
    if runs_triton(ids, "adapters"):
        return LoraRows(ids)
    return LoraRows(ids, _groups([adapter for adapter, n in zip(adapters, lengths, strict=True) for _ in range(n)]))


def add_lora(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, rows: LoraRows, ranks: Sequence[int] | npt.NDArray[np.int64]
) -> None:
    """Add (x A^T) B^T to y [T, N] in place. x [T, K]; a [E, R, K] and b [E, N, R] in x's dtype.

    ranks [E]: of the present adapters; a and b hold zeros beyond them. Sums are in fp32.
    """
    if not runs_triton(x, "adapters"):
        add_lora_reference(y, x, a, b, rows, ranks)
        return
    num_tokens, depth = x.shape
    num_adapters, width, rank = b.shape
    if num_tokens == 0:
        return
    assert x.stride(1) == y.stride(1) == 1
    assert a.is_contiguous()
    assert b.is_contiguous()
    block_r, block_k, block_n = lora_tile(rank, has_tensor_cores(x.dtype.itemsize, gpu_of(x.device)))
    parts, blocks = cdiv(depth, PART), cdiv(num_tokens, BLOCK_M)
    low = torch.empty((parts, num_tokens, rank), dtype=torch.float32, device=x.device)
    _shrink_kernel[(blocks, parts * cdiv(rank, block_r), num_adapters)](
        x, a, low, rows.ids, num_tokens, depth, rank, x.stride(0),
        BLOCK_M=BLOCK_M, BLOCK_R=block_r, BLOCK_K=block_k, PART=PART, num_warps=4, num_stages=3,
        **early_launch(x.device),
    )  # fmt: skip
    _expand_kernel[(blocks, cdiv(width, block_n), num_adapters)](
        low, b, y, rows.ids, num_tokens, width, rank, y.stride(0), parts,
        BLOCK_M=BLOCK_M, BLOCK_R=block_r, BLOCK_N=block_n, num_warps=4, num_stages=2, **early_launch(x.device),
    )  # fmt: skip


class LoraTile(NamedTuple):
    block_r: int
    block_k: int  # divides PART
    block_n: int


def lora_tile(rank: int, tensor_cores: bool) -> LoraTile:
    """Return tile sizes. Without tensor cores a product's operands are also in registers."""
    block_r = max(16, next_power_of_2(rank))
    return LoraTile(min(64, block_r), 128, 64) if tensor_cores else LoraTile(min(32, block_r), 32, 32)


def add_lora_reference(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, rows: LoraRows, ranks: Sequence[int] | npt.NDArray[np.int64]
) -> None:
    """The definition in plain torch, adapter by adapter, without the unused rows of a and columns of b."""
    for adapter, own in rows.groups:
        rank = ranks[adapter]
        if not rank:
            continue
        low, up = x[own] @ a[adapter, :rank].t(), b[adapter, :, :rank].t()
        if isinstance(own, slice):
            y[own].addmm_(low, up)
        else:
            y[own] = torch.addmm(y[own], low, up)


def _groups(ids: list[int]) -> tuple[tuple[int, slice | Tensor], ...]:
    """Return each adapter's rows, consecutive ones as a slice."""
    places: dict[int, list[int]] = {}
    for place, adapter in enumerate(ids):
        if adapter >= 0:
            places.setdefault(adapter, []).append(place)
    return tuple((adapter, _rows(own)) for adapter, own in sorted(places.items()))


def _rows(places: list[int]) -> slice | Tensor:
    first, last = places[0], places[-1]
    return slice(first, last + 1) if last - first + 1 == len(places) else torch.tensor(places)


@triton.jit(do_not_specialize=["num_tokens"])
def _shrink_kernel(
    x_ptr,  # [T, K]
    a_ptr,  # [E, R, K]
    low_ptr,  # [parts, T, R] fp32
    ids_ptr,  # [T] int32
    num_tokens,
    depth,
    rank,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PART: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per BLOCK_M tokens, PART columns with BLOCK_R rows of A, and adapter."""
    wait_for_inputs(PDL)
    adapter = tl.program_id(2)
    token, mine = _own_tokens(ids_ptr, num_tokens, adapter, BLOCK_M)
    if tl.max(mine.to(tl.int32), 0) == 0:
        return
    tiles = tl.cdiv(rank, BLOCK_R)
    part = tl.program_id(1) // tiles
    r = tl.program_id(1) % tiles * BLOCK_R + tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    x_rows = x_ptr + token.to(tl.int64)[:, None] * x_stride
    a_rows = a_ptr + (adapter.to(tl.int64) * rank + r)[:, None] * depth
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for start in range(part * PART, tl.minimum(depth, (part + 1) * PART), BLOCK_K):
        column = start + k
        x = tl.load(x_rows + column[None, :], mask=mine[:, None] & (column < depth)[None, :], other=0.0)
        a = tl.load(a_rows + column[None, :], mask=(r < rank)[:, None] & (column < depth)[None, :], other=0.0)
        acc = tl.dot(x, tl.trans(a), acc, input_precision="ieee")
    low_ptrs = low_ptr + (part.to(tl.int64) * num_tokens + token)[:, None] * rank + r[None, :]
    tl.store(low_ptrs, acc, mask=mine[:, None] & (r < rank)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _expand_kernel(
    low_ptr,  # [parts, T, R] fp32
    b_ptr,  # [E, N, R]
    y_ptr,  # [T, N]
    ids_ptr,  # [T] int32
    num_tokens,
    width,
    rank,
    y_stride,
    parts,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per BLOCK_M tokens, BLOCK_N outputs and adapter; it writes only the rows of its adapter."""
    wait_for_inputs(PDL)
    adapter = tl.program_id(2)
    token, mine = _own_tokens(ids_ptr, num_tokens, adapter, BLOCK_M)
    if tl.max(mine.to(tl.int32), 0) == 0:
        return
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_R)
    b_rows = b_ptr + (adapter.to(tl.int64) * width + n)[:, None] * rank
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, rank, BLOCK_R):
        r = start + lane
        low = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        low_ptrs = low_ptr + token.to(tl.int64)[:, None] * rank + r[None, :]
        for _ in range(parts):
            low += tl.load(low_ptrs, mask=mine[:, None] & (r < rank)[None, :], other=0.0)
            low_ptrs += tl.cast(num_tokens, tl.int64) * rank
        b = tl.load(b_rows + r[None, :], mask=(n < width)[:, None] & (r < rank)[None, :], other=0.0)
        acc = tl.dot(low.to(b.dtype), tl.trans(b), acc, input_precision="ieee")
    y_ptrs = y_ptr + token.to(tl.int64)[:, None] * y_stride + n[None, :]
    mask = mine[:, None] & (n < width)[None, :]
    y = tl.load(y_ptrs, mask=mask, other=0.0).to(tl.float32) + acc
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _own_tokens(ids_ptr, num_tokens, adapter, BLOCK_M: tl.constexpr):
    """Return a program's tokens, and which of them have this adapter."""
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    return token, tl.load(ids_ptr + token, mask=token < num_tokens, other=-1) == adapter
