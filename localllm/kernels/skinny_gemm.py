"""y = x W^T + b for few rows of x: the matrix product of decoding, where the cost is reading W once.

W is [N, K] with K contiguous, in x's type or with one byte per weight: float8_e4m3fn with scales per channel [N] or per
block of 128 x 128, or int8 with scales per channel and optional zeros. Bytes are converted exactly to x's 16-bit type
in registers, so only the fp32 sums and the output are rounded; scales are applied to the fp32 sums. Powers of two for
each 32 inputs are applied to e4m3 in registers.

Operands are swapped: W is the MMA operand that needs 64 rows (wgmma on sm_90; 16 rows elsewhere), x the one for which
16 suffice, so no tensor-core row is wasted on padding. On sm_90 and later W is loaded by TMA if its rows are 16-byte
aligned. If N gives too few programs, K is split; each split writes fp32 sums, which the last program of a tile adds in
order. A product is launched by its reader (fused_epilogue.py), and the kernel then does the reader's work: a gated
activation (with tiles of rows of gate and up), or the addition to the stream and what the norm of the stream needs. x
may be such a norm, which the kernel finishes.

Roof: memory. Floor time = bytes of W / bandwidth. At 4.3 TB/s an H200 allows about 15 thread instructions per 16-bit
weight and 7.5 per byte; tests/kernels/variants/skinny_gemm.py keeps the loops far below that. The remaining limit is
the number of bytes in flight: about 26 KB per SM, hence stages x tile. Before sm_80 Triton offers no tensor cores.

In deterministic mode tiles and the order of sums depend only on N, K and types, for any number of rows: one row's
bits do not depend on the others. Splits that run in parallel for few rows are computed one after another by one program
for many rows, and added in the same order. So they are wherever the last program may not add.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.fused_epilogue import (
    COUNTERS,
    SUMS_AT_ONCE,
    PendingNorm,
    Product,
    Unfinished,
    is_last_part,
    parts_and_counters,
    places_of_part,
    sum_of_parts,
    whole,
)
from localllm.kernels.gated import gated_tile, is_row_of_tile, rows_of_tile
from localllm.kernels.launch import (
    cdiv,
    device_features,
    launch_options,
    launches_early,
    next_power_of_2,
    prefetch_rows,
    runs_triton,
    tl,
    triton,
    uses,
)
from localllm.kernels.quantized_weight import ROW_BLOCK, SCALE_BLOCK, dequantized, rows_in_fp32
from localllm.kernels.rms_norm import normed
from localllm.kernels.tuned import settings_for
from localllm.kernels.unpack_bytes import scaled_groups, unpack_pairs

PREFETCHED_LINES = tl.constexpr(256)  # of 128 bytes: 32 KB of W for each program, before it waits for x
UNMASKED_ROWS = tl.constexpr(64)  # rows in a tile of x from which rows beyond the last are read again, not masked
FEW_ROWS = 8  # with so few rows of x, tiles are chosen for enough programs without splits
LEAST_PROGRAMS = 96  # with fewer, K is split
UNSPLIT_PROGRAMS = 128  # one a processor
MOST_SUMS = 32768  # of a row: 128 KB of fp32 that one program of the next norm reads, as for planar weights
L2_OVER_MEMORY = 1.28  # an H200's 5.5 TB/s over 4.3: estimates, not measured
LAUNCH_BYTES = 10_000_000  # that memory delivers while a small kernel starts and ends: 2.4 us
SERIAL_ROWS = 256  # deterministic: from this many rows on, parallel splits cost more than they gain


def skinny_gemm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None, zeros: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x [M, K] fp16, bf16 or fp32 -> [M, N] in x's dtype, or in `out` [M, N], contiguous, and its dtype.

    weight [N, K] in x's dtype; or float8_e4m3fn with scales fp32 [N] or [ceil(N/128), ceil(K/128)] or uint8 [N,
    ceil(K/32)], as of `Fp8Weight`; or int8 with scales fp32 [N] and optional zeros int8 [N]: (q - zero) * scale. bias
    [N].
    """
    y = skinny_gemm_unfinished(x, weight, bias, scales, zeros)
    return out.copy_(y) if isinstance(y, Tensor) and out is not None else whole(y, out)


def skinny_gemm_unfinished(
    x: Tensor | PendingNorm, weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None,
    zeros: Tensor | None = None,
) -> Unfinished:  # fmt: skip
    """Compute `skinny_gemm`, but leave the launch to the reader."""
    x, squares, eps = (x.scaled, x.squares, x.eps) if isinstance(x, PendingNorm) else (x, None, 0.0)
    if not runs_triton(x, "products"):
        return skinny_gemm_reference(x, weight, bias, scales, zeros)
    rows, n, k = x.shape[0], *weight.shape
    if rows == 0:
        return x.new_empty((0, n))
    x = x if x.stride(1) == 1 else x.contiguous()
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    if _kind(weight) != "float" and (k % 2 or weight.stride(0) % 2 or weight.storage_offset() % 2):
        even = F.pad(weight.view(torch.uint8), (0, k % 2)).contiguous().view(weight.dtype)  # not found in checkpoints
        assert squares is None, "hidden sizes are even"
        return skinny_gemm_unfinished(F.pad(x, (0, k % 2)), even, bias, scales, zeros)
    block_scales = _kind_of_scales(scales) == "block"
    arch = device_features(x.device).arch
    key = (_row_bucket(rows), n, k, weight.element_size(), x.element_size(), block_scales, arch)
    tile = settings_for("skinny_gemm", key, skinny_gemm_tile)
    assert tile.block_k <= SCALE_BLOCK or not block_scales, "a tile has one scale"
    many = (launch_options().deterministic and rows >= SERIAL_ROWS) or _programs(tile, rows, n) > COUNTERS
    serial = tile.split_k > 1 and (many or not uses("product merge"))
    return SkinnyProduct(x, squares, eps, weight, bias, scales, zeros, tile, serial)


@dataclass(frozen=True, slots=True, eq=False)
class SkinnyProduct(Product):
    """The arguments of `skinny_gemm`, with rows contiguous, and its tile. serial: one program computes all splits."""

    x: Tensor
    squares: Tensor | None  # of a `PendingNorm`, of which x is `scaled`
    eps: float
    weight: Tensor
    bias: Tensor | None
    scales: Tensor | None
    zeros: Tensor | None
    tile: SkinnyGemmTile
    serial: bool

    @property
    def shape(self) -> tuple[int, int]:
        return self.x.shape[0], self.weight.shape[0]

    def whole(self, out: Tensor | None = None) -> Tensor:
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device) if out is None else out
        self._launch(out, self.bias)
        return out

    def gated(self, activation: str) -> Tensor | None:
        rows, n = self.shape
        if _kind_of_scales(self.scales) == "block" and n // 2 % SCALE_BLOCK != 0:
            return None  # gate and up share a block
        out = torch.empty((rows, n // 2), dtype=self.dtype, device=self.device)
        self._launch(out, self.bias, activation)
        return out

    def add_and_norm(self, residual: Tensor, weight: Tensor, eps: float) -> PendingNorm | None:
        # fp16 cannot hold a large stream times the weight. A row's squares must not depend on the batch's tiles.
        if self.dtype == torch.float16 or launch_options().deterministic:
            return None
        assert residual.is_contiguous()
        rows, n = self.shape
        squares = torch.empty((rows, cdiv(n, self.tile.block_n)), dtype=torch.float32, device=self.device)
        scaled = torch.empty((rows, n), dtype=self.dtype, device=self.device)
        self._launch(scaled, self.bias, stream=(residual, weight, squares))
        return PendingNorm(residual, weight, eps, scaled, squares)

    def _launch(
        self, out: Tensor, bias: Tensor | None, activation: str | None = None,
        stream: tuple[Tensor, Tensor, Tensor] | tuple[None, None, None] = (None, None, None),
    ) -> None:  # fmt: skip
        """stream: the residual that y is added to, the weight of its norm, and where its squares are written."""
        x, weight, scales, tile = self.x, self.weight, self.scales, self.tile
        (rows, n), k, kind = self.shape, x.shape[1], _kind(self.weight)
        target = device_features(x.device)
        stored = weight if kind == "float" else weight.view(torch.int16)  # [N, K / 2]: two weights per word
        tma = (
            target.tma
            and uses("product TMA")
            and stored.data_ptr() % 16 == 0
            and stored.stride(0) * stored.element_size() % 16 == 0
        )
        gated = activation is not None
        stages = num_stages(tile, kind, target.arch, tma=tma, ptx=target.ptx, gated=gated)
        launch: dict[str, Any] = {"num_warps": tile.num_warps, "num_stages": stages}
        if pdl := target.tma and launches_early():
            launch["launch_pdl"] = True
        squares = 0 if self.squares is None else self.squares.shape[1]
        programs = cdiv(rows, tile.block_m) * (cdiv(n // 2, tile.block_n // 2) if gated else cdiv(n, tile.block_n))
        in_parallel = tile.split_k > 1 and not self.serial
        scratch = parts_and_counters(tile.split_k, rows, n, x.device) if in_parallel else (None, None)
        _skinny_gemm_kernel[(programs, 1 if self.serial else tile.split_k)](
            out, *scratch, x, _descriptor(stored, tile, gated) if tma else stored, stored if pdl else None,
            scales, self.zeros, bias, *stream, self.squares, self.eps, squares, rows, n, k,
            x.stride(0), stored.stride(0), 0 if scales is None else scales.stride(0),
            KIND=kind, SCALES=_kind_of_scales(scales),
            HAS_ZEROS=self.zeros is not None, HAS_BIAS=bias is not None, ACTIVATION=activation,
            SQUARES=next_power_of_2(squares), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
            EVEN_K=k % tile.block_k == 0, SPLIT_K=tile.split_k, SERIAL=self.serial, TMA=tma, PTX=target.ptx, PDL=pdl,
            **launch,
        )  # fmt: skip


def skinny_gemm_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None, zeros: Tensor | None = None
) -> Tensor:
    """Compute x W^T + b in plain torch; one-byte weights are converted to fp32, some rows of W at a time."""
    if scales is None:
        return F.linear(x, weight, bias)
    wide, parts = x.float(), []
    for first in range(0, weight.shape[0], ROW_BLOCK):
        rows = slice(first, first + ROW_BLOCK)
        parts.append(F.linear(wide, rows_in_fp32(weight, scales, zeros, rows)))
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return (out if bias is None else out + bias).to(x.dtype)


def w8a16_gemm(
    x: Tensor | PendingNorm, weight: Tensor, bias: Tensor | None, scales: Tensor, zeros: Tensor | None = None
) -> Unfinished:
    """Do `skinny_gemm_unfinished` with one-byte weights and any number of rows; before sm_80 cuBLAS computes many rows,
    on dequantised W."""
    many = weight.is_cuda and x.shape[0] > 16 and device_features(weight.device).arch < 80
    if (many and not launch_options().deterministic) or not uses("product kernel"):
        x = normed(x)
        return F.linear(x, dequantized(weight, scales, zeros, x.dtype), bias)
    return skinny_gemm_unfinished(x, weight, bias, scales, zeros)


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


def num_stages(tile: SkinnyGemmTile, kind: str, arch: int, *, tma: bool, ptx: bool, gated: bool) -> int:
    """Return the stages of the loads' pipeline.

    For AMD, without PTX, Triton 3.6 cannot compile more than three stages of split bytes. A gated tile loaded by TMA
    reaches wgmma through registers, so that its shared memory is free a turn earlier: one more stage keeps as many
    bytes in flight.
    """
    if not ptx and kind != "float":
        return min(3, tile.num_stages)
    through_registers = gated and tma and arch == 90 and kind == "float" and tile.block_n >= 64
    return tile.num_stages + 1 if through_registers else tile.num_stages


def _row_bucket(rows: int) -> int:
    """Return a power of two. From 513 rows on the tiles of x alone fill a GPU, so K is whole."""
    return min(1024, max(FEW_ROWS, next_power_of_2(rows)))


def _kind(weight: Tensor) -> str:
    return {torch.float8_e4m3fn: "e4m3", torch.int8: "int8"}.get(weight.dtype, "float")


def _kind_of_scales(scales: Tensor | None) -> str:
    if scales is None:
        return "none"
    return "group" if scales.dtype == torch.uint8 else "block" if scales.ndim == 2 else "channel"


def _descriptor(weight: Tensor, tile: SkinnyGemmTile, gated: bool) -> Any:
    """Return the descriptor of tiles of W; of [gate; up] as [2, N / 2, K], whose tiles have rows of both."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    block_k = tile.block_k if weight.is_floating_point() else tile.block_k // 2
    block = [tile.block_n, block_k]
    if gated:
        weight, block = weight.unflatten(0, (2, -1)), [2, tile.block_n // 2, block_k]
    return TensorDescriptor(weight, list(weight.shape), list(weight.stride()), block)


@triton.jit(do_not_specialize=["rows"])
def _skinny_gemm_kernel(
    out_ptr,  # [rows, N]; [rows, N / 2] with ACTIVATION
    parts_ptr,  # [SPLIT_K, rows, N] fp32, and a counter for each tile, if splits run in parallel
    counters_ptr,
    x_ptr,  # [rows, K]
    weight,  # pointer to [N, K], or its tensor descriptor, with ACTIVATION as [2, N / 2, K]
    weight_ptr,  # to the same; None without PDL
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    residual_ptr,  # [rows, N], to which y is added; out is then the sum times gamma
    gamma_ptr,  # [N]
    sum_squares_ptr,  # [rows, tiles of N] fp32: of the sum
    x_squares_ptr,  # [rows, num_squares] fp32: y is divided by the root of their mean over K
    x_eps, num_squares, rows, N, K, x_stride, weight_stride, scales_stride,
    KIND: tl.constexpr, SCALES: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, SQUARES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, SPLIT_K: tl.constexpr, SERIAL: tl.constexpr, TMA: tl.constexpr,
    PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N columns of y for BLOCK_M rows,
    over one split of K (all splits one after another if SERIAL). With splits, the last program of a tile goes on.

    ACTIVATION: W is [gate; up], and half of the tile's rows are gate's, the others the same rows of up. The program
    writes act(gate) * up, both rounded before, as a kernel that reads y would. Likewise y is rounded before it is added
    to the residual."""
    GATED: tl.constexpr = ACTIVATION is not None
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    width = N // 2 if GATED else N  # of out
    first_n, first_m = tile_of_program(rows, width, BLOCK_M, OUTPUTS)
    n = rows_of_tile(first_n, N, BLOCK_N, GATED)
    if PDL:
        PACKED: tl.constexpr = 1 if KIND == "float" else 2
        first_k = 0 if SERIAL else tl.program_id(1) * tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
        row_ptrs = weight_ptr + n.to(tl.int64) * weight_stride
        prefetch_rows(row_ptrs, first_k // PACKED, K // PACKED, PREFETCHED_LINES // BLOCK_N)
        tl.extra.cuda.gdc_wait()
    # What the end of the program reads is on its way during the loop.
    column, m = first_n + tl.arange(0, OUTPUTS), first_m + tl.arange(0, BLOCK_M)
    row, inside = m.to(tl.int64)[:, None], (m < rows)[:, None] & (column < width)[None, :]
    if x_squares_ptr is not None:
        part = tl.arange(0, SQUARES)[None, :]
        is_part = (m < rows)[:, None] & (part < num_squares)
        squares = tl.load(x_squares_ptr + row * num_squares + part, mask=is_part, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * width + column[None, :], mask=inside, other=0.0)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if SERIAL:
        for split in range(SPLIT_K):
            total += _split_sum(
                x_ptr, weight, scales_ptr, zeros_ptr, n, first_n, first_m, split, rows, N, K, x_stride, weight_stride,
                scales_stride, KIND, SCALES, HAS_ZEROS, GATED, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, SPLIT_K, TMA, PTX,
            )  # fmt: skip
    else:
        total = _split_sum(
            x_ptr, weight, scales_ptr, zeros_ptr, n, first_n, first_m, tl.program_id(1), rows, N, K, x_stride,
            weight_stride, scales_stride, KIND, SCALES, HAS_ZEROS, GATED, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, SPLIT_K,
            TMA, PTX,
        )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if parts_ptr is not None:
        places, exists = places_of_part(m, n, is_row_of_tile(first_n, N, BLOCK_N, GATED), rows, N)
        counter_ptr = counters_ptr + tl.program_id(0)
        if not is_last_part(total, parts_ptr, counter_ptr, places, exists, tl.program_id(1), rows, N, SPLIT_K):
            return
        PARTS: tl.constexpr = min(SPLIT_K, max(1, SUMS_AT_ONCE // (BLOCK_M * BLOCK_N)))
        total = sum_of_parts(parts_ptr, places, exists, rows, N, tl.num_programs(1), PARTS)
    if SCALES == "channel":
        total *= tl.load(scales_ptr + n)[:, None]
    if x_squares_ptr is not None:
        total *= tl.rsqrt(tl.sum(squares, 1) / K + x_eps)[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + n).to(tl.float32)[:, None]
    if GATED:
        total = gated_tile(total.to(out_ptr.dtype.element_ty), ACTIVATION)
    y = tl.trans(total).to(out_ptr.dtype.element_ty)
    if residual_ptr is not None:
        y = (y.to(tl.float32) + residual).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * width + column[None, :], y, mask=inside)
        stream = tl.where(inside, y.to(tl.float32), 0.0)
        squares_ptrs = sum_squares_ptr + m.to(tl.int64) * tl.cdiv(N, BLOCK_N) + first_n // BLOCK_N
        tl.store(squares_ptrs, tl.sum(stream * stream, 1), mask=m < rows)
        y = (stream * tl.load(gamma_ptr + column, mask=column < width, other=0.0)[None, :]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + column[None, :], y, mask=inside)


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
    x_ptr, weight, scales_ptr, zeros_ptr, n, first_n, first_m, split, rows, N, K, x_stride, weight_stride,
    scales_stride, KIND: tl.constexpr, SCALES: tl.constexpr, HAS_ZEROS: tl.constexpr, GATED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, SPLIT_K: tl.constexpr,
    TMA: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Return fp32 [BLOCK_N, BLOCK_M]: W x^T over one split of K, before channel scales are applied. n: rows of W."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    PACKED: tl.constexpr = 1 if KIND == "float" else 2  # weights per element of `weight`
    k_of_x, k_of_w = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // PACKED)
    # Beyond the edge the last row of x is read again. In a small tile of x such rows are masked: at one row, 15 copies
    # of it would add up to half of W's bytes to what L2 delivers.
    MASKS_ROWS: tl.constexpr = BLOCK_M < UNMASKED_ROWS
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
        if TMA and GATED:
            w = tl.reshape(weight.load([0, first_n, k // PACKED]), [BLOCK_N, BLOCK_K // PACKED])
        elif TMA:
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
            if SCALES == "group":
                group = k // 32 + tl.arange(0, BLOCK_K // 32)
                group_ptrs = scales_ptr + n.to(tl.int64)[:, None] * scales_stride + group[None, :]
                exponents = tl.load(group_ptrs, mask=(group < tl.cdiv(K, 32))[None, :], other=0)
                even, odd = scaled_groups(even, exponents), scaled_groups(odd, exponents)
            x_even, x_odd = tl.split(tl.reshape(x, [BLOCK_M, BLOCK_K // 2, 2]))
            if SCALES == "block":
                part = tl.dot(even, tl.trans(x_even), input_precision="ieee")
                part = tl.dot(odd, tl.trans(x_odd), part, input_precision="ieee")
                scale = tl.load(scales_ptr + first_n // 128 * scales_stride + k // 128)
                if GATED:
                    of_up = tl.load(scales_ptr + (N // 2 + first_n) // 128 * scales_stride + k // 128)
                    scale = tl.where(tl.arange(0, BLOCK_N) < BLOCK_N // 2, scale, of_up)[:, None]
                total += part * scale
            else:
                total = tl.dot(even, tl.trans(x_even), total, input_precision="ieee")
                total = tl.dot(odd, tl.trans(x_odd), total, input_precision="ieee")
    return total
