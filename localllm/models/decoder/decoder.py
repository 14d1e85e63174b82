"""One decoder for all families; their differences are in the spec.

Plain objects and functions, no nn.Module: there are no hooks and no lookups in a token's path.
Does not know: requests, schedules, sampling; where the checkpoint's tensors come from (loader.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from localllm.kernels.fused_epilogue import whole
from localllm.kernels.layer_cache import LayerCache, LayerKV, StateStep, kv_of
from localllm.kernels.paged_attention import AttentionPlan
from localllm.kernels.rms_norm import normed
from localllm.kernels.rotary_store_kv import Rotation, has_no_skipped_slot, plan_rotation
from localllm.models.decoder.layer import CrossLayer, DecoderLayer, Delta, LayerKind, LayerStep, Norm, RecurrentStep
from localllm.models.inputs import ForwardInputs
from localllm.models.layers.attention import (
    AttentionStep,
    ChosenKeys,
    SparseStep,
    plan_sources,
    plan_step,
    sparse_step,
)
from localllm.models.layers.embedding import EmbeddingTable
from localllm.models.layers.far import Crossing
from localllm.models.layers.gemma import AltUpEnds, PerLayerInputs
from localllm.models.layers.group import Alone, Group
from localllm.models.layers.linear import Linear
from localllm.models.layers.lora import LoraBank
from localllm.models.layers.rotary import rope_tables
from localllm.models.spec.latent import heads_at_once
from localllm.models.spec.model_spec import (
    FINAL_HIDDEN,
    FINAL_STREAM,
    ModelSpec,
    group_of_layers,
    kv_groups,
    query_heads,
)


class Taps:
    """The features of a step's tokens that a drafter reads, written by `DecoderModel.forward`.

    layers: the layers whose inputs (residual + delta) are kept, FINAL_HIDDEN for the hidden state after the final norm,
    FINAL_STREAM for the stream before this norm.
    features: [T, len(layers) * hidden] in the order of `layers`.
    """

    __slots__ = ("_size", "features", "layers")

    def __init__(self, layers: Sequence[int], features: Tensor) -> None:
        self.layers, self.features = tuple(layers), features
        self._size = features.shape[1] // len(self.layers)

    def keep(self, layer: int, residual: Tensor, delta: Tensor | None) -> None:
        """Keep residual + delta [T, hidden] if it is the feature of this layer."""
        for place, tapped in enumerate(self.layers):
            if tapped == layer:
                out = self.features[:, place * self._size : (place + 1) * self._size]
                if delta is None:
                    out.copy_(residual)
                else:
                    torch.add(residual, delta, out=out)


class TappedModel(Protocol):
    """A model, or its last pipeline stage, whose features a drafter reads."""

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def forward(self, inputs: ForwardInputs, cache: Sequence[LayerCache | None], *, taps: Taps) -> Tensor: ...


_StepKey = tuple[LayerKind, int]
"""The kind and the KV group of a layer, -1 for a layer in none."""


class DecoderModel:
    """A loaded model: computes hidden states of a step's tokens, and logits of selected rows."""

    def __init__(
        self,
        spec: ModelSpec,
        embedding: EmbeddingTable | None,
        layers: Sequence[DecoderLayer],
        norm: Norm | None,
        lm_head: Linear | None,
        tables: tuple[Tensor | None, Tensor | None],
        max_model_len: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        group: Group | None = None,
        vocab: tuple[int, ...] | None = None,
        layer_inputs: PerLayerInputs | None = None,
        streams: AltUpEnds | None = None,
    ) -> None:
        """spec: with the sizes that this shard holds. embedding: a first pipeline stage's; norm, lm_head: a last one's.
        group: the shards of its layers. vocab: rows of the head on each; None: all are here."""
        self.spec, self.device, self.dtype = spec, device, dtype
        self.embedding, self.layers, self.norm, self.lm_head = embedding, layers, norm, lm_head
        self.token_embedding = embedding  # that a drafter reads; a last stage with a drafter has one for it alone
        self.group, self._vocab = Alone() if group is None else group, vocab
        self.layer_inputs = layer_inputs  # per-layer embeddings
        self.streams = streams  # layers work on several streams of each token
        self.stage_width = self.spec.hidden_size  # numbers of a token that a later pipeline stage receives (shard.py)
        self.hands_on = False  # another stage has the next layers
        self._rope_tables = tables
        self.layer_groups = group_of_layers(self.spec)  # the KV group of each layer
        self._windows = tuple(own.window for own in kv_groups(self.spec))
        self._steps = tuple(zip((layer.kind for layer in layers), self.layer_groups, strict=True))  # of each layer
        self.max_model_len = max_model_len  # the rotary tables end here
        self.lora: LoraBank | None = None  # the adapters' buffers; None: adapters are not enabled
        self.crossing: Crossing | None = None  # to experts in RAM; None: all of the model is on its device
        self.unused_tensors: frozenset[str] = frozenset()  # a shard's; of no use if no other shard uses them either

    def table_bytes(self, max_model_len: int) -> int:
        """Return the bytes of the rotary tables for `max_model_len` positions."""
        return sum(max_model_len * table[0].nbytes for table in self._rope_tables if table is not None)

    @torch.inference_mode()
    def serve_context(self, max_model_len: int) -> None:
        """Resize the rotary tables for another context. Not while an engine is open: its graphs read the old tables."""
        if max_model_len != self.max_model_len:
            self._rope_tables = rope_tables(self.spec, max_model_len, self.device)
            self.max_model_len = max_model_len

    @torch.inference_mode()
    def forward(
        self, inputs: ForwardInputs, cache: Sequence[LayerCache | None], stream: Tensor | None = None,
        taps: Taps | None = None,
    ) -> Tensor:  # fmt: skip
        """Return hidden states [T, hidden] after the final norm; writes the step's K and V, and recurrent states.

        cache: one entry per layer, None for a layer that keeps nothing.

        A pipeline stage that is not the first starts from `stream` [T, stage_width], what the stage before it returned,
        and may change it; a stage that is not the last returns the stream before the norm, and behind it the per-layer
        embeddings of the next layers. taps: filled with a drafter's features.
        """
        if self.lora is None:
            return self._forward(inputs, cache, stream, taps)
        self.lora.begin(inputs)
        try:
            return self._forward(inputs, cache, stream, taps)
        finally:
            self.lora.end()

    def _forward(
        self, inputs: ForwardInputs, cache: Sequence[LayerCache | None], stream: Tensor | None, taps: Taps | None
    ) -> Tensor:
        if self.crossing is not None:
            self.crossing.begin(len(inputs.token_ids))
        steps = self._prepare(inputs, cache)
        given: Tensor | None = None  # [T, layers, size] per-layer embeddings
        if self.embedding is None:
            assert stream is not None, "a later stage starts from the stream of the stage before it"
            residual, given = self._arrived(stream)
        else:
            residual = self.embedding(inputs.token_ids, inputs.positions, inputs.embeds)
        if self.layer_inputs is not None:
            given = self.layer_inputs(inputs.token_ids, inputs.positions, residual, inputs.embeds)
        if given is not None:
            steps = {
                key: replace(step, layer_inputs=given) if isinstance(step, AttentionStep) else step
                for key, step in steps.items()
            }
        if inputs.source is not None:
            source = plan_sources(inputs.source, self.spec.num_heads)
            steps = {
                key: replace(step, source=source) for key, step in steps.items() if isinstance(step, AttentionStep)
            }
        if self.streams is not None and self.embedding is not None:
            residual = self.streams.spread(residual)
        is_later_stage = self.embedding is None  # the first stage has the layers that rows are added behind
        deep = () if inputs.embeds is None or is_later_stage else inputs.embeds.deep_rows(self.spec.hidden_size)
        delta: Delta | None = None
        for index, (layer, kept, key) in enumerate(zip(self.layers, cache, self._steps, strict=True)):
            if inputs.before_layer is not None:
                inputs.before_layer()
            if taps is not None:
                delta = None if delta is None else whole(delta)
                taps.keep(index, residual, delta)
            delta = layer(residual, delta, kept, steps[key])
            if index < len(deep) and inputs.embeds is not None and delta is not None:
                delta = whole(delta).index_add_(0, inputs.embeds.places, deep[index])
        if self.streams is not None and not self.hands_on:
            residual = self.streams.join(residual)
        if taps is not None and FINAL_STREAM in taps.layers:
            delta = None if delta is None else whole(delta)
            taps.keep(FINAL_STREAM, residual, delta)
        hidden = self._end(residual, delta)
        if given is not None and self.hands_on:
            hidden = torch.cat((hidden.flatten(1), given[:, len(self.layers) :].flatten(1)), 1)
        if taps is not None:
            taps.keep(FINAL_HIDDEN, hidden, None)
        return hidden

    def _arrived(self, stream: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream, or streams, and the per-layer embeddings of what the stage before has sent."""
        sizes, hidden, altup = self.spec.per_layer_input, self.spec.hidden_size, self.spec.altup
        if sizes is None:
            return stream, None
        width = hidden if altup is None else altup.num_streams * hidden
        residual, given = stream[:, :width].contiguous(), stream[:, width:].unflatten(1, (-1, sizes.size))
        return residual if altup is None else residual.unflatten(1, (-1, hidden)), given

    def _end(self, residual: Tensor, delta: Delta | None) -> Tensor:
        """Return the stream after the last layer, normed where this stage has the final norm."""
        if delta is None:
            return residual if self.norm is None else self.norm(residual)
        if self.norm is None:
            return residual.add_(whole(delta))
        return normed(self.norm.add_pending(delta, residual))  # with the kernels of the layers' products

    @torch.inference_mode()
    def store_source(self, states: Tensor, kept: Sequence[LayerKV], slots: Tensor) -> None:
        """Write what each layer's cross-attention reads of an encoder's states [S, hidden] to the slots [S] int64."""
        for layer, kv in zip(self.layers, kept, strict=True):
            assert isinstance(layer, CrossLayer), "only an encoder-decoder has sources"
            layer.cross.store(states, kv, slots)

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor | None:
        """Map hidden [L, hidden], rows of `forward`'s output, to logits [L, vocab] fp32, in `out` if given.

        Of a tensor-parallel model all shards compute their rows of the vocabulary; the first shard returns the logits,
        the others None. So does a pipeline stage that is not the last.
        """
        if self.lm_head is None:
            return None
        if self._vocab is None:
            return self.finish_logits(self.lm_head.in_fp32(hidden, out))
        logits = self.group.gather_to_first(self.lm_head(hidden), self._vocab)
        if logits is None:
            return None
        return self.finish_logits(logits.float() if out is None else out.copy_(logits))

    def finish_logits(self, logits: Tensor) -> Tensor:
        """Scale and cap the head's outputs [L, vocab] fp32 as the family does, in place where possible."""
        if self.spec.logits_multiplier is not None:
            logits.mul_(self.spec.logits_multiplier)
        cap = self.spec.final_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _prepare(self, inputs: ForwardInputs, cache: Sequence[LayerCache | None]) -> dict[_StepKey, LayerStep]:
        """Return the inputs that layers of one kind and KV group share, computed once per step."""
        steps: dict[_StepKey, LayerStep] = dict(self._attention_steps(inputs, cache))
        if self.spec.layer_kinds:
            padding, state = inputs.groups[0].slot_mapping, _state_step(inputs)
            for key in self._steps:
                attention = steps.get(key)
                if key[0].part != "attention" and not isinstance(attention, RecurrentStep):
                    steps[key] = RecurrentStep(padding, state, attention)
        return steps

    def _attention_steps(
        self, inputs: ForwardInputs, cache: Sequence[LayerCache | None]
    ) -> dict[_StepKey, AttentionStep]:
        valid = has_no_skipped_slot(inputs.groups[0].slot_mapping)
        query_scales = {rotated: self._query_scale(inputs.positions, rotated=rotated) for rotated in (False, True)}
        index, latent = self.spec.index, self.spec.latent
        choice = ChosenKeys()
        plans: dict[int, AttentionPlan] = {}
        sparse: dict[int, SparseStep] = {}
        vision = self.spec.vision
        causal = inputs if inputs.key_limits is None else replace(inputs, key_limits=None)
        steps: dict[_StepKey, AttentionStep] = {}
        for layer, (key, kept) in enumerate(zip(self._steps, cache, strict=True)):
            kind, group = key
            if key in steps or group < 0:
                continue
            own, kv = inputs.groups[group], kv_of(kept)
            assert kv is not None, "a layer in a KV group has keys and values"
            if group not in plans:
                window = self._windows[group]
                seen = causal if window is None and vision is not None and vision.windowed_only else inputs
                if index is not None:
                    chosen, seen = sparse_step(seen, own, kv.k.shape[2], index.topk, choice)
                    sparse |= {} if chosen is None else {group: chosen}
                heads = query_heads(self.spec, layer)
                plans[group] = plan_step(seen, own, kv.k, heads if latent is None else heads_at_once(heads), window)
            table = self.rope_table(kind)
            steps[key] = AttentionStep(
                plans[group],
                None if table is None else self._rotation(table, inputs),
                own.slot_mapping,
                valid,
                query_scales[kind.has_rope],
                sparse=sparse.get(group),
            )
        return steps

    def _rotation(self, table: Tensor, inputs: ForwardInputs) -> Rotation:
        """Return how the step's heads turn. With three positions for each token, the step gathers a table with a row
        for each token."""
        if inputs.rotary is None or inputs.rotary.ndim == 1:
            return plan_rotation(table, inputs.positions if inputs.rotary is None else inputs.rotary)
        axes = torch.tensor(self.spec.rope.axes, device=table.device)
        at = inputs.rotary.index_select(0, axes).t()  # [T, frequencies]
        cos, sin = table.view(len(table), 2, -1).unbind(1)
        tokens = torch.arange(len(at), device=table.device)
        return plan_rotation(torch.cat([cos.gather(0, at), sin.gather(0, at)], dim=1), tokens)

    def _query_scale(self, positions: Tensor, *, rotated: bool) -> Tensor | None:
        """Return the factors [T, 1, 1] of the queries in layers that rotate, or in the others; None: there are none."""
        growth = self.spec.growth_of(rotated=rotated)
        if growth is None:
            return None
        factors: Tensor = ((positions + growth.offset) // growth.period).add(1).log().mul(growth.factor).add(1)
        return factors[:, None, None].to(self.dtype)

    def rope_table(self, kind: LayerKind) -> Tensor | None:
        """Return the cosines and sines [max_model_len, rotary_dim] fp32 of such layers; None: they do not rotate."""
        if not kind.has_rope:
            return None
        full, local = self._rope_tables
        table = local if kind.windowed and local is not None else full
        assert table is not None, "layers that rotate have a table"
        return table


def _state_step(inputs: ForwardInputs) -> StateStep | None:
    """Return the step's rows as recurrent layers read them; None: the model keeps no states."""
    if inputs.state is None:
        return None
    state, num_decodes = inputs.state, inputs.num_decodes if inputs.decode_queries == 1 else 0
    return StateStep(
        inputs.cu_seqlens_q, *state[:3], inputs.query_lens, *state[3:6], num_decodes, state.drafted
    )  # fmt: skip
