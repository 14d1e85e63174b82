"""Gemma 4's layers in the list of operations of a decode step (lone_step.py).

    ATTEND ... ADD                  as for every layer with norms on both sides
    ADD, ROUTE, EXPERTS ..., ADD    with experts: their outputs and the dense part's are normed and added up
    LINEAR, MULTIPLY, LINEAR        the gate of the layer's embedding, times the embedding, and the matrix back
    SCALE, ADD                      the stream times the layer's number; then the part that was not yet added

Does not know: how operations become structures of the library.
"""

from __future__ import annotations

from typing import Any

from localllm.kernels.cpu.native.structures import Activation, Op
from localllm.kernels.layer_kv import LayerKV
from localllm.models.architectures.layer import Gemma4Layer
from localllm.models.layers.moe import ExpertsOfStream
from localllm.models.layers.per_layer_input import PerLayerGate
from localllm.models.lone_writer import Buffer, Writer, sizes


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
