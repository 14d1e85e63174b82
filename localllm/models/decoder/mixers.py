"""Build latent attention or a layer's recurrent part from a spec and a source of tensors, in the order the layer needs.

Canonical names, below `model.layers.N.`:

    latent          self_attn.q_proj, or q_a_proj, q_a_layernorm and q_b_proj;
                    kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj, o_proj (DeepSeek's names), and of an indexer
                    indexer.wq_b, wk, k_norm, weights_proj
    short_conv      conv.in_proj, conv.conv, conv.out_proj
    gated_delta     linear_attn.in_proj_qkv, in_proj_z, in_proj_b, in_proj_a, conv1d, A_log, dt_bias, norm, out_proj
    mamba2          mamba.in_proj, conv1d, A_log, dt_bias, D, norm, out_proj

A checkpoint that stores -exp(A_log) instead has the name `A`.
Does not know: files, formats, other parts of a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.models.decoder.layer import Recurrence, Scaled
from localllm.models.layers.group import Projection
from localllm.models.layers.latent_attention import Indexer, LatentAttention
from localllm.models.layers.linear import Linear, ScaledOutputs
from localllm.models.layers.norm import LayerNorm, RMSNorm
from localllm.models.layers.recurrent import DeltaHeads, GatedDeltaNet, Mamba2, ScanHeads, ShortConv
from localllm.models.layers.rotary import half_split_order
from localllm.models.spec.latent import LatentSpec
from localllm.models.spec.model_spec import ModelSpec, index_size
from localllm.models.spec.recurrent import RecurrentSpec
from localllm.models.weights.source import ShardWeights, TensorSource

NORM_EPS = 1e-6
"""Epsilon of the norms over latents; config.json's value is only for the other norms."""


def build_latent_attention(
    spec: ModelSpec, latent: LatentSpec, share: ShardWeights, prefix: str, layer: int
) -> LatentAttention:
    """Build the layer's attention with the shard's query heads; its indexer is whole on each shard, so that all choose
    alike. prefix: model.layers.N.self_attn."""
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
        rows, columns, order = heads * head, q_rows, _query_rows(latent, own)
        if latent.gated:
            rows, columns, order = rows + heads * latent.value_size, 2 * q_rows, _gated_query_rows(latent, own)
        q_up = weights.linear([f"{prefix}q_b_proj"], (rows, columns), order=order)
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
        indexer=_indexer(spec, latent, weights, f"{prefix}indexer.") if index_size(spec, layer) else None,
    )


def _indexer(spec: ModelSpec, latent: LatentSpec, weights: TensorSource, prefix: str) -> Indexer:
    index, hidden = latent.index, spec.hidden_size
    assert index is not None
    assert latent.q_latent_size is not None
    order = torch.arange(index.head_dim, device="cpu")
    if index.interleaved:
        order[: latent.rope_size] = half_split_order(latent.rope_size, latent.rope_size)
    heads = torch.arange(index.num_heads, device="cpu")[:, None] * index.head_dim
    scale, shift = (weights.take([f"{prefix}k_norm.{part}"], (index.head_dim,))[order] for part in ("weight", "bias"))
    return Indexer(
        weights.linear(
            [f"{prefix}wq_b"], (index.num_heads * index.head_dim, latent.q_latent_size), order=(heads + order).flatten()
        ),
        weights.linear([f"{prefix}wk"], (index.head_dim, hidden), order=order),
        LayerNorm(scale, shift, NORM_EPS),
        weights.linear([f"{prefix}weights_proj"], (index.num_heads, hidden)),
        index.topk,
    )


def _query_rows(latent: LatentSpec, heads: range) -> Tensor:
    """Return the row order of these heads' queries: stored unrotated part first; here rotated part first, in halves."""
    size = latent.nope_size + latent.rope_size
    head = torch.cat((latent.nope_size + _rope_order(latent), torch.arange(latent.nope_size, device="cpu")))
    return (torch.arange(heads.start, heads.stop, device="cpu")[:, None] * size + head).flatten()


def _gated_query_rows(latent: LatentSpec, heads: range) -> Tensor:
    """Return the row order of these heads' queries, then their gates: stored head by head."""
    size, stored = latent.nope_size + latent.rope_size, latent.nope_size + latent.rope_size + latent.value_size
    queries, each = _query_rows(latent, heads), torch.arange(heads.start, heads.stop, device="cpu")[:, None]
    gates = each * stored + torch.arange(size, stored, device="cpu")
    return torch.cat((queries // size * stored + queries % size, gates.flatten()))


def _key_rows(latent: LatentSpec) -> Tensor:
    """Return the row order of keys: stored latent first; here the rotated part first."""
    return torch.cat((latent.latent_size + _rope_order(latent), torch.arange(latent.latent_size, device="cpu")))


def _rope_order(latent: LatentSpec) -> Tensor:
    if not latent.interleaved:
        return torch.arange(latent.rope_size, device="cpu")
    return half_split_order(latent.rope_size, latent.rope_size)


def build_recurrence(spec: ModelSpec, recurrent: RecurrentSpec, weights: TensorSource, prefix: str) -> Recurrence:
    """Build the recurrent part of a layer. prefix: model.layers.N."""
    build = {"short_conv": _short_conv, "gated_delta": _gated_delta, "mamba2": _mamba2}[recurrent.kind]
    part, factor = build(spec, recurrent, weights, prefix), recurrent.output_factor
    return part if factor == 1.0 else Scaled(part, factor)


def _short_conv(spec: ModelSpec, recurrent: RecurrentSpec, weights: TensorSource, prefix: str) -> Recurrence:
    width, bias = recurrent.width, recurrent.projection_bias
    return ShortConv(
        weights.linear([f"{prefix}conv.in_proj"], (3 * width, spec.hidden_size), bias=bias),
        *_convolution(recurrent, weights, f"{prefix}conv.conv"),
        weights.linear([f"{prefix}conv.out_proj"], (spec.hidden_size, width), bias=bias),
    )


def _gated_delta(spec: ModelSpec, recurrent: RecurrentSpec, weights: TensorSource, prefix: str) -> Recurrence:
    prefix, hidden = f"{prefix}linear_attn.", spec.hidden_size
    heads = DeltaHeads(
        recurrent.num_groups,
        recurrent.num_heads,
        recurrent.state_size,
        recurrent.head_size,
        tiled=recurrent.tiled_heads,
    )
    return GatedDeltaNet(
        weights.linear([f"{prefix}in_proj_{part}" for part in ("qkv", "z", "b", "a")], (sum(heads.parts), hidden)),
        _convolution(recurrent, weights, f"{prefix}conv1d")[0],
        _rate(recurrent, weights, prefix),
        weights.take([f"{prefix}dt_bias"], (heads.value_heads,), dtype=torch.float32),
        weights.take([f"{prefix}norm.weight"], (heads.value_dim,), dtype=torch.float32),
        spec.norm.eps,
        weights.linear([f"{prefix}out_proj"], (hidden, recurrent.inner_size)),
        heads,
    )


def _mamba2(spec: ModelSpec, recurrent: RecurrentSpec, weights: TensorSource, prefix: str) -> Recurrence:
    prefix, hidden, bias = f"{prefix}mamba.", spec.hidden_size, recurrent.projection_bias
    heads = ScanHeads(recurrent.num_heads, recurrent.head_size, recurrent.num_groups, recurrent.state_size)
    in_proj = weights.linear([f"{prefix}in_proj"], (sum(heads.parts), hidden), bias=bias)
    norm = None
    if recurrent.norm != "gate":
        norm = weights.values(f"{prefix}norm.weight", (heads.width,), dtype=torch.float32)
    return Mamba2(
        _scaled(in_proj, recurrent, heads, weights.device),
        *_convolution(recurrent, weights, f"{prefix}conv1d"),
        _rate(recurrent, weights, prefix),
        weights.take([f"{prefix}dt_bias"], (heads.heads,), dtype=torch.float32),
        weights.values(f"{prefix}D", (heads.heads,), dtype=torch.float32),
        norm,
        spec.norm.eps,
        weights.linear([f"{prefix}out_proj"], (hidden, heads.width), bias=bias),
        heads,
        limits=recurrent.time_step_limits,
        gate_first=recurrent.norm == "gate_then_norm",
    )


def _scaled(in_proj: Linear, recurrent: RecurrentSpec, heads: ScanHeads, device: torch.device) -> Projection:
    """Return the projection with factors on z, x, B, C and dt, if the spec has any."""
    if all(factor == 1.0 for factor in recurrent.input_factors):
        return in_proj
    columns = heads.groups * heads.state_size
    sizes = (heads.width, heads.width, columns, columns, heads.heads)
    each = [torch.full((size,), factor) for size, factor in zip(sizes, recurrent.input_factors, strict=True)]
    return ScaledOutputs(in_proj, torch.cat(each).to(device))


def _convolution(recurrent: RecurrentSpec, weights: TensorSource, stem: str) -> tuple[Tensor, Tensor | None]:
    """Return the taps [channels, K] of a depthwise convolution, and its bias."""
    channels = recurrent.conv_channels
    taps = weights.values(f"{stem}.weight", (channels, recurrent.conv_kernel), dtype=torch.float32)
    return taps, weights.take([f"{stem}.bias"], (channels,), dtype=torch.float32) if recurrent.conv_bias else None


def _rate(recurrent: RecurrentSpec, weights: TensorSource, prefix: str) -> Tensor:
    """Return A [heads] fp32, below 0: the rate at which each head's state decays. In fp16, exp(A_log) may overflow."""
    shape = (recurrent.num_heads,)
    if weights.has(f"{prefix}A"):
        return weights.values(f"{prefix}A", shape, dtype=torch.float32)
    return -weights.take([f"{prefix}A_log"], shape, dtype=torch.float32).exp()
