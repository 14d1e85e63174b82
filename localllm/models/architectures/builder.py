"""From a spec and a source of tensors to a decoder.

Run over a source that only promises (weights.py: PromisedWeights), the same code tells what a model will hold.
Does not know: files, formats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.kernels.linear import packs
from localllm.models.architectures.decoder import DecoderModel
from localllm.models.architectures.layer import (
    AttentionPart,
    DecoderLayer,
    FeedForward,
    LayerKind,
    PreNormLayer,
    SandwichLayer,
)
from localllm.models.layers.attention import Attention
from localllm.models.layers.embedding import Embedding
from localllm.models.layers.linear import Linear
from localllm.models.layers.mlp import GatedMLP
from localllm.models.layers.norm import RMSNorm
from localllm.models.layers.rotary import rope_table
from localllm.models.rope import RopeSpec
from localllm.models.spec import ModelSpec
from localllm.models.weights import EMBEDDING, TensorSource


class DecoderBuilder:
    """Puts the decoder together, part by part, asking for Llama's tensor names."""

    def __init__(self, spec: ModelSpec, weights: TensorSource, device: torch.device, dtype: torch.dtype) -> None:
        """device: what the model will compute on, also where `weights` only promises."""
        self.spec, self.weights, self.device, self.dtype = spec, weights, device, dtype

    def build(self, max_model_len: int) -> DecoderModel:
        spec = self.spec
        embedding, lm_head = self._embedding_and_head()
        layers = [self._layer(index) for index in range(spec.num_layers)]
        local = None if spec.local_rope is None else self._rope_table(spec.local_rope, max_model_len)
        tables = (self._rope_table(spec.rope, max_model_len), local)
        norm = self._norm("model.norm.weight")
        return DecoderModel(spec, embedding, layers, norm, lm_head, tables, self.device, self.dtype)

    def _embedding_and_head(self) -> tuple[Embedding, Linear]:
        """Embedding rows stay in the stored type where it is narrower: widening a row on its way out is exact.

        A tied head that is packed for the CPU cannot also be read by rows. It then gets its own copy: the packed
        head is 2 to 4 times faster than F.linear on the plain rows, which is up to half of a decode step of a small
        model, and the rows beside it cost 14 % more memory for a bf16 Qwen2.5-0.5B. (Reading rows from the memory
        map would be free, but a checkpoint rewritten in place would then change or kill a running server.)
        """
        spec = self.spec
        shape = (spec.vocab_size, spec.hidden_size)
        if not spec.tie_word_embeddings:
            embedding = self.weights.take([EMBEDDING], shape, keep_narrow=True)
            return self._embedding(embedding), self.weights.linear(["lm_head"], shape)
        separate = packs(spec.vocab_size * spec.hidden_size, self.device, self.dtype)
        rows = self.weights.take([EMBEDDING], shape, keep_narrow=separate)
        # Packing makes a copy of its own; a promised tensor is not packed and must be counted twice all the same.
        return self._embedding(rows), Linear(rows.to(self.dtype, copy=separate and rows.is_meta))

    def _embedding(self, rows: Tensor) -> Embedding:
        return Embedding(rows, self.dtype, self.spec.embedding_scale)

    def _layer(self, index: int) -> DecoderLayer:
        prefix = f"model.layers.{index}."
        kind, norm = self._kind(index), self._norm
        attention, mlp = self._attention(index, f"{prefix}self_attn."), self._mlp(index, f"{prefix}mlp.")
        input_norm = norm(f"{prefix}input_layernorm.weight")
        after_attention = norm(f"{prefix}post_attention_layernorm.weight")
        if not self.spec.post_norms:
            return PreNormLayer(kind, input_norm, attention, after_attention, mlp)
        before, after = (norm(f"{prefix}{side}_feedforward_layernorm.weight") for side in ("pre", "post"))
        return SandwichLayer(kind, input_norm, attention, after_attention, before, mlp, after)

    def _kind(self, index: int) -> LayerKind:
        spec = self.spec
        windowed = bool(spec.layer_is_windowed) and spec.layer_is_windowed[index]
        return LayerKind(windowed, has_rope=not spec.layer_has_rope or spec.layer_has_rope[index])

    def _norm(self, name: str) -> RMSNorm:
        weight = self.weights.take([name], (self.spec.hidden_size,))
        return RMSNorm(weight, self.spec.rms_norm_eps, plus_one=self.spec.norm_plus_one)

    def _attention(self, index: int, prefix: str) -> AttentionPart:
        spec = self.spec
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        stems = [f"{prefix}{name}_proj" for name in "qkv"]
        qkv = self.weights.linear(stems, (q_size + 2 * kv_size, spec.hidden_size), bias=spec.attention_bias)
        out = self.weights.linear([f"{prefix}o_proj"], (spec.hidden_size, q_size), bias=spec.attention_out_bias)
        scale = spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale
        return Attention(qkv, out, scale, qk_norm=self._qk_norm(prefix), softcap=spec.attention_softcap)

    def _qk_norm(self, prefix: str) -> RMSNorm | None:
        """q and k are normed in one call: their weights, repeated for each head, one above the other."""
        spec = self.spec
        if not spec.qk_norm:
            return None
        q, k = (self.weights.take([f"{prefix}{name}_norm.weight"], (spec.head_dim,)) for name in "qk")
        weight = torch.cat((q.expand(spec.num_heads, -1), k.expand(spec.num_kv_heads, -1)))
        return RMSNorm(weight, spec.rms_norm_eps, plus_one=spec.norm_plus_one)

    def _mlp(self, index: int, prefix: str) -> FeedForward:
        spec = self.spec
        stems = [f"{prefix}gate_proj", f"{prefix}up_proj"]
        gate_up = self.weights.linear(stems, (2 * spec.intermediate_size, spec.hidden_size), bias=spec.mlp_bias)
        down = self.weights.linear(
            [f"{prefix}down_proj"], (spec.hidden_size, spec.intermediate_size), bias=spec.mlp_bias
        )
        return GatedMLP(gate_up, down, spec.hidden_act)

    def _rope_table(self, rope: RopeSpec, num_positions: int) -> Tensor:
        return rope_table(rope, num_positions).to(self.weights.device)
