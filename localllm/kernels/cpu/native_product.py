"""Products of torch tensors with a `NativeMatrix`, by the native library.

    native_linear         x W^T
    native_gated          activation(gate) * up of the halves of x W^T
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
from localllm.kernels.cpu.native.structures import OUTPUTS, Activation, Kind, NativeMatrix
from localllm.machine.bandwidth import RAN_SHARE, ProductSpeeds

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


def native_gated(matrix: NativeMatrix, x: Tensor, activation: Activation) -> Tensor:
    """Return activation(gate) * up [T, N / 2] fp32, where x W^T is [gate, up]. x [T, K] fp32."""
    return _library().gated(matrix, x, activation)


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


def product_speeds() -> ProductSpeeds | None:
    """Return the multiply-adds/s of many rows with weights of 4 bits and with weights of 16 bits, measured now in about
    0.2 s; None without the native library."""
    if native() is None:
        return None
    (narrow, first), (wide, second) = _product_speed(Kind.Q4), _product_speed(Kind.BF16)
    return ProductSpeeds(narrow, wide, first or second)


def _product_speed(kind: Kind) -> tuple[float, bool]:
    """Return the multiply-adds/s of the fastest product in which no thread had to wait for a processor; if there is
    none, of the fastest, and True."""
    size, library = MEASURED_SIZE, _library()
    matrix = NativeMatrix(kind=kind, outputs=size, inputs=size)
    weights = torch.zeros(size * size * 2, dtype=torch.uint8, device="cpu")  # enough for either kind
    matrix.weights = weights.data_ptr()
    x, best_s, disturbed_s = torch.ones((MEASURED_ROWS, size), device="cpu"), math.inf, math.inf
    for _ in range(MEASURED_TIMES):
        begun_s, ran_s = time.perf_counter(), time.process_time()
        library.linear(matrix, x, is_fine=False)
        lasted_s, ran_s = time.perf_counter() - begun_s, time.process_time() - ran_s
        disturbed_s = min(disturbed_s, lasted_s)
        if ran_s >= RAN_SHARE * lasted_s * torch.get_num_threads():
            best_s = min(best_s, lasted_s)
    is_disturbed = math.isinf(best_s)
    return MEASURED_ROWS * size * size / (disturbed_s if is_disturbed else best_s), is_disturbed


def _library() -> Library:
    library = native()
    assert library is not None, "the layouts of native/matrix.h need the native library"
    return library
