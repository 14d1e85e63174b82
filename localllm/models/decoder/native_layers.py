"""The operations of recurrent parts and of Gemma 4's layers in a decode step's list (native_program.py).

A recurrent part, up to its last projection:

    LINEAR      norm, then all that one matrix makes: [B | C | x], [q | k | v | z | b | a] or [z | x | B | C | dt]
    CONVOLVE    the causal convolution, between two MULTIPLY for LFM2
    DELTA       the gated delta rule, or SCAN: Mamba-2's
    GATED_NORM  with its gate (MULTIPLY for a gate without a norm)

A layer of Gemma 4:

    ATTEND ... ADD                  as for every layer with norms on both sides
    ADD, ROUTE, EXPERTS ..., ADD    with experts: their outputs and the dense part's are normed and added up
    LINEAR, MULTIPLY, LINEAR        the gate of the layer's embedding, times the embedding, and the matrix back
    SCALE, ADD                      the stream times the layer's number; then the part that was not yet added

Does not know: how operations become structures of the library.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from localllm.kernels.cpu.native.structures import (
    Activation,
    NativeConvolution,
    NativeGatedDelta,
    NativeGatedNorm,
    NativeSelectiveScan,
    Op,
)
from localllm.kernels.cpu.recurrent import STATE_TYPES
from localllm.kernels.layer_cache import LayerKV, LayerState
from localllm.models.decoder.layer import Gemma4Layer
from localllm.models.decoder.native_writer import Buffer, Writer, sizes
from localllm.models.layers.gemma import PerLayerGate
from localllm.models.layers.moe import ExpertsOfStream
from localllm.models.layers.recurrent import GatedDeltaNet, Mamba2, ShortConv


def write_recurrence(writer: Writer, part: object, state: LayerState, norm: Any) -> None:
    """Write the operations of `part` on the stream; the result is in the writer's buffer `recurred`."""
    if isinstance(part, ShortConv):
        _short_conv(writer, part, state, norm)
    elif isinstance(part, GatedDeltaNet):
        _gated_delta(writer, part, state, norm)
    else:
        assert isinstance(part, Mamba2), type(part)
        _mamba2(writer, part, state, norm)


def _short_conv(writer: Writer, part: ShortConv, state: LayerState, norm: Any) -> None:
    width = part.weight.shape[1]
    writer.linear(part.in_proj, writer.stream, writer.projected, norm=norm)
    writer.multiply(writer.projected, 0, writer.projected, 2 * width, width)
    _convolve(writer, part.weight, part.bias, state, 2 * width, writer.recurred, is_silu=False)
    writer.multiply(writer.projected, width, writer.recurred, 0, width)


def _gated_delta(writer: Writer, part: GatedDeltaNet, state: LayerState, norm: Any) -> None:
    heads = part.heads
    channels, values, count, _ = heads.parts
    keys = heads.key_heads * heads.key_dim
    writer.linear(part.in_proj, writer.stream, writer.projected, norm=norm)
    _convolve(writer, part.weight, None, state, 0, writer.mixed, is_silu=True)
    writer.recurred.widen(values)
    assert state.matrix is not None
    rule = NativeGatedDelta(
        rate=writer.address(part.rate), dt_bias=writer.address(part.dt_bias), states=state.matrix.data_ptr(),
        key_heads=heads.key_heads, heads=heads.value_heads, key_dim=heads.key_dim, value_dim=heads.value_dim,
        is_tiled=heads.tiled,
    )  # fmt: skip
    writer.recurrent(
        Op.DELTA, rule, q=(writer.mixed, 0), k=(writer.mixed, keys), v=(writer.mixed, 2 * keys),
        a=(writer.projected, channels + values + count), b=(writer.projected, channels + values),
        y=(writer.recurred, 0),
    )  # fmt: skip
    _norm(writer, part.norm, part.eps, channels, heads.value_heads, heads.value_dim, gate_first=False)


def _mamba2(writer: Writer, part: Mamba2, state: LayerState, norm: Any) -> None:
    heads = part.heads
    width, columns = heads.width, heads.groups * heads.state_size
    writer.linear(part.in_proj, writer.stream, writer.projected, norm=norm)
    _convolve(writer, part.weight, part.bias, state, width, writer.mixed, is_silu=True)
    writer.recurred.widen(width)
    assert state.matrix is not None
    scan = NativeSelectiveScan(
        rate=writer.address(part.rate), dt_bias=writer.address(part.dt_bias), skip=writer.address(part.skip),
        states=state.matrix.data_ptr(), heads=heads.heads, groups=heads.groups, head_dim=heads.head_dim,
        state_size=heads.state_size, least=part.limits[0], most=part.limits[1],
    )  # fmt: skip
    writer.recurrent(
        Op.SCAN, scan, x=(writer.mixed, 0), dt=(writer.projected, 2 * width + 2 * columns),
        b=(writer.mixed, width), c=(writer.mixed, width + columns), y=(writer.recurred, 0),
    )  # fmt: skip
    if part.norm is None:
        writer.multiply(writer.projected, 0, writer.recurred, 0, width, Activation.SILU)
    else:
        _norm(writer, part.norm, part.eps, 0, heads.groups, width // heads.groups, gate_first=part.gate_first)


def _convolve(
    writer: Writer,
    weight: Tensor,
    bias: Tensor | None,
    state: LayerState,
    offset: int,
    target: Buffer,
    *,
    is_silu: bool,
) -> None:
    """Convolve the columns of `projected` from `offset` on."""
    taps, channels = weight.shape
    target.widen(channels)
    assert state.conv is not None
    convolution = NativeConvolution(
        weight=writer.address(weight), bias=writer.address(bias), states=state.conv.data_ptr(),
        state_type=STATE_TYPES[state.conv.dtype], channels=channels, taps=taps, is_silu=is_silu,
    )  # fmt: skip
    writer.recurrent(Op.CONVOLVE, convolution, x=(writer.projected, offset), y=(target, 0))


def _norm(
    writer: Writer, weight: Tensor, eps: float, gate_offset: int, groups: int, width: int, *, gate_first: bool
) -> None:
    """Norm `recurred` in place, with the gate from column `gate_offset` of `projected` on."""
    norm = NativeGatedNorm(
        weight=writer.address(weight), groups=groups, width=width, shares_weight=weight.numel() == width,
        gate_first=gate_first, eps=eps,
    )  # fmt: skip
    writer.recurrent(
        Op.GATED_NORM, norm, x=(writer.recurred, 0), gate=(writer.projected, gate_offset), y=(writer.recurred, 0)
    )


def write_gemma4(writer: Writer, layer: Gemma4Layer, kv: LayerKV) -> None:
    """Write one layer."""
    writer.attend(layer.attention, layer.kind, kv, layer.input_norm)
    writer.project(layer.attention, writer.part)
    writer.add_part(layer.attention_post_norm)
    writer.feed(layer.mlp, layer.mlp_norm)
    writer.shrink(layer.mlp, writer.part)
    last, norm = writer.part, layer.mlp_post_norm  # the buffer and the norm of what is still to be added
    if layer.experts is not None:
        last = _add_experts(writer, layer.experts, layer.dense_post_norm)
    if layer.per_layer is not None:
        writer.add(last, writer.stream, norm)
        _multiply_by_input(writer, layer.per_layer, layer.index)
        last, norm = writer.part, layer.per_layer.norm
    _scale_stream(writer, layer.index, layer.scalar)
    writer.add(last, writer.stream, norm)


def _add_experts(writer: Writer, experts: ExpertsOfStream, dense_post_norm: Any) -> Buffer:
    """Add up the normed outputs of the dense part, which is in `part`, and of the experts. Return their buffer."""
    both = writer.others["both"]
    writer.add(writer.part, both, dense_post_norm, adds=False)
    writer.choose_experts(experts.mixture, experts.norm, experts.router_norm)
    writer.shrink(experts.mixture, writer.part)
    writer.add(writer.part, both, experts.post_norm)
    return both


def _multiply_by_input(writer: Writer, per_layer: PerLayerGate, index: int) -> None:
    """Write to `part` what the layer's embedding adds to the stream, before its norm."""
    width, given, gate = per_layer.gate.weight.shape[0], writer.others["layer_inputs"], writer.others["gate"]
    given.widen(width * (index + 1))
    writer.linear(per_layer.gate, writer.stream, gate, activation=writer.activation)
    writer.multiply(given, index * width, gate, 0, width)
    writer.linear(per_layer.up, gate, writer.part)


def _scale_stream(writer: Writer, index: int, scalar: float) -> None:
    hidden, scalars = writer.model.spec.hidden_size, writer.others["scalars"]
    scalars.widen(index + 1)
    writer.constants.append((scalars, index, scalar))
    writer.plan(
        Op.SCALE, scalars, writer.stream, source_offset=index, matrix=sizes(hidden), activation=Activation.NONE
    )  # fmt: skip
