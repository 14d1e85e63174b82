"""Build a decoder from a spec and a source of tensors.

With a source that has only sizes (weights/weights.py: PromisedWeights), the same code counts what a model will hold.
Does not know: files, formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels.linear import should_pack
from localllm.kernels.quantized_weight import QuantizedTable
from localllm.models.architectures.decoder import DecoderModel
from localllm.models.architectures.latent import build_latent_attention
from localllm.models.architectures.layer import (
    AttentionPart,
    DecoderLayer,
    FeedForward,
    LayerKind,
    ParallelLayer,
    PostNormLayer,
    PreNormLayer,
    SandwichLayer,
    Scaled,
)
from localllm.models.architectures.mixture import build_mixture
from localllm.models.layers.alibi import alibi_slopes
from localllm.models.layers.attention import Attention
from localllm.models.layers.embedding import EmbeddingTable
from localllm.models.layers.linear import Linear, tied_head
from localllm.models.layers.mlp import MLP, GatedMLP
from localllm.models.layers.norm import LayerNorm, RMSNorm
from localllm.models.layers.qkv import Clip, HeadLayerNorm, WholeNorm
from localllm.models.layers.rotary import half_split_order, rope_tables
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.weights.weights import EMBEDDING, TensorSource


class DecoderBuilder:
    """Builds the decoder part by part, asking for tensors by Llama's names."""

    def __init__(self, spec: ModelSpec, weights: TensorSource, device: torch.device, dtype: torch.dtype) -> None:
        """device: where the model will compute, also if `weights` has only sizes."""
        self.spec, self.weights, self.device, self.dtype = spec, weights, device, dtype

    def build(self, max_model_len: int) -> DecoderModel:
        spec = self.spec
        embedding, lm_head = self._embedding_and_head()
        layers = [self._layer(index) for index in range(spec.num_layers)]
        norm = self._norm("model.norm")
        tables = rope_tables(spec, max_model_len, self.weights.device)
        return DecoderModel(spec, embedding, layers, norm, lm_head, tables, max_model_len, self.device, self.dtype)

    # -- embedding and head

    def _embedding_and_head(self) -> tuple[EmbeddingTable, Linear]:
        """Build the embedding and the head. Embedding rows keep the stored type if it is narrower: widening a row is
        exact.

        A tied head that is packed for the CPU cannot be read by rows, so the embedding gets its own copy. The packed
        head is 2 to 4 times faster than F.linear on plain rows, which is up to half of a decode step of a small model;
        the rows beside it cost 14 % more memory for a bf16 Qwen2.5-0.5B. (Reading rows from the memory map would be
        free, but a checkpoint rewritten in place would then change or kill a running server.)
        """
        spec = self.spec
        shape = (spec.vocab_size, spec.hidden_size)
        if not spec.tie_word_embeddings:
            rows = self.weights.table(EMBEDDING, shape, keep_narrow=True)
            return self._embedding(rows), self._lm_head(shape)
        separate = should_pack(spec.vocab_size * spec.hidden_size, self.device, self.dtype)
        rows = self.weights.table(EMBEDDING, shape, keep_narrow=separate)
        bias = self.weights.take(["lm_head.bias"], shape[:1]) if spec.lm_head_bias else None
        if not isinstance(rows, Tensor):  # quantised: lookup and product read the same bytes, except on a CPU
            layout = self.weights.cpu_weights
            head = Linear(tied_head(rows, self.device, layout), bias, cpu_weights=layout)
            return self._embedding(rows), head
        # Packing makes its own copy; a tensor on `meta` is not packed, but must be counted twice as well.
        return self._embedding(rows), Linear(rows.to(self.dtype, copy=separate and rows.is_meta), bias)

    def _lm_head(self, shape: tuple[int, int]) -> Linear:
        if not self.spec.lm_head_normalized:
            return self.weights.linear(["lm_head"], shape, bias=self.spec.lm_head_bias)
        return Linear(functional.normalize(self.weights.take(["lm_head.weight"], shape).float()).to(self.dtype))

    def _embedding(self, rows: Tensor | QuantizedTable) -> EmbeddingTable:
        spec, positions = self.spec, None
        if spec.positions == "learned":
            shape = (spec.max_position + spec.position_offset, spec.hidden_size)
            positions = self.weights.take(["model.embed_positions.weight"], shape)
        norm = self._norm("model.embed_norm") if spec.embedding_norm else None
        return EmbeddingTable(
            rows,
            self.dtype,
            spec.embedding_scale,
            positions=positions,
            position_offset=spec.position_offset,
            norm=norm,
            scales_given=spec.scales_given_embeds,
        )

    # -- a layer

    def _layer(self, index: int) -> DecoderLayer:
        prefix = f"model.layers.{index}."
        kind, topology, norm = self._kind(index), self.spec.topology, self._norm
        attention = self._scaled(self._attention(index, f"{prefix}self_attn."))
        mlp = self._scaled(self._mlp(index, f"{prefix}mlp."))
        if topology == "post_norm":
            after_attention, after_mlp = (
                norm(f"{prefix}post_{part}_layernorm") for part in ("attention", "feedforward")
            )
            return PostNormLayer(kind, attention, after_attention, mlp, after_mlp)
        input_norm = norm(f"{prefix}input_layernorm")
        if topology == "parallel_one_norm":
            return ParallelLayer(kind, input_norm, attention, None, mlp)
        after_attention = norm(f"{prefix}post_attention_layernorm")
        if topology == "parallel":
            return ParallelLayer(kind, input_norm, attention, after_attention, mlp)
        if topology == "sandwich":
            before, after = (norm(f"{prefix}{side}_feedforward_layernorm") for side in ("pre", "post"))
            return SandwichLayer(kind, input_norm, attention, after_attention, before, mlp, after)
        return PreNormLayer(kind, input_norm, attention, after_attention, mlp)

    def _kind(self, index: int) -> LayerKind:
        spec = self.spec
        windowed = bool(spec.layer_is_windowed) and spec.layer_is_windowed[index]
        has_rope = spec.positions == "rope" and (not spec.layer_has_rope or spec.layer_has_rope[index])
        return LayerKind(windowed, has_rope)

    def _scaled(self, part: Any) -> Any:
        factor = self.spec.residual_multiplier
        return part if factor is None else Scaled(part, factor)

    def _norm(self, stem: str) -> RMSNorm | LayerNorm:
        spec, shape = self.spec.norm, (self.spec.hidden_size,)
        if spec.weight:
            weight = self.weights.take([f"{stem}.weight"], shape)
        else:
            weight = torch.ones(shape, device=self.weights.device)
        weight = weight.float() + 1.0 if spec.plus_one else weight
        if spec.kind == "rms":
            return RMSNorm(weight, spec.eps)
        bias = self.weights.take([f"{stem}.bias"], shape) if spec.bias else None
        return LayerNorm(weight, bias, spec.eps)

    # -- attention

    def _attention(self, index: int, prefix: str) -> AttentionPart:
        spec = self.spec
        if spec.latent is not None:
            return build_latent_attention(spec, spec.latent, self.weights, prefix)
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        stems, shape = [f"{prefix}{name}_proj" for name in "qkv"], (q_size + 2 * kv_size, spec.hidden_size)
        qkv = self.weights.linear(stems, shape, bias=spec.attention_bias, order=self._qkv_order())
        out = self.weights.linear([f"{prefix}o_proj"], (spec.hidden_size, q_size), bias=spec.attention_out_bias)
        return Attention(
            qkv,
            out,
            spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale,
            before_rotation=list(self._qk_transforms(prefix)),
            qk_norm=self._qk_norm(prefix),
            softcap=spec.attention_softcap,
            sinks=self._sinks(prefix),
            alibi_slopes=self._alibi_slopes(),
        )

    def _qkv_order(self) -> Tensor | None:
        """Return the row order of q, k and v. Dimensions that rotate together are neighbours in some checkpoints; here
        they are half the rotated dimensions apart. Rows may be reordered as long as q and k agree.
        """
        spec = self.spec
        if not spec.rope_interleaved or spec.positions != "rope":
            return None
        turning = spec.num_heads + spec.num_kv_heads
        head = half_split_order(spec.rope.rotary_dim, spec.head_dim)
        rows = torch.arange((turning + spec.num_kv_heads) * spec.head_dim, device="cpu").view(-1, spec.head_dim)
        return torch.cat((rows[:turning, head], rows[turning:])).flatten()

    def _qk_transforms(self, prefix: str) -> Iterable[Callable[[Tensor], Tensor]]:
        spec = self.spec
        if spec.clip_qkv is not None:
            yield Clip(spec.clip_qkv)
        if spec.qk_norm == "whole":
            heads = {"q": spec.num_heads, "k": spec.num_kv_heads}
            yield WholeNorm(*(self._qk_rms_norm(prefix, name, heads[name] * spec.head_dim) for name in "qk"))
        elif spec.qk_norm == "each_head":
            yield HeadLayerNorm(torch.cat(self._weights_of_each_head(prefix)), spec.norm.eps)

    def _qk_rms_norm(self, prefix: str, name: str, size: int) -> RMSNorm:
        weight = self.weights.take([f"{prefix}{name}_norm.weight"], (size,))
        heads = weight.view(-1, self.spec.head_dim)
        return RMSNorm(self._in_order_of_rows(heads).flatten(), self.spec.norm.eps)

    def _weights_of_each_head(self, prefix: str) -> list[Tensor]:
        """Return the weights [heads, head_dim] of q, then of k."""
        spec, weights = self.spec, self.weights
        shapes = {"q": (spec.num_heads, spec.head_dim), "k": (spec.num_kv_heads, spec.head_dim)}
        stored = []
        for name, (heads, head_dim) in shapes.items():
            whole = f"{prefix}{name}_norm.weight"
            names = [whole] if weights.has(whole) else [f"{prefix}{name}_norm.{head}.weight" for head in range(heads)]
            shape = (heads, head_dim) if weights.has(whole) else (heads * head_dim,)
            stored.append(self._in_order_of_rows(weights.take(names, shape).view(heads, head_dim)))
        return stored

    def _in_order_of_rows(self, weights: Tensor) -> Tensor:
        """Reorder weights [..., head_dim] of q's and k's norms as the rows of a head are reordered."""
        if not self.spec.rope_interleaved:
            return weights
        order = half_split_order(self.spec.rope.rotary_dim, self.spec.head_dim)
        return weights[..., order.to(weights.device)]

    def _qk_norm(self, prefix: str) -> RMSNorm | None:
        """Return the norm of q and k for one call: the weights are repeated for each head, q's first."""
        spec = self.spec
        if spec.qk_norm != "head":
            return None
        q, k = (self.weights.take([f"{prefix}{name}_norm.weight"], (spec.head_dim,)) for name in "qk")
        weight = self._in_order_of_rows(torch.cat((q.expand(spec.num_heads, -1), k.expand(spec.num_kv_heads, -1))))
        return RMSNorm(weight.float() + 1.0 if spec.norm.plus_one else weight, spec.norm.eps)

    def _sinks(self, prefix: str) -> Tensor | None:
        if not self.spec.attention_sinks:
            return None
        return self.weights.take([f"{prefix}sinks"], (self.spec.num_heads,), dtype=torch.float32)

    def _alibi_slopes(self) -> Tensor | None:
        spec = self.spec
        if spec.positions != "alibi":
            return None
        slopes = torch.tensor(alibi_slopes(spec.num_heads), device=self.weights.device)
        return slopes.mul_(spec.alibi_scale)

    # -- feed-forward

    def _mlp(self, index: int, prefix: str) -> FeedForward:
        spec = self.spec
        if spec.mixture is not None and spec.mixture.is_in(index):
            return build_mixture(spec, spec.mixture, self.weights, prefix)
        width, bias = spec.intermediate_size, spec.mlp_bias
        down_shape = (spec.hidden_size, width)
        if not spec.mlp_gated:
            up = self.weights.linear([f"{prefix}up_proj"], (width, spec.hidden_size), bias=bias)
            return MLP(up, self.weights.linear([f"{prefix}down_proj"], down_shape, bias=bias), spec.hidden_act)
        stems = [f"{prefix}gate_proj", f"{prefix}up_proj"]
        gate_up = self.weights.linear(stems, (2 * width, spec.hidden_size), bias=bias)
        return GatedMLP(gate_up, self.weights.linear([f"{prefix}down_proj"], down_shape, bias=bias), spec.hidden_act)
