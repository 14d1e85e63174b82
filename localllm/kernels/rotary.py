"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in plain torch. On a GPU, kernels/rotary_store_kv.py
rotates q and k while it writes them.

Dimension i of the leading rotary_dim rotates with i + rotary_dim / 2 (half-split, as in Llama), or with its neighbour
(interleaved, as in GPT-J). Dimensions past rotary_dim are unchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_angles(table: Tensor, positions: Tensor, *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Return the step's cosines and signed sines, each [T, 1, rotary_dim] fp32, shared by all layers.

    table [max_pos, rotary_dim] fp32: cosines, then sines, of rotary_dim / 2 frequencies. The sine of the first
    dimension of a pair is negated, so that the rotation is two multiplications and one exchange.
    """
    cos, sin = table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    if interleaved:
        return torch.stack((cos, cos), dim=-1).flatten(-2), torch.stack((-sin, sin), dim=-1).flatten(-2)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate x [T, heads, head_dim] -> the same shape and dtype, contiguous; computed in fp32."""
    rotary_dim = cos.shape[-1]
    if rotary_dim == x.shape[-1]:
        return _rotate(x, cos, sin, interleaved)
    return torch.cat((_rotate(x[..., :rotary_dim], cos, sin, interleaved), x[..., rotary_dim:]), dim=-1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    turned = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if interleaved else x.roll(x.shape[-1] // 2, dims=-1)
    if x.dtype == torch.float32:
        return torch.mul(x, cos).addcmul_(turned, sin)
    return torch.mul(x, cos).addcmul_(turned.float(), sin).to(x.dtype)
