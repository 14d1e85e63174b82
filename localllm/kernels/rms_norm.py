"""RMSNorm over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467), alone or after a residual add.

    y = x * rsqrt(mean(x^2) + eps) * weight

Between two products it needs no kernel: `add_rms_norm_pending` (fused_epilogue.py: PendingNorm).
Statistics are in fp32. The sum with the residual is first rounded to the residual's type, as a 16-bit model does.
Limited by memory bandwidth: x and the residual are read once and kept in registers, and every result is written once.
One program per row, and no setting depends on the number of rows: a row's result has the same bits in any batch.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from localllm.kernels.fused_epilogue import PendingNorm, Product, Unfinished, whole
from localllm.kernels.launch import early_launch, next_power_of_2, runs_triton, tl, triton, wait_for_inputs


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of x [..., H] in its shape and dtype. weight [H] or [x.shape[-2], H] fp32."""
    if not runs_triton(x, "norms"):
        return rms_norm_reference(x, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, eps, out)
    return out


def add_rms_norm(x: Unfinished, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to residual [..., H] (contiguous) in place, and return the norm of the sum in x's dtype."""
    if not runs_triton(x, "norms"):
        return rms_norm_reference(residual.add_(whole(x)), weight, eps).to(x.dtype)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, weight, eps, out)
    return out


def add_rms_norm_pending(x: Unfinished, residual: Tensor, weight: Tensor, eps: float) -> Tensor | PendingNorm:
    """Do `add_rms_norm`, but leave the division by the root mean square to the reader if x is a product that can add
    itself to the residual."""
    if (
        isinstance(x, Product)
        and runs_triton(x, "norms")
        and (norm := x.add_and_norm(residual, weight, eps)) is not None
    ):
        return norm
    return add_rms_norm(x, residual, weight, eps)


def normed(x: Tensor | PendingNorm) -> Tensor:
    """Return the finished norm [T, H], in the stream's type."""
    return rms_norm(x.stream, x.weight, x.eps) if isinstance(x, PendingNorm) else x


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The plain-torch twin.

    The mean of squares is computed by one vector_norm, which reads x once and makes no temporary of x's size: at 512
    rows of 896 on a CPU this takes a third of F.rms_norm's time. At one row the calls themselves are the cost, so there
    are few.
    """
    wide = x if x.dtype == torch.float32 else x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    inverse = torch.addcmul(_constant(eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    out = torch.mul(wide, inverse).mul_(weight)
    return out if x.dtype == torch.float32 else out.to(x.dtype)


@cache
def _constant(value: float, device: torch.device) -> Tensor:
    return torch.full((1,), value, device=device)


class NormLaunch(NamedTuple):
    """Launch settings of a kernel with one program per row."""

    block: int  # columns: the row's width, rounded up to a power of two
    num_warps: int


def norm_launch(width: int) -> NormLaunch:
    """Return settings with 8 elements per thread: a load of 16 bytes from each 16-bit input."""
    block = next_power_of_2(width)
    return NormLaunch(block, min(16, max(1, block // 256)))


def _launch(x: Unfinished, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
    width = x.shape[-1]
    heads = weight.numel() // width
    assert heads == 1 or x.shape[-2] == heads, (x.shape, weight.shape)
    assert residual is None or (residual.is_contiguous() and residual.shape == x.shape)
    x = whole(x)
    rows = x.reshape(-1, heads, width)  # a view of x if its strides permit
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    block, num_warps = norm_launch(width)
    _rms_norm_kernel[(rows.shape[0] * heads,)](
        rows, residual, weight.contiguous(), out, rows.stride(0), rows.stride(1), eps,
        WIDTH=width, HEADS=heads, BLOCK=block, num_warps=num_warps, **early_launch(x.device),
    )  # fmt: skip


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, x_stride, x_head_stride, eps,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per row; each of HEADS consecutive rows has its own weight. residual_ptr may be None."""
    row = tl.program_id(0).to(tl.int64)
    head = row % HEADS
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    weight = tl.load(weight_ptr + head * WIDTH + column, mask=inside, other=0.0)
    wait_for_inputs(PDL)
    x_row_ptr = x_ptr + row // HEADS * x_stride + head * x_head_stride
    x = tl.load(x_row_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        place = residual_ptr + row * WIDTH + column
        total = (x + tl.load(place, mask=inside, other=0.0)).to(residual_ptr.dtype.element_ty)
        tl.store(place, total, mask=inside)
        x = total.to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps) * weight
    tl.store(out_ptr + row * WIDTH + column, y.to(out_ptr.dtype.element_ty), mask=inside)
