"""A mixture of experts instead of the feed-forward part (Shazeer et al. 2017, arXiv:1701.06538). The router sends each
token through top_k of many experts; some families add a shared expert for every token, gated or not.

    Mixtral, Qwen3-MoE      softmax, weights of the chosen sum to one
    Qwen2-MoE               plain softmax, and a shared expert with its own gate
    gpt-oss                 as Mixtral, with biases and its own activation
    DeepSeek-V3, GLM        sigmoid with a correction bias, groups of experts, and a shared expert
    Llama 4                 one expert, whose input is multiplied by a sigmoid, and a shared expert
    Gemma 4                 as Mixtral, times a factor per expert; beside a dense part that is normed for itself

Does not know: families; the order of gate and up in a checkpoint (here the gate's rows come first).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from localllm.kernels.cpu.native.structures import MAX_ROWS, Activation, NativeExperts, Op
from localllm.kernels.cpu.pack import CpuPacker
from localllm.kernels.moe.experts import experts
from localllm.kernels.moe.route import LEAST_SUM, route
from localllm.kernels.moe.weights import ExpertWeights, pack_experts, stack_experts
from localllm.models.layers.arena import RecordMatrices
from localllm.models.layers.disk import DiskMatrices
from localllm.models.layers.group import Group
from localllm.models.layers.linear import Linear, Weight, to_device_layout
from localllm.models.layers.mlp import MLP, GatedMLP
from localllm.models.layers.native_writer import Buffer, Writer, gated_fields, sizes
from localllm.models.layers.norm import LayerNorm, RMSNorm


@dataclass(frozen=True, slots=True)
class Routing:
    """The step from router logits to experts and weights; kernels/moe/route.py explains each field."""

    top_k: int
    scoring: str = "softmax"  # sigmoid, sparsemixer
    renormalize: bool = True  # the chosen weights are scaled to sum to one
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0  # final factor on the weights
    scales_inputs: bool = False  # the weight multiplies the expert's input instead of its output; top_k is 1
    least_sum: float = LEAST_SUM
    tolerance: float = 0.0  # with sparsemixer


def join_experts(matrices: Iterable[Weight], count: int, *, at_once: bool, packer: CpuPacker) -> ExpertWeights:
    """Join the matrices of `count` experts for their products. Each is read only after the previous one is in place.

    at_once: stack them into one tensor for kernels, ValueError if that is not possible; otherwise keep a list.
    packer: packs that list's quantised matrices on a CPU.
    """
    return stack_experts(matrices, count) if at_once else [to_device_layout(matrix, packer) for matrix in matrices]


def matrix_shape(weights: ExpertWeights) -> tuple[int, int]:
    """Return the outputs and inputs of each expert's matrix, without reading one that is on disk."""
    outputs, inputs = weights.shape if isinstance(weights, DiskMatrices | RecordMatrices) else weights[0].shape
    return outputs, inputs


def choices_of(writer: Writer, count: int, top_k: int, **fields: Any) -> NativeExperts:
    """Return experts for the native library, with buffers for what a step's router chooses of them. fields: further
    ones."""
    ids, weights = torch.zeros((MAX_ROWS, top_k), dtype=torch.int32), torch.zeros((MAX_ROWS, top_k))
    found = NativeExperts(count=count, top_k=top_k, ids=ids.data_ptr(), weights=weights.data_ptr(), **fields)
    writer.kept += [ids, weights, found]
    return found


class Experts:
    """The matrices of all experts. Owns the weights: if the device needs another layout, only that copy is kept."""

    __slots__ = ("activation", "down", "down_bias", "gate_up", "gate_up_bias", "padding")

    def __init__(
        self,
        gate_up: ExpertWeights,
        down: ExpertWeights,
        activation: str,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        *,
        padding: tuple[int, int] = (0, 0),
    ) -> None:
        self.gate_up = pack_experts(gate_up) if isinstance(gate_up, Tensor) else gate_up  # [E, 2 * I, H], gate first
        self.down = pack_experts(down) if isinstance(down, Tensor) else down  # [E, H, I]
        self.gate_up_bias, self.down_bias = gate_up_bias, down_bias
        self.padding = padding  # inputs of `down` before and after those that gate_up makes: zeros
        self.activation = activation  # relu2: gate_up [E, I, H] has no gate. Others, gated: as kernels/gated.py

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Run each token's experts: x [T, H], ids and weights [T, top_k] -> [T, H]."""
        return experts(
            x,
            ids,
            weights,
            self.gate_up,
            self.down,
            self.activation,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
            padding=self.padding,
        )

    def described(self, writer: Writer, top_k: int, **routing: Any) -> NativeExperts:
        """Return the experts for the native library, which stay valid as long as the writer's memory. routing: further
        fields. Raises `NotSupportedNatively`."""
        gate_up, down = (
            writer.each_expert(self.gate_up, self.gate_up_bias),
            writer.each_expert(self.down, self.down_bias),
        )
        return choices_of(writer, len(self.gate_up), top_k, gate_up=gate_up, down=down, **routing)

    def write(self, writer: Writer, chosen: int, top_k: int, source: Buffer, norm: Any) -> None:
        """Write the first matrices of the chosen experts. chosen: address of `described`."""
        outputs, inputs = matrix_shape(self.gate_up)
        op, width = (Op.EXPERTS_UP, outputs) if self.activation == "relu2" else (Op.EXPERTS_GATED, outputs // 2)
        source.widen(inputs)
        writer.expert_features.widen(top_k * width)
        writer.plan(
            op, source, writer.expert_features, experts=chosen, norm=writer.normed_by(norm), matrix=sizes(width),
            **gated_fields(self.activation),
        )  # fmt: skip

    def write_out(self, writer: Writer, chosen: int, target: Buffer, factor: float = 1.0) -> None:
        """Write the last matrices: added to the stream, or written to another buffer."""
        outputs = matrix_shape(self.down)[0]
        target.widen(outputs)
        writer.plan(
            Op.EXPERTS_DOWN, writer.expert_features, target, experts=chosen, adds=target is writer.stream,
            factor=factor, matrix=sizes(outputs),
        )  # fmt: skip


class AnyExperts(Protocol):
    """Experts here or elsewhere (far.py)."""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, /) -> Tensor:
        """Run each token's experts: x [T, H], ids and weights [T, top_k] -> [T, H]."""
        ...

    def described(self, writer: Writer, top_k: int, **routing: Any) -> NativeExperts:
        """Return the experts for the native library, as `Experts.described` does."""
        ...

    def write(self, writer: Writer, chosen: int, top_k: int, source: Buffer, norm: Any, /) -> None:
        """Write what comes between the router and the parts beside the experts, which read norm(source)."""
        ...

    def write_out(self, writer: Writer, chosen: int, target: Buffer, factor: float = 1.0, /) -> None:
        """Write what adds the results to the stream, or writes them to another buffer."""
        ...


class LatentExperts(NamedTuple):
    """Matrices around experts that work in a narrower space (Nemotron 3)."""

    down: Linear
    up: Linear


class MoE:
    """Router, experts, and an optional shared expert; replaces a GatedMLP."""

    __slots__ = (
        "correction_bias", "expert_scale", "experts", "latent", "own", "router", "routing", "shared", "shared_gate",
    )  # fmt: skip

    def __init__(
        self,
        router: Linear,
        experts: AnyExperts,
        routing: Routing,
        correction_bias: Tensor | None = None,
        shared: GatedMLP | MLP | None = None,
        shared_gate: Linear | None = None,
        *,
        expert_scale: Tensor | None = None,
        own: range | None = None,
        latent: LatentExperts | None = None,
    ) -> None:
        self.router = router  # [E, H], in the model's type, or in fp32 for families that compute logits in fp32
        self.experts = experts
        self.routing = routing
        self.correction_bias = correction_bias  # [E] fp32
        self.shared = shared
        self.shared_gate = shared_gate  # [1, H]: its sigmoid scales the shared expert's output
        self.latent = latent
        self.expert_scale = expert_scale  # [E] fp32: factors on the weights
        self.own = own  # the experts that this shard holds; None: all

    def __call__(self, x: Tensor, slot_mapping: Tensor | None = None, *, router_input: Tensor | None = None) -> Tensor:
        """Map x [T, H] to [T, H]. With slot_mapping [T], padding rows (slot < 0) skip the routed experts. router_input
        [T, H]: what the router reads; None: x."""
        ids, weights = route(
            self._logits(x if router_input is None else router_input),
            self.routing.top_k,
            scoring=self.routing.scoring,
            renormalize=self.routing.renormalize,
            least_sum=self.routing.least_sum,
            bias=self.correction_bias,
            num_groups=self.routing.num_groups,
            top_groups=self.routing.top_groups,
            scale=self.routing.scale,
            tolerance=self.routing.tolerance,
            slot_mapping=slot_mapping,
        )
        if self.expert_scale is not None:
            weights = weights.mul_(self.expert_scale[ids.clamp_min(0)])
        ids = ids if self.own is None else renumbered(ids, self.own)
        if self.routing.scales_inputs:
            out = self.experts(x * weights.to(x.dtype), ids, torch.ones_like(weights))
        elif self.latent is None:
            out = self.experts(x, ids, weights)
        else:
            out = self.latent.up(self.experts(self.latent.down(x), ids, weights))
        if self.shared is None:
            return out
        extra = self.shared(x)
        if self.shared_gate is not None:
            extra = extra.mul_(self.shared_gate(x).sigmoid())
        return out.add_(extra)

    def write(self, writer: Writer, norm: Any) -> None:
        """Write the operations up to the last matrices, with the shared expert."""
        self.write_routed(writer, norm, norm)
        if self.shared is None:
            return
        self.shared.write(writer, norm)
        if self.shared_gate is not None:  # the shared expert is scaled by its gate
            writer.linear(self.shared_gate, writer.stream, writer.shared_gate, norm=norm)
            assert writer.spec.mixture is not None
            width = sizes(writer.spec.mixture.shared_size)
            writer.plan(Op.SCALE, writer.shared_gate, writer.features, matrix=width, activation=Activation.SIGMOID)

    def write_routed(self, writer: Writer, norm: Any, router_norm: Any) -> None:
        """Write the router, and the first matrices of the chosen experts."""
        writer.linear(self.router, writer.stream, writer.router, norm=router_norm)
        routing = self.routing
        described = self.experts.described(
            writer, routing.top_k, correction=writer.address(self.correction_bias),
            is_sigmoid=routing.scoring == "sigmoid", renormalizes=routing.renormalize, least_sum=routing.least_sum,
            num_groups=routing.num_groups, top_groups=routing.top_groups, scale=routing.scale,
            expert_scale=writer.address(self.expert_scale), is_sparse_mixer=routing.scoring == "sparsemixer",
            tolerance=routing.tolerance, scales_inputs=routing.scales_inputs,
        )  # fmt: skip
        writer.chosen_experts = ctypes.addressof(described)
        writer.plan(Op.ROUTE, writer.router, writer.router, experts=writer.chosen_experts)
        source = writer.stream
        if self.latent is not None:
            source = writer.others["latent"]
            writer.linear(self.latent.down, writer.stream, source, norm=norm)
        self.experts.write(writer, writer.chosen_experts, routing.top_k, source, norm if self.latent is None else None)

    def write_out(self, writer: Writer, target: Buffer, factor: float = 1.0) -> None:
        """Write the last matrices: added to the stream, or written to another buffer."""
        if self.latent is None:
            self.experts.write_out(writer, writer.chosen_experts, target, factor)
        else:
            sums = writer.others["latent_sums"]
            self.experts.write_out(writer, writer.chosen_experts, sums)
            writer.linear(self.latent.up, sums, target, factor=factor)
        if self.shared is not None:
            self.shared.write_out(writer, target, factor, adds=True)

    def _logits(self, x: Tensor) -> Tensor:
        weight = self.router.weight
        return self.router(x.to(weight.dtype) if isinstance(weight, Tensor) else x)


class ExpertsOfStream:
    """A mixture that reads the residual stream and norms it for itself, once for the router and once for the experts
    (Gemma 4)."""

    __slots__ = ("group", "mixture", "norm", "post_norm", "router_norm")

    def __init__(
        self, mixture: MoE, router_norm: RMSNorm, norm: RMSNorm | LayerNorm, post_norm: RMSNorm | LayerNorm,
        group: Group,
    ) -> None:  # fmt: skip
        """group: the shards whose mixtures are added up before the last norm."""
        self.mixture, self.router_norm, self.norm, self.post_norm = mixture, router_norm, norm, post_norm
        self.group = group

    def __call__(self, residual: Tensor, slot_mapping: Tensor | None = None) -> Tensor:
        """Map the stream [T, H] to a fresh tensor [T, H]; the stream is not changed."""
        out = self.mixture(self.norm(residual), slot_mapping, router_input=self.router_norm(residual))
        return self.post_norm(self.group.sum_(out))

    def write(self, writer: Writer, target: Buffer) -> None:
        """Write the operations, whose normed output is added to `target`."""
        self.mixture.write_routed(writer, self.norm, self.router_norm)
        self.mixture.write_out(writer, writer.part)
        writer.add(writer.part, target, self.post_norm)


def renumbered(ids: Tensor, own: range) -> Tensor:
    """Return expert ids with the first of `own` as 0, and -1 for all others, which the products leave out."""
    return (ids - own.start).masked_fill_((ids < own.start) | (ids >= own.stop), -1)
