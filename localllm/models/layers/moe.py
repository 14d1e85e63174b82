"""A mixture of experts in place of the feed-forward part (Shazeer et al. 2017, arXiv:1701.06538): the router sends each
token through top_k of many experts; some families add one expert that every token passes, gated or not.

    Mixtral, Qwen3-MoE      softmax, weights of the chosen sum to one
    Qwen2-MoE               softmax as it is, and a shared expert behind a gate of its own
    gpt-oss                 as Mixtral, with biases and its own activation
    DeepSeek-V3, GLM        sigmoid with a correction bias, groups of experts, and a shared expert

Does not know: which family it is in; the order of gate and up in a checkpoint (here the gate's rows come first).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from localllm.kernels.moe.experts import experts
from localllm.kernels.moe.route import route
from localllm.kernels.moe.weights import ExpertWeights, pack_experts, stack_experts
from localllm.models.layers.linear import Linear, Weight, lay_out
from localllm.models.layers.mlp import GatedMLP


@dataclass(frozen=True, slots=True)
class Routing:
    """How logits become experts and weights; kernels/moe/route.py says what each means."""

    top_k: int
    scoring: str = "softmax"  # or "sigmoid"
    renormalize: bool = True  # the chosen weights are scaled to sum to one
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0  # on the weights, last


def join_experts(matrices: Iterable[Weight], count: int, *, at_once: bool) -> ExpertWeights:
    """The matrices of `count` experts as their products want them, each read only when the one before has its place.

    at_once: kernels take all experts as one; ValueError where these cannot be. Otherwise each is a matrix of its own.
    """
    return stack_experts(matrices, count) if at_once else [lay_out(matrix) for matrix in matrices]


class Experts:
    """The matrices of all experts. Takes the weights over: where the device wants another layout only that is kept."""

    __slots__ = ("activation", "down", "down_bias", "gate_up", "gate_up_bias")

    def __init__(
        self,
        gate_up: ExpertWeights,
        down: ExpertWeights,
        activation: str,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> None:
        self.gate_up = pack_experts(gate_up) if isinstance(gate_up, Tensor) else gate_up  # [E, 2 * I, H], gate first
        self.down = pack_experts(down) if isinstance(down, Tensor) else down  # [E, H, I]
        self.gate_up_bias, self.down_bias = gate_up_bias, down_bias
        self.activation = activation  # silu, gelu, gelu_tanh, swiglu_clamped

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], ids and weights [T, top_k] -> [T, H]"""
        return experts(
            x,
            ids,
            weights,
            self.gate_up,
            self.down,
            self.activation,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
        )


class MoE:
    """Router, experts, and a shared expert where there is one; stands where a GatedMLP does."""

    __slots__ = ("correction_bias", "experts", "router", "routing", "shared", "shared_gate")

    def __init__(
        self,
        router: Linear,
        experts: Experts,
        routing: Routing,
        correction_bias: Tensor | None = None,
        shared: GatedMLP | None = None,
        shared_gate: Linear | None = None,
    ) -> None:
        self.router = router  # [E, H], in the model's type or in fp32 where the family computes its logits so
        self.experts = experts
        self.routing = routing
        self.correction_bias = correction_bias  # [E] fp32
        self.shared = shared
        self.shared_gate = shared_gate  # [1, H]: the shared expert's answer is multiplied by its sigmoid

    def __call__(self, x: Tensor, slot_mapping: Tensor | None = None) -> Tensor:
        """x [T, H] -> [T, H]. With slot_mapping [T] rows of padding (slot < 0) pass no expert that is routed to."""
        ids, weights = route(
            self._logits(x),
            self.routing.top_k,
            scoring=self.routing.scoring,
            renormalize=self.routing.renormalize,
            bias=self.correction_bias,
            num_groups=self.routing.num_groups,
            top_groups=self.routing.top_groups,
            scale=self.routing.scale,
            slot_mapping=slot_mapping,
        )
        out = self.experts(x, ids, weights)
        if self.shared is None:
            return out
        extra = self.shared(x)
        if self.shared_gate is not None:
            extra = extra.mul_(self.shared_gate(x).sigmoid())
        return out.add_(extra)

    def _logits(self, x: Tensor) -> Tensor:
        weight = self.router.weight
        return self.router(x.to(weight.dtype) if isinstance(weight, Tensor) else x)
