"""int8 weights on a CPU, one scale an output, times rows of bytes: oneDNN's product with AVX512-VNNI or AVX-VNNI.

    CpuInt8Weight     W in oneDNN's blocked layout
    pack_int8         from codes and scales
    int8_codes        any quantised weight as codes and scales

Whatever a checkpoint has finer scales for (a GGUF's blocks of 32, groups of 128, blocks of fp8) is rounded again, to
127 steps of each output's largest weight. For normally distributed weights that adds 0.8 % (rms) to what the
checkpoint's own quantisation has cost: Q8_0 0.5 %, fp8 2.6 %, 4 bits 8 to 10 %. int8 per channel stays as it is.
The operations are torch's own but not public: `has_int8` tries them before anything relies on them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.cpu.activations import decode, encode
from localllm.kernels.cpu.blocks import BLOCK, reorder
from localllm.kernels.huge_pages import want_huge_pages
from localllm.kernels.int4_linear import Int4Weight
from localllm.kernels.int8_linear import Int8Weight
from localllm.kernels.planar.linear import PlanarWeight, dequantize_reference
from localllm.kernels.quantize import SMALLEST
from localllm.kernels.quantized_weight import QuantizedWeight
from localllm.kernels.stacked_weight import StackedWeight

CODES_AT_A_TIME = 1 << 20  # weights that are rounded at a time: their fp32 stays in the cache
DEQUANTIZED_COLUMNS = 256


@dataclass(frozen=True, slots=True, eq=False)
class CpuInt8Weight:
    """W = values * scales; a `QuantizedWeight`."""

    packed: Tensor  # [K, N] int8 as oneDNN wants it, with sums of columns
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
        """[N, K]: the layout is oneDNN's own, so W is read by multiplying it with the identity."""
        rows, columns = self.shape
        out = torch.empty((rows, columns), dtype=dtype)
        for start in range(0, columns, DEQUANTIZED_COLUMNS):
            unit = torch.full((min(DEQUANTIZED_COLUMNS, columns - start), columns), 128, dtype=torch.uint8)
            unit[:, start:].fill_diagonal_(129)
            out[:, start : start + unit.shape[0]] = _multiply(unit, self.packed, self.scales).t()
        return out


def pack_int8(values: Tensor, scales: Tensor) -> CpuInt8Weight:
    """values [N, K] int8, scales [N] fp32"""
    packed = reorder(values.contiguous())
    want_huge_pages(torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed))
    return CpuInt8Weight(packed, scales)


def int8_nbytes(rows: int, columns: int) -> int:
    """Bytes of the `CpuInt8Weight` of a matrix: whole blocks, a sum and a scale for each output."""
    padded = -(-rows // BLOCK) * BLOCK
    return padded * (-(-columns // BLOCK) * BLOCK + 4) + rows * 4


def int8_codes(weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """values [N, K] int8, scales [N] fp32: the weight as it is where it is just that, else rounded anew."""
    if isinstance(weight, Int8Weight) and weight.zeros is None:
        return weight.values, weight.scales
    if isinstance(weight, StackedWeight):
        parts = [int8_codes(part) for part in weight.parts if not isinstance(part, Tensor)]
        return torch.cat([values for values, _ in parts]), torch.cat([scales for _, scales in parts])
    if not isinstance(weight, PlanarWeight):
        return round_rows(weight.dequantize(torch.float32))
    values = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0])
    order = weight.input_order if isinstance(weight, Int4Weight) else None
    for start, part in PlanarWeight.parts(weight, CODES_AT_A_TIME):
        stop = start + part.shape[0]
        values[start:stop], scales[start:stop] = round_rows(dequantize_reference(part))
    return values if order is None else torch.empty_like(values).index_copy_(1, order, values), scales


def round_rows(wide: Tensor) -> tuple[Tensor, Tensor]:
    """[n, K] fp32, written over -> the nearest of 255 values a row, evenly spaced around 0"""
    scales = wide.abs().amax(dim=1).clamp_(min=SMALLEST) / 127
    return wide.mul_(1 / scales[:, None]).round_().to(torch.int8), scales


@cache
def has_int8() -> bool:
    """Whether this torch on this processor has the product, exact, in the layout that is counted with, and fast.

    Without VNNI pairs of products saturate at 16 bits; without a kernel of its own a processor gets a reference loop
    that is a hundred times too slow. Either is found by trying.
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
    """Whether `call` takes less than ten times what an fp32 matrix of the same shape takes with one row.

    On one thread: on a busy machine a second one may be waited for, for longer than the product takes.
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
    """codes [T, K] uint8 -> sums over (code - 128) * w [T, N] fp32; sums of integers are exact"""
    product, zero_point = _operation()
    y: Tensor = product(codes, 1.0, 128, packed, scales, zero_point, None, 1.0, 0, torch.float32, "none", [], "")
    return y


@cache
def _operation() -> tuple[Callable[..., Tensor], Tensor]:
    """Looked up once: the choice among its overloads costs microseconds."""
    return torch.ops.onednn.qlinear_pointwise.default, torch.zeros(1, dtype=torch.int32, device="cpu")
