"""The norms of the residual stream, with weights in fp32; storage as `w - 1` is already undone."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.fused_epilogue import PendingNorm, Unfinished, whole
from localllm.kernels.layer_norm import add_layer_norm, layer_norm
from localllm.kernels.rms_norm import add_rms_norm, add_rms_norm_pending, rms_norm
from localllm.models.layers.linear import Linear


class RMSNorm:
    __slots__ = ("eps", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight.float()
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Unfinished, residual: Tensor) -> Tensor:
        """Add x to residual in place; return the norm of the sum."""
        return add_rms_norm(x, residual, self.weight, self.eps)

    def add_pending(self, x: Unfinished, residual: Tensor) -> Tensor | PendingNorm:
        """Do the same, but leave the division by the root mean square to the reader where that saves a kernel."""
        return add_rms_norm_pending(x, residual, self.weight, self.eps)


class GatedNorm:
    """RMSNorm whose output is multiplied by the sigmoid of a low-rank function of itself (A.X K2)."""

    __slots__ = ("down", "norm", "up")

    def __init__(self, norm: RMSNorm, down: Linear, up: Linear) -> None:
        """down: [rank, hidden], up: [hidden, rank]."""
        self.norm, self.down, self.up = norm, down, up

    def __call__(self, x: Tensor) -> Tensor:
        return self._gated(self.norm(x))

    def add(self, x: Unfinished, residual: Tensor) -> Tensor:
        """Add x to residual in place; return the gated norm of the sum."""
        return self._gated(self.norm.add(x, residual))

    def add_pending(self, x: Unfinished, residual: Tensor) -> Tensor:
        return self.add(x, residual)

    def _gated(self, y: Tensor) -> Tensor:
        return (y.float() * self.up(F.silu(self.down(y))).float().sigmoid()).to(y.dtype)


class LayerNorm:
    __slots__ = ("bias", "eps", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self.weight = weight.float()
        self.bias = None if bias is None else bias.float()
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Unfinished, residual: Tensor) -> Tensor:
        """Add x to residual in place; return the norm of the sum."""
        return add_layer_norm(whole(x), residual, self.weight, self.bias, self.eps)

    def add_pending(self, x: Unfinished, residual: Tensor) -> Tensor:
        return self.add(x, residual)
