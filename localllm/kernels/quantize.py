"""Quantise each row to 8 bits with its own scale: fp8 e4m3 (Micikevicius et al. 2022, arXiv:2209.05433) or int8.

    values, scale = quantize(x, torch.float8_e4m3fn)      x is about values * scale
    quantize_nibbles, dequantize_nibbles                  4 bits with a scale and a zero point for each group

The result is the input of an 8-bit GEMM. rotary_store_kv.py quantises rows of the KV cache in the same way, with
`encode` and the functions for scales below. A row with NaN or infinity dequantises to non-finite values, a row of zeros
to zeros. Limited by memory bandwidth: each element is read once and written once.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from localllm.kernels.launch import INTERPRETED, early_launch, next_power_of_2, runs_triton, tl, triton, wait_for_inputs

SMALLEST = 1e-20
"""Lower bound of a row's largest magnitude, so that a row of zeros has a valid scale."""
LEAST_STEP = 2.0**-24
"""Lower bound of the scale of 4 bits: the smallest number of fp16."""


class Quantized(NamedTuple):
    """A quantised tensor: values * scale."""

    values: Tensor  # [..., H] float8_e4m3fn or int8
    scale: Tensor  # [..., 1] fp32


def quantize(x: Tensor, dtype: torch.dtype) -> Quantized:
    """Quantise x [..., H] to float8_e4m3fn or int8. A row's largest magnitude becomes the largest value of dtype."""
    if not runs_triton(x, "products"):
        return quantize_reference(x, dtype)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    assert encoding(dtype), dtype
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    block = next_power_of_2(x.shape[-1])
    _quantize_kernel[(rows.shape[0],)](
        rows, as_bytes(values), scale, WIDTH=x.shape[-1], TO=encoding(dtype),
        NATIVE_FP8=native_fp8(x.device), BLOCK=block, num_warps=min(16, max(1, block // 512)),
        **early_launch(x.device),
    )  # fmt: skip
    return Quantized(values, scale)


def quantize_reference(x: Tensor, dtype: torch.dtype) -> Quantized:
    """The plain-torch twin: divide by the row's scale, round to the nearest value, ties to even."""
    wide = x.float()
    scale = wide.abs().amax(dim=-1, keepdim=True).clamp_(min=SMALLEST).div_(largest(dtype))
    return Quantized(round_to(wide / scale, dtype), scale)


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round x fp32 to the nearest value of dtype, ties to even, saturating."""
    limit = largest(dtype)
    clamped = x.clamp(-limit, limit)
    return (clamped.round_() if dtype == torch.int8 else clamped).to(dtype)


def largest(dtype: torch.dtype) -> float:
    """Return 448 for float8_e4m3fn; 127 for int8, which does not use -128 so that both signs are alike."""
    return 127.0 if dtype == torch.int8 else torch.finfo(dtype).max


class Nibbles(NamedTuple):
    """Numbers of 4 bits: zero + (code - 8) * scale. G: groups of a row."""

    codes: Tensor  # [..., H / 2] uint8: columns 2 j and 2 j + 1 in the low and the high half of byte j
    scales: Tensor  # [..., 2, G] fp16: scales, then zero points


def quantize_nibbles(x: Tensor, num_groups: int) -> Nibbles:
    """Round x [..., H] to 16 evenly spaced values, from the least to the largest of each group of columns.

    A group with NaN, infinity or numbers beyond fp16 dequantises to numbers that are not finite.
    """
    groups = x.float().unflatten(-1, (num_groups, -1))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scale = ((high - low) / 15).clamp_(min=LEAST_STEP).half()
    zero = (low + 8 * scale.float()).half()
    steps = ((groups - zero.float()) / scale.float()).round_().clamp_(-8, 7)
    codes = steps.nan_to_num_(0.0).add_(8).to(torch.uint8).flatten(-2).unflatten(-1, (-1, 2))
    return Nibbles(codes[..., 0] | codes[..., 1] << 4, torch.stack((scale, zero), dim=-3).flatten(-2))


def dequantize_nibbles(codes: Tensor, scales: Tensor) -> Tensor:
    """Return [..., H] fp32 from `Nibbles`."""
    steps = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).float().sub_(8)
    scale, zero = scales.float().unsqueeze(-1).unbind(dim=-3)
    grouped: Tensor = steps.unflatten(-1, (scales.shape[-1], -1))
    return grouped.mul_(scale).add_(zero).flatten(-2)


# Helpers for the launches of other kernel files.


def as_bytes(values: Tensor) -> Tensor:
    """Return 8-bit values viewed as uint8, the type in which kernels store both."""
    return values.view(torch.uint8)


def encoding(dtype: torch.dtype) -> str:
    """Return a kernel's TO: "fp8", "int8" or (of uint8) "int4" for quantised types, "" for others."""
    return {torch.float8_e4m3fn: "fp8", torch.int8: "int8", torch.uint8: "int4"}.get(dtype, "")


@cache
def native_fp8(device: torch.device) -> bool:
    """Return whether the device converts fp32 to e4m3 with one instruction; otherwise the conversion takes a dozen."""
    return not INTERPRETED and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def _quantize_kernel(
    x_ptr, out_ptr, scale_ptr,
    WIDTH: tl.constexpr, TO: tl.constexpr, NATIVE_FP8: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per row."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    scale = scale_for(tl.max(magnitude(x), axis=0), TO)
    values = encode(x, inverse_of(scale), TO, NATIVE_FP8)
    tl.store(out_ptr + row * WIDTH + column, values, mask=column < WIDTH)
    tl.store(scale_ptr + row, scale)


@triton.jit
def magnitude(x):
    """Return |x|, and infinity for NaN, which a maximum would ignore."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def scale_for(peak, TO: tl.constexpr):
    """Return a row's scale from its largest magnitude, rounded like the twin's:
    plain division may differ in the last bit."""
    return tl.div_rn(tl.maximum(peak, 1e-20), 448.0 if TO == "fp8" else 127.0)


@triton.jit
def inverse_of(scale):
    """Return 1 / scale: one division per row, then a multiplication per element."""
    return tl.div_rn(1.0, scale)


@triton.jit
def encode(x, inverse_scale, TO: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Return the uint8 that represents x * inverse_scale as e4m3 or int8: nearest, ties to even, saturating."""
    scaled = x * inverse_scale
    if TO == "int8":
        # Adding 1.5 * 2^23 leaves the rounded integer, in two's complement, in the low bits of the sum.
        limited = tl.minimum(tl.maximum(scaled, -127.0), 127.0)
        return (limited + 12582912.0).to(tl.int32, bitcast=True).to(tl.uint8)
    if NATIVE_FP8:
        return scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)  # the instruction saturates
    return _fp8_bits(scaled)


@triton.jit
def _fp8_bits(x):
    """Convert to e4m3 without the instruction: 4 bits of exponent with bias 7, 3 of mantissa, no infinity,
    0x7F for NaN."""
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # 448; compared as integers, positive floats keep their order
    # Normal: round the mantissa to its upper 3 bits, carry into the exponent, then change the exponent's bias.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Subnormal: below 2^-6 values are multiples of 2^-9, which is the last bit of a number near 2^14.
    subnormal = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, subnormal, normal)
    code = tl.where(x == x, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
