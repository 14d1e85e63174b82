"""A gated activation, act(gate) * up: SwiGLU's and GeGLU's elementwise half (Shazeer 2020, arXiv:2002.05202).

    silu        gate / (1 + exp(-gate)) * up
    gelu        with erf
    gelu_tanh   GELU by its tanh approximation
    silu<=L     min(silu(gate), L) * clamp(up, -L, L), and so for the others (Step 3.7)

Limited by memory bandwidth: two elements are read and one is written for about ten instructions. Each element is
computed independently: a row's result has the same bits in any batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.fused_epilogue import Product, Unfinished, whole
from localllm.kernels.launch import cdiv, early_launch, next_power_of_2, runs_triton, tl, triton, wait_for_inputs
from localllm.kernels.tuned import settings_for

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def limited(activation: str, limit: float) -> str:
    """Return the name of an activation with a limit; 0: it has none."""
    return f"{activation}<={limit!r}" if limit else activation


def limit_of(activation: str) -> tuple[str, float]:
    """Return the activation without its limit, and the limit; 0: it has none."""
    name, _, limit = activation.partition("<=")
    return name, float(limit or 0.0)


def gated(gate_up: Unfinished, activation: str) -> Tensor:
    """gate_up [T, 2 * I], gate first -> [T, I] contiguous, same dtype. activation: one of ACTIVATIONS, or `limited`."""
    is_plain = not runs_triton(gate_up, "activations")
    name, limit = limit_of(activation)
    fuses = not limit and isinstance(gate_up, Product) and (not is_plain or gate_up.device.type == "cpu")
    if fuses and isinstance(gate_up, Product) and (out := gate_up.gated(name)) is not None:
        return out
    if is_plain:
        return gated_reference(whole(gate_up), activation)
    gate_up = whole(gate_up)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(-1) == 1
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    launch = settings_for("gated", (width,), gated_launch)
    _gated_kernel[(rows, cdiv(width, launch.block))](
        gate_up, out, gate_up.stride(-2), WIDTH=width, ACTIVATION=name, LIMIT=limit, BLOCK=launch.block,
        num_warps=launch.num_warps, **early_launch(gate_up.device),
    )  # fmt: skip
    return out


class GatedLaunch(NamedTuple):
    block: int  # columns of a program
    num_warps: int


def gated_launch(width: int) -> GatedLaunch:
    """Return settings with 8 elements per thread: one load of 16 bytes from each half."""
    return GatedLaunch(min(1024, next_power_of_2(width)), 4)


def gated_reference(gate_up: Tensor, activation: str) -> Tensor:
    """The plain-torch twin."""
    gate, up = gate_up.chunk(2, dim=-1)
    activation, limit = limit_of(activation)
    if activation == "silu":
        gate = F.silu(gate)
    else:
        gate = F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    if limit:
        gate, up = gate.clamp_(max=limit), up.clamp(-limit, limit)
    return gate.mul_(up)


@triton.jit
def _gated_kernel(
    gate_up_ptr, out_ptr, stride,
    WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK columns of a row."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    gate = activated(gate, ACTIVATION)
    y = (limited_product(gate, up, LIMIT) if LIMIT > 0 else gate * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * WIDTH + column, y, mask=inside)


@triton.jit
def activated(gate, ACTIVATION: tl.constexpr):
    """Return act(gate) in fp32."""
    if ACTIVATION == "silu":
        return gate / (1.0 + tl.exp(-gate))
    if ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 is the logistic function of 2u, u = sqrt(2 / pi) * (gate + 0.044715 * gate^3).
        twice = gate * (1.5957691216057308 + 0.07135481627260025 * gate * gate)
        return gate / (1.0 + tl.exp(-twice))
    return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))


@triton.jit
def limited_product(activated, up, LIMIT: tl.constexpr):
    """Return min(activated, LIMIT) * clamp(up, -LIMIT, LIMIT) in fp32."""
    activated = tl.minimum(activated, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return activated * tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def gated_tile(y, ACTIVATION: tl.constexpr):
    """Return act(gate) * up, fp32 [N / 2, M], of a tile y [N, M] of the rows that `rows_of_tile` returns."""
    halves = tl.reshape(y.to(tl.float32), [2, y.shape[0] // 2, y.shape[1]])
    gate, up = tl.split(tl.permute(halves, [1, 2, 0]))
    return activated(gate, ACTIVATION) * up


@triton.jit
def rows_of_tile(first, N, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """Return the BLOCK_N rows of W of a tile: from `first` on, or if GATED half of them of gate from `first` on, then
    the same of up. Beyond the edge the last row is read again: its results are not stored, and loads need no mask."""
    if GATED:
        HALF: tl.constexpr = BLOCK_N // 2
        place = tl.arange(0, BLOCK_N)
        return place // HALF * (N // 2) + tl.minimum(first + place % HALF, N // 2 - 1)
    else:
        return tl.minimum(first + tl.arange(0, BLOCK_N), N - 1)


@triton.jit
def is_row_of_tile(first, N, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """Return for each of the rows that `rows_of_tile` returns whether it is not beyond the edge."""
    if GATED:
        return first + tl.arange(0, BLOCK_N) % (BLOCK_N // 2) < N // 2
    else:
        return first + tl.arange(0, BLOCK_N) < N
