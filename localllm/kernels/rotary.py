"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) in half-split form: dimension i turns with i + d/2."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_angles(table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The step's cosines and signed sines, each [T, 1, rotary_dim] fp32, shared by all layers.

    table [max_pos, rotary_dim] fp32: cosines, then sines, of rotary_dim / 2 frequencies. The first half of the
    sines comes negated, so that the rotation is two multiplies and one roll.
    """
    cos, sin = table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, head_dim] -> the same shape and dtype, contiguous; dimensions past rotary_dim pass through."""
    return rotary_reference(x, cos, sin)


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x * cos + rotate_half(x) * sin over the leading rotary_dim dimensions, in fp32."""
    rotary_dim = cos.shape[-1]
    if rotary_dim == x.shape[-1]:
        return _rotate(x, cos, sin)
    return torch.cat((_rotate(x[..., :rotary_dim], cos, sin), x[..., rotary_dim:]), dim=-1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = x.roll(x.shape[-1] // 2, dims=-1)
    if x.dtype == torch.float32:
        return torch.mul(x, cos).addcmul_(turned, sin)
    return torch.mul(x, cos).addcmul_(turned.float(), sin).to(x.dtype)
