"""Build the feed-forward part of a family with experts from a spec and a source of tensors.

Canonical names: `mlp.gate` the router, `mlp.experts.E.gate_proj` and so on, or for all experts at once
`mlp.experts.gate_proj` or `mlp.experts.gate_up_proj`; `mlp.shared_expert`, `mlp.shared_expert_gate`.
Does not know: files, formats, other parts of a layer.
"""

from __future__ import annotations

import torch

from localllm.models.layers.linear import Linear
from localllm.models.layers.mlp import GatedMLP
from localllm.models.layers.moe import Experts, MoE, Routing
from localllm.models.spec.mixture import MixtureSpec
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.weights.weights import TensorSource


def build_mixture(spec: ModelSpec, mixture: MixtureSpec, weights: TensorSource, prefix: str) -> MoE:
    """Build the layer's mixture. prefix: model.layers.N.mlp."""
    correction = None
    if mixture.correction_bias:
        name = f"{prefix}gate.e_score_correction_bias"
        correction = weights.take([name], (mixture.num_experts,), dtype=torch.float32)
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
    )
    router, experts = _router(spec, mixture, weights, prefix), _experts(spec, mixture, weights, prefix)
    return MoE(router, experts, routing, correction, _shared(spec, mixture, weights, prefix), shared_gate)


def _router(spec: ModelSpec, mixture: MixtureSpec, weights: TensorSource, prefix: str) -> Linear:
    shape = (mixture.num_experts, spec.hidden_size)
    dtype = torch.float32 if mixture.router_in_fp32 else None
    bias = weights.take([f"{prefix}gate.bias"], shape[:1], dtype=dtype) if mixture.router_bias else None
    return Linear(weights.take([f"{prefix}gate.weight"], shape, dtype=dtype), bias)


def _experts(spec: ModelSpec, mixture: MixtureSpec, weights: TensorSource, prefix: str) -> Experts:
    count, width, hidden, bias = mixture.num_experts, mixture.intermediate_size, spec.hidden_size, mixture.expert_bias
    stem = f"{prefix}experts"
    gate_up, gate_up_bias = weights.experts(stem, ["gate_proj", "up_proj"], (count, 2 * width, hidden), bias=bias)
    down, down_bias = weights.experts(stem, ["down_proj"], (count, hidden, width), bias=bias)
    return Experts(gate_up, down, mixture.activation or spec.hidden_act, gate_up_bias, down_bias)


def _shared(spec: ModelSpec, mixture: MixtureSpec, weights: TensorSource, prefix: str) -> GatedMLP | None:
    width, hidden = mixture.shared_size, spec.hidden_size
    if not width:
        return None
    stems = [f"{prefix}shared_expert.{name}_proj" for name in ("gate", "up")]
    gate_up = weights.linear(stems, (2 * width, hidden))
    return GatedMLP(gate_up, weights.linear([f"{prefix}shared_expert.down_proj"], (hidden, width)), spec.hidden_act)
