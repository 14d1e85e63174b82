"""The ways in which a layer's two parts, attention and feed-forward, are connected to the residual stream. A recurrent
part may replace attention, or stand beside it.

    PreNormLayer    Llama's: each part reads the normed stream and is added to it
    SandwichLayer   Gemma's: each part's output is also normed before it is added
    Gemma4Layer     a SandwichLayer with experts beside the feed-forward part, a per-layer embedding, and a factor
    Gemma3nLayer    several residual streams, of which attention and feed-forward compute one (layers/gemma.py)
    PostNormLayer   OLMo 2's: only the outputs are normed
    ParallelLayer   GPT-J's: both parts read the same stream, and are added together
    SummedLayer     a ParallelLayer of a tensor-parallel shard
    CrossLayer      an encoder-decoder's: attention, cross-attention to the source, feed-forward; each part reads the
                    normed stream, or each sum is normed (BART)
    SingleLayer     Nemotron-H's: a norm and one part of any kind
    Scaled          a part whose output is multiplied before it is added (Granite)
    RecurrentPart   a recurrent part instead of attention (Qwen3.5)
    SideBySide      attention and a recurrent part that read the same stream, added together (Falcon-H1)

Between layers the stream is two tensors: `residual`, and `delta`, the previous layer's output that is still to be
added.
The addition and the following norm are then one kernel (kernels/rms_norm.py).
Each layer also writes itself as operations of a decode step's list (native_program.py), in the order in which it runs.
Does not know: families, specs, what the parts do inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from localllm.kernels.fused_epilogue import PendingNorm, Unfinished, whole
from localllm.kernels.layer_cache import HybridCache, LayerCache, LayerState, StateStep
from localllm.models.layers.attention import AttentionStep, CrossAttention
from localllm.models.layers.gemma import AltUp, Laurel, PerLayerGate, streams_before
from localllm.models.layers.group import Group
from localllm.models.layers.linear import unfinished
from localllm.models.layers.moe import ExpertsOfStream
from localllm.models.layers.native_writer import Buffer, NotSupportedNatively, Writer
from localllm.models.spec.recurrent import LayerPart

Delta = Unfinished
"""What a layer adds to the stream. The next norm adds it, and may have to finish a product before."""


class Norm(Protocol):
    def __call__(self, x: Tensor) -> Tensor: ...

    def add(self, x: Unfinished, residual: Tensor) -> Tensor:
        """Add x to residual in place; return the norm of the sum."""
        ...

    def add_pending(self, x: Unfinished, residual: Tensor) -> Tensor | PendingNorm:
        """Do the same, but leave the last step of the norm to the reader where that saves a kernel."""
        ...


@dataclass(frozen=True, slots=True)
class RecurrentStep:
    """A step's inputs to layers of a kind that is not attention alone."""

    slot_mapping: Tensor  # [T] int64, below 0 in padding rows
    state: StateStep | None  # None: the layer has no recurrent part
    attention: AttentionStep | None = None  # None: it has no attention


LayerStep = AttentionStep | RecurrentStep


class MixerPart(Protocol):
    """Attention, or what replaces it: the part of a layer that mixes a request's tokens."""

    def __call__(self, x: Tensor, cache: Any, step: Any, /) -> Tensor:
        """Map x [T, hidden] to a fresh tensor [T, hidden]; writes the step's keys and values, or states, into the
        cache. cache and step are of the part's kind."""
        ...

    def write(self, writer: Writer, kind: LayerKind, cache: Any, norm: Any, /) -> None:
        """Write the operations up to the last projection. Raises `NotSupportedNatively`."""
        ...

    def write_out(self, writer: Writer, target: Buffer, factor: float = 1.0, /) -> None:
        """Write the last projection: added to the stream, or written to another buffer."""
        ...


class Recurrence(Protocol):
    def __call__(self, x: Tensor, state: LayerState, step: StateStep, /) -> Tensor:
        """Map x [T, hidden] to a fresh tensor [T, hidden]; writes the states of the step's rows."""
        ...

    def write(self, writer: Writer, state: LayerState, norm: Any, /) -> None: ...

    def write_out(self, writer: Writer, target: Buffer, factor: float = 1.0, /, *, adds: bool = False) -> None: ...


class FeedForward(Protocol):
    def __call__(self, x: Tensor, slot_mapping: Tensor, /) -> Tensor:
        """Map x [T, hidden] to a fresh tensor [T, hidden]. Rows with a slot below 0 are padding, with any result."""
        ...

    def write(self, writer: Writer, norm: Any, /) -> None:
        """Write the operations up to the last matrix. Raises `NotSupportedNatively`."""
        ...

    def write_out(self, writer: Writer, target: Buffer, factor: float = 1.0, /) -> None: ...


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers of one kind share an attention plan and a rotation within a step."""

    windowed: bool
    has_rope: bool
    part: LayerPart = "attention"


class DecoderLayer(Protocol):
    @property
    def kind(self) -> LayerKind: ...

    def __call__(
        self, residual: Tensor, delta: Delta | None, cache: LayerCache | None, step: LayerStep
    ) -> Delta | None:
        """Add delta to residual [T, hidden] in place, run the layer, and return the next delta; None: all is added.
        cache: None for a layer that keeps nothing."""
        ...

    def write(self, writer: Writer, cache: Any, /) -> None:
        """Write the layer's operations. Raises `NotSupportedNatively` with the reason."""
        ...


@dataclass(frozen=True, slots=True)
class PreNormLayer:
    kind: LayerKind
    input_norm: Norm
    attention: MixerPart
    mlp_norm: Norm
    mlp: FeedForward

    def __call__(self, residual: Tensor, delta: Delta | None, cache: LayerCache | None, step: LayerStep) -> Delta:
        x = self.input_norm(residual) if delta is None else self.input_norm.add_pending(delta, residual)
        y = unfinished(self.attention, x, cache, step)
        return unfinished(self.mlp, self.mlp_norm.add_pending(y, residual), step.slot_mapping)

    def write(self, writer: Writer, cache: Any) -> None:
        self.attention.write(writer, self.kind, cache, self.input_norm)
        self.attention.write_out(writer, writer.stream)
        self.mlp.write(writer, self.mlp_norm)
        self.mlp.write_out(writer, writer.stream)


@dataclass(frozen=True, slots=True)
class SandwichLayer:
    kind: LayerKind
    input_norm: Norm
    attention: MixerPart
    attention_post_norm: Norm
    mlp_norm: Norm
    mlp: FeedForward
    mlp_post_norm: Norm

    def __call__(self, residual: Tensor, delta: Delta | None, cache: LayerCache | None, step: LayerStep) -> Tensor:
        x = self.attention_post_norm(self.attention(_enter(self.input_norm, residual, delta), cache, step))
        return self.mlp_post_norm(self.mlp(self.mlp_norm.add(x, residual), step.slot_mapping))

    def write(self, writer: Writer, cache: Any) -> None:
        self.attention.write(writer, self.kind, cache, self.input_norm)
        self.attention.write_out(writer, writer.part)
        writer.add(writer.part, writer.stream, self.attention_post_norm)
        self.mlp.write(writer, self.mlp_norm)
        self.mlp.write_out(writer, writer.part)
        writer.add(writer.part, writer.stream, self.mlp_post_norm)


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
    attention: MixerPart
    attention_post_norm: Norm
    mlp_norm: Norm
    mlp: FeedForward
    mlp_post_norm: Norm
    experts: ExpertsOfStream | None
    dense_post_norm: Norm | None  # only with experts
    per_layer: PerLayerGate | None
    index: int  # of the layer's embedding
    scalar: float

    def __call__(self, residual: Tensor, delta: Delta | None, cache: LayerCache | None, step: LayerStep) -> Tensor:
        x = self.attention_post_norm(self.attention(_enter(self.input_norm, residual, delta), cache, step))
        x = self.mlp(self.mlp_norm.add(x, residual), step.slot_mapping)
        if self.experts is not None and self.dense_post_norm is not None:
            x = self.dense_post_norm(x).add_(self.experts(residual, step.slot_mapping))
        x = self.mlp_post_norm(x)
        if self.per_layer is not None:
            assert isinstance(step, AttentionStep), "each layer of such a model attends"
            assert step.layer_inputs is not None, "the model computes per-layer embeddings"
            x = self.per_layer(residual.add_(x), step.layer_inputs[:, self.index])
        residual.mul_(self.scalar)
        return x

    def write(self, writer: Writer, cache: Any) -> None:
        self.attention.write(writer, self.kind, cache, self.input_norm)
        self.attention.write_out(writer, writer.part)
        writer.add(writer.part, writer.stream, self.attention_post_norm)
        self.mlp.write(writer, self.mlp_norm)
        self.mlp.write_out(writer, writer.part)
        last, norm = writer.part, self.mlp_post_norm  # the buffer and the norm of what is still to be added
        if self.experts is not None:
            last = writer.others["both"]  # the normed outputs of the dense part and of the experts
            writer.add(writer.part, last, self.dense_post_norm, adds=False)
            self.experts.write(writer, last)
        if self.per_layer is not None:
            writer.add(last, writer.stream, norm)
            self.per_layer.write(writer, self.index)
            last, norm = writer.part, self.per_layer.norm
        writer.scale_stream(self.index, self.scalar)
        writer.add(last, writer.stream, norm)


@dataclass(frozen=True, slots=True)
class Gemma3nLayer:
    """`residual` is all streams, [T, streams, hidden]."""

    kind: LayerKind
    altup: AltUp
    input_norm: Norm
    laurel: Laurel
    attention: MixerPart
    attention_post_norm: Norm
    mlp_norm: Norm
    mlp: FeedForward
    mlp_post_norm: Norm
    per_layer: PerLayerGate
    index: int  # of the layer's embedding

    def __call__(self, residual: Tensor, delta: Delta | None, cache: LayerCache | None, step: LayerStep) -> None:
        assert isinstance(step, AttentionStep), "each layer of such a model attends"
        assert step.layer_inputs is not None, "the model computes per-layer embeddings"
        predicted = self.altup.predict(residual)
        active = predicted[:, self.altup.active]
        x = self.input_norm(active)
        beside = self.laurel(x)
        x = self.attention_post_norm(self.attention(x, cache, step)).add_(active).add_(beside).mul_(2**-0.5)
        x = x.add_(self.mlp_post_norm(self.mlp(self.mlp_norm(x), step.slot_mapping)))
        corrected = self.altup.correct(predicted, x)
        given = self.per_layer(self.altup.output(corrected), step.layer_inputs[:, self.index])
        corrected[:, 1:] += given[:, None]  # all streams but the first
        residual.copy_(corrected)

    def write(self, writer: Writer, cache: Any) -> None:
        streams, beside = streams_before(writer, self.index + 1), writer.others["beside"]
        self.altup.write_prediction(writer, streams_before(writer, self.index), streams)
        self.laurel.write(writer, self.input_norm, beside)
        self.attention.write(writer, self.kind, cache, self.input_norm)
        self.attention.write_out(writer, writer.part)
        writer.add(writer.part, writer.stream, self.attention_post_norm)
        writer.add(beside, writer.stream, None)
        writer.scale_stream(self.index, 2**-0.5)
        self.mlp.write(writer, self.mlp_norm)
        self.mlp.write_out(writer, writer.part)
        writer.add(writer.part, writer.stream, self.mlp_post_norm)
        self.altup.write_correction(writer, streams)
        self.per_layer.write(writer, self.index)
        for place in range(1, self.altup.num_streams):
            writer.add(writer.part, streams, self.per_layer.norm, place * writer.spec.hidden_size)


@dataclass(frozen=True, slots=True)
class PostNormLayer:
    kind: LayerKind
    attention: MixerPart
    attention_post_norm: Norm
    mlp: FeedForward
    mlp_post_norm: Norm

    def __call__(self, residual: Tensor, delta: Delta | None, cache: LayerCache | None, step: LayerStep) -> Tensor:
        x = residual if delta is None else residual.add_(whole(delta))
        residual.add_(self.attention_post_norm(self.attention(x, cache, step)))
        return self.mlp_post_norm(self.mlp(residual, step.slot_mapping))

    def write(self, writer: Writer, cache: Any) -> None:
        self.attention.write(writer, self.kind, cache, None)
        self.attention.write_out(writer, writer.part)
        writer.add(writer.part, writer.stream, self.attention_post_norm)
        self.mlp.write(writer, None)
        self.mlp.write_out(writer, writer.part)
        writer.add(writer.part, writer.stream, self.mlp_post_norm)


@dataclass(frozen=True, slots=True)
class ParallelLayer:
    kind: LayerKind
    input_norm: Norm
    attention: MixerPart
    mlp_norm: Norm | None  # None: the feed-forward reads what attention reads
    mlp: FeedForward

    def __call__(self, residual: Tensor, delta: Delta | None, cache: LayerCache | None, step: LayerStep) -> Tensor:
        x = _enter(self.input_norm, residual, delta)
        y = x if self.mlp_norm is None else self.mlp_norm(residual)
        return self.attention(x, cache, step).add_(self.mlp(y, step.slot_mapping))

    def write(self, writer: Writer, cache: Any) -> None:
        """Both parts read the stream before either is added."""
        self.attention.write(writer, self.kind, cache, self.input_norm)
        self.mlp.write(writer, self.input_norm if self.mlp_norm is None else self.mlp_norm)
        self.attention.write_out(writer, writer.stream)
        self.mlp.write_out(writer, writer.stream)


@dataclass(frozen=True, slots=True)
class SummedLayer:
    """A `ParallelLayer` of a shard: the sum of its two parts is added up over all shards, at once."""

    layer: ParallelLayer
    group: Group

    @property
    def kind(self) -> LayerKind:
        return self.layer.kind

    def __call__(self, residual: Tensor, delta: Delta | None, cache: LayerCache | None, step: LayerStep) -> Tensor:
        return self.group.sum_(self.layer(residual, delta, cache, step))

    def write(self, writer: Writer, cache: Any) -> None:
        raise NotSupportedNatively("the model is split over several ranks")


@dataclass(frozen=True, slots=True)
class CrossLayer:
    kind: LayerKind
    index: int
    norms: tuple[Norm, Norm, Norm]  # of attention, of cross-attention, of the feed-forward part
    attention: MixerPart
    cross: CrossAttention
    mlp: FeedForward
    norms_sums: bool  # norms follow the sums, in place of preceding the parts

    def __call__(self, residual: Tensor, delta: Delta | None, cache: LayerCache | None, step: LayerStep) -> None:
        assert isinstance(step, AttentionStep), "each layer of such a model attends"
        assert step.source is not None, "each row of such a model has a source"
        if delta is not None:
            residual.add_(whole(delta))
        for part, norm in enumerate(self.norms):
            x = residual if self.norms_sums else norm(residual)
            if part == 0:
                y = self.attention(x, cache, step)
            elif part == 1:
                y = self.cross(x, step.source, self.index)
            else:
                y = self.mlp(x, step.slot_mapping)
            residual.add_(y)
            if self.norms_sums:
                residual.copy_(norm(residual))

    def write(self, writer: Writer, cache: Any) -> None:
        for part, norm in enumerate(self.norms):
            before = None if self.norms_sums else norm
            if part == 0:
                self.attention.write(writer, self.kind, cache, before)
                self.attention.write_out(writer, writer.stream)
            elif part == 1:
                self.cross.write(writer, writer.sources[self.index], before)
                self.cross.write_out(writer, writer.stream)
            else:
                self.mlp.write(writer, before)
                self.mlp.write_out(writer, writer.stream)
            if self.norms_sums:
                writer.add(writer.stream, writer.stream, norm, adds=False)


@dataclass(frozen=True, slots=True)
class SingleLayer:
    kind: LayerKind
    norm: Norm
    part: MixerPart | FeedForward

    def __call__(self, residual: Tensor, delta: Delta | None, cache: LayerCache | None, step: LayerStep) -> Tensor:
        x = _enter(self.norm, residual, delta)
        part: Any = self.part
        result: Tensor = part(x, step.slot_mapping) if self.kind.part in ("mlp", "moe") else part(x, cache, step)
        return result

    def write(self, writer: Writer, cache: Any) -> None:
        part: Any = self.part
        if self.kind.part in ("mlp", "moe"):
            part.write(writer, self.norm)
        else:
            part.write(writer, self.kind, cache, self.norm)
        part.write_out(writer, writer.stream)


class RecurrentPart:
    """A recurrent part instead of attention."""

    __slots__ = ("recurrence",)

    def __init__(self, recurrence: Recurrence) -> None:
        self.recurrence = recurrence

    def __call__(self, x: Tensor, cache: LayerState, step: RecurrentStep) -> Tensor:
        assert step.state is not None, "a model with recurrent layers is given the places of their states"
        return self.recurrence(x, cache, step.state)

    def write(self, writer: Writer, kind: LayerKind, cache: LayerState, norm: Any) -> None:
        self.recurrence.write(writer, cache, norm)

    def write_out(self, writer: Writer, target: Buffer, factor: float = 1.0) -> None:
        self.recurrence.write_out(writer, target, factor)


class SideBySide:
    """Attention and a recurrent part that read the same stream, each scaled, and added together."""

    __slots__ = ("attention", "recurrence")

    def __init__(self, attention: MixerPart, recurrence: Recurrence) -> None:
        self.attention, self.recurrence = attention, recurrence

    def __call__(self, x: Tensor, cache: HybridCache, step: RecurrentStep) -> Tensor:
        assert step.state is not None, "a model with recurrent layers is given the places of their states"
        return self.recurrence(x, cache.state, step.state).add_(self.attention(x, cache.kv, step.attention))

    def write(self, writer: Writer, kind: LayerKind, cache: HybridCache, norm: Any) -> None:
        self.attention.write(writer, kind, cache.kv, norm)
        self.recurrence.write(writer, cache.state, norm)

    def write_out(self, writer: Writer, target: Buffer, factor: float = 1.0) -> None:
        self.attention.write_out(writer, target, factor)
        self.recurrence.write_out(writer, target, factor, adds=True)


class Scaled:
    """A part, attention or feed-forward, whose output is multiplied by a factor."""

    __slots__ = ("factor", "part")

    def __init__(self, part: MixerPart | FeedForward | Recurrence, factor: float) -> None:
        self.part: Any = part
        self.factor = factor

    def __call__(self, *inputs: Any) -> Tensor:
        output: Tensor = self.part(*inputs)
        return output.mul_(self.factor)

    def write(self, writer: Writer, *inputs: Any) -> None:
        self.part.write(writer, *inputs)

    def write_out(self, writer: Writer, target: Buffer, factor: float = 1.0, **adds: bool) -> None:
        self.part.write_out(writer, target, factor * self.factor, **adds)


def _enter(norm: Norm, residual: Tensor, delta: Delta | None) -> Tensor:
    """Return the normed stream, after adding delta to it; the first layer has no delta."""
    return norm(residual) if delta is None else norm.add(delta, residual)
