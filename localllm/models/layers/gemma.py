"""The parts of Gemma 3n and Gemma 4: AltUp, LAuReL and per-layer embeddings.

AltUp (Gemma 3n) has several residual streams, of which a layer computes one and predicts the others (arXiv:2301.13310);
LAuReL is a low-rank matrix beside attention (arXiv:2411.07501). The streams of a step are one tensor
[T, streams, hidden].
With per-layer embeddings every layer adds a small vector of the token to the stream, behind a gate:

    given  = (norm(projection(embeds)) + table[token] * sqrt(size)) / sqrt(2)      once per step, [T, layers, size]
    stream = stream + norm(up(act(gate(stream)) * given[:, layer]))                at the end of each layer

The table is a model's largest tensor and is only read by rows, so it keeps its stored type.
Does not know: where tensors come from, what the computed part of a layer is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.cpu.native.structures import Activation, Op
from localllm.models.inputs import GivenEmbeds
from localllm.models.layers.embedding import EmbeddingTable
from localllm.models.layers.linear import Linear
from localllm.models.layers.mlp import UNGATED
from localllm.models.layers.native_writer import Buffer, Writer, sizes
from localllm.models.layers.norm import LayerNorm, RMSNorm
from localllm.models.spec.model_spec import PerLayerInputSpec

LEAST_SQUARE = 1e-5
"""Least mean of squares of a stream whose magnitude is changed."""


class AltUp:
    """One layer's prediction of all streams, and their correction once the layer has computed one."""

    __slots__ = ("active", "correction", "output_scale", "prediction", "router", "router_norm")

    def __init__(
        self,
        active: int,
        router: Tensor,
        router_norm: RMSNorm,
        prediction: Tensor,
        correction: Tensor,
        output_scale: Tensor | None,
    ) -> None:
        """active: index of the computed stream. router [streams, hidden], prediction [streams * streams, streams],
        correction [streams, streams] and output_scale [hidden] in the model's type; router_norm: its output is already
        scaled for the router."""
        self.active, self.router, self.router_norm = active, router, router_norm
        self.prediction, self.correction, self.output_scale = prediction, correction, output_scale

    @property
    def num_streams(self) -> int:
        return len(self.router)

    def predict(self, streams: Tensor) -> Tensor:
        """Return a fresh [T, streams, hidden]: stream j plus a mixture of all streams."""
        count = streams.shape[1]
        mixture = F.linear(self._modalities(streams[:, self.active]), self.prediction).view(-1, count, count)
        return torch.baddbmm(streams, mixture, streams)

    def correct(self, predicted: Tensor, computed: Tensor) -> Tensor:
        """Correct the predicted streams in place, by how `computed` [T, hidden] differs from its prediction."""
        factors = F.linear(self._modalities(computed), self.correction).add_(1.0)
        innovation = computed - predicted[:, self.active]
        return predicted.add_(factors[:, :, None] * innovation[:, None])

    def output(self, streams: Tensor) -> Tensor:
        """Return the computed stream as the per-layer embedding's gate reads it."""
        active = streams[:, self.active]
        return active.contiguous() if self.output_scale is None else active * self.output_scale

    def write_prediction(self, writer: Writer, streams: Buffer, predicted: Buffer) -> None:
        """Write the operations of `predict`. The computed stream is also put into the writer's."""
        count, hidden = self.num_streams, writer.spec.hidden_size
        place, factors = self.active * hidden, writer.others["factors"]
        writer.copy(streams, place, writer.stream, 0, hidden)
        self._write_factors(writer, Linear(self.prediction), factors)
        writer.copy(streams, 0, predicted, 0, count * hidden)
        writer.mix(streams, factors, predicted, outputs=count, inputs=count, adds=True)
        writer.copy(predicted, place, writer.stream, 0, hidden)

    def write_correction(self, writer: Writer, predicted: Buffer) -> None:
        """Write the operations of `correct`, of what the writer's stream holds, and of `output`, which goes there."""
        count, hidden = self.num_streams, writer.spec.hidden_size
        place, factors, innovation = self.active * hidden, writer.others["factors"], writer.others["innovation"]
        self._write_factors(writer, Linear(self.correction, torch.ones(count)), factors)
        innovation.widen(hidden)
        writer.copy(writer.stream, 0, innovation, 0, hidden)
        writer.plan(
            Op.ADD, predicted, innovation, source_offset=place, matrix=sizes(hidden), adds=True, factor=-1.0
        )  # fmt: skip
        writer.mix(innovation, factors, predicted, outputs=count, inputs=1, adds=True)
        writer.copy(predicted, place, writer.stream, 0, hidden, self.output_scale)

    def _write_factors(self, writer: Writer, matrix: Linear, factors: Buffer) -> None:
        modalities, router = writer.others["modalities"], Linear(self.router)
        writer.linear(router, writer.stream, modalities, norm=self.router_norm, activation=Activation.TANH)
        writer.linear(matrix, modalities, factors)

    def _modalities(self, x: Tensor) -> Tensor:
        """Return the router's outputs [T, streams] in the model's type."""
        return F.linear(self.router_norm(x), self.router).float().tanh_().to(x.dtype)


class AltUpEnds:
    """The streams made of the embeddings, and joined again after the last layer. A pipeline stage may have neither."""

    __slots__ = ("embed", "unembed")

    def __init__(self, embed: Sequence[Linear] | None, unembed: Sequence[Linear] | None) -> None:
        """Matrices [hidden, hidden] of all streams but the first, which is the embeddings themselves. None: another
        stage has them."""
        self.embed, self.unembed = embed, unembed

    def spread(self, embeds: Tensor) -> Tensor:
        """Map [T, hidden] to streams [T, streams, hidden], all as long as the first."""
        assert self.embed is not None
        wanted = _magnitude(embeds)
        return torch.stack([embeds, *(_resized(matrix(embeds), wanted) for matrix in self.embed)], dim=1)

    def join(self, streams: Tensor) -> Tensor:
        """Map streams [T, streams, hidden] to their mean [T, hidden]."""
        assert self.unembed is not None
        first, *others = streams.unbind(1)
        wanted = _magnitude(first)
        changed = [
            _resized(matrix(each.contiguous()), wanted) for matrix, each in zip(self.unembed, others, strict=True)
        ]
        return torch.stack([first, *changed]).mean(0)

    def write_spread(self, writer: Writer) -> None:
        """Write the operations of `spread`, of what the writer's stream holds."""
        assert self.embed is not None
        streams = streams_before(writer, 0)
        writer.add(writer.stream, streams, None, adds=False)
        for place, matrix in enumerate(self.embed, 1):
            _write_resized(writer, matrix, writer.stream)
            writer.add(writer.part, streams, None, place * writer.spec.hidden_size, adds=False)

    def write_join(self, writer: Writer, streams: Buffer) -> None:
        """Write the operations of `join`; the result is the writer's stream."""
        assert self.unembed is not None
        hidden, each, sums = writer.spec.hidden_size, writer.others["each"], writer.others["sums"]
        matrix, share = sizes(hidden), 1 / (1 + len(self.unembed))
        writer.copy(streams, 0, writer.stream, 0, hidden)
        sums.widen(hidden)
        writer.plan(Op.ADD, writer.stream, sums, matrix=matrix, factor=share)
        for place, unembed in enumerate(self.unembed, 1):
            writer.copy(streams, place * hidden, each, 0, hidden)
            _write_resized(writer, unembed, each)
            writer.plan(Op.ADD, writer.part, sums, matrix=matrix, adds=True, factor=share)
        writer.copy(sums, 0, writer.stream, 0, hidden)


def streams_before(writer: Writer, layer: int) -> Buffer:
    """Return the buffer of the streams that a layer of a list reads, or after the last one, which are joined."""
    return writer.others[f"streams {layer % 2}"]


def _write_resized(writer: Writer, matrix: Linear, source: Buffer) -> None:
    """Write the product, as long as the writer's stream, to the buffer `part`."""
    writer.linear(matrix, source, writer.part)
    hidden = sizes(writer.spec.hidden_size)
    writer.plan(Op.RESIZE, writer.stream, writer.part, matrix=hidden, limit=math.sqrt(LEAST_SQUARE))


class Laurel:
    """x plus the normed product of two low-rank matrices with x."""

    __slots__ = ("left", "norm", "right")

    def __init__(self, left: Linear, right: Linear, norm: RMSNorm | LayerNorm) -> None:
        self.left, self.right, self.norm = left, right, norm

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, hidden] to a fresh tensor [T, hidden]."""
        return self.norm(self.right(self.left(x))).add_(x)

    def write(self, writer: Writer, norm: Any, target: Buffer) -> None:
        """Write the operations for x = norm(stream); the result goes to `target`."""
        low, wide = writer.others["low"], writer.others["wide"]
        writer.linear(self.left, writer.stream, low, norm=norm)
        writer.linear(self.right, low, wide)
        writer.add(writer.stream, target, norm, adds=False)
        writer.add(wide, target, self.norm)


def _magnitude(x: Tensor) -> Tensor:
    return x.float().square().mean(-1, keepdim=True).sqrt_()


def _resized(x: Tensor, magnitude: Tensor) -> Tensor:
    wide = x.float()
    own = wide.square().mean(-1, keepdim=True).clamp_min_(LEAST_SQUARE).sqrt_()
    return (wide * magnitude / own).to(x.dtype)


class PerLayerInputs:
    """The vectors of a step's tokens for all layers."""

    __slots__ = ("norm", "projection", "sizes", "table")

    def __init__(self, table: EmbeddingTable, projection: Linear, norm: RMSNorm, sizes: PerLayerInputSpec) -> None:
        """projection: [layers * size, hidden]. norm: of each layer's part of its output."""
        self.table, self.projection, self.norm, self.sizes = table, projection, norm, sizes

    def __call__(
        self, token_ids: Tensor, positions: Tensor, embeds: Tensor, given_embeds: GivenEmbeds | None = None
    ) -> Tensor:
        """Return [T, layers, size]. embeds [T, hidden]: the tokens' embeddings as the first layer reads them.
        given_embeds: those that are rows of pictures; padding stands for their tokens."""
        known: Tensor = token_ids.masked_fill(token_ids >= self.sizes.vocab_size, 0)
        if given_embeds is not None:
            known = known.index_fill(0, given_embeds.places, self.sizes.pad_id)
        given: Tensor = self.table(known, positions).unflatten(1, (-1, self.sizes.size))
        return given.add_(self.norm(self.projection(embeds).view(given.shape))).mul_(2**-0.5)


class PerLayerGate:
    """One layer's use of its vector; returns what is added to the stream."""

    __slots__ = ("activation", "gate", "norm", "up")

    def __init__(self, gate: Linear, up: Linear, norm: RMSNorm | LayerNorm, activation: str) -> None:
        self.gate, self.up, self.norm, self.activation = gate, up, norm, UNGATED[activation]

    def __call__(self, stream: Tensor, given: Tensor) -> Tensor:
        """Map the stream [T, hidden], and the layer's vectors [T, size], to a fresh tensor [T, hidden]."""
        return self.norm(self.up(self.activation(self.gate(stream)).mul_(given)))

    def write(self, writer: Writer, index: int) -> None:
        """Write to the buffer `part` what vector `index` adds to the stream, before the norm."""
        width, given, gate = self.gate.weight.shape[0], writer.others["layer_inputs"], writer.others["gate"]
        given.widen(width * (index + 1))
        writer.linear(self.gate, writer.stream, gate, activation=writer.activation)
        writer.multiply(given, index * width, gate, 0, width)
        writer.linear(self.up, gate, writer.part)
