"""EAGLE drafters: one layer that guesses a token from the target's hidden state of the token before it.

    EAGLE-1   h = fc([embedding, feature]); one layer without a norm at its entrance; the target's head
    EAGLE-3   h = fc([features of several layers]); a layer whose q, k and v read [norm(embedding), norm(h)]; a norm
              and a head of its own, whose row i is token i + d2t[i] of the target

The layer's output is the feature of the next guess. Embeddings are the target's: those in published files have been
stale copies. Only a drafter of another width than its target brings its own.
Does not know: config.json (eagle_config.py), how guesses are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from localllm.errors import CorruptModel
from localllm.kernels.layer_cache import LayerKV
from localllm.kernels.rotary_store_kv import has_no_skipped_slot, plan_rotation
from localllm.models.decoder.builder import DecoderBuilder
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.decoder.layer import FeedForward, MixerPart
from localllm.models.drafters.drafter import DrafterPlan, DraftStep
from localllm.models.drafters.eagle_config import EagleMethod, EagleSpec, open_eagle, read_eagle
from localllm.models.formats.at_load import at_load
from localllm.models.formats.checkpoint import Checkpoint
from localllm.models.layers.attention import AttentionStep, plan_step
from localllm.models.layers.embedding import EmbeddingTable
from localllm.models.layers.group import Group, SplitHead
from localllm.models.layers.linear import Linear
from localllm.models.layers.norm import RMSNorm
from localllm.models.layers.rotary import rope_tables
from localllm.models.spec.family import Storage
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.spec.shard import Shard, even, local_spec
from localllm.models.weights.layout import StoredLayout
from localllm.models.weights.meta import MetaWeights
from localllm.models.weights.parameters import held_bytes
from localllm.models.weights.source import stacked_rows
from localllm.models.weights.weights import Weights

LAYER = "model.layers.0."
_NAMES = Storage(
    renames=((r"^model\.", ""),),
    alternatives=(
        (r"^", "model."), (r"^layers\.0\.", "midlayer."), (r"^layers\.0\.", "transformer."), (r"^fc\.", "fusion_fc."),
    ),
    ignored=(r"d2t|t2d", r"(model\.)?embed_tokens\.weight", r"verifier_(norm|lm_head)\.weight"),
)  # fmt: skip
_STORAGE = {"eagle": replace(_NAMES, ignored=(*_NAMES.ignored, r"lm_head\.weight")), "eagle3": _NAMES}
"""The stored names, by method. An EAGLE-1 file may hold a copy of the target's head."""


class EagleLayer:
    """One layer with K and V of pairs (feature of token i - 1, token i)."""

    def __init__(
        self, input_norm: RMSNorm | None, hidden_norm: RMSNorm | None, attention: MixerPart, mlp_norm: RMSNorm,
        mlp: FeedForward, *, norm_before_residual: bool,
    ) -> None:  # fmt: skip
        """input_norm, hidden_norm: EAGLE-3's."""
        self.input_norm, self.hidden_norm, self.attention = input_norm, hidden_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.norm_before_residual = norm_before_residual

    def __call__(self, embedded: Tensor, hidden: Tensor, kv: LayerKV, step: AttentionStep) -> Tensor:
        """Map hidden [T, hidden] to [T, hidden], and write the step's K and V. embedded: [T, hidden], the tokens'
        embeddings; unused by EAGLE-1, whose fc has read them."""
        residual, x = hidden.clone(), hidden
        if self.input_norm is not None and self.hidden_norm is not None:
            normed = self.hidden_norm(hidden)
            x = torch.cat((self.input_norm(embedded), normed), dim=-1)
            residual = normed if self.norm_before_residual else residual
        y = self.mlp_norm.add(self.attention(x, kv, step), residual)
        return residual.add_(self.mlp(y, step.slot_mapping))


class EagleDrafter:
    """A loaded EAGLE drafter (models/drafters/drafter.py)."""

    first_key = 1

    def __init__(
        self, eagle: EagleSpec, target: DecoderModel | None, embedding: EmbeddingTable | None, fc: Linear | None,
        fc_norm: RMSNorm | None, layer: EagleLayer, norm: RMSNorm | None, head: SplitHead | None,
        head_tokens: Tensor | None,
    ) -> None:  # fmt: skip
        """eagle: with this shard's sizes. embedding: of its own; None: the target's. norm, head: EAGLE-3's.
        head_tokens: [draft_vocab] int64, the target's token of each row of the head; None: row i is token i."""
        self.spec, self.taps = eagle.layer, eagle.taps
        self._eagle, self._target, self._embedding, self._fc, self._fc_norm = eagle, target, embedding, fc, fc_norm
        self._layer, self._norm, self._head, self._head_tokens = layer, norm, head, head_tokens
        self._table: Tensor | None = None

    def serve_context(self, max_model_len: int) -> None:
        """Resize the rotary table for another context."""
        assert self._target is not None
        self._table, _ = rope_tables(self.spec, max_model_len, self._target.device)

    def table_bytes(self, max_model_len: int) -> int:
        """Return the bytes of the rotary table for `max_model_len` positions."""
        return max_model_len * self.spec.rope.rotary_dim * 4

    def extend(self, step: DraftStep, cache: Sequence[LayerKV | None], features: Tensor | None) -> Tensor:
        assert features is not None, "an EAGLE drafter has taps"
        if self._eagle.method == "eagle3" and self._fc is not None:
            features = self._fc(features if self._fc_norm is None else self._fc_norm(features))
        return self._run(step, cache, features).index_select(0, step.logits_indices)

    def step(self, step: DraftStep, cache: Sequence[LayerKV | None], hidden: Tensor) -> Tensor:
        return self._run(step, cache, hidden)

    def logits(self, hidden: Tensor) -> Tensor | None:
        target = self._target
        assert target is not None, "a drafter made from headers computes nothing"
        if self._head is None:
            return target.compute_logits(hidden)
        if self._norm is not None and not self._eagle.norm_output:
            hidden = self._norm(hidden)
        own = self._head(hidden)
        if own is None or self._head_tokens is None:
            return None if own is None else own.float()
        every = own.new_full((len(own), target.spec.vocab_size), float("-inf"), dtype=torch.float32)
        return every.index_copy_(1, self._head_tokens, own.float())

    def _run(self, step: DraftStep, cache: Sequence[LayerKV | None], hidden: Tensor) -> Tensor:
        """Return what the next guess reads, [T, hidden]."""
        (kv,), (group,) = cache, step.groups
        assert kv is not None, "the layer attends"
        assert self._table is not None
        embedded = self._embed(step)
        if self._eagle.method == "eagle" and self._fc is not None:
            hidden = self._fc(torch.cat((embedded, hidden), dim=-1))
        plan = plan_step(step, group, kv.k, self.spec.num_heads, None)
        rotation = plan_rotation(self._table, step.positions)
        shared = AttentionStep(plan, rotation, group.slot_mapping, has_no_skipped_slot(group.slot_mapping))
        out = self._layer(embedded, hidden, kv, shared)
        return self._norm(out) if self._norm is not None and self._eagle.norm_output else out

    def _embed(self, step: DraftStep) -> Tensor:
        table = self._embedding
        if table is None:
            assert self._target is not None
            table = self._target.token_embedding
        assert table is not None, "a stage with a drafter has the embedding"
        return table(step.token_ids, step.positions)


def plan_eagle(path: Path, method: EagleMethod, target: ModelSpec) -> DrafterPlan:
    """Return the plan from config.json and the tensors' headers. Raises as `load_eagle` does."""
    eagle = read_eagle(path, method, target)
    dtype = getattr(torch, eagle.layer.dtype)
    with open_eagle(path) as checkpoint, torch.device("meta"):
        weights = MetaWeights(_layout(eagle, checkpoint), torch.device("cpu"), dtype)
        held = held_bytes(_build(eagle, checkpoint, weights, _builder(eagle, weights, dtype), None))
    return DrafterPlan(method, path, eagle.layer, held, eagle.taps, EagleDrafter.first_key)


def eagle_bytes(
    plan: DrafterPlan, target: ModelSpec, device: torch.device, dtype: torch.dtype, *, max_model_len: int,
    shard: Shard | None = None, **load: Any,
) -> int:  # fmt: skip
    """Return the bytes of the loaded drafter, or of a shard of it, from the headers. load: cpu_weights and half_weights
    of `load_model`."""
    eagle, quantize = _planned(plan, target), at_load(plan.quantization, None)
    with open_eagle(plan.path) as checkpoint, torch.device("meta"):
        weights = MetaWeights(_layout(eagle, checkpoint), device, dtype, quantize=quantize, **load)
        drafter = _build(eagle, checkpoint, weights, _builder(eagle, weights, dtype, shard), None)
        return held_bytes(drafter) + drafter.table_bytes(max_model_len)


def load_eagle(
    plan: DrafterPlan, target: DecoderModel, device: torch.device, dtype: torch.dtype, *, max_model_len: int,
    shard: Shard | None = None, group: Group | None = None, **load: Any,
) -> EagleDrafter:  # fmt: skip
    """Load a planned drafter, or a shard of it. load: cpu_weights and half_weights of `load_model`.

    Raises `DrafterMismatch` if it belongs to another model, `CorruptModel` if tensors are missing, left over or of
    other shapes than config.json says, `UnsupportedModel`, `UnsupportedOption`."""
    eagle, quantize = _planned(plan, target.spec), at_load(plan.quantization, None)
    with torch.inference_mode(), open_eagle(plan.path) as checkpoint:
        weights = Weights(_layout(eagle, checkpoint), device, dtype, quantize=quantize, **load)
        drafter = _build(eagle, checkpoint, weights, _builder(eagle, weights, dtype, shard, group), target)
    drafter.serve_context(max_model_len)
    return drafter


def _planned(plan: DrafterPlan, target: ModelSpec) -> EagleSpec:
    assert plan.method in ("eagle", "eagle3"), plan.method
    return replace(read_eagle(plan.path, plan.method, target), layer=plan.spec)


def _layout(eagle: EagleSpec, checkpoint: Checkpoint) -> StoredLayout:
    return StoredLayout(checkpoint, eagle.layer, _STORAGE[eagle.method], None)


def _builder(
    eagle: EagleSpec, weights: Weights, dtype: torch.dtype, shard: Shard | None = None, group: Group | None = None
) -> DecoderBuilder:
    """Return the builder of the layer, with the biases that are stored: config.json names them in several ways."""
    q, out, gate = (f"{LAYER}{name}.bias" for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj"))
    spec = replace(
        eagle.layer, attention_bias=weights.has(q), attention_out_bias=weights.has(out), mlp_bias=weights.has(gate)
    )
    return DecoderBuilder(spec, weights, weights.device, dtype, shard, group)


def _build(
    eagle: EagleSpec, checkpoint: Checkpoint, weights: Weights, builder: DecoderBuilder, target: DecoderModel | None
) -> EagleDrafter:
    """Make the drafter, still without its rotary table, from a checkpoint's tensors, all of which must be used."""
    spec, shard = builder.spec, builder.shard
    width, inputs = spec.hidden_size, eagle.features_size
    norm = head = head_tokens = fc = fc_norm = embedding = None
    if eagle.method == "eagle":
        fc = weights.linear(["fc"], (width, width + inputs), bias=weights.has("fc.bias"))
    elif eagle.fuses:
        fc = weights.linear(["fc"], (width, inputs), bias=weights.has("fc.bias"))
        if eagle.norm_before_fc:
            fc_norm = RMSNorm(weights.take(["input_norm.weight"], (inputs,)), spec.norm.eps)
    if width != eagle.target_hidden_size:
        shape = (spec.vocab_size, width)
        rows = weights.take(["embed_tokens.weight"], shape, keep_narrow=True, rows=shard.vocab)
        embedding = builder.embedding(rows)
    layer = _layer(eagle, builder)
    if eagle.method == "eagle3":
        norm = _norm(builder, "norm")
        head = _head(eagle.draft_vocab_size, builder)
        head_tokens = _head_tokens(eagle, checkpoint, weights)
    left = sorted(weights.unused())
    if left and shard.index == 0:  # the others may use a part of the tensors
        names = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
        raise CorruptModel(
            f"The drafter in {checkpoint.path} holds {len(left)} tensors that {eagle.method} does not use.",
            f"Unexpected: {names}.",
        )
    eagle = replace(eagle, layer=local_spec(eagle.layer, shard))
    return EagleDrafter(eagle, target, embedding, fc, fc_norm, layer, norm, head, head_tokens)


def _layer(eagle: EagleSpec, builder: DecoderBuilder) -> EagleLayer:
    is_third, own = eagle.method == "eagle3", f"{LAYER}self_attn."
    attention = builder.attention(0, own, 2 * builder.spec.hidden_size if is_third else None)
    return EagleLayer(
        _norm(builder, f"{LAYER}input_layernorm") if is_third else None,
        _norm(builder, f"{LAYER}hidden_norm") if is_third else None,
        builder.part(attention),
        _norm(builder, f"{LAYER}post_attention_layernorm"),
        builder.part(builder.mlp(0, f"{LAYER}mlp.")),
        norm_before_residual=eagle.norm_before_residual,
    )


def _norm(builder: DecoderBuilder, stem: str) -> RMSNorm:
    norm = builder.norm(stem)
    assert isinstance(norm, RMSNorm), "a Llama layer has this norm"
    return norm


def _head(draft_vocab: int, builder: DecoderBuilder) -> SplitHead:
    """Return the shard's rows of the head, as even a part as possible."""
    sizes, index = even(draft_vocab, builder.shard.size), builder.shard.index
    first = sum(sizes[:index])
    order = stacked_rows(range(first, first + sizes[index]), draft_vocab)
    rows = builder.weights.linear(["lm_head"], (draft_vocab, builder.spec.hidden_size), order=order)
    return SplitHead(rows, builder.group, sizes)


def _head_tokens(eagle: EagleSpec, checkpoint: Checkpoint, weights: Weights) -> Tensor | None:
    """Return the target's token of each row of the head: its index plus its offset `d2t`."""
    rows, vocab = eagle.draft_vocab_size, eagle.layer.vocab_size
    if "d2t" not in checkpoint.tensors:
        if rows == vocab:
            return None
        raise CorruptModel(
            f"The drafter in {checkpoint.path} lacks d2t.",
            f"Its head has {rows} rows for a vocabulary of {vocab}; d2t says which tokens they are.",
        )
    if weights.device.type == "meta":
        return torch.empty(rows, dtype=torch.int64, device="meta")
    offsets = checkpoint.tensor("d2t")
    if offsets.is_floating_point() or tuple(offsets.shape) != (rows,):
        raise CorruptModel(
            f"d2t in {checkpoint.path} is {list(offsets.shape)} {offsets.dtype}.", f"It must be {rows} whole numbers."
        )
    tokens = torch.arange(rows, device="cpu") + offsets.long()
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab or len(tokens.unique()) < rows:
        raise CorruptModel(
            f"d2t in {checkpoint.path} does not map the head's {rows} rows to tokens of their own.",
            f"Row i is token i + d2t[i]; these are {int(tokens.min())} to {int(tokens.max())} of {vocab}.",
        )
    return tokens.to(weights.device)
