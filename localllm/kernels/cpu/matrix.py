"""The weights of layers as matrices for the native library.

    matrix_of      one weight and its bias; None: another layout
    matrices_of    likewise, a `StackedWeight` as several matrices
    NativeWeight   a weight of which nothing but its matrix is known
    parts_of       the bytes that a matrix consists of

A matrix points into the memory of the weight that torch's products read, so nothing is copied except biases and small
plain weights. oneDNN does not promise its layouts: a few columns of each matrix are compared with their products.
Does not know: layers, what is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.cpu.blocks import BLOCK, memory_of
from localllm.kernels.cpu.half import CpuHalfWeight, HalfRows
from localllm.kernels.cpu.int8 import CpuInt8Table, CpuInt8Weight, int8_columns
from localllm.kernels.cpu.native.structures import (
    FEW_ROWS,
    KIND_STORED,
    MAX_INT8_INPUTS,
    OUTPUTS,
    Kind,
    NativeMatrix,
    Stored,
)
from localllm.kernels.cpu.native_product import native_linear, native_unpack
from localllm.kernels.cpu.q4 import PER_GROUP, CpuQ4Weight, blocks_nbytes
from localllm.kernels.cpu.stored_blocks import CpuStoredWeight, block_size
from localllm.kernels.linear import PACK_MIN_ELEMENTS, StackedWeight, linear
from localllm.kernels.quantized_weight import QuantizedWeight

_CODES = 4  # int8 inputs in a lane


@dataclass(frozen=True, slots=True, eq=False)
class HeldMatrix:
    """A matrix together with the owners of its memory."""

    matrix: NativeMatrix
    owners: tuple[object, ...]


class MatrixPart(NamedTuple):
    """Bytes that a field of a matrix points to."""

    field: str
    num_bytes: int


def parts_of(matrix: NativeMatrix) -> list[MatrixPart]:
    """Return the parts of a matrix, in the order of the fields but for the bias, which is last."""
    outputs, inputs, kind = matrix.outputs, matrix.inputs, matrix.kind
    blocks = -(-outputs // OUTPUTS)
    if kind >= KIND_STORED:
        size, num_bytes = block_size(Stored(kind - KIND_STORED).name)
        weights = outputs * (inputs // size) * num_bytes
    elif kind in PER_GROUP:
        weights = blocks_nbytes(outputs, inputs, Kind(kind))
    else:
        halves = (inputs + 1) // 2 * 4
        each = {Kind.F32: 4 * inputs, Kind.I8: matrix.stored_inputs or inputs}
        weights = blocks * OUTPUTS * each.get(Kind(kind), halves)
    parts = [MatrixPart("weights", weights)]
    parts += [MatrixPart("scales", blocks * OUTPUTS * 4)] if matrix.scales else []
    parts += [MatrixPart("input_order", inputs * 4)] if matrix.input_order else []
    return parts + ([MatrixPart("bias", blocks * OUTPUTS * 4)] if matrix.bias else [])


@dataclass(frozen=True, slots=True, eq=False)
class NativeWeight:
    """A `QuantizedWeight` that the native library alone multiplies, of any layout of matrix.h."""

    native: NativeMatrix  # without a bias
    owner: object  # of its memory

    @property
    def shape(self) -> tuple[int, int]:
        return self.native.outputs, self.native.inputs

    @property
    def nbytes(self) -> int:
        return sum(part.num_bytes for part in parts_of(self.native))

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] fp16, bf16 or fp32, bias [N] -> [T, N] in x's dtype"""
        y = native_linear(self.native, x.float(), is_fine=len(x) <= FEW_ROWS)
        return (y if bias is None else y.add_(bias)).to(x.dtype)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return [N, K] in the order of the matrix's columns."""
        return native_unpack(self.native, dtype)


def matrix_of(weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> HeldMatrix | None:
    """Return the matrix of a weight on the CPU, with its bias [N]; None: its layout is not one of matrix.h."""
    if isinstance(weight, CpuQ4Weight | CpuHalfWeight | CpuStoredWeight | CpuInt8Table):
        return _held(weight.matrix(), bias, weight)
    if isinstance(weight, HalfRows):
        return matrix_of(weight.packed(), bias)
    if isinstance(weight, NativeWeight):
        return _held(NativeMatrix.from_buffer_copy(weight.native), bias, weight)
    if isinstance(weight, CpuInt8Weight):
        return _int8(weight, bias)
    if isinstance(weight, Tensor) and weight.is_mkldnn:
        return _packed_fp32(weight, bias)
    return _copied(weight, bias)


def matrices_of(weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> list[HeldMatrix] | None:
    """Return the matrices whose outputs follow one another in the weight's; None if one has another layout."""
    parts = weight.parts if isinstance(weight, StackedWeight) else (weight,)
    heights = [part.shape[0] for part in parts]
    biases = [None] * len(parts) if bias is None else bias.split(heights)
    matrices = [matrix_of(part, own) for part, own in zip(parts, biases, strict=True)]
    found = [matrix for matrix in matrices if matrix is not None]
    return found if len(found) == len(parts) else None


def _held(matrix: NativeMatrix, bias: Tensor | None, *owners: object) -> HeldMatrix:
    if bias is None:
        return HeldMatrix(matrix, owners)
    padded = padded_outputs(bias.float())
    matrix.bias = padded.data_ptr()
    return HeldMatrix(matrix, (*owners, padded))


def padded_outputs(per_output: Tensor) -> Tensor:
    """Return a copy of [..., N] with N rounded up to a multiple of 64, filled with zeros."""
    padded = F.pad(per_output, (0, -per_output.shape[-1] % OUTPUTS))
    return padded.clone(memory_format=torch.contiguous_format)


def _int8(weight: CpuInt8Weight, bias: Tensor | None) -> HeldMatrix | None:
    outputs, inputs = weight.shape
    memory, padded, stored_inputs = memory_of(weight.packed), -(-outputs // BLOCK) * BLOCK, -(-inputs // BLOCK) * BLOCK
    if inputs % _CODES or inputs > MAX_INT8_INPUTS or memory.numel() != padded * (stored_inputs + 4):
        return None
    codes = memory[: padded * stored_inputs].view(torch.int8).view(-1, stored_inputs // _CODES, OUTPUTS, _CODES)
    columns = _columns(inputs)
    stored = torch.stack([codes[:, k // _CODES, :, k % _CODES].reshape(-1)[:outputs] for k in columns])
    if not torch.equal(stored.float(), int8_columns(weight, columns)):
        return None
    scales = padded_outputs(weight.scales)
    matrix = NativeMatrix(
        kind=Kind.I8, outputs=outputs, inputs=inputs, weights=memory.data_ptr(), scales=scales.data_ptr(),
        stored_inputs=stored_inputs,
    )  # fmt: skip
    return _held(matrix, bias, weight, scales)


def _packed_fp32(weight: Tensor, bias: Tensor | None) -> HeldMatrix | None:
    outputs, inputs = weight.shape
    memory, padded = memory_of(weight), -(-outputs // OUTPUTS) * OUTPUTS
    if weight.dtype != torch.float32 or memory.numel() != padded * inputs * 4:
        return None
    values, columns = memory.view(torch.float32).view(-1, inputs, OUTPUTS), _columns(inputs)
    unit = torch.zeros((len(columns), inputs))
    unit[range(len(columns)), columns] = 1.0
    stored = torch.stack([values[:, k].reshape(-1)[:outputs] for k in columns])
    if not torch.equal(linear(unit, weight), stored):
        return None
    matrix = NativeMatrix(kind=Kind.F32, outputs=outputs, inputs=inputs, weights=memory.data_ptr())
    return _held(matrix, bias, weight)


def _copied(weight: Tensor | QuantizedWeight, bias: Tensor | None) -> HeldMatrix | None:
    """Return a copy in fp32 of a weight that is too small to be packed."""
    outputs, inputs = weight.shape
    if isinstance(weight, StackedWeight) or outputs * inputs >= PACK_MIN_ELEMENTS:
        return None
    wide = weight.float() if isinstance(weight, Tensor) else weight.dequantize(torch.float32)
    blocks = F.pad(wide, (0, 0, 0, -outputs % OUTPUTS)).view(-1, OUTPUTS, inputs).transpose(1, 2).contiguous()
    matrix = NativeMatrix(kind=Kind.F32, outputs=outputs, inputs=inputs, weights=blocks.data_ptr())
    return _held(matrix, bias, blocks)


def _columns(inputs: int) -> list[int]:
    """Return the columns to compare: neighbours, and the last."""
    return sorted({0, min(1, inputs - 1), inputs // 2, inputs - 1})
