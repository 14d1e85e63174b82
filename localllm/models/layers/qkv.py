"""Family-specific changes to q, k and v between projection and rotation, all in place.

RMSNorm over each head, the usual norm of q and k, is not here: the rotation kernel includes it
(kernels/rotary_store_kv.py).
Does not know: heads of the cache, positions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.models.layers.group import Group
from localllm.models.layers.norm import RMSNorm


class WholeNorm:
    """RMSNorm over all heads of q together, and over all heads of k together (OLMo 2)."""

    __slots__ = ("k", "q")

    def __init__(self, q: RMSNorm, k: RMSNorm) -> None:
        self.q, self.k = q, k

    def __call__(self, qkv: Tensor) -> Tensor:
        q_size, k_size = self.q.weight.shape[0], self.k.weight.shape[0]
        q, k = qkv[:, :q_size], qkv[:, q_size : q_size + k_size]
        q.copy_(self.q(q))
        k.copy_(self.k(k))
        return qkv


class SplitWholeNorm:
    """`WholeNorm` over heads that several shards hold: their sums of squares are added up in fp32."""

    __slots__ = ("counts_k", "group", "k", "q", "sizes")

    def __init__(self, q: RMSNorm, k: RMSNorm, sizes: tuple[int, int], group: Group, *, counts_k: bool) -> None:
        """sizes: elements of q and of k over all heads. counts_k: whether no shard before this one has its KV heads."""
        self.q, self.k, self.sizes, self.group, self.counts_k = q, k, sizes, group, counts_k

    def __call__(self, qkv: Tensor) -> Tensor:
        q_size, k_size = self.q.weight.shape[0], self.k.weight.shape[0]
        parts = [part.float() for part in (qkv[:, :q_size], qkv[:, q_size : q_size + k_size])]
        squares = torch.stack([part.square().sum(1) for part in parts], 1)  # [T, 2]
        if not self.counts_k:
            squares[:, 1] = 0
        self.group.sum_(squares)
        for index, (part, norm) in enumerate(zip(parts, (self.q, self.k), strict=True)):
            inverse = squares[:, index, None].div(self.sizes[index]).add_(norm.eps).rsqrt_()
            first = index * q_size
            qkv[:, first : first + part.shape[1]] = part.mul(inverse).mul_(norm.weight)
        return qkv


class HeadLayerNorm:
    """LayerNorm over each head of q and k, with a weight per head and no bias (Cohere, StableLM 2)."""

    __slots__ = ("eps", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight.float()  # [num_heads + num_kv_heads, head_dim]: q's, then k's
        self.eps = eps

    def __call__(self, qkv: Tensor) -> Tensor:
        num_heads, head_dim = self.weight.shape
        heads = qkv[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))
        heads.copy_(F.layer_norm(heads.float(), (head_dim,), None, None, self.eps).mul_(self.weight))
        return qkv


class Clip:
    """Clamp all elements to [-limit, limit] (OLMo 1, MPT)."""

    __slots__ = ("limit",)

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def __call__(self, qkv: Tensor) -> Tensor:
        return qkv.clamp_(-self.limit, self.limit)
