"""A layer's weight as a matrix of the native library. Returns None where the layout is unknown.

Does not know: layers, operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.cpu.blocks import memory_of
from localllm.kernels.cpu.int8 import CpuInt8Weight
from localllm.kernels.cpu.native.structures import OUTPUTS, Kind, NativeMatrix
from localllm.kernels.linear import PACK_ROWS
from localllm.kernels.quantized_weight import QuantizedWeight
from localllm.kernels.stacked_weight import StackedWeight


@dataclass(frozen=True, slots=True, eq=False)
class HeldMatrix:
    """A matrix, and what keeps its memory alive."""

    matrix: NativeMatrix
    owners: tuple[object, ...]


def matrix_of(weight: Tensor | QuantizedWeight, bias: Tensor | None) -> HeldMatrix | None:
    """Return the weight [N, K] and bias [N] as a native matrix that shares the weight's memory if it is large."""
    outputs, inputs = weight.shape
    padded = None if bias is None else F.pad(bias.float(), (0, -outputs % OUTPUTS)).contiguous()
    matrix = NativeMatrix(outputs=outputs, inputs=inputs, bias=None if padded is None else padded.data_ptr())
    if isinstance(weight, CpuInt8Weight):
        size = -(-outputs // OUTPUTS) * OUTPUTS
        if inputs % 64:
            return None
        address, scales = torch.ops.mkldnn.data_ptr(weight.packed), F.pad(weight.scales, (0, size - outputs))
        matrix.kind, matrix.weights, matrix.scales = Kind.I8, address, scales.data_ptr()
        matrix.sums = address + size * inputs
        return HeldMatrix(matrix, (weight, scales, padded))
    if not isinstance(weight, Tensor):
        return None
    if weight.is_mkldnn:
        if weight.dtype != torch.float32 or outputs % OUTPUTS or not _has_blocks():
            return None
        matrix.kind, matrix.weights = Kind.F32, torch.ops.mkldnn.data_ptr(weight)
        return HeldMatrix(matrix, (weight, padded))
    blocks = _blocks(weight.float())
    matrix.kind, matrix.weights = Kind.F32, blocks.data_ptr()
    return HeldMatrix(matrix, (blocks, padded))


def matrices_of(weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> list[HeldMatrix] | None:
    """Return the matrices whose outputs follow one another in the weight's; None if one has another layout."""
    parts = weight.parts if isinstance(weight, StackedWeight) else (weight,)
    biases = [None] * len(parts) if bias is None else bias.split([part.shape[0] for part in parts])
    matrices = [matrix_of(part, own) for part, own in zip(parts, biases, strict=True)]
    found = [matrix for matrix in matrices if matrix is not None]
    return found if len(found) == len(parts) else None


def _blocks(weight: Tensor) -> Tensor:
    whole = F.pad(weight, (0, 0, 0, -weight.shape[0] % OUTPUTS))
    return whole.view(-1, OUTPUTS, weight.shape[1]).transpose(1, 2).contiguous()


@cache
def _has_blocks() -> bool:
    weight = torch.arange(128.0 * 48).view(128, 48)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
    return torch.equal(memory_of(packed).view(torch.float32), _blocks(weight).flatten())
