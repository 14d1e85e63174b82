"""The layer for multi-token prediction (MTP) that a checkpoint brings, as a drafter of the checkpoint's own model.

    x        = projection([norm(embedding of token i), norm(hidden i - 1)])      MiMo: the other order
    output   = decoder layer(x)                  a whole layer of the family, with keys and values of its own
    logits   = head(norm(output))                the target's head, unless the checkpoint stores another
    hidden i = output                            MiMo: norm(output)

The hidden state of a pair after a prompt is the target's, after its final norm (Step 3.5: before it); that of a further
draft is the layer's own output. Its attention has the heads of the target's layers of its kind, windowed or not. One
layer writes all drafts: the first, where a checkpoint has several (Step 3.5 and MiMo V2 Flash have three).
Sources: DeepSeek-V3 (arXiv:2412.19437, section 2.2), MiMo (arXiv:2505.07608).
Does not know: which names a family stores (spec/family.py), how drafts are drawn and verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from localllm.errors import CorruptModel, DrafterMismatch
from localllm.kernels.fused_epilogue import whole
from localllm.kernels.layer_cache import LayerKV
from localllm.kernels.rotary_store_kv import has_no_skipped_slot, plan_rotation
from localllm.models.decoder.builder import DecoderBuilder
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.decoder.layer import DecoderLayer
from localllm.models.drafters.drafter import FINAL_HIDDEN, FINAL_STREAM, DrafterPlan, DraftStep
from localllm.models.formats.checkpoint import FLOATS, Checkpoint, is_gguf
from localllm.models.formats.gguf.file_names import prediction_layers_for
from localllm.models.formats.registry import open_checkpoint
from localllm.models.layers.attention import AttentionStep, ChosenKeys, plan_step, sparse_step
from localllm.models.layers.embedding import EmbeddingTable
from localllm.models.layers.group import SplitHead
from localllm.models.layers.linear import Linear
from localllm.models.layers.norm import RMSNorm
from localllm.models.loader import AROUND, open_further_layer, storage_of_further_layer
from localllm.models.read_spec import families, family_of
from localllm.models.spec.family import MTPLayout, Storage
from localllm.models.spec.latent import heads_at_once
from localllm.models.spec.model_spec import ModelSpec, kv_shape, query_heads
from localllm.models.spec.shard import Shard, local_spec
from localllm.models.weights.parameters import held_bytes
from localllm.models.weights.source import EMBEDDING, LM_HEAD, stacked_rows

_DRAFTS = 3  # the layer was trained to guess one token; each further one is right less often
_COMPARED_ROWS = 256
_HINT = "--speculative auto looks drafts up in the text, and --draft MODEL takes a smaller model."


@dataclass(frozen=True, slots=True)
class MTPParts:
    """The tensors of the layer."""

    embed_norm: RMSNorm
    hidden_norm: RMSNorm
    final_norm: RMSNorm  # before the head
    projection: Linear  # [hidden, 2 * hidden]
    layer: DecoderLayer
    embedding: EmbeddingTable | None  # None: the target's
    head: SplitHead | None  # None: the target's


class MTPDrafter:
    """A `Drafter` of one layer, which shares what it can with its target."""

    first_key = 1

    def __init__(self, spec: ModelSpec, layout: MTPLayout, parts: MTPParts, target: DecoderModel) -> None:
        """spec: of the layer, with the sizes that this shard holds."""
        self.spec, self.layout, self.parts, self._target = spec, layout, parts, target
        self.taps: tuple[int, ...] = _taps(layout)

    def serve_context(self, max_model_len: int) -> None:
        """No-op: the rotary tables are the target's."""

    def extend(self, step: DraftStep, cache: Sequence[LayerKV | None], features: Tensor | None) -> Tensor:
        assert features is not None, "the layer reads the target's hidden states"
        return self._run(step, cache, features).index_select(0, step.logits_indices)

    def step(self, step: DraftStep, cache: Sequence[LayerKV | None], hidden: Tensor) -> Tensor:
        return self._run(step, cache, hidden)

    def logits(self, hidden: Tensor) -> Tensor | None:
        normed = hidden if self.layout.hands_on_normed else self.parts.final_norm(hidden)
        if self.parts.head is None:
            return self._target.compute_logits(normed)
        logits = self.parts.head(normed)
        return None if logits is None else self._target.finish_logits(logits.float())

    def _run(self, step: DraftStep, cache: Sequence[LayerKV | None], hidden: Tensor) -> Tensor:
        """Return the hidden states [T, hidden] of the step's pairs, as the next pair reads them."""
        parts, (kv,) = self.parts, cache
        assert kv is not None, "the layer keeps keys and values"
        embedding = self._target.token_embedding if parts.embedding is None else parts.embedding
        assert embedding is not None, "a stage with a drafter has the embedding"
        embedded, read = parts.embed_norm(embedding(step.token_ids, step.positions)), parts.hidden_norm(hidden)
        both = (read, embedded) if self.layout.hidden_first else (embedded, read)
        stream = parts.projection(torch.cat(both, dim=1))
        delta = parts.layer(stream, None, kv, self._attention_step(step, kv))
        output = stream if delta is None else stream.add_(whole(delta))
        return parts.final_norm(output) if self.layout.hands_on_normed else output

    def _attention_step(self, step: DraftStep, kv: LayerKV) -> AttentionStep:
        heads = self.spec.num_heads if self.spec.latent is None else heads_at_once(self.spec.num_heads)
        kind = replace(self.parts.layer.kind, windowed=self.spec.mtp_is_windowed)
        group, table = step.groups[0], self._target.rope_table(kind)
        assert table is not None, "the families with such a layer rotate"
        index = self.spec.index
        seen, sparse = step, None
        if index is not None:
            sparse, seen = sparse_step(step, group, kv.k.shape[2], index.topk, ChosenKeys())
        plan = plan_step(seen, group, kv.k, heads, self.spec.sliding_window)
        valid = has_no_skipped_slot(group.slot_mapping)
        return AttentionStep(plan, plan_rotation(table, step.positions), group.slot_mapping, valid, sparse=sparse)


# ---- loading ---------------------------------------------------------------------------------------------------------


def plan_mtp(path: Path, target: ModelSpec) -> DrafterPlan:
    """Return the plan of the prediction layer in the target's own checkpoint, or in the mtp-*.gguf file beside it.

    Raises `DrafterMismatch` if the checkpoint has no such layer, or one that is not supported.
    """
    layout = _layout(path, target)
    path = _file_of_layer(path, f"{layout.parts_prefix(target.num_layers)}{layout.embed_norm}.weight")
    with open_checkpoint(path) as checkpoint:
        prefix, around = layout.stored_prefix(target.num_layers), layout.parts_prefix(target.num_layers)
        if f"{around}{layout.embed_norm}.weight" not in checkpoint.tensors:
            beside, hint = "", _HINT
            if is_gguf(path):
                repo = next((part[8:].replace("--", "/") for part in path.parts if part[:8] == "models--"), "ORG/NAME")
                beside = ", or have it in a file of its own, mtp-NAME.gguf, which belongs beside it"
                hint = f"localllm pull {repo} --include '*mtp-*', if the repository has that file. {_HINT}"
            raise DrafterMismatch(
                f"{path.name} has no layer for multi-token prediction.",
                f"In a checkpoint of {target.architecture} its names begin with {around}, and there are none. Many "
                f"quantised copies leave the layer out{beside}.",
                hint,
            )
        names = storage_of_further_layer(checkpoint, target, prefix, around)
        has_experts, has_indexer = (
            names.stored_name(f"model.layers.0.{name}.weight") in checkpoint.tensors
            for name in ("mlp.gate", "self_attn.indexer.wk")
        )
        spec = _layer_spec(target, has_experts=has_experts, has_indexer=has_indexer)
        shared = _shared_copies(checkpoint, names, layout, around)
        own = [info.num_bytes for name, info in checkpoint.tensors.items() if name.startswith(around)]
        stored = sum(own) - sum(checkpoint.tensors[name].num_bytes for name in shared)
    return DrafterPlan("mtp", path, spec, stored, _taps(layout), MTPDrafter.first_key, _DRAFTS)


def mtp_bytes(plan: DrafterPlan, num_layers: int, device: torch.device, dtype: torch.dtype, **load: Any) -> int:
    """Return the exact bytes of the loaded layer, from the headers. num_layers: the target's own. load: cpu_weights,
    half_weights and shard of `load_model`."""
    return held_bytes(_read_parts(plan, num_layers, device, dtype, sizes_only=True, **load))


def open_mtp(
    plan: DrafterPlan, target: DecoderModel, device: torch.device, dtype: torch.dtype, *,
    num_layers: int | None = None, shard: Shard | None = None, **load: Any,
) -> MTPDrafter:  # fmt: skip
    """Load the prediction layer, or a shard of it. num_layers: as for `mtp_bytes`; None: `target` has all layers.
    load: as for `mtp_bytes`, and the shard's group. Raises `CorruptModel` for tensors of wrong shapes, or that the
    layer does not use."""
    parts = _read_parts(plan, num_layers or target.spec.num_layers, device, dtype, shard=shard, **load)
    spec = plan.spec if shard is None else local_spec(plan.spec, shard)
    return MTPDrafter(spec, _layout(plan.path, plan.spec), parts, target)


def _layout(path: Path, target: ModelSpec) -> MTPLayout:
    layout = family_of(target).mtp if target.implementation == "localllm" else None
    if layout is None:
        known = sorted({family.name for family in families().values() if family.mtp is not None})
        raise DrafterMismatch(
            f"--speculative mtp is not supported for {target.architecture}.",
            f"Layers for multi-token prediction are supported for {', '.join(known)}.",
            _HINT,
        )
    return layout.in_gguf() if is_gguf(path) else layout


def _file_of_layer(path: Path, name: str) -> Path:
    """Return the file that has the tensor `name` of the layer: the model's own or, in GGUF, one beside it."""
    if not is_gguf(path):
        return path
    with open_checkpoint(path) as checkpoint:
        if name in checkpoint.tensors:
            return path
    for folder in (path.parent, path.parent.parent):
        names = [str(file.relative_to(folder)) for place in ("*.gguf", "MTP/*.gguf") for file in folder.glob(place)]
        if own := prediction_layers_for(path.name, names):
            return folder / own[0]
    return path


def _taps(layout: MTPLayout) -> tuple[int, ...]:
    return (FINAL_HIDDEN if layout.reads_normed else FINAL_STREAM,)


def _layer_spec(target: ModelSpec, *, has_experts: bool, has_indexer: bool) -> ModelSpec:
    """Return the spec of a model of the prediction layer alone: the target's, with one layer that keeps all tokens,
    also if it sees a window of them, and that has the heads of the target's layers of its kind."""
    mixture = replace(target.mixture, layers=(), layer_limits=()) if target.mixture and has_experts else None
    latent = target.latent
    if latent is not None and latent.index is not None:
        latent = replace(latent, index=replace(latent.index, layers=(True,)) if has_indexer else None)
    kinds = target.layer_is_windowed or (False,) * target.num_layers
    like = kinds.index(target.mtp_is_windowed) if target.mtp_is_windowed in kinds else 0
    kv_heads, head_dim = kv_shape(target, like)
    return replace(
        target, num_layers=1, mixture=mixture, layer_is_windowed=(), drafter=None, layer_kinds=(), recurrent=None,
        sliding_window=target.sliding_window if target.mtp_is_windowed else None, latent=latent, layer_heads=(),
        num_heads=query_heads(target, like), num_kv_heads=kv_heads, head_dim=head_dim, layer_kv_shapes=(),
        layer_has_sinks=(), layer_limits=(target.mtp_limit,) if target.mtp_limit else (),
        attention_sinks=target.layer_has_sinks[like] if target.layer_has_sinks else target.attention_sinks,
    )  # fmt: skip


def _read_parts(plan: DrafterPlan, num_layers: int, device: torch.device, dtype: torch.dtype, **load: Any) -> MTPParts:
    layout = _layout(plan.path, plan.spec)
    around = layout.parts_prefix(num_layers)
    opened = open_further_layer(
        plan.path, plan.spec, layout.stored_prefix(num_layers), device, dtype, around=around, renames=layout.renames,
        quantization=plan.quantization, **load,
    )  # fmt: skip
    with opened as (checkpoint, weights, builder):
        shared = _shared_copies(checkpoint, weights.layout.storage, layout, around)
        parts = _build(builder, layout, {name.removeprefix(around) for name in shared})
        left = sorted(name for name in weights.unused(around) if name not in shared)
    if left and builder.shard.index == 0:  # the others may use a part of the tensors
        raise CorruptModel(
            f"The prediction layer of {plan.path.name} has {len(left)} tensors that {plan.spec.architecture} does "
            "not use.",
            f"Unexpected: {', '.join(left[:5])}.",
            "Leave out --speculative mtp.",
        )
    return parts


def _build(builder: DecoderBuilder, layout: MTPLayout, shared: set[str]) -> MTPParts:
    """Build the layer and the parts around it. shared: names of those that are copies of the target's tensors."""
    spec, source, own = builder.spec, builder.weights, builder.shard.vocab
    hidden, vocab = spec.hidden_size, (spec.vocab_size, spec.hidden_size)

    def norm(name: str) -> RMSNorm:
        made = builder.norm(f"{AROUND}{name}")
        assert isinstance(made, RMSNorm), "the families with such a layer have this norm"
        return made

    def has_own(name: str) -> bool:
        return bool(name) and f"{name}.weight" not in shared and source.has(f"{AROUND}{name}.weight")

    embedding = head = None
    if has_own(layout.embedding):
        table = source.table(f"{AROUND}{layout.embedding}.weight", vocab, keep_narrow=True, rows=own)
        embedding = builder.embedding(table)
    if has_own(layout.head):
        rows = source.linear([f"{AROUND}{layout.head}"], vocab, order=stacked_rows(own, spec.vocab_size))
        head = SplitHead(rows, builder.group, builder.shard.counts.vocab)
    projection = source.linear([f"{AROUND}{layout.projection}"], (hidden, 2 * hidden))
    return MTPParts(
        norm(layout.embed_norm), norm(layout.hidden_norm), norm(layout.final_norm), projection, builder.layer(0),
        embedding, head,
    )  # fmt: skip


def _shared_copies(checkpoint: Checkpoint, storage: Storage, layout: MTPLayout, prefix: str) -> list[str]:
    """Return the stored tensors of the layer that repeat the model's embedding or head: the target's are used."""
    embedding, head = map(storage.stored_name, (EMBEDDING, LM_HEAD))
    pairs = ((layout.embedding, embedding), (layout.head, head if head in checkpoint.tensors else embedding))
    names = ((f"{prefix}{copy}.weight", original) for copy, original in pairs if copy)
    return [copy for copy, original in names if copy in checkpoint.tensors and _is_same(checkpoint, copy, original)]


def _is_same(checkpoint: Checkpoint, copy: str, original: str) -> bool:
    """Compare rows spread over both tensors: a matrix that was trained further differs in all rows."""
    known, found = checkpoint.tensors.get(original), checkpoint.tensors[copy]
    if known is None or (known.dtype, known.shape) != (found.dtype, found.shape):
        return False
    if found.dtype not in FLOATS and not is_gguf(found.file):  # scales are stored apart
        return False
    step = max(1, found.shape[0] // _COMPARED_ROWS)
    return torch.equal(checkpoint.tensor(copy)[::step], checkpoint.tensor(original)[::step])
