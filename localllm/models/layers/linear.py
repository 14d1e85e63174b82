"""A weight matrix and its bias, laid out for the device by kernels/linear.py."""

from __future__ import annotations

from torch import Tensor

from localllm.kernels.linear import linear, pack_weight


class Linear:
    """y = x W^T + b. Takes the weight over: where the device wants another layout only the packed copy is kept."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = pack_weight(weight)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N]"""
        return linear(x, self.weight, self.bias)
