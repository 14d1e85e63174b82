"""The kernels for planar words: multiply, dequantise W to 16 bits. linear.py launches them.

Scales are loaded one iteration ahead, weights and x through the pipeline's buffers. A load of 128 scales is too narrow
for cp.async; loaded when needed, it would make each iteration wait for memory twice more.
The launch settings, `planar_tile`, are in this file too, since tuned settings belong to the source text they were tuned
with.
"""

from __future__ import annotations

from typing import NamedTuple

from localllm.kernels.fused_epilogue import is_last_part, places_of_part, sum_of_parts
from localllm.kernels.gated import gated_tile, is_row_of_tile, rows_of_tile
from localllm.kernels.launch import cdiv, prefetch_rows, tl, triton
from localllm.kernels.planar.layout import chunk_size, unpack_planes

PREFETCHED_LINES = tl.constexpr(256)  # of 128 bytes: 32 KB of words for each program, before it waits for x
PROGRAMS_PER_PROCESSOR = 4  # fits the registers at 16 rows; target when splitting over K
MAX_SPLIT = 8


class PlanarTile(NamedTuple):
    block_m: int  # rows of x
    block_n: int  # outputs
    split: int  # splits of K, summed afterwards
    num_warps: int
    num_stages: int


def planar_tile(
    rows: int, outputs: int, columns: int, bits: int, group: int, mins: bool, processors: int, wgmma: bool
) -> PlanarTile:
    """Return settings. rows: a power of two, the bucket of the batch.
    Chosen by registers, spills and instructions per weight.

    128 outputs for four warps give each warp two MMA tiles, and only then do Hopper's unpacked weights go from
    registers straight into the MMA; with one tile they pass through shared memory (4.5 instead of 2.9 instructions per
    weight).
    """
    lanes = min(32, group)
    largest = 32 if mins else 128 if wgmma and group >= 128 else 64
    block_m = min(largest, max(8 if lanes == 32 else 16, rows))  # smaller tiles of x are too small for cp.async
    block_n = 128 if outputs > 64 else 64
    four_warps_spill = block_m == 64 and (group < 128 or not wgmma)
    four_warps_spill |= block_m == 32 and mins and bits == 4 and lanes == 32
    num_warps = 8 if four_warps_spill or block_m == 128 else 4
    tiles = cdiv(outputs, block_n) * cdiv(rows, block_m)
    wanted = max(1, PROGRAMS_PER_PROCESSOR * processors // tiles)
    chunks = cdiv(columns, chunk_size(bits, lanes))
    split = 1
    while split < MAX_SPLIT and split * 2 <= wanted and chunks >= split * 2 * 4:  # at least four iterations each
        split *= 2
    stages = 4 if block_m < 64 or (block_m == 64 and wgmma) else 3  # more would not fit into 99 KB of shared memory
    return PlanarTile(block_m, block_n, split, num_warps, stages)


def register_limit(
    tile: PlanarTile, bits: int, group: int, *, mins: bool, wgmma: bool, reads_squares: bool, gated: bool
) -> dict[str, int]:
    """Return a launch option that keeps as many programs on a processor as the loop's registers allow: what follows it,
    the sum of the splits and the reader's work, would take more."""
    if not wgmma or mins or bits != 4 or tile.num_warps != 4 or tile.block_m > 32:
        return {}
    if group >= 128:
        # Where x's squares are read, Triton 3.6 and 3.7 spill with 128, and take 127 if they may take more; gated, not.
        return {"maxnreg": {8: 112, 16: 136 if reads_squares and not gated else 128, 32: 176}[tile.block_m]}
    return {"maxnreg": 160} if group == 32 and tile.split > 1 and tile.block_m == 16 else {}


@triton.jit
def _int8_to_fp32(value):
    """Convert int8 to fp32 by setting bits: 2^23 + (value + 128), minus 2^23 + 128.
    An I2F runs at a quarter of the rate."""
    biased = (value.to(tl.int32) & 255) ^ 0x4B000080
    return biased.to(tl.float32, bitcast=True) - 8388736.0


@triton.jit
def _load_group(at, zeros_ptr, scales_ptr, mins_ptr, mask):
    """Load (zeros, scales, mins) [BLOCK_N] of one group as stored; scales replace absent ones."""
    scale = tl.load(scales_ptr + at, mask=mask, other=0)
    zero = scale if zeros_ptr is None else tl.load(zeros_ptr + at, mask=mask, other=0)
    minimum = scale if mins_ptr is None else tl.load(mins_ptr + at, mask=mask, other=0)
    return zero, scale, minimum


@triton.jit
def load_groups(
    k,
    zeros_ptr,
    scales_ptr,
    mins_ptr,
    super_scales_ptr,
    super_mins_ptr,
    stride,
    offs_n,
    mask,
    GROUP: tl.constexpr,
    SUPER_GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Load the values of the chunk's groups at k: (super_scales, super_mins, zeros, scales, mins, zeros,
    scales, ...)."""
    at = tl.cast(k // GROUP, tl.int64) * stride + offs_n
    zero, scale, minimum = _load_group(at, zeros_ptr, scales_ptr, mins_ptr, mask)
    at_super = tl.cast(k // SUPER_GROUP, tl.int64) * stride + offs_n
    super_scale = scale if super_scales_ptr is None else tl.load(super_scales_ptr + at_super, mask=mask, other=0)
    super_min = scale if super_mins_ptr is None else tl.load(super_mins_ptr + at_super, mask=mask, other=0)
    if GROUP >= CHUNK:
        return super_scale, super_min, zero, scale, minimum
    else:  # Triton before 3.7 also compiles code after a return, and requires matching types
        zero1, scale1, minimum1 = _load_group(at + stride, zeros_ptr, scales_ptr, mins_ptr, mask)
        if GROUP * 2 == CHUNK:
            return super_scale, super_min, zero, scale, minimum, zero1, scale1, minimum1
        else:
            zero2, scale2, minimum2 = _load_group(at + 2 * stride, zeros_ptr, scales_ptr, mins_ptr, mask)
            zero3, scale3, minimum3 = _load_group(at + 3 * stride, zeros_ptr, scales_ptr, mins_ptr, mask)
            return (
                super_scale,
                super_min,
                zero,
                scale,
                minimum,
                zero1,
                scale1,
                minimum1,
                zero2,
                scale2,
                minimum2,
                zero3,
                scale3,
                minimum3,
            )


@triton.jit
def scale_to_fp32(scale, super_scale, IS_MULTIPLE: tl.constexpr):
    """Convert a stored scale or min to fp32. IS_MULTIPLE: it is an int8 multiple of `super_scale`."""
    if IS_MULTIPLE:
        return super_scale.to(tl.float32) * _int8_to_fp32(scale)
    else:
        return scale.to(tl.float32)


@triton.jit
def zero_point(zero, dtype: tl.constexpr, BITS: tl.constexpr):
    """Convert uint8 [BLOCK_N] to dtype: the value to subtract from an unpacked plane, including its magic number."""
    if dtype == tl.float32:
        return zero.to(tl.float32) - (128.0 if BITS == 8 else 0.0)
    elif dtype == tl.float16:
        magic = (zero.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
        return magic - 1152.0 if BITS == 8 else magic
    elif BITS == 8:
        return (zero.to(tl.float32) - 128.0).to(tl.bfloat16)
    else:
        return (zero.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)


@triton.jit(do_not_specialize=["M", "num_squares"])
def planar_linear_kernel(
    y_ptr,
    parts_ptr,
    counters_ptr,
    x_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    mins_ptr,
    super_scales_ptr,
    super_mins_ptr,
    table_ptr,
    bias_ptr,
    residual_ptr,
    gamma_ptr,
    sum_squares_ptr,
    x_squares_ptr,
    x_eps,
    num_squares,
    M,
    N,
    K,
    x_stride,
    words_stride,
    scales_stride,
    BITS: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    SUPER_GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    EVEN_K: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    ALWAYS_SPLIT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SQUARES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_M rows of x, BLOCK_N outputs, one part of K; the last program of a tile goes on. y [M, N]; or
    with ACTIVATION, W being [gate; up], act(gate) * up [M, N / 2].

    parts_ptr [parts of K, M, N] fp32 and a counter for each tile: None without splits, or read where there are some,
    unless ALWAYS_SPLIT. PARTS: added at once. residual [M, N], to which y is added; y is then the sum times gamma [N],
    and sum_squares [M, tiles of N] fp32 are its own sums of squares. x_squares [M, num_squares] fp32: y is divided by
    the root of their mean over K, if there are any.
    """
    GATED: tl.constexpr = ACTIVATION is not None
    WRITTEN: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    width = N // 2 if GATED else N  # of y
    PLANES: tl.constexpr = 16 // BITS
    CHUNK: tl.constexpr = LANES * PLANES
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    # The value of an unpacked 4-bit plane where the weight is 0; varying zero points include it, tables do not need it.
    MAGIC: tl.constexpr = 0.0 if BITS == 8 or dtype == tl.float32 else (1024.0 if dtype == tl.float16 else 128.0)

    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_n = tl.program_id(1) * WRITTEN
    offs_n = rows_of_tile(first_n, N, BLOCK_N, True) if GATED else first_n + tl.arange(0, BLOCK_N)
    part_of_k = tl.program_id(2)
    lanes = tl.arange(0, LANES)
    in_m, in_n = offs_m < M, offs_n < N
    chunks = tl.cdiv(K, CHUNK)
    per_part = tl.cdiv(chunks, tl.num_programs(2))
    first = part_of_k * per_part
    last = tl.minimum(first + per_part, chunks)

    word_ptrs = words_ptr + offs_n.to(tl.int64)[:, None] * words_stride + lanes[None, :]
    x_ptrs = x_ptr + offs_m.to(tl.int64)[None, :] * x_stride + lanes[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    # Sums of x over a group, for the minima, also use the MMA: it is idle at few rows, a sum across lanes is not.
    ones = tl.full([BLOCK_N, LANES], 1.0, dtype)
    ahead = load_groups(
        first * CHUNK,
        zeros_ptr,
        scales_ptr,
        mins_ptr,
        super_scales_ptr,
        super_mins_ptr,
        scales_stride,
        offs_n,
        in_n,
        GROUP,
        SUPER_GROUP,
        CHUNK,
    )
    if PDL:
        rows = words_ptr + tl.minimum(offs_n, N - 1).to(tl.int64) * words_stride
        prefetch_rows(rows, first * LANES, words_stride, PREFETCHED_LINES // BLOCK_N)
        tl.extra.cuda.gdc_wait()
    # What the end of the program reads is on its way during the loop.
    column = first_n + tl.arange(0, WRITTEN)
    row, inside = offs_m.to(tl.int64)[None, :], (column < width)[:, None] & in_m[None, :]
    if x_squares_ptr is not None:
        square = tl.arange(0, SQUARES)[None, :]
        is_square = in_m[:, None] & (square < num_squares)
        squares = tl.load(
            x_squares_ptr + offs_m.to(tl.int64)[:, None] * num_squares + square, mask=is_square, other=0.0
        )
    for chunk in range(first, last):
        groups = ahead
        ahead = load_groups(
            (chunk + 1) * CHUNK,
            zeros_ptr,
            scales_ptr,
            mins_ptr,
            super_scales_ptr,
            super_mins_ptr,
            scales_stride,
            offs_n,
            offs_n < tl.where(chunk + 1 < last, N, 0),
            GROUP,
            SUPER_GROUP,
            CHUNK,
        )
        words = tl.load(word_ptrs + chunk * LANES, mask=in_n[:, None], other=0)
        planes = unpack_planes(words, dtype, table_ptr, BITS, ASSEMBLY)
        for p in tl.static_range(PLANES):
            k = chunk * CHUNK + p * LANES
            x_mask = in_m[None, :] if EVEN_K else in_m[None, :] & (k + lanes < K)[:, None]
            xt = tl.load(x_ptrs + k, mask=x_mask, other=0.0)
            if (p * LANES) % GROUP == 0:
                part = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            w = planes[p]
            if zeros_ptr is not None:
                w = w - zero_point(groups[2 + 3 * (p * LANES // GROUP)], dtype, BITS)[:, None]
            elif table_ptr is None and MAGIC + ZERO != 0.0:
                w = w - (MAGIC + ZERO)
            part = tl.dot(w, xt, part, input_precision="ieee")
            if mins_ptr is not None:
                sums = tl.dot(ones, xt, sums, input_precision="ieee")
            if ((p + 1) * LANES) % GROUP == 0 or p + 1 == PLANES:
                acc += (
                    part
                    * scale_to_fp32(groups[3 + 3 * (p * LANES // GROUP)], groups[0], super_scales_ptr is not None)[
                        :, None
                    ]
                )
                if mins_ptr is not None:
                    minimum = scale_to_fp32(groups[4 + 3 * (p * LANES // GROUP)], groups[1], super_mins_ptr is not None)
                    acc += sums * minimum[:, None]

    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if parts_ptr is not None:  # noqa: SIM102  one condition for the compiler, the other for the device
        if ALWAYS_SPLIT or tl.num_programs(2) > 1:
            counter_ptr = counters_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
            places, exists = places_of_part(offs_m, offs_n, is_row_of_tile(first_n, N, BLOCK_N, GATED), M, N)
            if not is_last_part(acc, parts_ptr, counter_ptr, places, exists, part_of_k, M, N, tl.num_programs(2)):
                return
            acc = sum_of_parts(parts_ptr, places, exists, M, N, tl.num_programs(2), PARTS)
    if x_squares_ptr is not None:
        acc *= tl.where(num_squares > 0, tl.rsqrt(tl.sum(squares, 1) / K + x_eps), 1.0)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + offs_n, mask=in_n, other=0.0).to(tl.float32)[:, None]
    if GATED:
        acc = gated_tile(acc.to(y_ptr.dtype.element_ty), ACTIVATION)
    y = acc.to(y_ptr.dtype.element_ty)
    if residual_ptr is not None:
        # Read only now: during the loop, the registers are full.
        residual = tl.load(residual_ptr + row * width + column[:, None], mask=inside, other=0.0)
        y = (y.to(tl.float32) + residual).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * width + column[:, None], y, mask=inside)
        stream = tl.where(inside, y.to(tl.float32), 0.0)
        squares_ptrs = sum_squares_ptr + offs_m.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        tl.store(squares_ptrs, tl.sum(stream * stream, 0), mask=in_m)
        y = (stream * tl.load(gamma_ptr + column, mask=column < width, other=0.0)[:, None]).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * width + column[:, None], y, mask=inside)


@triton.jit
def dequantize_kernel(
    out_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    mins_ptr,
    super_scales_ptr,
    super_mins_ptr,
    table_ptr,
    N,
    K,
    words_stride,
    scales_stride,
    BITS: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    SUPER_GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: a chunk of BLOCK_N outputs, computed like the twin in fp32 and with the same roundings."""
    PLANES: tl.constexpr = 16 // BITS
    chunk = tl.program_id(0)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, LANES)
    in_n = offs_n < N
    rows = offs_n.to(tl.int64)[:, None]
    words = tl.load(words_ptr + rows * words_stride + (chunk * LANES + lanes)[None, :], mask=in_n[:, None], other=0)
    planes = unpack_planes(words, tl.float32, table_ptr, BITS, "")
    groups = load_groups(
        chunk * LANES * PLANES,
        zeros_ptr,
        scales_ptr,
        mins_ptr,
        super_scales_ptr,
        super_mins_ptr,
        scales_stride,
        offs_n,
        in_n,
        GROUP,
        SUPER_GROUP,
        LANES * PLANES,
    )
    for p in tl.static_range(PLANES):
        w = planes[p] - ZERO
        if zeros_ptr is not None:
            w -= zero_point(groups[2 + 3 * (p * LANES // GROUP)], tl.float32, BITS)[:, None]
        w *= scale_to_fp32(groups[3 + 3 * (p * LANES // GROUP)], groups[0], super_scales_ptr is not None)[:, None]
        if mins_ptr is not None:
            w += scale_to_fp32(groups[4 + 3 * (p * LANES // GROUP)], groups[1], super_mins_ptr is not None)[:, None]
        columns = (chunk * PLANES + p) * LANES + lanes
        inside = in_n[:, None] & (columns < K)[None, :]
        tl.store(out_ptr + rows * K + columns[None, :], w.to(out_ptr.dtype.element_ty), mask=inside)
