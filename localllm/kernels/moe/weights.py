"""The experts' matrices of one layer, as their products want them.

Tensor                    [E, N, K] in the activations' type
ScaledExperts             int8 or e4m3, one scale per output
PlanarExperts             4 or 8 bits in groups (planar/layout.py)
a list, one per expert    on a CPU: packed matrices, or quantised ones that can multiply by themselves
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.kernels.int4_linear import Int4Weight
from localllm.kernels.linear import linear, pack_weight, packs
from localllm.kernels.planar.linear import PlanarWeight, stack_rows
from localllm.kernels.quantized_weight import QuantizedWeight


@dataclass(frozen=True, slots=True)
class ScaledExperts:
    """w[e, n, k] = values[e, n, k] * scales[e, n]"""

    values: Tensor  # [E, N, K] int8 or float8_e4m3fn, K even
    scales: Tensor  # [E, N] fp32

    def __len__(self) -> int:
        return self.values.shape[0]

    def __getitem__(self, expert: int) -> Tensor:
        """One expert's matrix in fp32."""
        return self.values[expert].float() * self.scales[expert][:, None]

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes + self.scales.nbytes)


@dataclass(frozen=True, slots=True)
class PlanarExperts:
    """E matrices [N, K] as one of E * N outputs."""

    weight: PlanarWeight  # [E * N, K]
    num_experts: int

    def __len__(self) -> int:
        return self.num_experts

    def __getitem__(self, expert: int) -> PlanarWeight:
        """One expert's matrix, sharing memory."""
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
    """weight [E, N, K] -> how this device likes it; drop the original."""
    if packs(weight[0].numel(), weight.device, weight.dtype):
        return [pack_weight(matrix) for matrix in weight]
    return weight


def stack_experts(weights: Sequence[PlanarWeight]) -> PlanarExperts:
    """One per expert, alike in everything but their values; ValueError where they are not, or where GPTQ's desc_act
    gives each expert an order of inputs of its own."""
    if any(isinstance(weight, Int4Weight) and weight.input_order is not None for weight in weights):
        raise ValueError("experts with desc_act (inputs in an order of their own) are not supported")
    return PlanarExperts(stack_rows(weights), len(weights))


def expert_linear(x: Tensor, weights: ExpertWeights, expert: int, bias: Tensor | None) -> Tensor:
    """x [T, K] -> [T, N] through one expert in plain torch; bias [E, N]."""
    weight, offset = weights[expert], None if bias is None else bias[expert]
    if not isinstance(weight, Tensor):
        return weight.linear(x, offset)
    return linear(x, weight if weight.is_mkldnn or weight.dtype == x.dtype else weight.to(x.dtype), offset)
