"""Build latent attention or a layer's recurrent part from a spec and a source of tensors, in the order the layer needs.

Canonical names, below `model.layers.N.`:

    latent          self_attn.q_proj, or q_a_proj, q_a_layernorm and q_b_proj;
                    kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj, o_proj (DeepSeek's names), and of an indexer
                    indexer.wq_b, wk, k_norm, weights_proj
    short_conv      conv.in_proj, conv.conv, conv.out_proj
    gated_delta     linear_attn.in_proj_qkv, in_proj_z, in_proj_b, in_proj_a, conv1d, A_log, dt_bias, norm, out_proj;
                    with separate inputs in_proj_q, in_proj_k, in_proj_v, and conv1d or q_conv1d, k_conv1d, v_conv1d
    mamba2          mamba.in_proj, conv1d, A_log, dt_bias, D, norm, out_proj

A checkpoint that stores -exp(A_log) instead has the name `A`.
Does not know: files, formats, other parts of a layer.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from localllm.models.decoder.layer import Recurrence, Scaled
from localllm.models.layers.group import Projection
from localllm.models.layers.latent_attention import Indexer, LatentAttention
from localllm.models.layers.linear import Linear, ScaledOutputs
from localllm.models.layers.norm import LayerNorm, RMSNorm
from localllm.models.layers.recurrent import DeltaHeads, GatedDeltaNet, Mamba2, ScanHeads, ShortConv, SplitGroups
from localllm.models.layers.rotary import half_split_order
from localllm.models.spec.latent import LatentSpec
from localllm.models.spec.model_spec import ModelSpec, index_size
from localllm.models.spec.recurrent import RecurrentSpec
from localllm.models.weights.source import ShardWeights, TensorSource, stacked_rows

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


def build_recurrence(spec: ModelSpec, recurrent: RecurrentSpec, share: ShardWeights, prefix: str) -> Recurrence:
    """Build the shard's part of a layer's recurrent part. prefix: model.layers.N."""
    build = {"short_conv": _short_conv, "gated_delta": _gated_delta, "mamba2": _mamba2}[recurrent.kind]
    part, factor = build(spec, recurrent, share, prefix), recurrent.output_factor
    return part if factor == 1.0 else Scaled(part, factor)


def _short_conv(spec: ModelSpec, recurrent: RecurrentSpec, share: ShardWeights, prefix: str) -> Recurrence:
    width, bias, shard = recurrent.width, recurrent.projection_bias, share.shard
    order = stacked_rows(shard.states, width, 3)
    return ShortConv(
        share.source.linear([f"{prefix}conv.in_proj"], (3 * width, spec.hidden_size), bias=bias, order=order),
        *_convolution(recurrent, share.source, f"{prefix}conv.conv", stacked_rows(shard.states, width)),
        share.row_parallel(
            f"{prefix}conv.out_proj", (spec.hidden_size, width), shard.states, shard.counts.states, bias=bias
        ),
    )


def _gated_delta(spec: ModelSpec, recurrent: RecurrentSpec, share: ShardWeights, prefix: str) -> Recurrence:
    prefix, hidden, weights, shard = f"{prefix}linear_attn.", spec.hidden_size, share.source, share.shard
    whole = DeltaHeads(recurrent.num_groups, recurrent.num_heads, recurrent.state_size, recurrent.head_size)
    heads = whole._replace(
        key_heads=len(shard.state_groups), value_heads=len(shard.states), tiled=recurrent.tiled_heads
    )
    own, order, channels = None, None, None
    if not shard.is_whole:
        own = _value_heads(recurrent, shard.states)
        q = _rows_of(torch.arange(shard.state_groups.start, shard.state_groups.stop, device="cpu"), whole.key_dim)
        keys, values = whole.key_heads * whole.key_dim, _rows_of(own, whole.value_dim)
        channels = torch.cat((q, keys + q, 2 * keys + values))
        z = whole.parts[0]
        b = z + whole.parts[1]
        order = torch.cat((channels, z + values, b + own, b + whole.value_heads + own))
    inputs = ("q", "k", "v") if recurrent.separate_inputs else ("qkv",)
    stems = [f"{prefix}in_proj_{part}" for part in (*inputs, "z", "b", "a")]
    return GatedDeltaNet(
        weights.linear(stems, (sum(whole.parts), hidden), order=order),
        _convolution(recurrent, weights, f"{prefix}conv1d", channels)[0],
        _rate(recurrent, weights, prefix, own),
        _own(weights.take([f"{prefix}dt_bias"], (whole.value_heads,), dtype=torch.float32), own),
        weights.take([f"{prefix}norm.weight"], (heads.value_dim,), dtype=torch.float32),
        spec.norm.eps if recurrent.norm_eps is None else recurrent.norm_eps,
        _out_of_heads(recurrent, share, f"{prefix}out_proj", hidden),
        heads,
        beta_scale=recurrent.beta_scale,
    )


def _mamba2(spec: ModelSpec, recurrent: RecurrentSpec, share: ShardWeights, prefix: str) -> Recurrence:
    prefix, hidden, bias = f"{prefix}mamba.", spec.hidden_size, recurrent.projection_bias
    weights, shard = share.source, share.shard
    whole = ScanHeads(recurrent.num_heads, recurrent.head_size, recurrent.num_groups, recurrent.state_size)
    heads = whole._replace(heads=len(shard.states), groups=len(shard.state_groups))
    own, order, channels, width = None, None, None, None
    if not shard.is_whole:
        own = _value_heads(recurrent, shard.states)
        width = _rows_of(own, whole.head_dim)
        b = _rows_of(torch.arange(shard.state_groups.start, shard.state_groups.stop, device="cpu"), whole.state_size)
        channels = torch.cat((width, whole.width + b, whole.width + whole.groups * whole.state_size + b))
        order = torch.cat((width, whole.width + channels, whole.width + whole.parts[1] + own))
    in_proj = weights.linear([f"{prefix}in_proj"], (sum(whole.parts), hidden), bias=bias, order=order)
    norm, exchange = None, None
    if recurrent.norm != "gate":
        norm = _own(weights.values(f"{prefix}norm.weight", (whole.width,), dtype=torch.float32), width)
        if shard.size > whole.groups:  # a group's heads are on several shards
            exchange = SplitGroups(share.group, whole.groups, shard.state_groups.start, whole.width // whole.groups)
    return Mamba2(
        _scaled(in_proj, recurrent, heads, weights.device),
        *_convolution(recurrent, weights, f"{prefix}conv1d", channels),
        _rate(recurrent, weights, prefix, own),
        _own(weights.take([f"{prefix}dt_bias"], (whole.heads,), dtype=torch.float32), own),
        _own(weights.values(f"{prefix}D", (whole.heads,), dtype=torch.float32), own),
        norm,
        spec.norm.eps,
        _out_of_heads(recurrent, share, f"{prefix}out_proj", hidden, bias=bias),
        heads,
        limits=recurrent.time_step_limits,
        gate_first=recurrent.norm == "gate_then_norm",
        exchange=exchange,
    )


def _value_heads(recurrent: RecurrentSpec, own: range) -> Tensor:
    """Return the stored heads that a shard has, in the order in which it keeps them. own: of the numbering that goes
    group after group."""
    if not recurrent.tiled_heads:
        return torch.arange(own.start, own.stop, device="cpu")
    size = recurrent.num_heads // recurrent.num_groups
    return torch.tensor(sorted(head % size * recurrent.num_groups + head // size for head in own), device="cpu")


def _rows_of(heads: Tensor, size: int) -> Tensor:
    """Return the rows of heads of `size` rows each."""
    return (heads[:, None] * size + torch.arange(size, device="cpu")).flatten()


def _own(values: Tensor, order: Tensor | None) -> Tensor:
    return values if order is None else values[order.to(values.device)]


def _out_of_heads(
    recurrent: RecurrentSpec, share: ShardWeights, stem: str, hidden: int, *, bias: bool = False
) -> Projection:
    """Return the last projection, of the outputs of the shard's heads."""
    size, shard, shape = recurrent.head_size, share.shard, (hidden, recurrent.inner_size)
    counts = tuple(count * size for count in shard.counts.states)
    own = range(shard.states.start * size, shard.states.stop * size)
    if shard.is_whole or not recurrent.tiled_heads:
        return share.row_parallel(stem, shape, own, counts, bias=bias)
    ends = list(accumulate(shard.counts.states, initial=0))
    stored = torch.cat([_value_heads(recurrent, range(a, b)) for a, b in pairwise(ends)])
    return share.by_rows(stem, shape, counts, bias=bias, order=_rows_of(stored, size).argsort())


def _scaled(in_proj: Linear, recurrent: RecurrentSpec, heads: ScanHeads, device: torch.device) -> Projection:
    """Return the projection with factors on z, x, B, C and dt, if the spec has any. heads: of the shard."""
    if all(factor == 1.0 for factor in recurrent.input_factors):
        return in_proj
    columns = heads.groups * heads.state_size
    sizes = (heads.width, heads.width, columns, columns, heads.heads)
    each = [torch.full((size,), factor) for size, factor in zip(sizes, recurrent.input_factors, strict=True)]
    return ScaledOutputs(in_proj, torch.cat(each).to(device))


def _convolution(
    recurrent: RecurrentSpec, weights: TensorSource, stem: str, own: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the taps [channels, K] of a depthwise convolution, and its bias. own: channels to take; None: all."""
    channels, taps = recurrent.conv_channels, recurrent.conv_kernel
    if recurrent.separate_inputs and not weights.has(f"{stem}.weight"):
        prefix, _, last = stem.rpartition(".")
        names = [f"{prefix}.{part}_{last}.weight" for part in "qkv"]
        weight = weights.take(names, (channels, 1, taps), dtype=torch.float32).view(channels, taps)
    else:
        weight = weights.values(f"{stem}.weight", (channels, taps), dtype=torch.float32)
    bias = weights.take([f"{stem}.bias"], (channels,), dtype=torch.float32) if recurrent.conv_bias else None
    return _own(weight, own), None if bias is None else _own(bias, own)


def _rate(recurrent: RecurrentSpec, weights: TensorSource, prefix: str, own: Tensor | None) -> Tensor:
    """Return A [heads] fp32, below 0: the rate at which each head's state decays. In fp16, exp(A_log) may overflow."""
    shape = (recurrent.num_heads,)
    if weights.has(f"{prefix}A"):
        return _own(weights.values(f"{prefix}A", shape, dtype=torch.float32), own)
    return -_own(weights.take([f"{prefix}A_log"], shape, dtype=torch.float32), own).exp()
