"""Build the feed-forward part of a family with experts from a spec and a source of tensors.

Canonical names: `mlp.gate` the router, `mlp.experts.E.gate_proj` and so on, or for all experts at once
`mlp.experts.gate_proj` or `mlp.experts.gate_up_proj`; `mlp.gate.expert_scale`, `mlp.shared_expert`,
`mlp.shared_expert_gate`, `mlp.latent_down_proj`, `mlp.latent_up_proj`.
Does not know: files, formats, other parts of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from localllm.errors import UnsupportedOption
from localllm.kernels.cpu.native.structures import OUTPUTS
from localllm.kernels.cpu.pack import native_nbytes
from localllm.kernels.gated import limited
from localllm.models.layers.arena import RecordMatrices
from localllm.models.layers.disk import DiskMatrices
from localllm.models.layers.far import FarExperts, FarMLP
from localllm.models.layers.linear import Linear, Weight
from localllm.models.layers.mlp import MLP, GatedMLP
from localllm.models.layers.moe import Experts, LatentExperts, MoE, Routing
from localllm.models.spec.mixture import MixtureSpec
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.weights.parameters import held_bytes
from localllm.models.weights.source import FarWeights, ShardWeights, TensorSource, stacked_rows


def build_mixture(spec: ModelSpec, mixture: MixtureSpec, share: ShardWeights, layer: int) -> MoE:
    """Build the layer's mixture with the shard's part of the experts, which may be in RAM or on disk."""
    prefix = f"model.layers.{layer}.mlp."
    weights, own = share.source, share.shard.experts
    correction = None
    if mixture.correction_bias:
        name = f"{prefix}gate.e_score_correction_bias"
        correction = weights.take([name], (mixture.num_experts,), dtype=torch.float32)
    expert_scale = None
    if mixture.expert_scale:
        expert_scale = weights.take([f"{prefix}gate.expert_scale"], (mixture.num_experts,), dtype=torch.float32)
    shared_gate = None
    if mixture.shared_gate:
        shared_gate = weights.linear([f"{prefix}shared_expert_gate"], (1, spec.hidden_size))
    routing = Routing(
        mixture.top_k,
        mixture.scoring,
        mixture.renormalize,
        mixture.num_groups,
        mixture.top_groups,
        mixture.scale,
        mixture.scales_inputs,
        mixture.least_sum,
        mixture.tolerance,
    )
    router, experts = _router(spec, mixture, weights, prefix), _experts(spec, mixture, share, layer)
    return MoE(
        router,
        experts,
        routing,
        correction,
        _shared(spec, mixture, share, layer, prefix),
        shared_gate,
        expert_scale=expert_scale,
        own=None if len(own) == mixture.num_experts else own,
        latent=_latent(spec, mixture, weights, prefix),
    )


def mlp_activation(spec: ModelSpec, layer: int) -> str:
    """Return the activation of a layer's feed-forward part, or of its shared expert."""
    return limited(spec.hidden_act, spec.layer_limits[layer] if spec.layer_limits else 0.0)


def held_experts(mixture: MoE) -> int:
    """Return the bytes of a mixture's routed experts, where they are."""
    experts = mixture.experts
    return held_bytes(experts.experts if isinstance(experts, FarExperts) else experts)


def _router(spec: ModelSpec, mixture: MixtureSpec, weights: TensorSource, prefix: str) -> Linear:
    shape = (mixture.num_experts, spec.hidden_size)
    dtype = torch.float32 if mixture.router_in_fp32 else None
    bias = weights.take([f"{prefix}gate.bias"], shape[:1], dtype=dtype) if mixture.router_bias else None
    return Linear(weights.take([f"{prefix}gate.weight"], shape, dtype=dtype), bias)


class _Matrices(NamedTuple):
    """The names and the shape [E, N, K] of the first or the last matrices of all experts of a layer."""

    names: list[str]
    shape: tuple[int, int, int]


def _matrices(spec: ModelSpec, mixture: MixtureSpec) -> tuple[_Matrices, _Matrices]:
    count, width, names = mixture.num_experts, mixture.intermediate_size, _first_names(spec)
    hidden = mixture.latent_size or spec.hidden_size
    return _Matrices(names, (count, len(names) * width, hidden)), _Matrices(["down_proj"], (count, hidden, width))


def _stem(layer: int) -> str:
    return f"model.layers.{layer}.mlp.experts"


def expert_pairs(
    spec: ModelSpec, mixture: MixtureSpec, weights: TensorSource, layer: int
) -> Iterator[tuple[Weight, Weight]]:
    """Yield both matrices of one expert of the layer after another, each read when it is asked for."""
    return zip(*(weights.each_expert(_stem(layer), *each) for each in _matrices(spec, mixture)), strict=True)


def record_bytes(spec: ModelSpec, weights: TensorSource, layer: int) -> int | None:
    """Return the bytes of an expert's record in RAM (layers/arena.py), or of a dense layer's feed-forward part, from
    headers; None: its matrices have no layout for the native library."""
    if spec.mixture is None:
        pair, has_bias = tuple(each.weight for each in _mlp_matrices(spec, weights, layer)), spec.mlp_bias
    else:
        pair, has_bias = next(expert_pairs(spec, spec.mixture, weights, layer)), spec.mixture.expert_bias
    sizes = [native_nbytes(weight, weights.packer.mode) for weight in pair]
    sizes += [-(-each.shape[0] // OUTPUTS) * OUTPUTS * 4 for each in pair if has_bias]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def build_far_mlp(spec: ModelSpec, far: FarWeights, layer: int) -> FarMLP:
    """Build the feed-forward part of a dense layer in RAM (`why_not_far`)."""
    first, last = _mlp_matrices(spec, far.source, layer)
    biases = [None if each.bias is None else each.bias[None] for each in (first, last)]
    activation, pair = mlp_activation(spec, layer), (first.weight, last.weight)
    arena = far.crossing.arena
    records = None if arena is None else arena.records(1, [pair], biases)
    if records is None:
        experts = Experts([first.weight], [last.weight], activation, *biases)
    else:
        in_ram = RecordMatrices(records, "gate_up"), RecordMatrices(records, "down")
        experts = Experts(*in_ram, activation, *records.biases())
    return FarMLP(FarExperts(experts, far.crossing, spec, records))


def held_mlp(spec: ModelSpec, weights: TensorSource, layer: int) -> int:
    """Return the bytes of a dense layer's feed-forward part."""
    return held_bytes([*_mlp_matrices(spec, weights, layer)])


def _mlp_matrices(spec: ModelSpec, weights: TensorSource, layer: int) -> tuple[Linear, Linear]:
    width, prefix = spec.intermediate_size, f"model.layers.{layer}.mlp."
    width = spec.layer_widths[layer] if spec.layer_widths else width
    names = _first_names(spec)
    stems, shape = [f"{prefix}{name}" for name in names], (len(names) * width, spec.hidden_size)
    return (
        weights.linear(stems, shape, bias=spec.mlp_bias),
        weights.linear([f"{prefix}down_proj"], (spec.hidden_size, width), bias=spec.mlp_bias),
    )


def _experts(spec: ModelSpec, mixture: MixtureSpec, share: ShardWeights, layer: int) -> Experts | FarExperts:
    """Build the shard's experts, or its features of all experts."""
    bias, stem = mixture.expert_bias, _stem(layer)
    limit = mixture.layer_limits[layer] if mixture.layer_limits else 0.0
    activation = limited(mixture.activation or spec.hidden_act, limit)
    far = share.far if share.far is not None and layer in share.far.layers else None
    weights = share.source if far is None else far.source
    first, last = _matrices(spec, mixture)
    if far is not None and (cache := far.crossing.cache) is not None:
        biases = [weights.expert_biases(stem, each.names, each.shape[:2]) if bias else None for each in (first, last)]
        on_disk = DiskMatrices(cache, layer, "gate_up"), DiskMatrices(cache, layer, "down")
        return FarExperts(Experts(*on_disk, activation, *biases), far.crossing, spec)
    if far is not None and (arena := far.crossing.arena) is not None:
        biases = [weights.expert_biases(stem, each.names, each.shape[:2]) if bias else None for each in (first, last)]
        records = arena.records(mixture.num_experts, expert_pairs(spec, mixture, weights, layer), biases)
        if records is not None:
            in_ram = RecordMatrices(records, "gate_up"), RecordMatrices(records, "down")
            return FarExperts(Experts(*in_ram, activation, *records.biases()), far.crossing, spec, records)
    if share.alike is not None and far is None:
        return share.alike.experts(layer, lambda: _held_experts(spec, mixture, share, weights, stem, activation))
    experts = _held_experts(spec, mixture, share, weights, stem, activation)
    return experts if far is None else FarExperts(experts, far.crossing, spec)


def _held_experts(
    spec: ModelSpec, mixture: MixtureSpec, share: ShardWeights, weights: TensorSource, stem: str, activation: str
) -> Experts:
    """Build the shard's experts from a source, one matrix after another."""
    width, bias = mixture.intermediate_size, mixture.expert_bias
    own, features, (first, last) = share.shard.experts, share.shard.expert_features, _matrices(spec, mixture)
    held = _held_features(share, stem, width)
    gate_up, gate_up_bias = weights.experts(
        stem, *first, bias=bias, own=own, order=stacked_rows(features, width, len(first.names))
    )
    down, down_bias = weights.experts(stem, *last, bias=bias and features.start == 0, own=own, columns=held)
    padding = (0, 0) if held is None else (features.start - held.start, held.stop - features.stop)
    return Experts(gate_up, down, activation, gate_up_bias, down_bias, padding=padding)


def _first_names(spec: ModelSpec) -> list[str]:
    """Return the names of an expert's first matrices, which read its input."""
    return ["gate_proj", "up_proj"] if spec.mlp_gated else ["up_proj"]


def _latent(spec: ModelSpec, mixture: MixtureSpec, weights: TensorSource, prefix: str) -> LatentExperts | None:
    """Return the matrices before and after experts that work in a narrower space."""
    narrow, wide = mixture.latent_size, spec.hidden_size
    if not narrow:
        return None
    return LatentExperts(
        weights.linear([f"{prefix}latent_down_proj"], (narrow, wide)),
        weights.linear([f"{prefix}latent_up_proj"], (wide, narrow)),
    )


def _held_features(share: ShardWeights, stem: str, width: int) -> range | None:
    """Return the inputs of each expert's last matrix that the shard holds; None: all."""
    features = share.shard.expert_features
    if len(features) == width:
        return None
    held = share.source.widened_experts(stem, "down_proj", features, width)
    if held is None:
        raise UnsupportedOption(
            f"--tensor-parallel-size {share.shard.size} is not supported for the experts of this checkpoint.",
            "Their inputs are stored in an order of their own (desc_act), so that no expert can be split.",
            "--enable-expert-parallel gives each rank whole experts.",
            param="tensor_parallel_size",
        )
    return held


def _shared(
    spec: ModelSpec, mixture: MixtureSpec, share: ShardWeights, layer: int, prefix: str
) -> GatedMLP | MLP | None:
    width, hidden, features = mixture.shared_size, spec.hidden_size, share.shard.shared_features
    if not width:
        return None
    stems = [f"{prefix}shared_expert.{name}" for name in _first_names(spec)]
    first = share.source.linear(stems, (len(stems) * width, hidden), order=stacked_rows(features, width, len(stems)))
    down = share.row_parallel(
        f"{prefix}shared_expert.down_proj", (hidden, width), features, share.shard.counts.shared_features
    )
    return (GatedMLP if spec.mlp_gated else MLP)(first, down, mlp_activation(spec, layer))
