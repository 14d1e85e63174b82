"""int8 weights on a CPU, one scale per output, times rows of bytes: oneDNN's product with AVX512-VNNI or AVX-VNNI.

    CpuInt8Weight     W in oneDNN's blocked layout
    CpuInt8Table      W in the same layout for the native library, in memory of its own: rows of it can be looked up
    pack_int8         from codes and scales
    int8_codes        any quantised weight as codes and scales
    int8_columns      some of the codes, read back

Weights with finer scales (a GGUF's blocks of 32, groups of 128, blocks of fp8) are rounded again, to 127 steps of each
output's largest weight. For normally distributed weights that adds an error of 0.8 % (rms) to that of the checkpoint's
own quantisation: Q8_0 0.5 %, fp8 2.6 %, 4 bits 8 to 10 %. int8 per channel is unchanged.
The operations are torch's own but not public: `has_int8` tries them before they are used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.cpu.activations import decode, encode
from localllm.kernels.cpu.blocks import BLOCK, Examples, reorder
from localllm.kernels.cpu.native.structures import FEW_ROWS, Kind, NativeMatrix
from localllm.kernels.cpu.native_product import native_linear, native_unpack
from localllm.kernels.int4_linear import Int4Weight
from localllm.kernels.int8_linear import Int8Weight
from localllm.kernels.planar.linear import PlanarWeight, dequantize_reference
from localllm.kernels.quantize import SMALLEST
from localllm.kernels.quantized_weight import QuantizedWeight

CODES_AT_A_TIME = 1 << 20  # weights rounded at a time, so that their fp32 stays in the cache
DEQUANTIZED_COLUMNS = 256


@dataclass(frozen=True, slots=True, eq=False)
class CpuInt8Weight:
    """W = values * scales; a `QuantizedWeight`."""

    packed: Tensor  # [K, N] int8 in oneDNN's layout, with sums of columns
    scales: Tensor  # [N] fp32

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[1], self.packed.shape[0]

    @property
    def nbytes(self) -> int:
        return int(torch.ops.mkldnn._nbytes(self.packed)) + self.scales.nbytes

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] fp16, bf16 or fp32, bias [N] -> [T, N] in x's dtype"""
        if x.shape[0] == 0:
            return x.new_empty((0, self.scales.shape[0]))
        codes = encode(x)
        return decode(_multiply(codes.bytes, self.packed, self.scales), codes, bias, x.dtype)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return [N, K], recovered by multiplying by the identity, since the layout is oneDNN's own."""
        rows, columns = self.shape
        out = torch.empty((rows, columns), dtype=dtype)
        for start in range(0, columns, DEQUANTIZED_COLUMNS):
            unit = torch.full((min(DEQUANTIZED_COLUMNS, columns - start), columns), 128, dtype=torch.uint8)
            unit[:, start:].fill_diagonal_(129)
            out[:, start : start + unit.shape[0]] = _multiply(unit, self.packed, self.scales).t()
        return out


@dataclass(frozen=True, slots=True, eq=False)
class CpuInt8Table:
    """W = codes * scales, a `QuantizedTable` for a CPU with the native library: an embedding that is also the head.

    oneDNN, whose layout the codes have, converts only half a gigabyte a second. The library's product is faster than
    oneDNN's up to 16 rows, and takes 1.1 to 1.4 times as long from 64 rows on, which few steps give a head.
    """

    codes: Tensor  # [padded N / 64, K / 4, 64, 4] int8
    scales: Tensor  # [padded N] fp32
    outputs: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs, self.codes.shape[1] * self.codes.shape[3]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] fp16, bf16 or fp32, bias [N] -> [T, N] in x's dtype"""
        y = native_linear(self.matrix(), x.float(), is_fine=len(x) <= FEW_ROWS)
        return (y if bias is None else y.add_(bias)).to(x.dtype)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return [N, K]."""
        return native_unpack(self.matrix(), dtype)

    def dequantize_rows(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return [T, K], the given rows [T] int64 of `dequantize`."""
        words = self.codes.view(torch.int32).squeeze(-1)[rows // BLOCK, :, rows % BLOCK]  # [T, K / 4]
        return (words.view(torch.int8) * self.scales[rows][:, None]).to(dtype)

    def matrix(self) -> NativeMatrix:
        """Return the matrix for the native library. Valid as long as this weight."""
        outputs, inputs = self.shape
        codes, scales = self.codes.data_ptr(), self.scales.data_ptr()
        return NativeMatrix(kind=Kind.I8, outputs=outputs, inputs=inputs, weights=codes, scales=scales)


def empty_table(rows: int, columns: int) -> CpuInt8Table:
    """Return a table whose codes and scales are not written yet. columns: a multiple of 4."""
    blocks = -(-rows // BLOCK)
    codes = torch.empty((blocks, columns // 4, BLOCK, 4), dtype=torch.int8, device="cpu")
    return CpuInt8Table(codes, torch.zeros(blocks * BLOCK, device="cpu"), rows)


def table_nbytes(rows: int, columns: int) -> int:
    """Return the bytes of a matrix's `CpuInt8Table`."""
    return -(-rows // BLOCK) * BLOCK * (columns + 4)


def pack_int8(values: Tensor, scales: Tensor, examples: Examples | None = None) -> CpuInt8Weight:
    """Pack values [N, K] int8, scales [N] fp32. examples: what was packed before, which makes it faster."""
    packed = reorder(values.contiguous(), Examples() if examples is None else examples)
    return CpuInt8Weight(packed, scales)


def int8_nbytes(rows: int, columns: int) -> int:
    """Return the bytes of a matrix's `CpuInt8Weight`: whole blocks, and a sum and a scale per output."""
    padded = -(-rows // BLOCK) * BLOCK
    return padded * (-(-columns // BLOCK) * BLOCK + 4) + rows * 4


def int8_codes(weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """Return values [N, K] int8, scales [N] fp32: unchanged if the weight has this format, rounded otherwise."""
    if isinstance(weight, Int8Weight) and weight.zeros is None:
        return weight.values, weight.scales
    if not isinstance(weight, PlanarWeight):
        return round_rows(weight.dequantize(torch.float32))
    values = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0])
    order = weight.input_order if isinstance(weight, Int4Weight) else None
    for start, part in PlanarWeight.parts(weight, CODES_AT_A_TIME):
        stop = start + part.shape[0]
        values[start:stop], scales[start:stop] = round_rows(dequantize_reference(part))
    return values if order is None else torch.empty_like(values).index_copy_(1, order, values), scales


def int8_columns(weight: CpuInt8Weight, columns: Sequence[int]) -> Tensor:
    """Return the codes [len(columns), N] fp32 of these inputs, computed by products."""
    outputs, inputs = weight.shape
    unit = torch.full((len(columns), inputs), 128, dtype=torch.uint8)
    unit[range(len(columns)), list(columns)] = 129
    return _multiply(unit, weight.packed, torch.ones(outputs))


def round_rows(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Round [n, K] fp32, overwritten, to the nearest of 255 values per row, evenly spaced around 0."""
    scales = wide.abs().amax(dim=1).clamp_(min=SMALLEST) / 127
    return wide.mul_(1 / scales[:, None]).round_().to(torch.int8), scales


@cache
def has_int8() -> bool:
    """Return whether this torch has a fast and exact product on this processor, in the expected layout.

    Without VNNI, pairs of products saturate at 16 bits; a processor without its own kernel gets a reference loop that
    is a hundred times too slow. Both are detected by trying.
    """
    try:
        values = torch.full((BLOCK + 1, BLOCK + 1), 127, dtype=torch.int8, device="cpu")
        weight = pack_int8(values, torch.ones(BLOCK + 1, device="cpu"))
        largest = torch.full((1, BLOCK + 1), 255, dtype=torch.uint8, device="cpu")
        if int(_multiply(largest, weight.packed, weight.scales)[0, 0]) != 127 * 127 * (BLOCK + 1):
            return False
        return weight.nbytes == int8_nbytes(BLOCK + 1, BLOCK + 1) and _is_fast()
    except (AttributeError, RuntimeError):
        return False


def _is_fast() -> bool:
    plain = torch.ones((1024, 256), device="cpu")
    weight = pack_int8(plain.to(torch.int8), torch.ones(1024, device="cpu"))
    codes = torch.ones((1, 256), dtype=torch.uint8, device="cpu")
    return is_no_reference_loop(lambda: _multiply(codes, weight.packed, weight.scales), plain)


def is_no_reference_loop(call: Callable[[], object], plain: Tensor) -> bool:
    """Return whether `call` takes less than ten times as long as an fp32 matrix of the same shape with one row.

    Measured on one thread: on a busy machine, waiting for a second one may take longer than the product.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _best_time(call) < 10 * _best_time(lambda: F.linear(plain[:1], plain))
    finally:
        torch.set_num_threads(threads)


def _best_time(call: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def _multiply(codes: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """Multiply codes [T, K] uint8 -> sums over (code - 128) * w [T, N] fp32; sums of integers are exact."""
    product, zero_point = _operation()
    y: Tensor = product(codes, 1.0, 128, packed, scales, zero_point, None, 1.0, 0, torch.float32, "none", [], "")
    return y


@cache
def _operation() -> tuple[Callable[..., Tensor], Tensor]:
    """Look up the operation once: choosing among its overloads takes microseconds."""
    return torch.ops.onednn.qlinear_pointwise.default, torch.zeros(1, dtype=torch.int32, device="cpu")
