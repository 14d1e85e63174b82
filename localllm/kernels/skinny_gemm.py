"""y = x W^T + b for few rows of x: the matrix product of decoding, where the cost is reading W once.

W is [N, K] with K contiguous, in x's type or with one byte per weight: float8_e4m3fn with scales per channel [N] or per
block of 128 x 128, or int8 with scales per channel and optional zeros. Bytes are converted exactly to x's 16-bit type
in registers, so the only roundings are those of the fp32 sums and of the output; scales are applied to the fp32 sums.

Operands are swapped: W is the MMA operand that needs 64 rows (wgmma on sm_90; 16 rows elsewhere), x the one for which
16 suffice, so no tensor-core row is wasted on padding. On sm_90 and later W is loaded by TMA if its rows are 16-byte
aligned. If N gives too few programs, K is split; each split writes fp32 sums, which the next kernel adds in order,
without atomics (split_sum.py).

Roof: memory. Floor time = bytes of W / bandwidth. At 4.3 TB/s an H200 allows about 15 thread instructions per 16-bit
weight and 7.5 per byte; tests/kernels/variants/skinny_gemm.py keeps the loops far below that. The remaining limit is
the number of bytes in flight: about 26 KB per SM, hence stages x tile. Before sm_80 Triton offers no tensor cores.

In deterministic mode tiles and the order of sums depend only on N, K and types, for any number of rows: one row's
bits do not depend on the others. Splits that run in parallel for few rows are computed one after another by one program
for many rows, and added in the same order.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.launch import (
    INTERPRETED,
    cdiv,
    launch_options,
    next_power_of_2,
    prefetch_rows,
    runs_triton,
    tl,
    triton,
)
from localllm.kernels.split_sum import SplitSum, whole
from localllm.kernels.tuned import settings_for
from localllm.kernels.unpack_bytes import unpack_pairs

PREFETCHED_LINES = tl.constexpr(256)  # of 128 bytes: 32 KB of W for each program, before it waits for x
SCALE_BLOCK = 128  # rows and columns of W per scale, if scales are per block
UNMASKED_ROWS = tl.constexpr(64)  # rows in a tile of x from which rows beyond the last are read again, not masked
FEW_ROWS = 8  # with so few rows of x, tiles are chosen for enough programs without splits
LEAST_PROGRAMS = 96  # with fewer, K is split
UNSPLIT_PROGRAMS = 128  # one a processor
MOST_SUMS = 32768  # of a row: 128 KB of fp32 that one program of the next norm reads, as for planar weights
L2_OVER_MEMORY = 1.28  # an H200's 5.5 TB/s over 4.3: estimates, not measured
LAUNCH_BYTES = 10_000_000  # that memory delivers while a small kernel starts and ends: 2.4 us
SERIAL_ROWS = 256  # deterministic: from this many rows on, parallel splits cost more than they gain
ROW_BLOCK = 4096  # rows of W that the twin converts to fp32 at a time


def skinny_gemm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None, zeros: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x [M, K] fp16, bf16 or fp32 -> [M, N] in x's dtype, or in `out` [M, N], contiguous, and its dtype.

    weight [N, K] in x's dtype; or float8_e4m3fn with scales fp32 [N] or [ceil(N/128), ceil(K/128)]; or int8 with scales
    fp32 [N] and optional zeros int8 [N]: (q - zero) * scale. bias [N].
    """
    return whole(skinny_gemm_unsummed(x, weight, bias, scales, zeros, out), out)


def skinny_gemm_unsummed(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None, zeros: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | SplitSum:  # fmt: skip
    """Compute `skinny_gemm`, but leave the sum of the splits to the reader; `out` is only written without splits."""
    if not runs_triton(x):
        y = skinny_gemm_reference(x, weight, bias, scales, zeros)
        return y if out is None else out.copy_(y)
    rows, n, k = x.shape[0], *weight.shape
    if rows == 0:
        return x.new_empty((0, n)) if out is None else out
    x = x if x.stride(1) == 1 else x.contiguous()
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    target = device_features(x.device)
    block_scales = scales is not None and scales.ndim == 2
    kind = _kind(weight)
    if kind != "float" and (k % 2 or weight.stride(0) % 2 or weight.storage_offset() % 2):
        even = F.pad(weight.view(torch.uint8), (0, k % 2)).contiguous().view(weight.dtype)  # not found in checkpoints
        return skinny_gemm_unsummed(F.pad(x, (0, k % 2)), even, bias, scales, zeros, out)
    key = (_row_bucket(rows), n, k, weight.element_size(), x.element_size(), block_scales, target.arch)
    tile = settings_for("skinny_gemm", key, skinny_gemm_tile)
    assert tile.block_k <= SCALE_BLOCK or not block_scales, "a tile has one scale"
    serial = tile.split_k > 1 and launch_options().deterministic and rows >= SERIAL_ROWS
    splits = 1 if serial else tile.split_k
    if splits > 1:
        sums = torch.empty((splits, rows, n), dtype=torch.float32, device=x.device)
    else:
        sums = torch.empty((rows, n), dtype=x.dtype, device=x.device) if out is None else out
    stored = weight if kind == "float" else weight.view(torch.int16)  # [N, K / 2]: two weights per word
    tma = target.tma and stored.data_ptr() % 16 == 0 and stored.stride(0) * stored.element_size() % 16 == 0
    stages = tile.num_stages if target.ptx else _plain_stages(kind, tile)
    launch: dict[str, Any] = {"num_warps": tile.num_warps, "num_stages": stages}
    if pdl := target.tma and launch_options().programmatic_launch:
        launch["launch_pdl"] = True
    programs = cdiv(rows, tile.block_m) * cdiv(n, tile.block_n)
    _skinny_gemm_kernel[(programs, splits)](
        sums,
        x,
        _descriptor(stored, tile) if tma else stored,
        stored if pdl else None,
        scales,
        zeros,
        bias if splits == 1 else None,
        rows,
        n,
        k,
        x.stride(0),
        stored.stride(0),
        0 if scales is None else scales.stride(0),
        KIND=kind,
        SCALES="none" if scales is None else "block" if block_scales else "channel",
        HAS_ZEROS=zeros is not None,
        HAS_BIAS=bias is not None and splits == 1,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        EVEN_K=k % tile.block_k == 0,
        SPLIT_K=tile.split_k,
        SERIAL=serial,
        TMA=tma,
        PTX=target.ptx,
        PDL=pdl,
        **launch,
    )
    return sums if splits == 1 else SplitSum(sums, bias, x.dtype)


def skinny_gemm_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None, zeros: Tensor | None = None
) -> Tensor:
    """Compute x W^T + b in plain torch; one-byte weights are converted to fp32, some rows of W at a time."""
    if scales is None:
        return F.linear(x, weight, bias)
    wide, parts = x.float(), []
    for first in range(0, weight.shape[0], ROW_BLOCK):
        rows = slice(first, first + ROW_BLOCK)
        parts.append(F.linear(wide, _rows_in_fp32(weight, scales, zeros, rows)))
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return (out if bias is None else out + bias).to(x.dtype)


def w8a16_gemm(
    x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor, zeros: Tensor | None = None
) -> Tensor | SplitSum:
    """Do `skinny_gemm_unsummed` with one-byte weights and any number of rows; before sm_80 cuBLAS computes many rows,
    on dequantised W."""
    if x.is_cuda and x.shape[0] > 16 and device_features(x.device).arch < 80 and not launch_options().deterministic:
        return F.linear(x, dequantized(weight, scales, zeros, x.dtype), bias)
    return skinny_gemm_unsummed(x, weight, bias, scales, zeros)


def dequantized(weight: Tensor, scales: Tensor, zeros: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return [N, K] in dtype, the dequantised one-byte weights; arguments as in `skinny_gemm`."""
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    for first in range(0, weight.shape[0], ROW_BLOCK):
        rows = slice(first, first + ROW_BLOCK)
        out[rows] = _rows_in_fp32(weight, scales, zeros, rows)
    return out


def _rows_in_fp32(weight: Tensor, scales: Tensor, zeros: Tensor | None, rows: slice) -> Tensor:
    wide = weight[rows].float()  # ROW_BLOCK is a multiple of SCALE_BLOCK: blocks begin where a slice does
    if scales.ndim == 2:
        blocks = scales[rows.start // SCALE_BLOCK : cdiv(rows.stop, SCALE_BLOCK)]
        per_column = blocks.repeat_interleave(SCALE_BLOCK, dim=1)[:, : wide.shape[1]]
        return wide.mul_(per_column.repeat_interleave(SCALE_BLOCK, dim=0)[: wide.shape[0]])
    if zeros is not None:
        wide.sub_(zeros[rows].float()[:, None])
    return wide.mul_(scales[rows][:, None])


class SkinnyGemmTile(NamedTuple):
    block_m: int  # rows of x
    block_n: int  # rows of W
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int


def skinny_gemm_tile(
    rows: int, n: int, k: int, weight_bytes: int, x_bytes: int, block_scales: bool, arch: int
) -> SkinnyGemmTile:
    """Return settings. rows: a bucket.

    Tiles of 64 rows of W use wgmma on sm_90; tiles of 32 give enough programs for a medium N without splits.
    """
    if x_bytes == 4 or arch < 80:  # no tensor cores: the loop is unrolled multiplications
        whole_k = SkinnyGemmTile(16, 32, 32, 1, 4, 3)
        return whole_k if launch_options().deterministic else _split(whole_k, rows, n, k)
    if launch_options().deterministic:
        return _deterministic_tile(n, k, weight_bytes, block_scales)
    if arch == 90:
        return _hopper_tile(rows, n, k, weight_bytes, block_scales)
    block_m = min(64, max(16, rows))
    if weight_bytes == 1:
        return _split(SkinnyGemmTile(block_m, 64, 128, 1, 4, 4), rows, n, k)
    block_n = 64 if n >= 8192 or (block_m > 16 and n >= 2048) else 32
    stages = 6 if block_n == 32 and block_m == 16 else 4 if block_m < 64 else 3
    return _split(SkinnyGemmTile(block_m, block_n, 128, 1, 4, stages), rows, n, k)


def _hopper_tile(rows: int, n: int, k: int, weight_bytes: int, block_scales: bool) -> SkinnyGemmTile:
    """Return settings on sm_90, where L2 delivers little more than memory does, so what else is read from L2 counts: x
    for every tile of W, and the sums of splits.

    Up to 8 rows of x are small: the widest tile is chosen that fills the GPU without splits. With more rows the tile
    with the least `_cost` is chosen.
    """
    tiles = [_split(tile, rows, n, k) for tile in _hopper_tiles(rows, weight_bytes, block_scales)]
    if rows <= FEW_ROWS:
        filling = [tile for tile in tiles if _programs(tile, rows, n) >= UNSPLIT_PROGRAMS and tile.split_k == 1]
        return filling[-1] if filling else tiles[0]
    filling = [tile for tile in tiles if _programs(tile, rows, n) >= LEAST_PROGRAMS]
    filling = [tile for tile in filling if tile.split_k == 1 or tile.split_k * n <= MOST_SUMS]
    return min(filling, key=lambda tile: _cost(tile, rows, n, k, weight_bytes), default=tiles[0])


def _hopper_tiles(rows: int, weight_bytes: int, block_scales: bool) -> list[SkinnyGemmTile]:
    """Return the tiles for wgmma (HMMA with 32 rows of W), ascending in width, with split_k still 1: those that spill
    no registers, with two programs a processor for most."""
    block_m = min(64, max(16, rows))
    if weight_bytes == 2:
        narrow = SkinnyGemmTile(block_m, 32, 128, 1, 4, 6 if block_m == 16 else 4)
        wide = SkinnyGemmTile(block_m, 128, 64, 1, 4 if block_m == 16 else 8, 4)
        return [narrow, SkinnyGemmTile(block_m, 64, 128, 1, 4, 4), wide]
    if block_m == 64 or block_scales:  # a tile has one scale, of 128 rows and columns
        return [SkinnyGemmTile(block_m, 64, 128, 1, 4, 4), SkinnyGemmTile(block_m, 128, 128, 1, 8, 4)]
    return [
        SkinnyGemmTile(block_m, 64, 256, 1, 4, 4),
        SkinnyGemmTile(block_m, 128, 256, 1, 8, 3),
        SkinnyGemmTile(block_m, 256, 128, 1, 8, 4),
    ]


def _cost(tile: SkinnyGemmTile, rows: int, n: int, k: int, weight_bytes: int) -> tuple[float, float]:
    """Return about how long the product takes, as the bytes that memory delivers meanwhile; and the bytes from L2.

    L2 moves W, x for every tile of W, and the fp32 sums of splits, written and read again. Where N <= K a norm follows,
    as after the projections of attention and MLP: it can be part of the product if K is whole, and is launched by
    itself otherwise.
    """
    weights = n * k * weight_bytes
    moved = weights + 2 * rows * k * cdiv(n, tile.block_n)
    if tile.split_k == 1:
        return max(weights, moved / L2_OVER_MEMORY), moved
    moved += 8 * rows * n * tile.split_k
    return max(weights, moved / L2_OVER_MEMORY) + (LAUNCH_BYTES if n <= k else 0), moved


def _deterministic_tile(n: int, k: int, weight_bytes: int, block_scales: bool) -> SkinnyGemmTile:
    """Return settings that do not depend on the number of rows: 64 fill a wgmma; with fewer only arithmetic is wasted.

    One-byte weights are not split, since scales would be applied to the sum in another order.
    """
    tile = SkinnyGemmTile(64, 64, 128 if block_scales else 64, 1, 4, 4)
    return _split(tile, 64, n, k) if weight_bytes == 2 else tile


def _split(tile: SkinnyGemmTile, rows: int, n: int, k: int) -> SkinnyGemmTile:
    """Return the tile with the splits of K, a power of two: about 132 programs, each with at least four tiles."""
    while tile.split_k < 8 and _programs(tile, rows, n) < LEAST_PROGRAMS and cdiv(k, tile.block_k) >= 8 * tile.split_k:
        tile = tile._replace(split_k=2 * tile.split_k)
    return tile


def _programs(tile: SkinnyGemmTile, rows: int, n: int) -> int:
    return cdiv(rows, tile.block_m) * cdiv(n, tile.block_n) * tile.split_k


def _plain_stages(kind: str, tile: SkinnyGemmTile) -> int:
    """Return the pipeline stages without PTX:
    for AMD, Triton 3.6 cannot compile more stages of split bytes than this."""
    return tile.num_stages if kind == "float" else min(3, tile.num_stages)


def _row_bucket(rows: int) -> int:
    """Return a power of two. From 513 rows on the tiles of x alone fill a GPU, so K is whole."""
    return min(1024, max(FEW_ROWS, next_power_of_2(rows)))


def _kind(weight: Tensor) -> str:
    return {torch.float8_e4m3fn: "e4m3", torch.int8: "int8"}.get(weight.dtype, "float")


class DeviceFeatures(NamedTuple):
    """Features of the device that kernels may use."""

    arch: int  # compute capability as 75, 80, 90; 80 for other vendors
    tma: bool  # also: programmatic dependent launch
    ptx: bool


@cache
def device_features(device: torch.device) -> DeviceFeatures:
    if INTERPRETED or torch.version.hip is not None:
        return DeviceFeatures(80, False, False)
    major, minor = torch.cuda.get_device_capability(device)
    return DeviceFeatures(10 * major + minor, major >= 9, True)


def _descriptor(weight: Tensor, tile: SkinnyGemmTile) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    block_k = tile.block_k if weight.is_floating_point() else tile.block_k // 2
    return TensorDescriptor(weight, list(weight.shape), list(weight.stride()), [tile.block_n, block_k])


@triton.jit(do_not_specialize=["rows"])
def _skinny_gemm_kernel(
    out_ptr,  # [rows, N], or fp32 [SPLIT_K, rows, N] if splits run in parallel
    x_ptr,  # [rows, K]
    weight,  # pointer to [N, K], or its tensor descriptor
    weight_ptr,  # to the same; None without PDL
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    rows,
    N,
    K,
    x_stride,
    weight_stride,
    scales_stride,
    KIND: tl.constexpr,
    SCALES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    SERIAL: tl.constexpr,
    TMA: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_N columns of y for BLOCK_M rows,
    over one split of K (all splits one after another if SERIAL)."""
    first_n, first_m = tile_of_program(rows, N, BLOCK_M, BLOCK_N)
    if PDL:
        PACKED: tl.constexpr = 1 if KIND == "float" else 2
        n = tl.minimum(first_n + tl.arange(0, BLOCK_N), N - 1)
        first_k = 0 if SERIAL else tl.program_id(1) * tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
        row_ptrs = weight_ptr + n.to(tl.int64) * weight_stride
        prefetch_rows(row_ptrs, first_k // PACKED, K // PACKED, PREFETCHED_LINES // BLOCK_N)
        tl.extra.cuda.gdc_wait()
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if SERIAL:
        for split in range(SPLIT_K):
            total += _split_sum(
                x_ptr, weight, scales_ptr, zeros_ptr, first_n, first_m, split, rows, N, K, x_stride, weight_stride,
                scales_stride, KIND, SCALES, HAS_ZEROS, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, SPLIT_K, TMA, PTX,
            )  # fmt: skip
    else:
        total = _split_sum(
            x_ptr, weight, scales_ptr, zeros_ptr, first_n, first_m, tl.program_id(1), rows, N, K, x_stride,
            weight_stride, scales_stride, KIND, SCALES, HAS_ZEROS, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, SPLIT_K, TMA, PTX,
        )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n, m = first_n + tl.arange(0, BLOCK_N), first_m + tl.arange(0, BLOCK_M)
    if SCALES == "channel":
        total *= tl.load(scales_ptr + n, mask=n < N, other=0.0)[:, None]
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    row_of_out = m.to(tl.int64)
    if not SERIAL:
        row_of_out += tl.program_id(1).to(tl.int64) * rows
    out_ptrs = out_ptr + row_of_out[:, None] * N + n[None, :]
    tl.store(out_ptrs, tl.trans(total).to(out_ptr.dtype.element_ty), mask=(m < rows)[:, None] & (n < N)[None, :])


@triton.jit
def tile_of_program(rows, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the first row of W and of x for this program:
    in groups of eight tiles of x, so that both stay in cache."""
    GROUP: tl.constexpr = 8
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // (GROUP * tiles_n)
    within = tl.program_id(0) % (GROUP * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP, GROUP)
    return within // height * BLOCK_N, (group * GROUP + within % height) * BLOCK_M


@triton.jit
def _split_sum(
    x_ptr, weight, scales_ptr, zeros_ptr, first_n, first_m, split, rows, N, K, x_stride, weight_stride, scales_stride,
    KIND: tl.constexpr, SCALES: tl.constexpr, HAS_ZEROS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, SPLIT_K: tl.constexpr, TMA: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Return fp32 [BLOCK_N, BLOCK_M]: W x^T over one split of K, before channel scales are applied."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    PACKED: tl.constexpr = 1 if KIND == "float" else 2  # weights per element of `weight`
    k_of_x, k_of_w = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // PACKED)
    # Beyond the edge the last row is read again: its results are not stored, and loads need no mask. In a small tile of
    # x such rows are masked: at one row, 15 copies of it would add up to half of W's bytes to what L2 delivers.
    MASKS_ROWS: tl.constexpr = BLOCK_M < UNMASKED_ROWS
    n = tl.minimum(first_n + tl.arange(0, BLOCK_N), N - 1)
    m = first_m + tl.arange(0, BLOCK_M)
    is_row = (m < rows)[:, None]
    if not MASKS_ROWS:
        m = tl.minimum(m, rows - 1)
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * x_stride + k_of_x[None, :]
    if not TMA:
        weight_ptrs = weight + n.to(tl.int64)[:, None] * weight_stride + k_of_w[None, :]
    if HAS_ZEROS:
        zeros = tl.load(zeros_ptr + n).to(dtype)[:, None]
    tiles = tl.cdiv(K, BLOCK_K)
    per_split = tl.cdiv(tiles, SPLIT_K)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for tile in range(split * per_split, tl.minimum((split + 1) * per_split, tiles)):
        k = tile * BLOCK_K
        if TMA:
            w = weight.load([first_n, k // PACKED])
        elif EVEN_K:
            w = tl.load(weight_ptrs + k // PACKED)
        else:
            w = tl.load(weight_ptrs + k // PACKED, mask=(k + k_of_w * PACKED < K)[None, :], other=0)
        if EVEN_K and MASKS_ROWS:
            x = tl.load(x_ptrs + k, mask=is_row, other=0.0)
        elif EVEN_K:
            x = tl.load(x_ptrs + k)
        elif MASKS_ROWS:
            x = tl.load(x_ptrs + k, mask=is_row & (k + k_of_x < K)[None, :], other=0.0)
        else:
            x = tl.load(x_ptrs + k, mask=(k + k_of_x < K)[None, :], other=0.0)
        if KIND == "float":
            total = tl.dot(w, tl.trans(x), total, input_precision="ieee")
        else:
            even, odd = unpack_pairs(w, KIND, dtype, PTX)
            if HAS_ZEROS:
                even, odd = even - zeros, odd - zeros  # exact: |q - zero| <= 255; x is 0 beyond K
            x_even, x_odd = tl.split(tl.reshape(x, [BLOCK_M, BLOCK_K // 2, 2]))
            if SCALES == "block":
                part = tl.dot(even, tl.trans(x_even), input_precision="ieee")
                part = tl.dot(odd, tl.trans(x_odd), part, input_precision="ieee")
                total += part * tl.load(scales_ptr + first_n // 128 * scales_stride + k // 128)
            else:
                total = tl.dot(even, tl.trans(x_even), total, input_precision="ieee")
                total = tl.dot(odd, tl.trans(x_odd), total, input_precision="ieee")
    return total
