"""RMSNorm over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467), alone or after a residual add."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H], weight fp32 and broadcastable to x; returns x's shape and dtype, statistics in fp32."""
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place, then the norm of the sum: one pass over memory for a fused kernel, two here."""
    residual.add_(x)
    return rms_norm(residual, weight, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight.

    The mean of squares comes from one vector_norm, which reads x once and makes no x-sized temporary: at 512 rows
    of 896 on CPU a third of F.rms_norm's time. At one row the calls themselves are the cost, so there are few.
    """
    wide = x if x.dtype == torch.float32 else x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    inverse = torch.addcmul(_constant(eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    out = torch.mul(wide, inverse).mul_(weight)
    return out if x.dtype == torch.float32 else out.to(x.dtype)


@cache
def _constant(value: float, device: torch.device) -> Tensor:
    return torch.full((1,), value, device=device)
