"""The experts' matrices of one layer, in the form that their products need.

Tensor                    [E, N, K] in the activations' type
ScaledExperts             int8 or e4m3, one scale per output
PlanarExperts             4 or 8 bits in groups (planar/layout.py)
a list, one per expert    on a CPU: packed matrices, or quantised ones with their own `linear`
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.fp8_linear import Fp8Weight
from localllm.kernels.int4_linear import Int4Weight
from localllm.kernels.int8_linear import Int8Weight
from localllm.kernels.launch import INTERPRETED
from localllm.kernels.linear import linear, pack_weight, should_pack
from localllm.kernels.planar.linear import PlanarWeight, planar_differences
from localllm.kernels.quantized_weight import MetaWeight, QuantizedWeight, dequantized

PACKED_ROWS = (1, 2, 4, 8, 16, 32, 48, 64)


@dataclass(frozen=True, slots=True)
class ScaledExperts:
    """w[e, n, k] = values[e, n, k] * scales[e, n], or scales[e, n // 128, k // 128], or two to the power of
    scales[e, n, k // 32] - 127"""

    values: Tensor  # [E, N, K] int8 or float8_e4m3fn, K even
    scales: Tensor  # fp32 [E, N], or per block [E, ceil(N / 128), ceil(K / 128)]; or uint8 [E, N, ceil(K / 32)]

    def __len__(self) -> int:
        return self.values.shape[0]

    def __getitem__(self, expert: int) -> Tensor:
        """Return one expert's matrix in fp32."""
        return dequantized(self.values[expert], self.scales[expert], None, torch.float32)

    @property
    def in_blocks(self) -> bool:
        return self.scales.ndim == 3 and not self.in_groups

    @property
    def in_groups(self) -> bool:
        """Return whether scales are powers of two for each 32 inputs."""
        return self.scales.dtype == torch.uint8

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes + self.scales.nbytes)


@dataclass(frozen=True, slots=True)
class PlanarExperts:
    """E matrices [N, K] stored as one of E * N outputs."""

    weight: PlanarWeight  # [E * N, K]
    num_experts: int

    def __len__(self) -> int:
        return self.num_experts

    def __getitem__(self, expert: int) -> PlanarWeight:
        """Return one expert's matrix, sharing memory."""
        outputs = self.shape[1]
        return self.weight.rows(expert * outputs, (expert + 1) * outputs)

    @property
    def shape(self) -> tuple[int, int, int]:
        rows, columns = self.weight.shape
        return self.num_experts, rows // self.num_experts, columns

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


ExpertWeights = Tensor | ScaledExperts | PlanarExperts | Sequence[Tensor | QuantizedWeight]


def pack_experts(weight: Tensor) -> Tensor | list[Tensor]:
    """Return weight [E, N, K] in the best form for this device; drop the original."""
    if should_pack(weight[0].numel(), weight.device, weight.dtype):
        return [pack_weight(matrix) for matrix in weight]
    return weight


def needs_stacked_experts(device: torch.device) -> bool:
    """Return whether the device's kernels need a layer's experts as one tensor.
    On a CPU each may have its own format."""
    return INTERPRETED or device.type != "cpu"


def stack_experts(matrices: Iterable[Tensor | QuantizedWeight], count: int) -> ExpertWeights:
    """Return `count` matrices as one, holding only one of them at a time besides. Raises ValueError if they differ or
    no kernel supports them. Meta matrices are kept as they are, since their total size is right (it includes a
    static scale of inputs, 4 bytes, which no expert kernel reads)."""
    iterator = iter(matrices)
    first = next(iterator)
    if isinstance(first, MetaWeight):
        return [first, *iterator]
    stack: dict[str, Any] = {
        name: _empty_stack(tensor, count, _axis(first, name)) for name, tensor in _tensors(first).items()
    }
    for place, matrix in enumerate(chain([first], iterator)):
        tensors = _tensors(matrix)
        _check_same_layout(first, matrix)
        for name, tensor in tensors.items():
            axis = _axis(first, name)
            size = tensor.shape[axis]
            stack[name].narrow(axis, place * size, size).copy_(tensor)
    if isinstance(first, PlanarWeight):
        return PlanarExperts(replace(first, **stack), count)
    each = {name: tensor.unflatten(0, (count, -1)) for name, tensor in stack.items()}
    return each["values"] if isinstance(first, Tensor) else ScaledExperts(**each)


def _tensors(matrix: Tensor | QuantizedWeight) -> dict[str, Tensor]:
    """Return the tensors that have a row or a column per output, by name."""
    if isinstance(matrix, Tensor):
        return {"values": matrix}
    if isinstance(matrix, PlanarWeight):
        if isinstance(matrix, Int4Weight) and matrix.input_order is not None:
            raise ValueError("experts with desc_act (inputs in an order of their own) are not supported")
        return matrix.tensors()
    if isinstance(matrix, Int8Weight) and matrix.zeros is None:
        return {"values": matrix.values, "scales": matrix.scales}
    if isinstance(matrix, Fp8Weight):
        return {"values": matrix.values, "scales": matrix.scales}
    raise ValueError(f"no kernel multiplies with experts of this kind: {type(matrix).__name__}")


def _axis(matrix: Tensor | QuantizedWeight, name: str) -> int:
    return 1 if isinstance(matrix, PlanarWeight) and name != "words" else 0


def _empty_stack(tensor: Tensor, count: int, axis: int) -> Tensor:
    shape = list(tensor.shape)
    shape[axis] *= count
    return tensor.new_empty(shape)


def _check_same_layout(first: Tensor | QuantizedWeight, other: Tensor | QuantizedWeight) -> None:
    """Raise ValueError unless both matrices agree in everything but their values."""
    if isinstance(first, PlanarWeight) and isinstance(other, PlanarWeight):
        differs = planar_differences(first, other)
        if differs or first.shape != other.shape:
            raise ValueError(f"quantised experts that differ in {', '.join(differs) or 'shape'} cannot be one")
    elif type(first) is not type(other) or first.shape != other.shape:
        raise ValueError("experts that are stored in different ways cannot be one")


def expert_linear(x: Tensor, weights: ExpertWeights, expert: int, bias: Tensor | None) -> Tensor:
    """x [T, K] -> [T, N] through one expert in plain torch; bias [E, N]."""
    weight, offset = weights[expert], None if bias is None else bias[expert]
    if not isinstance(weight, Tensor):
        return weight.linear(x, offset)
    if weight.is_mkldnn:
        return _packed_linear(x, weight, offset)
    return linear(x, weight if weight.dtype == x.dtype else weight.to(x.dtype), offset)


def _packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply with rows padded to one of PACKED_ROWS. oneDNN generates and keeps code for every number of rows: 3 ms
    and 0.6 MiB each, 160 MiB once an expert has had 1 to 128 rows. An expert may get any number of rows."""
    parts = []
    for rows in x.split(PACKED_ROWS[-1]):
        size = next(size for size in PACKED_ROWS if size >= len(rows))
        parts.append(linear(F.pad(rows, (0, 0, 0, size - len(rows))), weight, bias)[: len(rows)])
    return parts[0] if len(parts) == 1 else torch.cat(parts)
