"""y = x W^T + b with both operands in 8 bits: float8 e4m3 or int8 (Dettmers et al. 2022, arXiv:2208.07339, section 2).

x was quantised per row, or per row and 128 columns; W per channel, or per block of 128 x 128 (DeepSeek-V3,
arXiv:2412.19437, section 3.3). int8 sums are exact in int32. e4m3 sums are moved from the tensor core to fp32 every 128
columns: on sm_90 its own accumulator keeps about 14 bits.

Roof: arithmetic, since this is for many rows; twice the 16-bit rate. e4m3 with scales per row and channel uses torch's
scaled_mm if that supports the types; otherwise tiles of 128 x 128 with both operands loaded by TMA (wgmma) on sm_90.
For few rows kernels/skinny_gemm.py reads the same weights with unquantised x.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.launch import cdiv, device_features, runs_triton, tl, triton, uses
from localllm.kernels.quantize import Quantized
from localllm.kernels.quantized_weight import SCALE_BLOCK, dequantized
from localllm.kernels.skinny_gemm import tile_of_program
from localllm.kernels.tuned import settings_for

PROBE_ERROR = 0.01
"""Share of a product's norm by which scaled_mm may differ from its twin; both round to bfloat16."""


def w8a8_gemm(
    x: Quantized,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    zeros: Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """x of [M, K] -> [M, N] in dtype.

    x.values e4m3 or int8 like weight [N, K]. scales fp32 [N] with x.scale [M, 1], or [ceil(N/128), ceil(K/128)] with
    x.scale [M, ceil(K/128)] (e4m3 only). zeros int8 [N] (int8 only): W is (q - zero) * scale. bias [N].
    """
    if not runs_triton(x.values, "products"):
        return w8a8_gemm_reference(x, weight, scales, bias, zeros, dtype=dtype)
    if _suits_scaled_mm(x.values, weight, scales, dtype):
        return scaled_mm(x, weight, scales, bias, dtype)
    (rows, k), n = x.values.shape, weight.shape[0]
    out = torch.empty((rows, n), dtype=dtype, device=weight.device)
    if rows == 0:
        return out
    target = device_features(weight.device)
    tile = settings_for("w8a8_gemm", (64 if rows <= 64 else 128, n, k, target.arch), w8a8_tile)
    tma = target.tma and uses("product TMA") and k % 16 == 0 and weight.data_ptr() % 16 == 0 and weight.is_contiguous()
    values = x.values.contiguous()
    _w8a8_gemm_kernel[(cdiv(rows, tile.block_m) * cdiv(n, tile.block_n),)](
        out,
        _descriptor(values, tile.block_m, tile.block_k) if tma else values,
        _descriptor(weight, tile.block_n, tile.block_k) if tma else weight,
        x.scale,
        scales,
        zeros,
        bias,
        rows,
        n,
        k,
        values.stride(0),
        weight.stride(0),
        x.scale.stride(0),
        scales.stride(0),
        INT8=weight.dtype == torch.int8,
        BLOCK_SCALES=scales.ndim == 2,
        HAS_ZEROS=zeros is not None,
        HAS_BIAS=bias is not None,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        EVEN_K=k % tile.block_k == 0,
        TMA=tma,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def w8a8_gemm_reference(
    x: Quantized,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    zeros: Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """The plain-torch twin: both operands are converted to fp32 and multiplied in fp32."""
    columns = x.scale if x.scale.shape[1] == 1 else x.scale.repeat_interleave(SCALE_BLOCK, 1)[:, : x.values.shape[1]]
    out = F.linear(x.values.float() * columns, dequantized(weight, scales, zeros, torch.float32))
    return (out if bias is None else out + bias).to(dtype)


def scaled_mm(x: Quantized, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Run torch's e4m3 GEMM with one scale per row and one per channel, under its name in this torch version."""
    channel_scales = scales[None, :]
    if hasattr(F, "scaled_mm"):  # torch 2.10
        rowwise = F.ScalingType.RowWise
        return F.scaled_mm(
            x.values, weight.t(), x.scale, rowwise, channel_scales, rowwise, bias=bias, output_dtype=dtype
        )
    out: Tensor = torch._scaled_mm(x.values, weight.t(), x.scale, channel_scales, bias=bias, out_dtype=dtype)
    return out


def _suits_scaled_mm(values: Tensor, weight: Tensor, scales: Tensor, dtype: torch.dtype) -> bool:
    """Return whether scaled_mm supports the arguments:
    rowwise scales need bf16 output and sides that are multiples of 16."""
    aligned = weight.shape[0] % 16 == 0 and weight.shape[1] % 16 == 0 and weight.is_contiguous()
    takes = weight.dtype == torch.float8_e4m3fn and scales.ndim == 1 and dtype == torch.bfloat16 and aligned
    return takes and values.is_cuda and values.shape[0] > 0 and _has_scaled_mm(values.device)


@cache
def _has_scaled_mm(device: torch.device) -> bool:
    """Return whether scaled_mm works with scales per row, and is right.
    Tried out, because the supported GPUs change with every torch version."""
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(64, 256, generator=generator).to(device, torch.float8_e4m3fn) for _ in range(2))
    scales = torch.rand(64, generator=generator).to(device) + 0.5
    try:
        given = Quantized(x, scales.flip(0)[:, None])
        got = scaled_mm(given, weight, scales, None, torch.bfloat16).float()
    except (RuntimeError, ValueError):
        return False
    right = w8a8_gemm_reference(given, weight, scales, dtype=torch.bfloat16).float()
    return bool((got - right).norm() <= PROBE_ERROR * right.norm())


class W8A8Tile(NamedTuple):
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def w8a8_tile(rows: int, n: int, k: int, arch: int) -> W8A8Tile:
    """Return settings. rows: 64 or 128, a bucket. BLOCK_K is SCALE_BLOCK, so that a tile has one scale."""
    if arch < 80:
        return W8A8Tile(64, 64, SCALE_BLOCK, 4, 2)
    return W8A8Tile(rows, 128, SCALE_BLOCK, 4 if rows == 64 else 8, 4 if arch == 90 or arch == 80 else 3)


def _descriptor(values: Tensor, rows: int, columns: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(values, list(values.shape), list(values.stride()), [rows, columns])


@triton.jit(do_not_specialize=["rows"])
def _w8a8_gemm_kernel(
    out_ptr,  # [rows, N]
    x,  # pointer to [rows, K], or its tensor descriptor
    weight,  # pointer to [N, K], or its tensor descriptor
    x_scales_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    rows,
    N,
    K,
    x_stride,
    weight_stride,
    x_scales_stride,
    scales_stride,
    INT8: tl.constexpr,
    BLOCK_SCALES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA: tl.constexpr,
):
    """One program: a tile [BLOCK_M, BLOCK_N] of y. With scales per block, BLOCK_K is 128 and BLOCK_N divides it."""
    first_n, first_m = tile_of_program(rows, N, BLOCK_M, BLOCK_N)
    # Beyond the edge the last row is read again: its results are not stored, and loads need no mask.
    m = tl.minimum(first_m + tl.arange(0, BLOCK_M), rows - 1)
    n = tl.minimum(first_n + tl.arange(0, BLOCK_N), N - 1)
    k_in_tile = tl.arange(0, BLOCK_K)
    NOTHING: tl.constexpr = 0 if INT8 else 0.0
    if not TMA:
        x_ptrs = x + m.to(tl.int64)[:, None] * x_stride + k_in_tile[None, :]
        weight_ptrs = weight + n.to(tl.int64)[:, None] * weight_stride + k_in_tile[None, :]
    x_scale_ptrs = x_scales_ptr + m.to(tl.int64) * x_scales_stride
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if INT8 else tl.float32)
    x_sums = tl.zeros([BLOCK_M], tl.int32)
    for tile in range(tl.cdiv(K, BLOCK_K)):
        k = tile * BLOCK_K
        if TMA:
            x_tile, w = x.load([first_m, k]), weight.load([first_n, k])
        elif EVEN_K:
            x_tile, w = tl.load(x_ptrs + k), tl.load(weight_ptrs + k)
        else:
            mask = (k + k_in_tile < K)[None, :]
            x_tile, w = (
                tl.load(x_ptrs + k, mask=mask, other=NOTHING),
                tl.load(weight_ptrs + k, mask=mask, other=NOTHING),
            )
        if HAS_ZEROS:
            x_sums += tl.sum(x_tile.to(tl.int32), axis=1)
        if INT8:
            total = tl.dot(x_tile, tl.trans(w), total, out_dtype=tl.int32)
        elif BLOCK_SCALES:
            scale = tl.load(x_scale_ptrs + tile) * tl.load(scales_ptr + first_n // 128 * scales_stride + tile)
            total += tl.dot(x_tile, tl.trans(w), max_num_imprecise_acc=BLOCK_K) * scale[:, None]
        else:
            total = tl.dot(x_tile, tl.trans(w), total, max_num_imprecise_acc=BLOCK_K)
    if HAS_ZEROS:
        total -= x_sums[:, None] * tl.load(zeros_ptr + n).to(tl.int32)[None, :]
    y = total.to(tl.float32)
    if not BLOCK_SCALES:
        y *= tl.load(x_scale_ptrs)[:, None] * tl.load(scales_ptr + n)[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + n).to(tl.float32)[None, :]
    row, column = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=(row < rows)[:, None] & (column < N)[None, :])
