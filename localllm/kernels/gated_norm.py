"""RMSNorm of groups of columns together with a gate, in the two orders that recurrent layers use.

    norm before gate    y = rms(x) * weight * silu(gate)       gated delta net
    gate before norm    y = rms(x * silu(gate)) * weight       Mamba-2

Everything is in fp32 until y is rounded. Limited by memory bandwidth: one program for each group of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.kernels.cpu.native.library import native
from localllm.kernels.cpu.recurrent import gated_norm as native_gated_norm
from localllm.kernels.launch import early_launch, runs_triton, tl, triton, wait_for_inputs
from localllm.kernels.rms_norm import norm_launch


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, gate_first: bool) -> Tensor:
    """Return the gated norm of x [T, G, D] in its type, contiguous.

    x and gate are views of that shape whose last two dimensions are contiguous. weight fp32, [D] for all groups or
    [G, D].
    """
    assert weight.numel() in (x.shape[2], x.shape[1] * x.shape[2]), (weight.shape, x.shape)
    if runs_triton(x, "recurrent"):
        return _launch(x, gate, weight, eps, gate_first)
    if not x.is_cuda and (library := native()) is not None:
        return native_gated_norm(library, x, gate, weight, eps, gate_first)
    return gated_norm_reference(x, gate, weight, eps, gate_first=gate_first)


def gated_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, gate_first: bool) -> Tensor:
    """The plain-torch twin."""
    y, gate = x.float(), gate.float()
    opened = gate / (1 + torch.exp(-gate))
    if gate_first:
        y = y * opened
    y = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + eps) * weight.view(-1, x.shape[2])
    return (y if gate_first else y * opened).to(x.dtype)


def _launch(x: Tensor, gate: Tensor, weight: Tensor, eps: float, gate_first: bool) -> Tensor:
    rows, groups, width = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block, num_warps = norm_launch(width)
    _gated_norm_kernel[(rows * groups,)](
        x, gate, weight, out, x.stride(0), gate.stride(0), eps,
        GROUPS=groups, WIDTH=width, SHARED=weight.numel() == width, GATE_FIRST=gate_first, BLOCK=block,
        num_warps=num_warps, **early_launch(x.device),
    )  # fmt: skip
    return out


@triton.jit
def _gated_norm_kernel(
    x_ptr, gate_ptr, weight_ptr, out_ptr, x_stride, gate_stride, eps,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, SHARED: tl.constexpr, GATE_FIRST: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program for one group of a row. SHARED: all groups have one weight."""
    place = tl.program_id(0).to(tl.int64)
    row, group = place // GROUPS, place % GROUPS
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    weight = tl.load(weight_ptr + (0 if SHARED else group * WIDTH) + column, mask=inside, other=0.0)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row * x_stride + group * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + group * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    opened = gate / (1.0 + tl.exp(-gate))
    if GATE_FIRST:
        x *= opened
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps) * weight
    if not GATE_FIRST:
        y *= opened
    tl.store(out_ptr + place * WIDTH + column, y.to(out_ptr.dtype.element_ty), mask=inside)
