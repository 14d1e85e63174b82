"""A weight matrix and its bias, laid out for the device by kernels/linear.py or quantised already."""

from __future__ import annotations

from torch import Tensor

from localllm.kernels.linear import linear, pack_weight
from localllm.kernels.quantized_weight import QuantizedWeight
from localllm.kernels.stacked_weight import StackedWeight

Weight = Tensor | QuantizedWeight


class Linear:
    """y = x W^T + b. Takes the weight over: where the device wants another layout only the packed copy is kept."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Weight, bias: Tensor | None = None) -> None:
        self.weight = lay_out(weight)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N]"""
        weight = self.weight
        return linear(x, weight, self.bias) if isinstance(weight, Tensor) else weight.linear(x, self.bias)


def lay_out(weight: Weight) -> Weight:
    """The weight as its device reads it fastest."""
    if isinstance(weight, StackedWeight):
        return StackedWeight([lay_out(part) for part in weight.parts])
    return pack_weight(weight) if isinstance(weight, Tensor) else weight
