"""Build a layer's recurrent part from a spec and a source of tensors.

Canonical names, below `model.layers.N.`:

    short_conv      conv.in_proj, conv.conv, conv.out_proj
    gated_delta     linear_attn.in_proj_qkv, in_proj_z, in_proj_b, in_proj_a, conv1d, A_log, dt_bias, norm, out_proj
    mamba2          mamba.in_proj, conv1d, A_log, dt_bias, D, norm, out_proj

A checkpoint that stores -exp(A_log) instead has the name `A`.
Does not know: files, formats, other parts of a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.models.architectures.layer import Recurrence, Scaled
from localllm.models.layers.gated_delta_net import DeltaHeads, GatedDeltaNet
from localllm.models.layers.linear import Linear, ScaledOutputs
from localllm.models.layers.mamba2 import Mamba2, ScanHeads
from localllm.models.layers.short_conv import ShortConv
from localllm.models.layers.split import Projection
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.spec.recurrent import RecurrentSpec
from localllm.models.weights.source import TensorSource


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
