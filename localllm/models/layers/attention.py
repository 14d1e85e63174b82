"""Attention of one layer: project, norm, rotate, store, attend, project. q, k and v come from one matrix.

Does not know: which blocks belong to whom (the step's `AttentionPlan` does).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from localllm.kernels.layer_kv import LayerKV
from localllm.kernels.paged_attention import AttentionPlan, paged_attention
from localllm.kernels.rotary import rotary
from localllm.kernels.store_kv import store_kv
from localllm.models.layers.linear import Linear
from localllm.models.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """What a layer needs to know of the step; layers of one kind share it."""

    plan: AttentionPlan
    angles: tuple[Tensor, Tensor] | None  # from rotary_angles; None: no positions (NoPE)
    slot_mapping: Tensor  # [T] int64
    all_slots_valid: bool


class Attention:
    __slots__ = ("head_dim", "num_heads", "num_kv_heads", "out", "qk_norm", "qkv", "scale", "softcap")

    def __init__(
        self,
        qkv: Linear,
        out: Linear,
        qk_norm: RMSNorm | None,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        softcap: float | None,
    ) -> None:
        self.qkv, self.out = qkv, out
        self.qk_norm = qk_norm  # weight [num_heads + num_kv_heads, head_dim]: q's for each head, then k's
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.scale, self.softcap = scale, softcap

    def __call__(self, x: Tensor, kv: LayerKV, step: AttentionStep) -> Tensor:
        """x [T, hidden] -> [T, hidden]; writes the step's K and V into the cache."""
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        rotating = self.num_heads + self.num_kv_heads
        qk, v = heads[:, :rotating], heads[:, rotating:]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        if step.angles is not None:
            qk = rotary(qk, *step.angles)
        q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
        store_kv(k, v, kv.k, kv.v, step.slot_mapping, all_valid=step.all_slots_valid)
        attended = paged_attention(q, kv.k, kv.v, step.plan, scale=self.scale, softcap=self.softcap)
        return self.out(attended)
