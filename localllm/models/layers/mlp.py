"""The gated feed-forward part: down(act(gate(x)) * up(x)), gate and up as one matrix."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from localllm.kernels.gelu_mul import gelu_mul
from localllm.kernels.silu_mul import silu_mul
from localllm.models.layers.linear import Linear

CPU_ROWS = 256
"""Rows at a time on a CPU. The widest buffer of a model is gate_up's output: for a whole prefill chunk it exceeds what
malloc keeps, and getting its pages anew from the system in every layer costs a tenth of the step."""

GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu_mul,
    "gelu_tanh": lambda gate_up: gelu_mul(gate_up, "tanh"),
    "gelu": lambda gate_up: gelu_mul(gate_up, "none"),
}


class GatedMLP:
    __slots__ = ("activation", "down", "gate_up")

    def __init__(self, gate_up: Linear, down: Linear, activation: str) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activation = GATED[activation]

    def __call__(self, x: Tensor, slot_mapping: Tensor | None = None) -> Tensor:
        """x [T, hidden] -> [T, hidden]; rows of padding are computed like any other."""
        if x.device.type != "cpu" or x.shape[0] <= CPU_ROWS:
            return self.down(self.activation(self.gate_up(x)))
        return torch.cat([self.down(self.activation(self.gate_up(rows))) for rows in x.split(CPU_ROWS)])
