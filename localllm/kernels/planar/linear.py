"""y = x W^T + b with W in 4 or 8 bits: the operation of Int4Weight (int4_linear.py) and GGUFWeight (gguf_linear.py).

    w[n, k] = scale[group of k, n] * (q[n, k] - zero[group of k, n]) + min[group of k, n]

q is stored in planes (layout.py). The product is computed as y^T = W x^T, with the weights as the left operand of the
MMA: decode has few rows, and the left operand must have many. Each plane is converted to integers in the activations'
type by setting bits: 0x4300 | q is 128 + q in bf16, 0x6400 | q is 1024 + q in fp16, both exact, and subtracting 128 +
zero gives q - zero exactly. Integers are multiplied with x, and groups are scaled after the MMA in fp32. Apart from x
itself nothing is rounded before the sum, so the result is more accurate than with weights converted to 16 bits first.
On NVIDIA the bits are set for two weights at a time by lop3 in inline assembly; elsewhere by the same steps in Triton.

Roof: at a few rows the weights are read once and the limit is either memory or instructions. With 128 weights per group
the loop takes under 3 thread instructions per weight on sm_90 (tests/kernels/variants/planar_linear.py has the budget);
4.3 TB/s allows 3.8. K is split if N alone does not fill the GPU; the last program of a tile adds the sums of the splits
in a fixed order (kernels/fused_epilogue.py). Like a product of 16-bit weights (skinny_gemm.py), a product is launched
by its reader: the kernel applies a gated activation, or adds y to the stream, and finishes a norm that it reads.
Beyond `planar_crossover` rows the matrix is converted to 16 bits, part by part, and multiplied by cuBLAS.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.choice import Crossover
from localllm.kernels.fused_epilogue import (
    COUNTERS,
    PendingNorm,
    Product,
    Unfinished,
    parts_and_counters,
    parts_at_once,
    whole,
)
from localllm.kernels.launch import INTERPRETED, cdiv, early_launch, launch_options, next_power_of_2, runs_triton, uses
from localllm.kernels.planar.kernels import (
    PlanarTile,
    dequantize_kernel,
    planar_linear_kernel,
    planar_tile,
    register_limit,
)
from localllm.kernels.planar.layout import chunk_size, unpack_assembly, unpack_words
from localllm.kernels.rms_norm import normed
from localllm.kernels.tuned import settings_for

SUPER_GROUP = 256  # weights that share one 16-bit scale if the scales themselves are quantised (GGUF's K types)
TWIN_ELEMENTS = 1 << 20  # weights that the twin holds in fp32 at a time
DEQUANTIZED_ELEMENTS = 1 << 26  # 16-bit weights that a long prefill holds at a time
PARTIAL_ROWS = 1024  # rows whose splits of K are held in fp32 at a time, at most
DETERMINISTIC_ROWS = 64  # deterministic: the bucket whose tiles and split are used for every batch


W = TypeVar("W", bound="PlanarWeight")


@dataclass(frozen=True, slots=True)
class PlanarWeight:
    """W [N, K] as planes of integers. G groups of `group` weights along K, the last one padded to a whole chunk."""

    words: Tensor  # [N, padded K * bits / 16] int16, see layout.py
    scales: Tensor  # [G, N] fp16 or bf16; int8 multiples of super_scales if those are given
    columns: int  # K
    bits: int = 4
    lanes: int = 32  # weights in a plane, 16 for such short groups
    group: int = 128
    zeros: Tensor | None = None  # [G, N] uint8: the code that means 0. None: `zero` everywhere
    zero: int = 8  # 0 if the codes are signed (8 bits) or use a table
    mins: Tensor | None = None  # [G, N], typed like scales: added to each weight
    super_scales: Tensor | None = None  # [ceil(K / 256), N] fp16: unit of scales
    super_mins: Tensor | None = None
    table: tuple[float, ...] | None = None  # values of the 16 codes if not evenly spaced; preferably 8-bit integers

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0], self.columns

    @property
    def nbytes(self) -> int:
        values = (getattr(self, f.name) for f in dataclasses.fields(self))
        return sum(value.nbytes for value in values if isinstance(value, Tensor))

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K], bias [N] -> [T, N] in x's dtype."""
        return whole(self.unfinished(x, bias))

    def unfinished(self, x: Tensor | PendingNorm, bias: Tensor | None = None) -> Unfinished:
        """Compute `linear`, but leave its last work to the reader (fused_epilogue.py)."""
        return planar_linear_unfinished(x, self, bias)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return [N, K]: scale * (q - zero) + min in fp32, rounded once to dtype."""
        out = torch.empty(self.shape, dtype=dtype, device=self.words.device)
        if runs_triton(self.words, "products"):
            return _dequantize(self, out)
        for start, part in self.parts(TWIN_ELEMENTS):
            out[start : start + part.shape[0]] = dequantize_reference(part)
        return out

    def dequantize_rows(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return [T, K], the given rows [T] int64 of `dequantize`."""
        taken = {n: t.index_select(0 if n == "words" else 1, rows) for n, t in self.tensors().items()}
        return dataclasses.replace(self, **taken).dequantize(dtype)

    def rows(self, start: int, stop: int) -> Self:
        """Return outputs start .. stop-1, sharing memory."""
        tensors = self.tensors()
        views = {name: t[start:stop] if name == "words" else t[:, start:stop] for name, t in tensors.items()}
        return dataclasses.replace(self, **views)

    def parts(self, elements: int) -> Iterator[tuple[int, Self]]:
        """Yield (first output, part) in order; a part has about `elements` weights, and at least 64 outputs or all."""
        step = max(64, elements // self.columns // 64 * 64)
        for start in range(0, self.shape[0], step):
            yield start, self.rows(start, min(start + step, self.shape[0]))

    def tensors(self) -> dict[str, Any]:
        """Return the tensors with a first or last dimension of N, by name."""
        names = ("words", "scales", "zeros", "mins", "super_scales", "super_mins")
        return {name: t for name in names if (t := getattr(self, name)) is not None}


def stack_rows(weights: Sequence[W]) -> W:
    """Return one matrix of all their outputs, as for q, k and v. Raises ValueError if they differ in more than N."""
    first, *others = weights
    for other in others:
        if differs := planar_differences(first, other):
            raise ValueError(f"quantised weights that differ in {', '.join(differs)} cannot be stacked")
    stacked: dict[str, Any] = {
        name: torch.cat([w.tensors()[name] for w in weights], dim=0 if name == "words" else 1)
        for name in first.tensors()
    }
    return dataclasses.replace(first, **stacked)


def planar_differences(first: PlanarWeight, other: PlanarWeight) -> list[str]:
    """Return the fields in which two weights differ, except N and per-output values;
    two that differ cannot be merged."""
    names = [n for n in _shared_fields(first, other) if not _equal(getattr(first, n), getattr(other, n))]
    has_other_parts = type(first) is not type(other) or first.tensors().keys() != other.tensors().keys()
    return names or (["kind"] if has_other_parts else [])


def _shared_fields(first: PlanarWeight, other: PlanarWeight) -> list[str]:
    per_output = first.tensors().keys() | other.tensors().keys()
    return [f.name for f in dataclasses.fields(first) if f.name not in per_output]


def _equal(a: object, b: object) -> bool:
    return a is b or (torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b)


def planar_linear(x: Tensor, weight: PlanarWeight, bias: Tensor | None = None) -> Tensor:
    """x [T, K] fp16, bf16 or fp32, bias [N] -> x W^T + bias [T, N] in x's dtype."""
    return whole(planar_linear_unfinished(x, weight, bias))


def planar_linear_unfinished(x: Tensor | PendingNorm, weight: PlanarWeight, bias: Tensor | None = None) -> Unfinished:
    """Compute `planar_linear`, but leave the launch to the reader."""
    if not runs_triton(x, "products"):
        return planar_linear_reference(normed(x), weight, bias)
    crossover = settings_for("planar_crossover", planar_key(weight), planar_crossover)
    rows = x.shape[0]
    if rows > crossover.skinny_rows and not launch_options().deterministic:  # there no row depends on their number
        return _multiply_dequantized(normed(x), weight, bias)
    x, squares, eps = (x.scaled, x.squares, x.eps) if isinstance(x, PendingNorm) else (x, None, 0.0)
    if rows == 0:
        return x.new_empty((0, weight.shape[0]))
    bucket = DETERMINISTIC_ROWS if launch_options().deterministic else next_power_of_2(rows)
    tile = settings_for("planar_linear", (bucket, *planar_key(weight)), planar_tile)
    if not uses("product merge") or cdiv(weight.shape[0], tile.block_n) > COUNTERS:
        tile = tile._replace(split=1)
    return PlanarProduct(x if x.stride(1) == 1 else x.contiguous(), squares, eps, weight, bias, tile)


def planar_linear_reference(x: Tensor, weight: PlanarWeight, bias: Tensor | None = None) -> Tensor:
    """The definition in fp32: some rows of W at a time are dequantised and multiplied."""
    out = x.new_empty((x.shape[0], weight.shape[0]))
    wide = x.float()
    for start, part in weight.parts(TWIN_ELEMENTS):
        stop = start + part.shape[0]
        out[:, start:stop] = F.linear(
            wide, dequantize_reference(part), None if bias is None else bias[start:stop].float()
        )
    return out


def dequantize_reference(weight: PlanarWeight) -> Tensor:
    """Return [N, K] fp32. Each product is exact, so the only rounding is that of adding min."""
    codes = unpack_words(weight.words, weight.bits, weight.lanes)
    if weight.table is not None:
        values = torch.tensor(weight.table, dtype=torch.float32, device=codes.device)[codes.int()]
    else:
        values = codes.float()
    size = min(weight.group, values.shape[1])
    if values.shape[1] % size:
        values = F.pad(values, (0, -values.shape[1] % size))
    values = values.view(values.shape[0], -1, size)  # [N, G, group]
    if weight.zeros is not None:
        values -= weight.zeros.t().float().sub_(128.0 if weight.bits == 8 else 0.0)[:, : values.shape[1], None]
    elif weight.zero:
        values -= weight.zero
    values *= _in_fp32(weight.scales, weight.super_scales, size)[:, : values.shape[1], None]
    if weight.mins is not None:
        values += _in_fp32(weight.mins, weight.super_mins, size)[:, : values.shape[1], None]
    return values.flatten(1)[:, : weight.columns]


def _in_fp32(per_group: Tensor, per_super_group: Tensor | None, group: int) -> Tensor:
    """Return [N, G] fp32 from [G, N], multiplied by the super scales if there are any."""
    scales = per_group.t().float()
    if per_super_group is None:
        return scales
    repeated = per_super_group.t().float().repeat_interleave(SUPER_GROUP // group, dim=1)
    return scales * repeated[:, : scales.shape[1]]


# Launches


def planar_key(weight: PlanarWeight) -> tuple[int | bool, ...]:
    """Return (N, K, bits, group, whether there are minima, processors, whether the MMA is Hopper's)."""
    return *weight.shape, weight.bits, weight.group, weight.mins is not None, *_gpu(weight.words.device)


def planar_crossover(
    outputs: int, columns: int, bits: int, group: int, mins: bool, processors: int, wgmma: bool
) -> Crossover:
    """Return the rows beyond which converting W to 16 bits once costs less than unpacking it for every tile of rows:
    derived from instruction counts, not measured.

    The conversion moves 4.5 bytes per weight, eight times as much as the 4-bit weights alone. Short groups are scaled
    more often, so it pays sooner.
    """
    return Crossover(767 if group >= 128 else 191)


@cache
def _gpu(device: torch.device) -> tuple[int, bool]:
    """Return the number of processors, and whether the MMA is Hopper's."""
    if INTERPRETED:
        return 4, True
    gpu = torch.cuda.get_device_properties(device)
    return int(gpu.multi_processor_count), gpu.major == 9 and torch.version.hip is None


@cache
def code_table_on(table: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(table, dtype=torch.float32, device=device)


@cache
def _no_squares(device: torch.device) -> Tensor:
    """Return what stands for the squares of rows that are not pending norms."""
    return torch.zeros(1, dtype=torch.float32, device=device)


def _may_read_squares(dtype: torch.dtype) -> bool:
    """Return whether products of this type read pending norms: see `PlanarProduct.add_and_norm`."""
    return dtype != torch.float16 and not launch_options().deterministic


class _Stream(NamedTuple):
    """The residual that a product is added to, the weight of its norm, and where the sums of squares are written."""

    residual: Tensor  # [M, N]
    gamma: Tensor  # [N] fp32
    squares: Tensor  # [M, tiles of N] fp32


@dataclass(frozen=True, slots=True, eq=False)
class PlanarProduct(Product):
    """The arguments of `planar_linear`, with rows contiguous, and its tile."""

    x: Tensor
    squares: Tensor | None  # of a `PendingNorm`, of which x is `scaled`
    eps: float
    weight: PlanarWeight
    bias: Tensor | None
    tile: PlanarTile

    @property
    def shape(self) -> tuple[int, int]:
        return self.x.shape[0], self.weight.shape[0]

    def whole(self, out: Tensor | None = None) -> Tensor:
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device) if out is None else out
        self._launch(out)
        return out

    def gated(self, activation: str) -> Tensor:
        rows, outputs = self.shape
        out = torch.empty((rows, outputs // 2), dtype=self.dtype, device=self.device)
        self._launch(out, activation)
        return out

    def add_and_norm(self, residual: Tensor, weight: Tensor, eps: float) -> PendingNorm | None:
        # fp16 cannot hold a large stream times the weight. A row's squares must not depend on the batch's tiles.
        if not _may_read_squares(self.dtype):
            return None
        assert residual.is_contiguous()
        rows, outputs = self.shape
        tiles_n = cdiv(outputs, self.tile.block_n)
        squares = torch.empty((rows, tiles_n), dtype=torch.float32, device=self.device)
        scaled = torch.empty((rows, outputs), dtype=self.dtype, device=self.device)
        self._launch(scaled, stream=_Stream(residual, weight, squares))
        return PendingNorm(residual, weight, eps, scaled, squares)

    def _launch(self, out: Tensor, activation: str | None = None, stream: _Stream | None = None) -> None:
        """Launch the kernel; with splits for some rows at a time, so that their sums and counters have room."""
        rows, (outputs, columns), x, weight, tile = self.x.shape[0], self.weight.shape, self.x, self.weight, self.tile
        tiles_n = cdiv(outputs, tile.block_n) if activation is None else cdiv(outputs // 2, tile.block_n // 2)
        at_once = rows if tile.split == 1 else min(PARTIAL_ROWS, COUNTERS // tiles_n * tile.block_m)
        shares = tile.num_warps == 8
        squares, most_squares = self.squares, 0 if self.squares is None else self.squares.shape[1]
        num_squares = most_squares
        if stream is None and activation is None and squares is None and _may_read_squares(self.dtype):
            # The kernel of a product that reads a pending norm, as the same matrix of other layers does: one less.
            squares, most_squares = _no_squares(x.device), cdiv(columns, tile.block_n)
        for start in range(0, rows, at_once):
            some = slice(start, min(start + at_once, rows))
            count = some.stop - start
            scratch: tuple[Tensor | None, Tensor | None] = (None, None)
            if tile.split > 1:
                scratch = parts_and_counters(tile.split, count, outputs, x.device)
            elif shares and uses("product merge"):
                # The kernel of the same product with splits, one less. It takes more registers after its loop, but of
                # programs of eight warps a processor runs one in any case.
                scratch = parts_and_counters(1, 1, 1, x.device)
            planar_linear_kernel[(cdiv(count, tile.block_m), tiles_n, tile.split)](
                out[some],
                *scratch,
                x[some],
                weight.words,
                weight.scales,
                weight.zeros,
                weight.mins,
                weight.super_scales,
                weight.super_mins,
                None if weight.table is None else code_table_on(weight.table, x.device),
                self.bias,
                None if stream is None else stream.residual[some],
                None if stream is None else stream.gamma,
                None if stream is None else stream.squares[some],
                squares if squares is None or not num_squares else squares[some],
                self.eps if num_squares else 1.0,
                num_squares,
                count,
                outputs,
                columns,
                x.stride(0),
                weight.words.stride(0),
                weight.scales.stride(0),
                **constants(weight, x.dtype),
                BLOCK_M=tile.block_m,
                BLOCK_N=tile.block_n,
                PARTS=parts_at_once(tile.split, tile.block_m * tile.block_n),
                ALWAYS_SPLIT=not shares,
                ACTIVATION=activation,
                SQUARES=next_power_of_2(most_squares),
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
                **register_limit(
                    tile,
                    weight.bits,
                    weight.group,
                    mins=weight.mins is not None,
                    wgmma=_gpu(x.device)[1],
                    reads_squares=squares is not None,
                    gated=activation is not None,
                ),
                **early_launch(x.device),
            )


def constants(weight: PlanarWeight, dtype: torch.dtype) -> dict[str, int | bool | str]:
    """Return the kernel's compile-time constants that follow from the weight and the type of x."""
    return {
        "BITS": weight.bits,
        "LANES": weight.lanes,
        "GROUP": weight.group,
        "SUPER_GROUP": SUPER_GROUP,
        "ZERO": weight.zero if weight.zeros is None else 0,
        "EVEN_K": weight.columns % chunk_size(weight.bits, weight.lanes) == 0,
        "ASSEMBLY": unpack_assembly(weight.bits, dtype, weight.table),
    }


def _multiply_dequantized(x: Tensor, weight: PlanarWeight, bias: Tensor | None) -> Tensor:
    """Multiply by cuBLAS with W dequantised to 16 bits, some rows at a time so that the scratch memory stays small."""
    outputs, columns = weight.shape
    if outputs * columns <= DEQUANTIZED_ELEMENTS:
        return F.linear(x, PlanarWeight.dequantize(weight, x.dtype), bias)
    y = x.new_empty((x.shape[0], outputs))
    for start, part in weight.parts(DEQUANTIZED_ELEMENTS):
        stop = start + part.shape[0]
        scratch = PlanarWeight.dequantize(part, x.dtype)
        y[:, start:stop] = F.linear(x, scratch, None if bias is None else bias[start:stop])
    return y


def _dequantize(weight: PlanarWeight, out: Tensor) -> Tensor:
    outputs, columns = weight.shape
    block_n = 32
    grid = (cdiv(columns, chunk_size(weight.bits, weight.lanes)), cdiv(outputs, block_n))
    compiled_for = constants(weight, torch.float32)
    dequantize_kernel[grid](
        out,
        weight.words,
        weight.scales,
        weight.zeros,
        weight.mins,
        weight.super_scales,
        weight.super_mins,
        None if weight.table is None else code_table_on(weight.table, out.device),
        outputs,
        columns,
        weight.words.stride(0),
        weight.scales.stride(0),
        **{name: value for name, value in compiled_for.items() if name not in ("EVEN_K", "ASSEMBLY")},
        BLOCK_N=block_n,
        num_warps=4,
    )
    return out
