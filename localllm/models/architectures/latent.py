"""Build latent attention from a spec and a source of tensors, with matrices in the order that the layer needs.

Canonical names are DeepSeek's: `self_attn.q_proj`, or `q_a_proj`, `q_a_layernorm` and `q_b_proj`; `kv_a_proj_with_mqa`,
`kv_a_layernorm`, `kv_b_proj`, `o_proj`.
Does not know: files, formats, other parts of a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.models.architectures.shard_weights import ShardWeights
from localllm.models.layers.latent_attention import LatentAttention
from localllm.models.layers.norm import RMSNorm
from localllm.models.layers.rotary import half_split_order
from localllm.models.spec.latent import LatentSpec
from localllm.models.spec.model_spec import ModelSpec

NORM_EPS = 1e-6
"""Epsilon of the norms over latents; config.json's value is only for the other norms."""


def build_latent_attention(spec: ModelSpec, latent: LatentSpec, share: ShardWeights, prefix: str) -> LatentAttention:
    """Build the layer's attention with the shard's query heads. prefix: model.layers.N.self_attn."""
    weights, own = share.source, share.shard.heads
    hidden, heads, head = spec.hidden_size, spec.num_heads, latent.nope_size + latent.rope_size
    q_rows = heads * head if latent.q_latent_size is None else latent.q_latent_size
    direct = latent.q_latent_size is None
    order = torch.cat(
        (_query_rows(latent, own) if direct else torch.arange(q_rows, device="cpu"), q_rows + _key_rows(latent))
    )
    stems = [f"{prefix}{'q' if direct else 'q_a'}_proj", f"{prefix}kv_a_proj_with_mqa"]
    down = weights.linear(stems, (q_rows + latent.cached_size, hidden), order=order)
    q_norm = q_up = None
    if not direct:
        q_norm = RMSNorm(weights.take([f"{prefix}q_a_layernorm.weight"], (q_rows,)), NORM_EPS)
        q_up = weights.linear([f"{prefix}q_b_proj"], (heads * head, q_rows), order=_query_rows(latent, own))
    expanded = latent.nope_size + latent.value_size
    expansion = weights.take(
        [f"{prefix}kv_b_proj.weight"],
        (heads * expanded, latent.latent_size),
        rows=range(own.start * expanded, own.stop * expanded),
    )
    to_keys, to_values = expansion.view(len(own), -1, latent.latent_size).split(
        [latent.nope_size, latent.value_size], 1
    )
    return LatentAttention(
        latent,
        down,
        RMSNorm(weights.take([f"{prefix}kv_a_layernorm.weight"], (latent.latent_size,)), NORM_EPS),
        to_keys.transpose(1, 2).clone(memory_format=torch.contiguous_format),
        to_values.clone(memory_format=torch.contiguous_format),
        share.row_parallel(
            f"{prefix}o_proj",
            (hidden, heads * latent.value_size),
            range(own.start * latent.value_size, own.stop * latent.value_size),
            tuple(count * latent.value_size for count in share.shard.counts.heads),
        ),
        head**-0.5 if spec.attention_scale is None else spec.attention_scale,
        q_norm=q_norm,
        q_up=q_up,
    )


def _query_rows(latent: LatentSpec, heads: range) -> Tensor:
    """Return the row order of these heads' queries: stored unrotated part first; here rotated part first, in halves."""
    size = latent.nope_size + latent.rope_size
    head = torch.cat((latent.nope_size + _rope_order(latent), torch.arange(latent.nope_size, device="cpu")))
    return (torch.arange(heads.start, heads.stop, device="cpu")[:, None] * size + head).flatten()


def _key_rows(latent: LatentSpec) -> Tensor:
    """Return the row order of keys: stored latent first; here the rotated part first."""
    return torch.cat((latent.latent_size + _rope_order(latent), torch.arange(latent.latent_size, device="cpu")))


def _rope_order(latent: LatentSpec) -> Tensor:
    if not latent.interleaved:
        return torch.arange(latent.rope_size, device="cpu")
    return half_split_order(latent.rope_size, latent.rope_size)
