"""The ways in which a layer's two parts, attention and feed-forward, are connected to the residual stream.

    PreNormLayer    Llama's: each part reads the normed stream and is added to it
    SandwichLayer   Gemma's: each part's output is also normed before it is added
    Gemma4Layer     a SandwichLayer with experts beside the feed-forward part, a per-layer embedding, and a factor
    Gemma3nLayer    several residual streams, of which attention and feed-forward compute one (layers/altup.py)
    PostNormLayer   OLMo 2's: only the outputs are normed
    ParallelLayer   GPT-J's: both parts read the same stream, and are added together
    SummedLayer     a ParallelLayer of a tensor-parallel shard
    Scaled          a part whose output is multiplied before it is added (Granite)

Between layers the stream is two tensors: `residual`, and `delta`, the previous layer's output that is still to be
added.
The addition and the following norm are then one kernel (kernels/rms_norm.py).
Does not know: families, specs, what the parts do inside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from localllm.kernels.layer_kv import LayerKV
from localllm.models.layers.altup import AltUp, Laurel
from localllm.models.layers.attention import AttentionStep
from localllm.models.layers.group import Group
from localllm.models.layers.moe import ExpertsOfStream
from localllm.models.layers.per_layer_input import PerLayerGate


class Norm(Protocol):
    def __call__(self, x: Tensor) -> Tensor: ...

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add x to residual in place; return the norm of the sum."""
        ...


class AttentionPart(Protocol):
    def __call__(self, x: Tensor, kv: LayerKV, step: AttentionStep) -> Tensor:
        """Map x [T, hidden] to a fresh tensor [T, hidden]; writes the step's keys and values into the cache."""
        ...


class FeedForward(Protocol):
    def __call__(self, x: Tensor, slot_mapping: Tensor) -> Tensor:
        """Map x [T, hidden] to a fresh tensor [T, hidden]. Rows with a slot below 0 are padding, with any result."""
        ...


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers of one kind share an attention plan and a rotation within a step."""

    windowed: bool
    has_rope: bool


class DecoderLayer(Protocol):
    @property
    def kind(self) -> LayerKind: ...

    def __call__(self, residual: Tensor, delta: Tensor | None, kv: LayerKV, step: AttentionStep) -> Tensor | None:
        """Add delta to residual [T, hidden] in place, run the layer, and return the next delta; None: all is added."""
        ...


@dataclass(frozen=True, slots=True)
class PreNormLayer:
    kind: LayerKind
    input_norm: Norm
    attention: AttentionPart
    mlp_norm: Norm
    mlp: FeedForward

    def __call__(self, residual: Tensor, delta: Tensor | None, kv: LayerKV, step: AttentionStep) -> Tensor:
        x = self.attention(_enter(self.input_norm, residual, delta), kv, step)
        return self.mlp(self.mlp_norm.add(x, residual), step.slot_mapping)


@dataclass(frozen=True, slots=True)
class SandwichLayer:
    kind: LayerKind
    input_norm: Norm
    attention: AttentionPart
    attention_post_norm: Norm
    mlp_norm: Norm
    mlp: FeedForward
    mlp_post_norm: Norm

    def __call__(self, residual: Tensor, delta: Tensor | None, kv: LayerKV, step: AttentionStep) -> Tensor:
        x = self.attention_post_norm(self.attention(_enter(self.input_norm, residual, delta), kv, step))
        return self.mlp_post_norm(self.mlp(self.mlp_norm.add(x, residual), step.slot_mapping))


@dataclass(frozen=True, slots=True)
class Gemma4Layer:
    """stream += post_norm(attention(norm(stream)))
    stream += post_norm(dense_post_norm(mlp(norm(stream))) + experts(stream))      without experts: post_norm(mlp(...))
    stream += per_layer(stream, the layer's embedding)                             if the model has them
    stream *= scalar

    The last part is returned and not yet added, so its norm's weight already contains the scalar.
    """

    kind: LayerKind
    input_norm: Norm
    attention: AttentionPart
    attention_post_norm: Norm
    mlp_norm: Norm
    mlp: FeedForward
    mlp_post_norm: Norm
    experts: ExpertsOfStream | None
    dense_post_norm: Norm | None  # only with experts
    per_layer: PerLayerGate | None
    index: int  # of the layer's embedding
    scalar: float

    def __call__(self, residual: Tensor, delta: Tensor | None, kv: LayerKV, step: AttentionStep) -> Tensor:
        x = self.attention_post_norm(self.attention(_enter(self.input_norm, residual, delta), kv, step))
        x = self.mlp(self.mlp_norm.add(x, residual), step.slot_mapping)
        if self.experts is not None and self.dense_post_norm is not None:
            x = self.dense_post_norm(x).add_(self.experts(residual, step.slot_mapping))
        x = self.mlp_post_norm(x)
        if self.per_layer is not None:
            assert step.layer_inputs is not None, "the model computes per-layer embeddings"
            x = self.per_layer(residual.add_(x), step.layer_inputs[:, self.index])
        residual.mul_(self.scalar)
        return x


@dataclass(frozen=True, slots=True)
class Gemma3nLayer:
    """`residual` is all streams, [T, streams, hidden]."""

    kind: LayerKind
    altup: AltUp
    input_norm: Norm
    laurel: Laurel
    attention: AttentionPart
    attention_post_norm: Norm
    mlp_norm: Norm
    mlp: FeedForward
    mlp_post_norm: Norm
    per_layer: PerLayerGate
    index: int  # of the layer's embedding

    def __call__(self, residual: Tensor, delta: Tensor | None, kv: LayerKV, step: AttentionStep) -> None:
        assert step.layer_inputs is not None, "the model computes per-layer embeddings"
        predicted = self.altup.predict(residual)
        active = predicted[:, self.altup.active]
        x = self.input_norm(active)
        beside = self.laurel(x)
        x = self.attention_post_norm(self.attention(x, kv, step)).add_(active).add_(beside).mul_(2**-0.5)
        x = x.add_(self.mlp_post_norm(self.mlp(self.mlp_norm(x), step.slot_mapping)))
        corrected = self.altup.correct(predicted, x)
        given = self.per_layer(self.altup.output(corrected), step.layer_inputs[:, self.index])
        corrected[:, 1:] += given[:, None]  # all streams but the first
        residual.copy_(corrected)


@dataclass(frozen=True, slots=True)
class PostNormLayer:
    kind: LayerKind
    attention: AttentionPart
    attention_post_norm: Norm
    mlp: FeedForward
    mlp_post_norm: Norm

    def __call__(self, residual: Tensor, delta: Tensor | None, kv: LayerKV, step: AttentionStep) -> Tensor:
        x = residual if delta is None else residual.add_(delta)
        residual.add_(self.attention_post_norm(self.attention(x, kv, step)))
        return self.mlp_post_norm(self.mlp(residual, step.slot_mapping))


@dataclass(frozen=True, slots=True)
class ParallelLayer:
    kind: LayerKind
    input_norm: Norm
    attention: AttentionPart
    mlp_norm: Norm | None  # None: the feed-forward reads what attention reads
    mlp: FeedForward

    def __call__(self, residual: Tensor, delta: Tensor | None, kv: LayerKV, step: AttentionStep) -> Tensor:
        x = _enter(self.input_norm, residual, delta)
        y = x if self.mlp_norm is None else self.mlp_norm(residual)
        return self.attention(x, kv, step).add_(self.mlp(y, step.slot_mapping))


@dataclass(frozen=True, slots=True)
class SummedLayer:
    """A `ParallelLayer` of a shard: the sum of its two parts is added up over all shards, at once."""

    layer: ParallelLayer
    group: Group

    @property
    def kind(self) -> LayerKind:
        return self.layer.kind

    def __call__(self, residual: Tensor, delta: Tensor | None, kv: LayerKV, step: AttentionStep) -> Tensor:
        return self.group.sum_(self.layer(residual, delta, kv, step))


class Scaled:
    """A part, attention or feed-forward, whose output is multiplied by a factor."""

    __slots__ = ("factor", "part")

    def __init__(self, part: Callable[..., Tensor], factor: float) -> None:
        self.part, self.factor = part, factor

    def __call__(self, *inputs: Any) -> Tensor:
        return self.part(*inputs).mul_(self.factor)


def _enter(norm: Norm, residual: Tensor, delta: Tensor | None) -> Tensor:
    """Return the normed stream, after adding delta to it; the first layer has no delta."""
    return norm(residual) if delta is None else norm.add(delta, residual)
