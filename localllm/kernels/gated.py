"""The kernels of a gated activation, act(gate) * up, for silu_mul.py and gelu_mul.py.

Limited by memory bandwidth: two elements are read and one is written for about ten instructions. Each element is
computed independently: a row's result has the same bits in any batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.kernels.launch import cdiv, early_launch, next_power_of_2, tl, triton, wait_for_inputs


def launch_gated(gate_up: Tensor, activation: str) -> Tensor:
    """gate_up [T, 2 * I] -> [T, I]. activation: "silu", or gelu's `approximate`: "none" or "tanh"."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, next_power_of_2(width))  # 8 elements per thread of 4 warps: one load of 16 bytes from each half
    _gated_kernel[(rows, cdiv(width, block))](
        gate_up, out, gate_up.stride(0), WIDTH=width, ACTIVATION=activation, BLOCK=block, num_warps=4,
        **early_launch(gate_up.device),
    )  # fmt: skip
    return out


@triton.jit
def _gated_kernel(
    gate_up_ptr, out_ptr, stride,
    WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK columns of a row."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = _gated(gate_up_ptr + row * stride, column, WIDTH, ACTIVATION)
    tl.store(out_ptr + row * WIDTH + column, y.to(out_ptr.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def _gated(row_ptr, column, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr):
    """Return act(gate) * up in fp32, 0 from WIDTH on."""
    gate = tl.load(row_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(row_ptr + WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        return gate / (1.0 + tl.exp(-gate)) * up
    if ACTIVATION == "tanh":
        # (1 + tanh(u)) / 2 is the logistic function of 2u, u = sqrt(2 / pi) * (gate + 0.044715 * gate^3).
        twice = gate * (1.5957691216057308 + 0.07135481627260025 * gate * gate)
        return gate / (1.0 + tl.exp(-twice)) * up
    return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
