"""RMSNorm with its weight in fp32, Gemma's `w - 1` storage already undone."""

from __future__ import annotations

from torch import Tensor

from localllm.kernels.rms_norm import add_rms_norm, rms_norm


class RMSNorm:
    __slots__ = ("eps", "weight")

    def __init__(self, weight: Tensor, eps: float, *, plus_one: bool = False) -> None:
        self.weight = weight.float() + 1.0 if plus_one else weight.float()
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual += x in place; returns the norm of the sum."""
        return add_rms_norm(x, residual, self.weight, self.eps)
