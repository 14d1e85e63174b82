"""Operations of a decode step's list before their buffers exist. Each layer writes its own, in `write` and `write_out`.

Buffers are as wide as the widest operation that uses them, so memory for them comes last (`Writer.lowered`).
Does not know: kinds of layers and their order.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from localllm.kernels.cpu.matrix import HeldMatrix, matrices_of
from localllm.kernels.cpu.native.structures import (
    MAX_ROWS,
    OUTPUTS,
    Activation,
    NativeAttention,
    NativeConvolution,
    NativeGatedNorm,
    NativeHeadProducts,
    NativeLowRank,
    NativeMatrix,
    NativeMixing,
    NativeNorm,
    NativeOperation,
    NativeStateRow,
    NormKind,
    Op,
)
from localllm.kernels.cpu.recurrent import STATE_TYPES
from localllm.kernels.gated import limit_of
from localllm.kernels.layer_cache import LayerCache, LayerKV, LayerState
from localllm.models.layers.arena import RecordMatrices
from localllm.models.layers.disk import DiskMatrices
from localllm.models.layers.linear import Linear, ScaledOutputs
from localllm.models.layers.lora import LoraLinear
from localllm.models.layers.norm import GatedNorm, LayerNorm, RMSNorm
from localllm.models.spec.model_spec import ModelSpec

ACTIVATIONS = {
    "silu": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "relu2": Activation.RELU2,
    "quick_gelu": Activation.QUICK_GELU,
    "swiglu_clamped": Activation.SWIGLU_CLAMPED,
}


def gated_fields(activation: str) -> dict[str, Any]:
    """Return the fields of an operation with a gated activation."""
    name, limit = limit_of(activation)
    return {"activation": ACTIVATIONS[name], "limit": limit}


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

    def __init__(
        self, spec: ModelSpec, kv_cache: Sequence[LayerCache | None], rope_table: Callable[[Any], Tensor | None],
        sources: Sequence[LayerKV] = (),
    ) -> None:  # fmt: skip
        """rope_table: returns the cosines and sines of layers of a kind. sources: what each layer's cross-attention
        reads."""
        self.spec, self.rope_table, self.sources = spec, rope_table, sources
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
        self.chosen_experts = 0  # address of the layer's experts
        self.calls: list[tuple[int, Callable[[int], None]]] = []  # before an operation, the host's work for some rows
        self.kept: list[object] = [
            kv_cache,
            sources,
            self.states,
            self.adapters,
        ]  # owners of the memory that the operations point to

    @property
    def activation(self) -> Activation:
        """The model's activation."""
        return ACTIVATIONS[self.spec.hidden_act]

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

    # -- matrices of experts

    def each_expert(self, weights: Any, biases: Tensor | None) -> int:
        """Return the address of the matrices of all experts."""
        if isinstance(weights, DiskMatrices | RecordMatrices):
            self.kinds.add(weights.form.kind)
        if isinstance(weights, DiskMatrices):
            matrices, owned = weights.matrices(biases)
            self.kept += [matrices, *owned]
            return ctypes.addressof(matrices)
        if isinstance(weights, RecordMatrices):
            matrices = weights.matrices()
            self.kept += [matrices, weights]
            return ctypes.addressof(matrices)
        count = len(weights)
        each = [None] * count if biases is None else list(biases)
        held = [self._held(matrices_of(weights[i], each[i]), weights[i]) for i in range(count)]
        if any(len(parts) > 1 for parts in held):
            raise NotSupportedNatively("experts of parts that are stored in different ways")
        matrices = (NativeMatrix * count)(*(parts[0] for parts in held))
        self.kept.append(matrices)
        return ctypes.addressof(matrices)

    def add(self, source: Buffer, target: Buffer, norm: Any, offset: int = 0, *, adds: bool = True) -> None:
        """Add what a part has written, normed, to the stream or another buffer, from column `offset` on."""
        hidden = self.spec.hidden_size
        target.widen(offset + hidden)
        self.plan(Op.ADD, source, target, offset, norm=self.normed_by(norm), matrix=sizes(hidden), adds=adds)

    # -- operations

    def call(self, work: Callable[[int], None]) -> None:
        """Let the host work between the operations before and after. work: takes the number of rows."""
        self.calls.append((len(self.planned), work))

    def linear(
        self, linear: Any, source: Buffer, target: Buffer, *, norm: Any = None,
        activation: Activation = Activation.NONE, factor: float = 1.0, adds: bool = False,
    ) -> None:  # fmt: skip
        """Write y = activation(norm(x) W^T + bias) * factor; added if asked, or if `target` is the stream."""
        adds = adds or target is self.stream
        self._products(linear, source, target, norm, adds=adds, activation=activation, factor=factor)

    def _products(self, linear: Any, source: Buffer, target: Buffer, norm: Any, **fields: Any) -> None:
        """Write the outputs of all matrices of a layer one after the other."""
        linear, factors = self._unscaled(linear)
        matrices = self._matrices(linear)
        source.widen(matrices[0].inputs)
        target.widen(sum(matrix.outputs for matrix in matrices))
        low_ranks = self._low_ranks(linear, matrices, source, norm)
        offset = 0
        for matrix, low_rank in zip(matrices, low_ranks, strict=True):
            self.plan(
                Op.LINEAR, source, target, offset, matrix=matrix, norm=self.normed_by(norm), low_rank=low_rank,
                output_factors=None if factors is None else factors + 4 * offset, **fields,
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
        self.plan(Op.SHRINK, source, source, matrix=sizes(inputs), norm=self.normed_by(norm), low_rank=addresses[0])
        return addresses

    def gated(self, gate_up: Any, norm: Any, activation: str, *, deviations: float | None = None) -> None:
        """Write the gated activation of a projection. activation: as in kernels/gated.py. deviations: above the mean,
        where the gate is cut off before."""
        fields, (linear, factors) = gated_fields(activation), self._unscaled(gate_up)
        matrices, width = self._matrices(linear), linear.weight.shape[0] // 2
        self.features.widen(width)
        if len(matrices) == 1 and deviations is None:
            self.stream.widen(linear.weight.shape[1])
            (low_rank,) = self._low_ranks(linear, matrices, self.stream, norm)
            self.plan(
                Op.GATED, self.stream, self.features, matrix=matrices[0], norm=self.normed_by(norm), low_rank=low_rank,
                output_factors=factors, **fields,
            )  # fmt: skip
            return
        self._products(gate_up, self.stream, self.gate_up, norm)
        if deviations is not None:
            self.plan(Op.CUT, self.gate_up, self.gate_up, matrix=sizes(width), limit=deviations)
        self.plan(Op.GATE, self.gate_up, self.features, matrix=sizes(width), **fields)

    def attend(self, attention: NativeAttention, offset: int = 0) -> None:
        """Attend from the heads in `qkv`, from column `offset` on. The result is in `attended`."""
        self.kept.append(attention)
        self.attended.widen(attention.heads * attention.value_dim)
        address = ctypes.addressof(attention)
        self.plan(Op.ATTEND, self.qkv, self.attended, source_offset=offset, attention=address)

    def each_head(
        self, weights: Tensor, source: Buffer, target: Buffer, *, x_head: int, y_head: int, source_offset: int = 0,
        copied: int = 0,
    ) -> None:  # fmt: skip
        """Multiply each head of the source with its matrix, weights [heads, outputs, inputs], behind the `copied`
        values that are written as they are. x_head, y_head: floats from head to head."""
        if weights.dtype not in STATE_TYPES:
            raise NotSupportedNatively(f"matrices of heads in {str(weights.dtype).removeprefix('torch.')}")
        held, (heads, outputs, inputs) = weights.contiguous(), weights.shape
        source.widen(heads * x_head)
        target.widen(heads * y_head)
        products = NativeHeadProducts(
            weights=held.data_ptr(), type=STATE_TYPES[held.dtype], heads=heads, outputs=outputs, inputs=inputs,
            copied=copied, x_head_stride=x_head, y_head_stride=y_head,
        )  # fmt: skip
        self.kept += [held, products]
        self.plan(
            Op.HEADS, source, target, source_offset=source_offset, matrix=sizes(0), heads=ctypes.addressof(products)
        )

    def copy(
        self, source: Buffer, source_offset: int, target: Buffer, offset: int, width: int, norm: Any = None
    ) -> None:
        """Write `width` columns of the source, normed if asked, to the target."""
        self.plan(
            Op.ADD, source, target, offset, source_offset, norm=self.normed_by(norm), matrix=sizes(width), adds=False
        )

    def multiply(
        self, source: Buffer, source_offset: int, target: Buffer, offset: int, width: int,
        activation: Activation = Activation.NONE, *, factors: int | None = None,
    ) -> None:  # fmt: skip
        """Multiply `width` columns of the target with the activation of as many of the source, or of fewer: `factors`,
        each of which multiplies as many columns, one after another."""
        matrix = NativeMatrix(outputs=width, inputs=factors or width)
        self.plan(Op.MULTIPLY, source, target, offset, source_offset, matrix=matrix, activation=activation)

    def scale_stream(self, index: int, factor: float) -> None:
        """Multiply the stream by a number, which is kept in column `index` of a buffer of all layers' numbers."""
        scalars = self.others["scalars"]
        scalars.widen(index + 1)
        self.constants.append((scalars, index, factor))
        hidden = sizes(self.spec.hidden_size)
        self.plan(Op.SCALE, scalars, self.stream, source_offset=index, matrix=hidden, activation=Activation.NONE)

    def mix(self, source: Buffer, factors: Buffer, target: Buffer, *, outputs: int, inputs: int, adds: bool) -> None:
        """Write `outputs` vectors of the hidden size, each a sum of `inputs` others with factors of its own."""
        hidden = self.spec.hidden_size
        source.widen(inputs * hidden)
        target.widen(outputs * hidden)
        mixing = NativeMixing(outputs=outputs, inputs=inputs, width=hidden, adds=adds)
        self.recurrent(Op.MIX, mixing, x=(source, 0), factors=(factors, 0), y=(target, 0))

    def convolve(
        self, weight: Tensor, bias: Tensor | None, state: LayerState, offset: int, target: Buffer, *, is_silu: bool
    ) -> None:
        """Convolve the columns of `projected` from `offset` on."""
        taps, channels = weight.shape
        target.widen(channels)
        assert state.conv is not None
        convolution = NativeConvolution(
            weight=self.address(weight), bias=self.address(bias), states=state.conv.data_ptr(),
            state_type=STATE_TYPES[state.conv.dtype], channels=channels, taps=taps, is_silu=is_silu,
        )  # fmt: skip
        self.recurrent(Op.CONVOLVE, convolution, x=(self.projected, offset), y=(target, 0))

    def norm_recurred(
        self, weight: Tensor, eps: float, gate_offset: int, groups: int, width: int, *, gate_first: bool
    ) -> None:
        """Norm `recurred` in place, with the gate from column `gate_offset` of `projected` on."""
        norm = NativeGatedNorm(
            weight=self.address(weight), groups=groups, width=width, shares_weight=weight.numel() == width,
            gate_first=gate_first, eps=eps,
        )  # fmt: skip
        self.recurrent(
            Op.GATED_NORM, norm, x=(self.recurred, 0), gate=(self.projected, gate_offset), y=(self.recurred, 0)
        )

    def recurrent(self, op: Op, description: Any, **places: tuple[Buffer, int]) -> None:
        """Write a recurrent operation, or a `mix`. places: the buffer of each input and of the output y, and its first
        column."""
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

    def _unscaled(self, linear: Any) -> tuple[Any, int | None]:
        """Return a layer without the factors of its outputs, and their address; None: it has none."""
        return (linear.linear, self.address(linear.factors)) if isinstance(linear, ScaledOutputs) else (linear, None)

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

    def normed_by(self, norm: RMSNorm | LayerNorm | Tensor | None) -> NativeNorm:
        """Return the norm, or the factors of each column."""
        if isinstance(norm, Tensor):
            return NativeNorm(NormKind.SCALE, self.address(norm))
        if isinstance(norm, GatedNorm):
            raise NotSupportedNatively("gated norms")
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


def _lowered(plan: _Planned) -> NativeOperation:
    source, target = plan.source.values, plan.target.values
    return NativeOperation(
        op=plan.op, x=source.data_ptr() + 4 * plan.source_offset, x_stride=source.stride(0),
        y=target.data_ptr() + 4 * plan.offset, y_stride=target.stride(0), **plan.fields,
    )  # fmt: skip


def sizes(width: int) -> NativeMatrix:
    """Return a matrix without weights, for operations that need only its size."""
    return NativeMatrix(outputs=width, inputs=width)
