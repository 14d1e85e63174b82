"""Build a decoder, or a rank's shard of it, from a spec and a source of tensors.

With a source that has only sizes (weights/weights.py: MetaWeights), the same code counts what a model will hold.
Does not know: files, formats.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, islice, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels.cpu.half import pack_half
from localllm.kernels.linear import should_pack
from localllm.kernels.quantized_weight import QuantizedTable
from localllm.kernels.rotary_store_kv import Heads
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.decoder.gemma_parts import GemmaParts
from localllm.models.decoder.layer import (
    CrossLayer,
    DecoderLayer,
    FeedForward,
    LayerKind,
    MixerPart,
    ParallelLayer,
    PostNormLayer,
    PreNormLayer,
    RecurrentPart,
    SandwichLayer,
    Scaled,
    SideBySide,
    SingleLayer,
    SummedLayer,
)
from localllm.models.decoder.mixers import build_latent_attention, build_recurrence
from localllm.models.decoder.mixture import build_far_mlp, build_mixture, mlp_activation
from localllm.models.layers.attention import (
    Attention,
    Clip,
    CrossAttention,
    HeadLayerNorm,
    HeadsChange,
    SplitWholeNorm,
    WholeNorm,
    WidenedValues,
    alibi_slopes,
    distance_buckets,
)
from localllm.models.layers.embedding import EmbeddingTable, SplitEmbeddingTable, Table, sinusoids
from localllm.models.layers.group import Alone, Group, Summed
from localllm.models.layers.linear import Linear, ScaledOutputs, tied_head
from localllm.models.layers.mlp import MLP, GatedMLP, SparseGate
from localllm.models.layers.norm import GatedNorm, LayerNorm, RMSNorm
from localllm.models.layers.rotary import half_split_order, rope_tables
from localllm.models.spec.model_spec import ModelSpec, keeps_kv, kv_shape, query_heads
from localllm.models.spec.shard import Shard, heads_of, in_width, kv_heads_of, local_spec, stage_width, whole_shard
from localllm.models.weights.source import (
    EMBEDDING,
    AlikeLayers,
    FarWeights,
    ShardWeights,
    TensorSource,
    stacked_rows,
)


class DecoderBuilder:
    """Builds the decoder part by part, asking for tensors by Llama's names."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: TensorSource,
        device: torch.device,
        dtype: torch.dtype,
        shard: Shard | None = None,
        group: Group | None = None,
        far: FarWeights | None = None,
        alike: AlikeLayers | None = None,
    ) -> None:
        """spec: of the whole model. device: where the model will compute, also if `weights` has only sizes. shard: the
        part to build; None: the whole model. group: the shards of its layers. far: the parts that stay in RAM. alike:
        shares experts among layers, if `weights` has only sizes."""
        self.spec, self.weights, self.device, self.dtype = spec, weights, device, dtype
        self.shard = whole_shard(spec) if shard is None else shard
        self.group = Alone() if group is None else group
        self.share = ShardWeights(weights, self.shard, self.group, far, alike)
        self.gemma = GemmaParts(spec, self.share, self.norm, dtype)
        self._of_distances: Tensor | None = None

    def build(self, max_model_len: int) -> DecoderModel:
        spec, shard = self.spec, self.shard
        embedding, lm_head = self._embedding_and_head()
        layers = self._layers()
        norm = None if lm_head is None or spec.topology == "sum_norm" else self.norm("model.norm")
        tables = rope_tables(spec, max_model_len, self.weights.device)
        first = embedding if shard.layers.start == 0 else None
        model = DecoderModel(
            local_spec(spec, shard), first, layers, norm, lm_head, tables, max_model_len, self.device, self.dtype,
            group=self.group, vocab=None if shard.is_whole else shard.counts.vocab,
            layer_inputs=self.gemma.layer_inputs(), streams=self.gemma.streams(),
        )  # fmt: skip
        model.token_embedding = embedding
        model.stage_width = stage_width(spec, shard.layers.start)
        model.hands_on = shard.layers.stop < spec.num_layers
        model.crossing = None if self.share.far is None else self.share.far.crossing
        return model

    def _layers(self) -> list[DecoderLayer]:
        """Build the shard's layers. Those whose experts go to RAM are read ahead, and their files' pages are dropped,
        because the page cache would push out the experts."""
        far, layers, built = self.share.far, self.shard.layers, list[DecoderLayer]()
        if far is None or not far.layers:
            return [self.layer(index) for index in layers]
        coming = iter(layers if far.crossing.arena is not None else ())  # else the experts have been read already
        with ThreadPoolExecutor(1, "read-ahead") as ahead:
            ahead.map(far.source.read_ahead, islice(coming, 1))
            for index in layers:
                ahead.map(far.source.read_ahead, islice(coming, 1))
                built.append(self.layer(index))
                far.source.drop_pages()
        return built

    # -- embedding and head

    def _embedding_and_head(self) -> tuple[EmbeddingTable | None, Linear | None]:
        """Build the shard's rows of both: the embedding for the first stage and for a drafter that reads it, the head
        for the last stage.

        Embedding rows keep the stored type if it is narrower: widening a row is exact.
        A tied head in float32 that is packed for the CPU cannot be read by rows, so the embedding gets its own copy.
        The packed head is 2 to 4 times faster than F.linear on plain rows, which is up to half of a decode step of a
        small model. (Reading rows from the memory map would be free, but a checkpoint rewritten in place would then
        change or kill a running server.) One that stays 16 bits wide, or is packed in 8 or 4 bits, is read by rows too:
        there is one copy. The head of an encoder-decoder may be quantised while its embedding is not.
        """
        spec, shard, shape = self.spec, self.shard, (self.spec.vocab_size, self.spec.hidden_size)
        is_first, is_last = shard.layers.start == 0, shard.layers.stop == spec.num_layers
        is_tied = is_last and spec.tie_word_embeddings
        looks_up = is_first or (is_last and spec.drafter is not None and spec.drafter.reads_embedding)
        separate = not is_tied or should_pack(len(shard.vocab) * spec.hidden_size, self.device, self.dtype)
        embedding = head = None
        if not shard.vocab:
            none = torch.empty((0, spec.hidden_size), dtype=self.dtype, device=self.weights.device)
            return self.embedding(none) if looks_up else None, Linear(none) if is_last else None
        if looks_up or is_tied:
            if is_tied:
                table = self.weights.table(EMBEDDING, shape, keep_narrow=separate, rows=shard.vocab, has_head=True)
                plain = table if spec.source is not None and isinstance(table, Tensor) else None
                if plain is not None and (quantized := self.weights.head(plain)) is not None:
                    return self.embedding(table), Linear(quantized, self._logits_bias(), packer=self.weights.packer)
                rows = self._shared_table(table)
                embedding = self.embedding(rows) if looks_up else None
                head = self._tied_head(rows, separate)
            else:
                embedding = self.embedding(
                    self.share.looked_up(EMBEDDING, shape, keep_narrow=separate, rows=shard.vocab)
                )
        return embedding, self._lm_head(shape) if is_last and not is_tied else head

    def _shared_table(self, rows: Tensor | QuantizedTable) -> Tensor | QuantizedTable:
        """Return the embedding and tied head in a layout that serves both, if there is one."""
        is_half = isinstance(rows, Tensor) and self.weights.keeps_half(rows.dtype, (rows.shape[0], rows.shape[1]))
        if not isinstance(rows, Tensor) or not is_half:
            return rows
        return pack_half(rows, is_head=True, is_exact=self.weights.packer.is_exact)

    def _tied_head(self, rows: Tensor | QuantizedTable, separate: bool) -> Linear:
        spec = self.spec
        bias = None
        if spec.source is not None:
            bias = self._logits_bias()
        elif spec.lm_head_bias:
            bias = self.weights.take(["lm_head.bias"], (spec.vocab_size,), rows=self.shard.vocab)
        if not isinstance(
            rows, Tensor
        ):  # quantised: lookup and product read the same bytes, except as `tied_head` says
            packer = self.weights.packer
            return Linear(tied_head(rows, self.device, packer.mode), bias, packer=packer)
        # Packing makes its own copy; a tensor on `meta` is not packed, but must be counted twice as well.
        return Linear(rows.to(self.dtype, copy=separate and rows.is_meta), bias)

    def _lm_head(self, shape: tuple[int, int]) -> Linear:
        if self.spec.source is not None:
            rows = self.weights.take(["lm_head.weight"], shape, rows=self.shard.vocab)
            quantized = self.weights.head(rows)
            return Linear(rows if quantized is None else quantized, self._logits_bias(), packer=self.weights.packer)
        if not self.spec.lm_head_normalized:
            order = stacked_rows(self.shard.vocab, shape[0])
            return self.weights.linear(["lm_head"], shape, bias=self.spec.lm_head_bias, order=order)
        rows = self.weights.take(["lm_head.weight"], shape, rows=self.shard.vocab)
        return Linear(functional.normalize(rows.float()).to(self.dtype))

    def _logits_bias(self) -> Tensor | None:
        """Return what an encoder-decoder adds to its logits, which some checkpoints leave out where it is zero."""
        is_there = self.spec.lm_head_bias and self.weights.has("lm_head.bias")
        own = slice(self.shard.vocab.start, self.shard.vocab.stop)
        return self.weights.values("lm_head.bias", (self.spec.vocab_size,))[own] if is_there else None

    def embedding(self, rows: Table) -> EmbeddingTable:
        """Return the embedding of the shard's rows of the vocabulary."""
        spec, positions = self.spec, None
        shape = (spec.max_position + spec.position_offset, spec.hidden_size)
        if spec.positions == "learned":
            positions = self.weights.take(["model.embed_positions.weight"], shape)
        elif spec.positions.startswith("sinusoids"):
            positions = sinusoids(*shape, reaches_end=spec.positions == "sinusoids_to_end")
            positions = positions.to(self.weights.device, self.dtype)
        kept: dict[str, Any] = {
            "scale": spec.embedding_scale,
            "positions": positions,
            "position_offset": spec.position_offset,
            "norm": self._embedding_norm(),
            "norms_given": spec.embedding_norm == "weighted",
            "scales_given": spec.scales_given_embeds,
        }
        if self.shard.is_whole:
            return EmbeddingTable(rows, self.dtype, **kept)
        return SplitEmbeddingTable(rows, self.dtype, self.shard.vocab, self.group, **kept)

    # -- a layer

    def layer(self, index: int) -> DecoderLayer:
        prefix = f"model.layers.{index}."
        kind, topology, norm = self._kind(index), self.spec.topology, self.norm
        if kind.part == "recurrent":
            topology = self.spec.recurrent_topology or topology
        if topology == "single":
            is_mixer = kind.part not in ("mlp", "moe")
            part = self._mixer(index, prefix) if is_mixer else self.mlp(index, f"{prefix}mlp.")
            return SingleLayer(kind, norm(f"{prefix}input_layernorm"), self.part(part))
        attention = self.part(self._mixer(index, prefix))
        mlp = self.part(self.mlp(index, f"{prefix}mlp."), self._mlp_factor(index))
        if self.spec.source is not None:
            stems = ("input_layernorm", "cross_layernorm", "post_attention_layernorm")
            norms = (norm(f"{prefix}{stems[0]}"), norm(f"{prefix}{stems[1]}"), norm(f"{prefix}{stems[2]}"))
            cross = self._cross_attention(f"{prefix}cross_attn.")
            return CrossLayer(kind, index, norms, attention, cross, mlp, norms_sums=topology == "sum_norm")
        if topology in ("gemma3n", "gemma4"):
            return self.gemma.layer(index, kind, prefix, attention, mlp)
        if topology == "post_norm":
            after_attention, after_mlp = (
                norm(f"{prefix}post_{part}_layernorm") for part in ("attention", "feedforward")
            )
            return PostNormLayer(kind, attention, after_attention, mlp, after_mlp)
        input_norm = self._gated_norm(f"{prefix}input_layernorm")
        if topology == "parallel_one_norm":
            return self._parallel(ParallelLayer(kind, input_norm, attention, None, mlp))
        if topology == "sandwich":
            before = norm(f"{prefix}pre_feedforward_layernorm")
            eps = self.spec.norm.after_eps
            after_attention, after = (
                norm(f"{prefix}post_{n}_layernorm", eps=eps) for n in ("attention", "feedforward")
            )
            return SandwichLayer(kind, input_norm, attention, after_attention, before, mlp, after)
        mixture = self.spec.mixture
        is_gated = mixture is not None and mixture.is_in(index)
        mlp_norm = (self._gated_norm if is_gated else norm)(f"{prefix}post_attention_layernorm")
        if topology == "parallel":
            return self._parallel(ParallelLayer(kind, input_norm, attention, mlp_norm, mlp))
        return PreNormLayer(kind, input_norm, attention, mlp_norm, mlp)

    def _kind(self, index: int) -> LayerKind:
        spec = self.spec
        windowed = bool(spec.layer_is_windowed) and spec.layer_is_windowed[index]
        has_rope = spec.positions == "rope" and (not spec.layer_has_rope or spec.layer_has_rope[index])
        return LayerKind(windowed, has_rope, spec.layer_kind(index))

    def part(self, part: Any, own_factor: float = 1.0) -> Any:
        """Return attention or feed-forward as the layer calls it: scaled, and added up over the shards."""
        factor = own_factor * (1.0 if self.spec.residual_multiplier is None else self.spec.residual_multiplier)
        scaled = part if factor == 1.0 else Scaled(part, factor)
        adds_later = self.shard.is_whole or self.spec.topology.startswith("parallel")
        return scaled if adds_later else Summed(scaled, self.group)

    def _parallel(self, layer: ParallelLayer) -> DecoderLayer:
        return layer if self.shard.is_whole else SummedLayer(layer, self.group)

    def norm(self, stem: str, factor: float = 1.0, eps: float | None = None) -> RMSNorm | LayerNorm:
        """Return a norm of the stream. factor: on its output. eps: None: the family's."""
        spec, shape = self.spec.norm, (self.spec.hidden_size,)
        if spec.weight:
            weight = self.weights.take([f"{stem}.weight"], shape)
        else:
            weight = self._ones(*shape)
        weight = weight.float() + 1.0 if spec.plus_one else weight
        weight = weight if factor == 1.0 else weight.float() * factor
        if spec.kind == "rms":
            return RMSNorm(weight, spec.eps if eps is None else eps)
        assert factor == 1.0, "a bias would need the factor too"
        bias = self.weights.take([f"{stem}.bias"], shape) if spec.bias else None
        return LayerNorm(weight, bias, spec.eps)

    def _gated_norm(self, stem: str) -> RMSNorm | LayerNorm | GatedNorm:
        """Return a norm with a gate, if the family has such norms."""
        rank, hidden = self.spec.norm.gate_rank, self.spec.hidden_size
        if not rank:
            return self.norm(stem)
        plain, linear = self.norm(f"{stem}.norm"), self.weights.linear
        assert isinstance(plain, RMSNorm)
        return GatedNorm(plain, linear([f"{stem}.W_down"], (rank, hidden)), linear([f"{stem}.W_up"], (hidden, rank)))

    def _embedding_norm(self) -> RMSNorm | LayerNorm | None:
        if self.spec.embedding_norm == "unweighted":
            return RMSNorm(self._ones(self.spec.hidden_size), self.spec.norm.eps)
        return self.norm("model.embed_norm") if self.spec.embedding_norm else None

    def _ones(self, *shape: int) -> Tensor:
        return torch.ones(shape, device=self.weights.device)

    def _mixer(self, index: int, prefix: str) -> MixerPart:
        """Build attention, a recurrent part, or both, by the layer's kind."""
        kind, recurrent = self.spec.layer_kind(index), self.spec.recurrent
        attention: MixerPart | None = None
        if self.spec.has_attention(index):
            attention = self.attention(index, f"{prefix}self_attn.")
            factor = self.spec.attention_factor
            attention = attention if factor == 1.0 else Scaled(attention, factor)
        if kind == "attention" or recurrent is None:
            assert attention is not None, kind
            return attention
        recurrence = build_recurrence(self.spec, recurrent, self.share, prefix)
        return RecurrentPart(recurrence) if attention is None else SideBySide(attention, recurrence)

    # -- attention

    def attention(self, index: int, prefix: str, num_inputs: int | None = None) -> MixerPart:
        """Build a layer's attention. num_inputs: columns of q, k and v; None: those of the stream."""
        spec = self.spec
        if spec.latent is not None:
            return build_latent_attention(spec, spec.latent, self.share, prefix, index)
        (kv_heads, dim), made = kv_shape(spec, index), self._heads_made(index)
        heads, own = query_heads(spec, index), heads_of(spec, self.shard, index)
        q_size, gates = heads * dim, {None: 0, "heads": 1}.get(spec.attention_gate, dim)  # the gates of a head
        kept = (len(made) - 1) * dim if spec.value_dim is None else dim + spec.value_dim
        rows, width = gates * heads + q_size + kept * kv_heads, spec.value_dim or dim  # width: that o_proj reads
        names = ["gate", *made] if spec.attention_gate in ("matrix", "heads") else list(made)
        stems, shape = [f"{prefix}{name}_proj" for name in names], (rows, num_inputs or spec.hidden_size)
        qkv = self.weights.linear(stems, shape, bias=spec.attention_bias, order=self._qkv_order(index))
        out = self.share.row_parallel(
            f"{prefix}o_proj",
            (spec.hidden_size, heads * width),
            range(own.start * width, own.stop * width),
            tuple(count * heads // spec.num_heads * width for count in self.shard.counts.heads),
            bias=spec.attention_out_bias,
        )
        return Attention(
            qkv,
            out,
            dim**-0.5 if spec.attention_scale is None else spec.attention_scale,
            before_rotation=list(self._changes_of_heads(index, prefix)),
            qk_norm=self._head_norm(index, prefix),
            norm_last=spec.qk_norm_last,
            softcap=spec.attention_softcap,
            sinks=self._sinks(index, prefix),
            alibi_slopes=self._alibi_slopes(),
            distance_bias=self._distance_bias(prefix),
            made=made,
            gate_size=gates * len(own),
            gate_activation=spec.gate_activation,
            value_dim=spec.value_dim,
        )

    def _cross_attention(self, prefix: str) -> CrossAttention:
        spec, heads, dim = self.spec, self.shard.heads, self.spec.head_dim
        width, bias, own = spec.num_heads * dim, spec.attention_bias, range(heads.start * dim, heads.stop * dim)
        states, shape = [f"{prefix}k_proj", f"{prefix}v_proj"], (2 * width, spec.hidden_size)
        counts = tuple(count * dim for count in self.shard.counts.heads)
        return CrossAttention(
            self.weights.linear(
                [f"{prefix}q_proj"], (width, spec.hidden_size), bias=bias, order=stacked_rows(own, width)
            ),
            self.weights.linear(states, shape, bias=bias, order=stacked_rows(own, width, copies=2)),
            self.share.row_parallel(
                f"{prefix}o_proj", (spec.hidden_size, width), own, counts, bias=spec.attention_out_bias
            ),
            len(heads),
            dim**-0.5 if spec.attention_scale is None else spec.attention_scale,
            self.group,
        )

    def _distance_bias(self, prefix: str) -> Tensor | None:
        """Return T5's bias of each head by distance [heads, distances] fp32: the layer's own, or the first layer's."""
        if self.spec.positions != "buckets":
            return None
        buckets, furthest = self.spec.position_buckets
        name = f"{prefix}relative_attention_bias.weight"
        if self.weights.has(name):
            table, own = (
                self.weights.take([name], (buckets, self.spec.num_heads), dtype=torch.float32),
                self.shard.heads,
            )
            self._of_distances = table.t()[own.start : own.stop, distance_buckets(buckets, furthest)].contiguous()
        return self._of_distances

    def _heads_made(self, index: int) -> Heads:
        """Return which heads the layer's projection makes."""
        if not keeps_kv(self.spec, index):
            return "q"
        from_keys = self.spec.layer_values_from_keys
        return "qk" if from_keys and from_keys[index] else "qkv"

    def _qkv_order(self, index: int) -> Tensor | None:
        """Return the rows of q, k and v of the shard's heads, with gates first; None: all, as they are.

        Dimensions that rotate together are neighbours in some checkpoints; here they are half the rotated dimensions
        apart. Rows may be reordered as long as q and k agree.
        """
        spec, shard = self.spec, self.shard
        is_turned, gate = spec.rope_interleaved and spec.positions == "rope", spec.attention_gate
        if shard.is_whole and not is_turned and gate != "interleaved":
            return None
        (kv_heads, dim), made = kv_shape(spec, index), self._heads_made(index)
        heads, own, own_kv = query_heads(spec, index), heads_of(spec, shard, index), kv_heads_of(spec, shard, index)
        first_key = (1 if gate in (None, "heads") else 2) * heads
        rows = torch.arange((first_key + kv_heads) * dim, device="cpu").view(-1, dim)
        values = torch.arange(kv_heads * (spec.value_dim or dim), device="cpu").view(kv_heads, -1) + rows.numel()
        if gate == "interleaved":
            queries, gates = [2 * head for head in own], [2 * head + 1 for head in own]
        else:
            queries = [first_key - heads + head for head in own]
            gates = list(own) if gate == "matrix" else []
        keys = [first_key + head for head in own_kv if "k" in made]
        if is_turned:
            head = half_split_order(spec.rope.rotary_dim, dim)
            rows[queries + keys] = rows[queries + keys][:, head]
        own_values = values[list(own_kv) if "v" in made else []]
        order = torch.cat((rows[[*gates, *queries, *keys]].flatten(), own_values.flatten()))
        if gate != "heads":
            return order
        return torch.cat((torch.arange(own.start, own.stop, device="cpu"), heads + order))

    def _changes_of_heads(self, index: int, prefix: str) -> Iterable[HeadsChange]:
        spec = self.spec
        if spec.value_dim is not None:
            yield WidenedValues(len(kv_heads_of(spec, self.shard, index)), spec.value_dim, kv_shape(spec, index)[1])
        if spec.clip_qkv is not None:
            yield Clip(spec.clip_qkv)
        if spec.qk_norm == "whole":
            yield self._whole_norm(prefix)
        elif spec.qk_norm == "each_head":
            yield HeadLayerNorm(torch.cat(self._weights_of_each_head(prefix)), spec.norm.eps)

    def _whole_norm(self, prefix: str) -> WholeNorm | SplitWholeNorm:
        spec, shard = self.spec, self.shard
        q = self._qk_rms_norm(prefix, "q", spec.num_heads, shard.heads)
        k = self._qk_rms_norm(prefix, "k", spec.num_kv_heads, shard.kv_heads)
        if shard.is_whole:
            return WholeNorm(q, k)
        sizes = (spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim)
        is_first = shard.heads.start % (spec.num_heads // spec.num_kv_heads) == 0  # of those with these KV heads
        return SplitWholeNorm(q, k, sizes, self.group, counts_k=is_first)

    def _qk_rms_norm(self, prefix: str, name: str, count: int, own: range) -> RMSNorm:
        dim = self.spec.head_dim
        rows = range(own.start * dim, own.stop * dim)
        weight = self.weights.take([f"{prefix}{name}_norm.weight"], (count * dim,), rows=rows)
        heads = weight.view(-1, self.spec.head_dim)
        return RMSNorm(self._in_order_of_rows(heads).flatten(), self.spec.norm.eps)

    def _weights_of_each_head(self, prefix: str) -> list[Tensor]:
        """Return the weights [own heads, head_dim] of q, then of k."""
        spec, shard = self.spec, self.shard
        return [
            self._weights_of_heads(f"{prefix}q_norm", spec.num_heads, shard.heads),
            self._weights_of_heads(f"{prefix}k_norm", spec.num_kv_heads, shard.kv_heads),
        ]

    def _weights_of_heads(self, stem: str, count: int, own: range) -> Tensor:
        weights, dim = self.weights, self.spec.head_dim
        if weights.has(f"{stem}.weight"):
            stored = weights.take([f"{stem}.weight"], (count, dim), rows=own)
        else:
            stored = weights.take([f"{stem}.{head}.weight" for head in own], (len(own) * dim,)).view(len(own), dim)
        return self._in_order_of_rows(stored)

    def _in_order_of_rows(self, weights: Tensor) -> Tensor:
        """Reorder weights [..., head_dim] of q's and k's norms as the rows of a head are reordered."""
        if not self.spec.rope_interleaved:
            return weights
        order = half_split_order(self.spec.rope.rotary_dim, self.spec.head_dim)
        return weights[..., order.to(weights.device)]

    def _head_norm(self, index: int, prefix: str) -> RMSNorm | None:
        """Return the norm of q and k, and of v without a weight, for one call: rows for each head, q's first."""
        spec, shard = self.spec, self.shard
        if spec.qk_norm == "unweighted" or (spec.qk_norm == "unweighted_rotated" and self._kind(index).has_rope):
            return RMSNorm(self._ones(len(shard.heads) + len(shard.kv_heads), spec.head_dim), spec.norm.eps)
        if spec.qk_norm != "head":
            return None
        dim, keeps = kv_shape(spec, index)[1], keeps_kv(spec, index)
        own = {"q": len(heads_of(spec, shard, index)), "k": len(kv_heads_of(spec, shard, index))}
        stored = [(name, count) for name, count in own.items() if name == "q" or keeps]
        each = [self.weights.take([f"{prefix}{n}_norm.weight"], (dim,)).expand(count, -1) for n, count in stored]
        weight = self._in_order_of_rows(torch.cat(each))
        weight = weight.float() + 1.0 if spec.norm.plus_one else weight
        if spec.v_norm and keeps:
            weight = torch.cat((weight, weight.new_ones(own["k"], dim)))
        return RMSNorm(weight, spec.norm.eps)

    def _sinks(self, index: int, prefix: str) -> Tensor | None:
        each = self.spec.layer_has_sinks
        if not (each[index] if each else self.spec.attention_sinks):
            return None
        heads = self.shard.heads
        return self.weights.take([f"{prefix}sinks"], (self.spec.num_heads,), dtype=torch.float32, rows=heads)

    def _alibi_slopes(self) -> Tensor | None:
        spec = self.spec
        if spec.positions != "alibi":
            return None
        own = alibi_slopes(spec.num_heads)[self.shard.heads.start : self.shard.heads.stop]
        slopes = torch.tensor(own, device=self.weights.device)
        return slopes.mul_(spec.alibi_scale)

    # -- feed-forward

    def _mlp_factor(self, index: int) -> float:
        mixture = self.spec.mixture
        if mixture is not None and mixture.is_in(index):
            return mixture.output_scale
        return self.spec.mlp_factors[1] if self.spec.mlp_factors else 1.0

    def mlp(self, index: int, prefix: str) -> FeedForward:
        spec, own, mixture = self.spec, self.shard.features, self.spec.mixture
        if mixture is not None and mixture.is_in(index) and not mixture.beside_mlp:
            return build_mixture(spec, mixture, self.share, index)
        if mixture is None and (far := self.share.far) is not None and index in far.layers:
            return build_far_mlp(spec, far, index)
        width, bias, counts = spec.intermediate_size, spec.mlp_bias, self.shard.counts.features
        if spec.layer_widths:
            width = spec.layer_widths[index]
            own = in_width(own, spec, width)
            ends = pairwise(accumulate(counts, initial=0))
            counts = tuple(len(in_width(range(a, b), spec, width)) for a, b in ends)
        names = ["gate_proj", "up_proj"] if spec.mlp_gated else ["up_proj"]
        up = self.weights.linear(
            [f"{prefix}{name}" for name in names],
            (len(names) * width, spec.hidden_size),
            bias=bias,
            order=stacked_rows(own, width, len(names)),
        )
        down = self.share.row_parallel(f"{prefix}down_proj", (spec.hidden_size, width), own, counts, bias=bias)
        if not spec.mlp_gated:
            return MLP(up, down, spec.hidden_act)
        if spec.layer_sparsity and spec.layer_sparsity[index]:
            shared = None if self.shard.is_whole else (self.group, width)
            return GatedMLP(up, down, SparseGate(spec.hidden_act, spec.layer_sparsity[index], self.dtype, shared))
        if not spec.mlp_factors:
            return GatedMLP(up, down, mlp_activation(spec, index))
        factors = torch.cat((torch.full((len(own),), spec.mlp_factors[0]), torch.ones(len(own))))
        return GatedMLP(ScaledOutputs(up, factors.to(self.weights.device)), down, spec.hidden_act)
