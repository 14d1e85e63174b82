"""LayerNorm over the last dimension (Ba et al. 2016, arXiv:1607.06450), alone or after a residual add.

    y = (x - mean(x)) * rsqrt(variance(x) + eps) * weight + bias

Built like rms_norm.py and with the same limit: memory bandwidth, one program per row, the same bits in any batch. The
variance is computed from the centred row, which is in registers: a large mean costs no accuracy.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.launch import early_launch, runs_triton, tl, triton, wait_for_inputs
from localllm.kernels.rms_norm import norm_launch


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return the norm of x [..., H] in its shape and dtype, statistics in fp32. weight and bias [H] fp32."""
    if not runs_triton(x, "norms"):
        return layer_norm_reference(x, weight, bias, eps)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, bias, eps, out)
    return out


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Add x to residual [..., H] (contiguous) in place, and return the norm of the sum in x's dtype."""
    if not runs_triton(x, "norms"):
        return layer_norm_reference(residual.add_(x), weight, bias, eps).to(x.dtype)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, weight, bias, eps, out)
    return out


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """The plain-torch twin."""
    return F.layer_norm(x.float(), (x.shape[-1],), weight, bias, eps).to(x.dtype)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor) -> None:
    width = x.shape[-1]
    assert residual is None or (residual.is_contiguous() and residual.shape == x.shape)
    rows = x.reshape(-1, width)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    block, num_warps = norm_launch(width)
    _layer_norm_kernel[(rows.shape[0],)](
        rows, residual, weight, bias, out, rows.stride(0), eps,
        WIDTH=width, BLOCK=block, num_warps=num_warps, **early_launch(x.device),
    )  # fmt: skip


@triton.jit
def _layer_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, x_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per row. Pointers to an absent residual or bias are None."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        place = residual_ptr + row * WIDTH + column
        total = (x + tl.load(place, mask=inside, other=0.0)).to(residual_ptr.dtype.element_ty)
        tl.store(place, total, mask=inside)
        x = total.to(tl.float32)
    centred = tl.where(inside, x - tl.sum(x, axis=0) / WIDTH, 0.0)
    y = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / WIDTH + eps) * weight
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, mask=inside, other=0.0)
    tl.store(out_ptr + row * WIDTH + column, y.to(out_ptr.dtype.element_ty), mask=inside)
