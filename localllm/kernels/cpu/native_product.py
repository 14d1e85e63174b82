"""Products of torch tensors with a `NativeMatrix`, by the native library.

    native_linear         x W^T
    native_unpack         W
    native_unpack_bf16    W in the layout of KIND_BF16
    product_speeds        the multiply-adds/s of a prompt

Does not know: where a matrix's memory comes from, models.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from localllm.kernels.cpu.native.library import Library, native
from localllm.kernels.cpu.native.structures import OUTPUTS, Kind, NativeMatrix

UNPACKED_AT_A_TIME = 1 << 20  # weights, so that they stay in the cache
MEASURED_SIZE, MEASURED_ROWS, MEASURED_TIMES = (
    2048,
    128,
    6,
)  # outputs and inputs, rows, products of which the best counts


def native_linear(matrix: NativeMatrix, x: Tensor, *, is_fine: bool) -> Tensor:
    """Return x W^T [T, N] fp32, with the matrix's bias if it has one. x [T, K] fp32.

    is_fine: encode x in 15 bits for matrices of 8 bits and less, else in 8 bits except for rows with outliers.
    """
    return _library().linear(matrix, x, is_fine=is_fine)


def native_unpack(matrix: NativeMatrix, dtype: torch.dtype) -> Tensor:
    """Return the values [N, K] in the order of the matrix's columns."""
    out = torch.empty((matrix.outputs, matrix.inputs), dtype=dtype, device="cpu")
    for start, part in unpacked_parts(matrix):
        out[start : start + len(part)] = part
    return out


def native_unpack_bf16(matrix: NativeMatrix, out: Tensor, first: int) -> None:
    """Write the blocks from output `first` on, a multiple of 64, into out [b, K / 2, 64, 2] bf16."""
    _library().unpack_bf16(matrix, out, first)


def unpacked_parts(matrix: NativeMatrix) -> Iterator[tuple[int, Tensor]]:
    """Yield (first output, values [n, K] fp32) in order. A part is valid until the next one."""
    step = max(OUTPUTS, UNPACKED_AT_A_TIME // matrix.inputs // OUTPUTS * OUTPUTS)
    buffer = torch.empty((min(step, matrix.outputs), matrix.inputs), device="cpu")
    for start in range(0, matrix.outputs, step):
        part = buffer[: matrix.outputs - start]
        _library().unpack(matrix, start, part)
        yield start, part


def product_speeds() -> tuple[float, float] | None:
    """Return the multiply-adds/s of many rows with weights of 4 bits and with weights of 16 bits, measured now in about
    0.2 s; None without the native library."""
    return None if native() is None else (_product_speed(Kind.Q4), _product_speed(Kind.BF16))


def _product_speed(kind: Kind) -> float:
    size, library = MEASURED_SIZE, _library()
    matrix = NativeMatrix(kind=kind, outputs=size, inputs=size)
    weights = torch.zeros(size * size * 2, dtype=torch.uint8, device="cpu")  # enough for either kind
    matrix.weights = weights.data_ptr()
    x, best_s = torch.ones((MEASURED_ROWS, size), device="cpu"), math.inf
    for _ in range(MEASURED_TIMES):
        begun_s = time.perf_counter()
        library.linear(matrix, x, is_fine=False)
        best_s = min(best_s, time.perf_counter() - begun_s)
    return MEASURED_ROWS * size * size / best_s


def _library() -> Library:
    library = native()
    assert library is not None, "the layouts of native/matrix.h need the native library"
    return library
