"""Operations of a decode step's list before their buffers exist, and the parts of layers that most models share.

Buffers are as wide as the widest operation that uses them, so memory for them comes last (`Writer.lowered`).
Does not know: kinds of layers and their order (native_program.py), recurrences (native_layers.py).
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from localllm.kernels.cpu.attention import CACHE_TYPES
from localllm.kernels.cpu.matrix import HeldMatrix, matrices_of
from localllm.kernels.cpu.native.structures import (
    MAX_ROWS,
    OUTPUTS,
    Activation,
    HeadNorm,
    HeadsMade,
    NativeAttention,
    NativeExperts,
    NativeLowRank,
    NativeMatrix,
    NativeNorm,
    NativeOperation,
    NativeStateRow,
    NormKind,
    Op,
)
from localllm.kernels.cpu.recurrent import STATE_TYPES
from localllm.kernels.layer_cache import LayerCache, LayerKV
from localllm.kernels.rotary_store_kv import count_query_heads
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.decoder.layer import LayerKind, RecurrentPart, Scaled, SideBySide
from localllm.models.layers.attention import Attention, Clip, HeadLayerNorm, WholeNorm
from localllm.models.layers.latent_attention import LatentAttention
from localllm.models.layers.linear import Linear
from localllm.models.layers.lora import LoraLinear
from localllm.models.layers.mlp import MLP, GatedMLP
from localllm.models.layers.moe import MoE
from localllm.models.layers.norm import LayerNorm, RMSNorm
from localllm.models.spec.model_spec import kv_groups

_HEADS_MADE = {"qkv": HeadsMade.QKV, "qk": HeadsMade.QK, "q": HeadsMade.Q}
_ACTIVATIONS = {
    "silu": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "relu2": Activation.RELU2,
    "quick_gelu": Activation.QUICK_GELU,
    "swiglu_clamped": Activation.SWIGLU_CLAMPED,
}


class NotSupportedNatively(Exception):
    """The model has no list of operations. The message is the reason, a part of a sentence."""


class Buffer:
    """Activations of up to MAX_ROWS rows. As wide as the widest operation that uses it."""

    __slots__ = ("values", "width")

    def __init__(self) -> None:
        self.width, self.values = 0, torch.empty(0)

    def widen(self, width: int) -> None:
        self.width = max(self.width, -(-width // OUTPUTS) * OUTPUTS)

    def allocate(self) -> None:
        self.values = torch.zeros(MAX_ROWS, self.width)


class _Planned(NamedTuple):
    op: Op
    source: Buffer
    target: Buffer
    offset: int  # floats from the start of a row of `target`
    source_offset: int  # of `source`
    fields: dict[str, Any]  # further fields of the operation


class _Operands(NamedTuple):
    """A description of a recurrent operation, and where each of its inputs and its output begin in a row."""

    description: Any
    places: dict[str, tuple[Buffer, int]]


class Writer:
    """Writes the operations of a model one by one. In the order of the forward pass."""

    def __init__(self, model: DecoderModel, kv_cache: Sequence[LayerCache | None]) -> None:
        self.model, self.kv_cache = model, kv_cache
        self.stream, self.qkv, self.attended, self.part, self.logits = (Buffer() for _ in range(5))
        self.gate_up, self.features, self.router, self.expert_features, self.shared_gate = (Buffer() for _ in range(5))
        self.projected, self.mixed, self.recurred = (Buffer() for _ in range(3))  # of recurrent layers
        self.states = (NativeStateRow * MAX_ROWS)()
        self.adapters = np.full(MAX_ROWS, -1, np.int64)  # of the step's rows
        self.planned: list[_Planned] = []
        self.kinds: set[int] = set()  # of all matrices, those of experts included
        self._operands: list[_Operands] = []
        self.group = 0  # of the block tables of the layer that is written
        self.others: defaultdict[str, Buffer] = defaultdict(Buffer)  # of few families
        self.constants: list[tuple[Buffer, int, float]] = []  # buffer, column, value in all rows
        self._chosen = 0  # address of the layer's experts
        self.kept: list[object] = [
            kv_cache,
            self.states,
            self.adapters,
        ]  # owners of the memory that the operations point to

    @property
    def activation(self) -> Activation:
        """The model's activation."""
        return _ACTIVATIONS[self.model.spec.hidden_act]

    def lowered(self) -> Any:
        """Return the operations for the library, with memory for their buffers."""
        for buffer in {id(each): each for plan in self.planned for each in (plan.source, plan.target)}.values():
            buffer.allocate()
            self.kept.append(buffer.values)
        for description, places in self._operands:
            for name, (buffer, offset) in places.items():
                setattr(description, name, buffer.values.data_ptr() + 4 * offset)
                setattr(description, f"{name}_stride", buffer.values.stride(0))
        for buffer, column, value in self.constants:
            buffer.values[:, column] = value
        return (NativeOperation * len(self.planned))(*(_lowered(plan) for plan in self.planned))

    # -- parts of a layer

    def attend(self, part: Any, kind: LayerKind, kv: LayerKV, norm: Any) -> None:
        attention, _ = unscaled(part)
        if isinstance(attention, LatentAttention):
            raise NotSupportedNatively("latent attention")
        assert isinstance(attention, Attention), type(attention)
        self.linear(attention.qkv, self.stream, self.qkv, norm=norm)
        description = self._attention(attention, kind, kv)
        self.kept.append(description)
        width = description.heads * description.head_dim
        self.attended.widen(width)
        self.plan(
            Op.ATTEND, self.qkv, self.attended, source_offset=attention.gate_size,
            attention=ctypes.addressof(description),
        )  # fmt: skip
        if attention.gate_size:
            self.multiply(self.qkv, 0, self.attended, 0, width, Activation.SIGMOID)

    def project(self, part: Any, target: Buffer) -> None:
        """The last projection of attention or a recurrence: added to the stream, or written to another buffer."""
        part, factor = unscaled(part)
        if isinstance(part, SideBySide):
            self._project(part.attention, self.attended, target, factor)
            self._project(part.recurrence, self.recurred, target, factor, adds=True)
        elif isinstance(part, RecurrentPart):
            self._project(part.recurrence, self.recurred, target, factor)
        else:
            self._project(part, self.attended, target, factor)

    def _project(self, part: Any, source: Buffer, target: Buffer, factor: float, *, adds: bool = False) -> None:
        part, own = unscaled(part)
        self.linear(part.out, source, target, factor=factor * own, adds=adds)

    def feed(self, part: Any, norm: Any) -> None:
        """The feed-forward part of the stream up to its last matrix."""
        mlp, _ = unscaled(part)
        activation = self.activation
        if isinstance(mlp, MLP):
            self.linear(mlp.up, self.stream, self.features, norm=norm, activation=activation)
        elif isinstance(mlp, GatedMLP):
            self._gated(mlp.gate_up, norm, activation)
        else:
            assert isinstance(mlp, MoE), type(mlp)
            self.choose_experts(mlp, norm)
            if mlp.shared is not None:
                self._feed_shared(mlp, mlp.shared, norm, activation)

    def shrink(self, part: Any, target: Buffer) -> None:
        """The last matrix of the feed-forward part: added to the stream, or written to another buffer."""
        mlp, factor = unscaled(part)
        if not isinstance(mlp, MoE):
            self.linear(mlp.down, self.features, target, factor=factor)
            return
        self.plan(
            Op.EXPERTS_DOWN, self.expert_features, target, experts=self._chosen, adds=target is self.stream,
            factor=factor, matrix=sizes(self.model.spec.hidden_size),
        )  # fmt: skip
        if mlp.shared is not None:
            self.linear(mlp.shared.down, self.features, target, factor=factor, adds=True)

    # -- a mixture of experts

    def choose_experts(self, mixture: MoE, norm: Any, router_norm: Any = None) -> None:
        """Route, and run the first matrices of the chosen experts. router_norm: None: `norm`."""
        if mixture.routing.scales_inputs:
            raise NotSupportedNatively("experts whose inputs are multiplied")
        self.linear(mixture.router, self.stream, self.router, norm=norm if router_norm is None else router_norm)
        self._chosen = ctypes.addressof(self._experts(mixture))
        self.plan(Op.ROUTE, self.router, self.router, experts=self._chosen)
        width = mixture.experts.gate_up[0].shape[0] // 2
        self.expert_features.widen(mixture.routing.top_k * width)
        name = self.model.spec.mixture.activation if self.model.spec.mixture is not None else None
        self.plan(
            Op.EXPERTS_GATED, self.stream, self.expert_features, experts=self._chosen,
            norm=self._norm(norm), matrix=sizes(width), activation=_ACTIVATIONS[name or self.model.spec.hidden_act],
        )  # fmt: skip

    def _feed_shared(self, mixture: MoE, shared: GatedMLP | MLP, norm: Any, activation: Activation) -> None:
        """The shared expert up to its last matrix, scaled by its gate if it has one."""
        if isinstance(shared, MLP):
            raise NotSupportedNatively("experts without a gate")
        self._gated(shared.gate_up, norm, activation)
        if mixture.shared_gate is not None:
            self.linear(mixture.shared_gate, self.stream, self.shared_gate, norm=norm)
            assert self.model.spec.mixture is not None
            width = sizes(self.model.spec.mixture.shared_size)
            self.plan(Op.SCALE, self.shared_gate, self.features, matrix=width, activation=Activation.SIGMOID)

    def _experts(self, mixture: MoE) -> NativeExperts:
        routing, experts = mixture.routing, mixture.experts
        ids = torch.zeros((MAX_ROWS, routing.top_k), dtype=torch.int32)
        weights = torch.zeros((MAX_ROWS, routing.top_k))
        self.kept += [ids, weights]
        described = NativeExperts(
            count=len(experts.gate_up), top_k=routing.top_k,
            gate_up=self._each_expert(experts.gate_up, experts.gate_up_bias),
            down=self._each_expert(experts.down, experts.down_bias),
            correction=self.address(mixture.correction_bias), is_sigmoid=routing.scoring == "sigmoid",
            renormalizes=routing.renormalize, least_sum=routing.least_sum, num_groups=routing.num_groups,
            top_groups=routing.top_groups, scale=routing.scale, expert_scale=self.address(mixture.expert_scale),
            ids=ids.data_ptr(), weights=weights.data_ptr(),
        )  # fmt: skip
        self.kept.append(described)
        return described

    def _each_expert(self, weights: Any, biases: Tensor | None) -> int:
        """Return the address of the matrices of all experts."""
        count = len(weights)
        each = [None] * count if biases is None else list(biases)
        held = [self._held(matrices_of(weights[i], each[i]), weights[i]) for i in range(count)]
        if any(len(parts) > 1 for parts in held):
            raise NotSupportedNatively("experts of parts that are stored in different ways")
        matrices = (NativeMatrix * count)(*(parts[0] for parts in held))
        self.kept.append(matrices)
        return ctypes.addressof(matrices)

    def add_part(self, norm: Any, target: Buffer | None = None, *, adds: bool = True) -> None:
        """Add what the last part has written, normed, to the stream or another buffer."""
        self.add(self.part, self.stream if target is None else target, norm, adds=adds)

    def add(self, source: Buffer, target: Buffer, norm: Any, *, adds: bool = True) -> None:
        hidden = self.model.spec.hidden_size
        target.widen(hidden)
        self.plan(Op.ADD, source, target, norm=self._norm(norm), matrix=sizes(hidden), adds=adds)

    # -- operations

    def linear(
        self, linear: Any, source: Buffer, target: Buffer, *, norm: Any = None,
        activation: Activation = Activation.NONE, factor: float = 1.0, adds: bool = False,
    ) -> None:  # fmt: skip
        """Write y = activation(norm(x) W^T + bias) * factor; added if asked, or if `target` is the stream."""
        adds = adds or target is self.stream
        self._products(linear, source, target, norm, adds=adds, activation=activation, factor=factor)

    def _products(self, linear: Any, source: Buffer, target: Buffer, norm: Any, **fields: Any) -> None:
        """Write the outputs of all matrices of a layer one after the other."""
        matrices = self._matrices(linear)
        source.widen(matrices[0].inputs)
        target.widen(sum(matrix.outputs for matrix in matrices))
        low_ranks = self._low_ranks(linear, matrices, source, norm)
        offset = 0
        for matrix, low_rank in zip(matrices, low_ranks, strict=True):
            self.plan(
                Op.LINEAR, source, target, offset, matrix=matrix, norm=self._norm(norm), low_rank=low_rank, **fields
            )  # fmt: skip
            offset += matrix.outputs

    def _low_ranks(
        self, linear: Any, matrices: list[NativeMatrix], source: Buffer, norm: Any
    ) -> list[int | None]:  # fmt: skip
        """Write the first product of a layer's adapters. Return the address of what each matrix adds; None: nothing."""
        if not isinstance(linear, LoraLinear):
            return [None] * len(matrices)
        a, b = linear.a, linear.b
        if a.dtype not in STATE_TYPES or not a.is_contiguous() or not b.transpose(1, 2).is_contiguous():
            raise NotSupportedNatively("adapters in a layout without products")
        (_, width, inputs), columns = a.shape, b.shape[1]
        low, described, first = torch.zeros(MAX_ROWS, width), list[NativeLowRank](), 0
        for matrix in matrices:
            described.append(
                NativeLowRank(
                    a=a.data_ptr(), b=b.data_ptr() + first * b.element_size(), type=STATE_TYPES[a.dtype], width=width,
                    columns=columns, ranks=linear.ranks.ctypes.data, adapters=self.adapters.ctypes.data,
                    low=low.data_ptr(),
                )
            )  # fmt: skip
            first += matrix.outputs
        self.kept += [linear, low, described]
        addresses: list[int | None] = [ctypes.addressof(each) for each in described]
        self.plan(Op.SHRINK, source, source, matrix=sizes(inputs), norm=self._norm(norm), low_rank=addresses[0])
        return addresses

    def _gated(self, gate_up: object, norm: Any, activation: Activation) -> None:
        if not isinstance(gate_up, Linear):
            raise NotSupportedNatively("a gate with factors")
        matrices, width = self._matrices(gate_up), gate_up.weight.shape[0] // 2
        self.features.widen(width)
        if len(matrices) == 1:
            self.stream.widen(gate_up.weight.shape[1])
            (low_rank,) = self._low_ranks(gate_up, matrices, self.stream, norm)
            self.plan(
                Op.GATED, self.stream, self.features, matrix=matrices[0], norm=self._norm(norm),
                activation=activation, low_rank=low_rank,
            )  # fmt: skip
            return
        self._products(gate_up, self.stream, self.gate_up, norm)
        self.plan(Op.GATE, self.gate_up, self.features, matrix=sizes(width), activation=activation)

    def multiply(
        self, source: Buffer, source_offset: int, target: Buffer, offset: int, width: int,
        activation: Activation = Activation.NONE,
    ) -> None:  # fmt: skip
        """Multiply `width` columns of the target with the activation of as many of the source."""
        self.plan(
            Op.MULTIPLY, source, target, offset, source_offset, matrix=sizes(width), activation=activation
        )  # fmt: skip

    def recurrent(self, op: Op, description: Any, **places: tuple[Buffer, int]) -> None:
        """Write a recurrent operation. places: the buffer of each input and of the output y, and its first column."""
        self._operands.append(_Operands(description, places))
        self.kept.append(description)
        self.plan(
            op, next(iter(places.values()))[0], places["y"][0], matrix=sizes(0),
            recurrent=ctypes.addressof(description), states=ctypes.addressof(self.states),
        )  # fmt: skip

    def plan(
        self, op: Op, source: Buffer, target: Buffer, offset: int = 0, source_offset: int = 0, **fields: Any
    ) -> None:
        self.planned.append(_Planned(op, source, target, offset, source_offset, {"factor": 1.0, **fields}))

    def _matrices(self, linear: Any) -> list[NativeMatrix]:
        """Return the matrices of a layer, one above the other; several if its parts are stored in different ways."""
        if type(linear) not in (Linear, LoraLinear):
            raise NotSupportedNatively(f"a projection of kind {type(linear).__name__}")
        return self._held(matrices_of(linear.weight, linear.bias), linear.weight)

    def _held(self, matrices: list[HeldMatrix] | None, weight: Any) -> list[NativeMatrix]:
        if matrices is None:
            kind = str(weight.dtype) if isinstance(weight, Tensor) else type(weight).__name__
            raise NotSupportedNatively(
                f"a weight of {weight.shape[0]} x {weight.shape[1]} in a layout without products ({kind})"
            )
        self.kept.append(matrices)
        self.kinds.update(held.matrix.kind for held in matrices)
        return [held.matrix for held in matrices]

    def _norm(self, norm: RMSNorm | LayerNorm | None) -> NativeNorm:
        if norm is None:
            return NativeNorm(NormKind.NONE)
        bias = norm.bias if isinstance(norm, LayerNorm) else None
        kind = NormKind.LAYER if isinstance(norm, LayerNorm) else NormKind.RMS
        return NativeNorm(kind, self.address(norm.weight), self.address(bias), norm.eps)

    def address(self, values: Tensor | None) -> int | None:
        """Return the address of fp32 values, which are kept; None if there are none."""
        if values is None:
            return None
        held = values.float().contiguous()
        self.kept.append(held)
        return held.data_ptr()

    def _attention(self, attention: Attention, kind: LayerKind, kv: LayerKV) -> NativeAttention:
        spec, (kv_heads, num_blocks, block_size, head_dim) = self.model.spec, kv.k.shape
        if kv.k.dtype not in CACHE_TYPES:
            raise NotSupportedNatively(f"a KV cache in {str(kv.k.dtype).removeprefix('torch.')}")
        table = self.model.rope_table(kind)
        window = kv_groups(spec)[self.group].window
        return NativeAttention(
            k=kv.k.data_ptr(), v=kv.v.data_ptr(),
            k_scales=None if kv.k_scale is None else kv.k_scale.data_ptr(),
            v_scales=None if kv.v_scale is None else kv.v_scale.data_ptr(),
            cache_type=CACHE_TYPES[kv.k.dtype], num_blocks=num_blocks, block_size=block_size,
            heads=count_query_heads(
                (attention.qkv.weight.shape[0] - attention.gate_size) // head_dim, kv, attention.made
            ),
            kv_heads=kv_heads, head_dim=head_dim,
            angles=self.address(table), rotary_dim=0 if table is None else table.shape[1],
            window=window or 0, group=self.group, scale=attention.scale, softcap=attention.softcap or 0.0,
            sinks=self.address(attention.sinks), slopes=self.address(attention.alibi_slopes),
            **self._changes(attention),
            query_growth=spec.query_scaling or 0.0,
            growth_period=spec.rope.parameters["original_max_position_embeddings"] if spec.query_scaling else 1,
        )  # fmt: skip

    def _changes(self, attention: Attention) -> dict[str, Any]:
        """Return the fields of what happens to q, k and v before the rotation."""
        fields: dict[str, Any] = {}
        changes = [*attention.before_rotation, *([] if attention.qk_norm is None else [attention.qk_norm])]
        for change in changes:
            if isinstance(change, Clip):
                fields["clip"] = change.limit
                continue
            kind, weight, eps = _head_norm(change)
            if attention.norm_last:
                kind = HeadNorm.RMS_LAST
            fields |= {"head_norm": kind, "head_norm_weight": self.address(weight), "head_norm_eps": eps}
        return fields | {"made": _HEADS_MADE[attention.made], "norms_values": attention.norms_values}


def _lowered(plan: _Planned) -> NativeOperation:
    source, target = plan.source.values, plan.target.values
    return NativeOperation(
        op=plan.op, x=source.data_ptr() + 4 * plan.source_offset, x_stride=source.stride(0),
        y=target.data_ptr() + 4 * plan.offset, y_stride=target.stride(0), **plan.fields,
    )  # fmt: skip


def unscaled(part: Any) -> tuple[Any, float]:
    """Return the part of a layer, and the factor of its output."""
    return (part.part, part.factor) if isinstance(part, Scaled) else (part, 1.0)


def sizes(width: int) -> NativeMatrix:
    """Return a matrix without weights, for operations that need only its size."""
    return NativeMatrix(outputs=width, inputs=width)


def _head_norm(norm: object) -> tuple[HeadNorm, Tensor, float]:
    """Return the kind, weight [heads + kv_heads, head_dim] and epsilon of a norm of q and k."""
    if isinstance(norm, RMSNorm):
        return HeadNorm.RMS, norm.weight, norm.eps
    if isinstance(norm, HeadLayerNorm):
        return HeadNorm.LAYER, norm.weight, norm.eps
    if isinstance(norm, WholeNorm):
        return HeadNorm.WHOLE, torch.cat((norm.q.weight, norm.k.weight)), norm.q.eps
    raise NotSupportedNatively(f"a change of q and k of kind {type(norm).__name__}")
