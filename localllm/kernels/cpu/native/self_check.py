"""A small product of each kind of weights, held against its definition in matrix.h, an attention, and the gated delta
rule. Takes less than a millisecond. Arrays are numpy's: torch's default device is `meta` while a model is loaded.
Does not know: the library (it gets something that multiplies).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localllm.kernels.cpu.native.structures import (
    GROUP,
    OUTPUTS,
    Kind,
    NativeAttention,
    NativeGatedDelta,
    NativeMatrix,
    NativeStateRows,
    Recurrent,
)
from localllm.kernels.gguf_blocks import E2M1_DOUBLED, IQ4_VALUES

INPUTS = 64
ROWS = 3
TOLERANCE = 1e-3  # of the largest result; codes of 15 bits make errors of 1e-4

Bytes = NDArray[np.uint8]
Values = NDArray[np.float32]


class Multiplies(Protocol):
    def linear(self, matrix: NativeMatrix, x: Tensor, out: Tensor | None = None, *, is_fine: bool = True) -> Tensor: ...

    def attend(self, attention: NativeAttention, rows: Tensor, queries: Tensor, out: Tensor) -> None: ...

    def run_recurrent(self, operation: Recurrent, rows: NativeStateRows) -> None: ...


def wrong_kind(pool: Multiplies) -> Kind | None:
    """Return the first kind whose product is wrong; None if all are right."""
    random = np.random.default_rng(7)
    x = random.standard_normal((ROWS, INPUTS), dtype=np.float32)
    for kind in Kind:
        if not _is_right(pool, kind, x, random):
            return kind
    return None


def is_attention_right(pool: Multiplies) -> bool:
    """Return whether two heads of 20 values over the same keys, of 3 and of 19 tokens in blocks of 16, give a softmax's
    mean of the values."""
    random = np.random.default_rng(7)
    keys, values = random.standard_normal((2, 32, 20), np.float32)
    queries, table = random.standard_normal((2, 2, 20), np.float32), np.array([0, 1], np.int32)
    attention = NativeAttention(
        k=keys.ctypes.data, v=values.ctypes.data, num_blocks=2, block_size=16, heads=2, kv_heads=1, head_dim=20,
        scale=0.2, growth_period=1,
    )  # fmt: skip
    lengths, out = (3, 19), np.empty((2, 40), np.float32)
    rows = np.array([[table.ctypes.data, length - 1, 0, 0] for length in lengths])
    pool.attend(attention, *map(torch.from_numpy, (rows, queries.reshape(2, 40), out)))
    for row, length in enumerate(lengths):
        weights = np.exp(queries[row] @ keys[:length].T * 0.2)
        expected = weights / weights.sum(1, keepdims=True) @ values[:length]
        if not np.abs(out[row] - expected.ravel()).max() <= TOLERANCE * np.abs(expected).max():
            return False
    return True


def is_recurrence_right(pool: Multiplies) -> bool:
    """Return whether two tokens of a head, with a state of 5 x 80 from zeros, give what gated_delta.py defines. rate 0:
    no decay."""
    random = np.random.default_rng(7)
    keys, values = random.standard_normal((2, 5), np.float32), random.standard_normal((2, 80), np.float32)
    gates, zero, y = np.zeros((2, 1), np.float32), np.zeros(1, np.float32), np.empty((2, 80), np.float32)
    state, bounds, places = np.zeros((2, 5, 80), np.float32), np.array([0, 2], np.int32), np.array([-1, 1, 0], np.int32)
    each = [array.ctypes.data for array in (keys, keys, values, gates, gates, y)]
    constants = [array.ctypes.data for array in (zero, zero, state)]
    rows = NativeStateRows(bounds.ctypes.data, *(places[i:].ctypes.data for i in range(3)), 1)
    pool.run_recurrent(NativeGatedDelta(*each, 5, 5, 80, 1, 1, 80, *constants, 1, 1, 5, 80, 0, 1.0), rows)
    units = keys / np.sqrt((keys * keys).sum(1, keepdims=True) + 1e-6)
    first = np.outer(units[0], values[0]) / 2
    expected = first + np.outer(units[1], values[1] - units[1] @ first) / 2
    outputs = np.stack((units[0] @ first, units[1] @ expected)) / np.sqrt(5)
    errors = np.abs(state[1] - expected).max(), np.abs(y - outputs).max()
    return bool(max(errors) <= TOLERANCE * np.abs(expected).max())


def _is_right(pool: Multiplies, kind: Kind, x: Values, random: np.random.Generator) -> bool:
    data, values = _weights(kind, random)
    aligned = np.empty(data.nbytes + 64, np.uint8)
    start = -aligned.ctypes.data % 64
    weights = aligned[start : start + data.nbytes]
    weights[:] = np.frombuffer(data.tobytes(), np.uint8)
    scales = random.random(OUTPUTS, dtype=np.float32) + np.float32(0.5)
    matrix = NativeMatrix(kind, OUTPUTS, INPUTS, weights.ctypes.data)
    if kind is Kind.I8:
        matrix.scales, values = scales.ctypes.data, values * scales[:, None]
    read = torch.from_numpy(x).bfloat16().float().numpy() if kind is Kind.BF16_ROUNDED else x
    expected = read.astype(np.float64) @ values.T.astype(np.float64)
    error = np.abs(pool.linear(matrix, torch.from_numpy(x)).numpy() - expected).max()
    return bool(error <= TOLERANCE * np.abs(expected).max())


def _weights(kind: Kind, random: np.random.Generator) -> tuple[Bytes | Values, Values]:
    """Return (bytes in the layout of the kind, the values [OUTPUTS, INPUTS] that they stand for)."""
    if kind in (Kind.F32, Kind.BF16, Kind.F16, Kind.BF16_ROUNDED):
        return _floats(kind, random.standard_normal((OUTPUTS, INPUTS), dtype=np.float32))
    if kind is Kind.I8:
        codes = random.integers(-127, 128, (OUTPUTS, INPUTS), np.int8)
        return _lanes(codes, 4).view(np.uint8), codes.astype(np.float32)
    return _blocks(kind, random)


def _lanes(values: NDArray[np.generic], together: int) -> NDArray[np.generic]:
    """Return values [OUTPUTS, K] as [K / together, OUTPUTS, together]."""
    return np.ascontiguousarray(values.reshape(OUTPUTS, -1, together).transpose(1, 0, 2))


def _floats(kind: Kind, values: Values) -> tuple[Bytes, Values]:
    if kind is Kind.F32:
        return _lanes(values, 1).view(np.uint8), values
    if kind is Kind.F16:
        halves = values.astype(np.float16)
        return _lanes(halves, 2).view(np.uint8), halves.astype(np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    return _lanes(bits, 2).view(np.uint8), (bits.astype(np.uint32) << 16).view(np.float32)


def _blocks(kind: Kind, random: np.random.Generator) -> tuple[Bytes, Values]:
    """Do `_weights` for kinds with blocks of 32 inputs."""
    blocks, tables = INPUTS // GROUP, {Kind.MXFP4: E2M1_DOUBLED, Kind.NVFP4: E2M1_DOUBLED, Kind.IQ4: IQ4_VALUES}
    parts: list[Bytes] = []
    values = np.empty((OUTPUTS, blocks, GROUP), np.float32)
    for block in range(blocks):
        codes = random.integers(0, 256 if kind is Kind.Q8 else 16, (OUTPUTS, GROUP), np.uint8)
        scales, minima = (random.random((2, OUTPUTS)) + 0.5).astype(np.float16)
        packed = codes if kind is Kind.Q8 else codes[:, :16] | codes[:, 16:] << 4
        parts.append(_lanes(packed, 4).view(np.uint8).ravel())
        offset = {Kind.Q8: 128, Kind.Q4: 8}.get(kind, 0)
        numbers = np.array(tables[kind], np.float32)[codes] if kind in tables else codes.astype(np.float32) - offset
        if kind is Kind.MXFP4:
            exponents = random.integers(126, 131, OUTPUTS, np.uint8)
            parts.append(exponents)
            values[:, block] = numbers * np.exp2(exponents[:, None].astype(np.float32) - 128)
            continue
        parts.append(scales.view(np.uint8))
        values[:, block] = numbers * scales[:, None].astype(np.float32)
        if kind in (Kind.Q4_MIN, Kind.NVFP4):
            parts.append(minima.view(np.uint8))
        if kind is Kind.NVFP4:  # the second scales
            values[:, block, 16:] = numbers[:, 16:] * minima[:, None].astype(np.float32)
        elif kind is Kind.Q4_MIN:
            values[:, block] -= minima[:, None].astype(np.float32)
    return np.concatenate(parts), values.reshape(OUTPUTS, INPUTS)
