"""The kernels of a gated activation, act(gate) * up, for silu_mul.py and gelu_mul.py.

Limited by memory bandwidth: two elements are read and one is written for about ten instructions. Each element is
computed independently, and a row's scale by one program: a row's result has the same bits in any batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.kernels.launch import cdiv, early_launch, next_power_of_2, tl, triton, wait_for_inputs
from localllm.kernels.quantize import (
    Quantized,
    as_bytes,
    empty_quantized,
    encode,
    encoding,
    inverse_of,
    magnitude,
    native_fp8,
    scale_for,
)


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


def launch_gated_quantized(gate_up: Tensor, activation: str, dtype: torch.dtype) -> Quantized:
    """Do `launch_gated` with each row of the result quantised to dtype, float8_e4m3fn or int8."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = empty_quantized((rows, width), dtype, gate_up.device)
    block = min(4096, next_power_of_2(width))
    _gated_quantized_kernel[(rows,)](
        gate_up, as_bytes(out.values), out.scale, gate_up.stride(0), WIDTH=width, ACTIVATION=activation,
        TO=encoding(dtype), NATIVE_FP8=native_fp8(gate_up.device), BLOCK=block, num_warps=max(1, block // 512),
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
def _gated_quantized_kernel(
    gate_up_ptr, out_ptr, scale_ptr, stride,
    WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, TO: tl.constexpr, NATIVE_FP8: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program per row, which it reads twice: first for the scale, then, from cache, to quantise. Rows of an MLP are
    too wide to keep in registers."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    peak = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK):
        y = _gated(gate_up_ptr + row * stride, start + tl.arange(0, BLOCK), WIDTH, ACTIVATION)
        peak = tl.maximum(peak, magnitude(y))
    scale = scale_for(tl.max(peak, axis=0), TO)
    inverse = inverse_of(scale)
    tl.store(scale_ptr + row, scale)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        y = _gated(gate_up_ptr + row * stride, column, WIDTH, ACTIVATION)
        tl.store(out_ptr + row * WIDTH + column, encode(y, inverse, TO, NATIVE_FP8), mask=column < WIDTH)


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
