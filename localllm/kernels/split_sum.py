"""The parts of a matrix product whose K is split, and their sum: y = part 0 + part 1 + ... + bias.

A product of few rows splits K to fill the GPU, and each split writes fp32 sums. The kernel that reads y next can add
them as it loads (`load_sum`), which saves a kernel that only adds: rotary_store_kv, gated and add_rms_norm do. For
every other reader `add_splits` launches that kernel. Both add in the order of the splits, then the bias, and round once
to y's type, so that y has the same bits.
Does not know: how a product is split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.kernels.launch import cdiv, early_launch, next_power_of_2, tl, triton, wait_for_inputs


@dataclass(frozen=True, slots=True)
class SplitSum:
    """y [M, N] as parts that are still to be added."""

    parts: Tensor  # [S, M, N] fp32, contiguous, S > 1
    bias: Tensor | None  # [N]
    dtype: torch.dtype  # of y

    @property
    def shape(self) -> tuple[int, int]:
        return self.parts.shape[1], self.parts.shape[2]

    @property
    def device(self) -> torch.device:
        return self.parts.device


def add_splits(y: SplitSum, out: Tensor | None = None) -> Tensor:
    """Return y [M, N], in `out` [M, N] and its dtype if given."""
    splits, rows, n = y.parts.shape
    out = torch.empty((rows, n), dtype=y.dtype, device=y.device) if out is None else out
    block = min(1024, next_power_of_2(n))
    _sum_splits_kernel[(rows, cdiv(n, block))](
        out, y.parts, y.bias, rows, n, SPLITS=splits, BLOCK_N=block, **early_launch(y.device)
    )
    return out


@triton.jit
def load_sum(ptr, bias_ptr, at, column, mask, split_stride, SPLITS: tl.constexpr, dtype: tl.constexpr):
    """Load y at the offsets `at`, in `column`, as fp32 with y's rounding; 0 where masked. Splits are `split_stride`
    elements apart; with SPLITS == 1 ptr is y itself and bias_ptr None."""
    if SPLITS == 1:
        return tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)
    else:
        total = sum_of_splits(ptr, bias_ptr, at, column, mask, split_stride, SPLITS)
        return total.to(dtype).to(tl.float32)


@triton.jit
def sum_of_splits(ptr, bias_ptr, at, column, mask, split_stride, SPLITS: tl.constexpr):
    """Return the sum of the parts and the bias, fp32, before it is rounded."""
    total = tl.zeros(at.shape, tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(ptr + split_stride * split + at, mask=mask, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["rows"])
def _sum_splits_kernel(
    out_ptr, parts_ptr, bias_ptr, rows, N, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One program per row and BLOCK_N columns."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = sum_of_splits(parts_ptr, bias_ptr, row * N + n, n, n < N, tl.cast(rows, tl.int64) * N, SPLITS)
    tl.store(out_ptr + row * N + n, total.to(out_ptr.dtype.element_ty), mask=n < N)
