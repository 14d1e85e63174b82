"""A model's description: a decoder by its differences from Llama.

Does not know: how config.json becomes one (architectures/read_spec.py), the machine, the settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localllm.config.settings import Task
from localllm.models.spec.altup import AltUpSpec
from localllm.models.spec.drafter import DraftMethod
from localllm.models.spec.kv_group import KVGroup
from localllm.models.spec.latent import LatentSpec
from localllm.models.spec.mixture import MixtureSpec
from localllm.models.spec.norms import NormSpec
from localllm.models.spec.per_layer_input import PerLayerInputSpec
from localllm.models.spec.recurrent import LayerPart, RecurrentSpec
from localllm.models.spec.rope import RopeSpec

__all__ = ["DrafterPlan", "ModelSpec", "RopeSpec"]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer, described by its differences from Llama."""

    architecture: str  # class name in config.json, e.g. LlamaForCausalLM
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int  # 1 with latent attention: all heads read the latent
    head_dim: int  # the cached size with latent attention
    vocab_size: int
    max_position: int  # context the checkpoint was trained (or scaled) for, or up to which it is supported
    hidden_act: str  # silu, gelu_tanh, gelu; relu, relu2, quick_gelu where the feed-forward is not gated
    tie_word_embeddings: bool
    dtype: str  # type of the stored weights: float32, bfloat16, float16
    rope: RopeSpec
    context_limit: str = ""  # a sentence: why max_position is below the trained context; empty: it is not
    norm: NormSpec = field(default_factory=NormSpec)
    topology: str = "pre_norm"
    """sandwich, post_norm, parallel, parallel_one_norm, gemma4, gemma3n: see architectures/layer.py."""
    attention_bias: bool = False  # on q, k, v
    attention_out_bias: bool = False  # on o
    mlp_bias: bool = False
    mlp_gated: bool = True
    layer_widths: tuple[int, ...] = ()  # per layer the width of the feed-forward part; empty: intermediate_size in all
    layer_sparsity: tuple[float, ...] = ()
    """Per layer the share of the feed-forward part's gate that becomes zero; empty: none in any (Gemma 3n)."""
    altup: AltUpSpec | None = None  # several residual streams (Gemma 3n)
    per_layer_input: PerLayerInputSpec | None = None  # a further embedding of the token for each layer (Gemma 3n, 4)
    lm_head_bias: bool = False
    lm_head_normalized: bool = False  # each row is scaled to length 1 (Baichuan 2)
    qk_norm: str | None = None
    """head: RMSNorm over each head of q and k, one weight for all (Qwen3, Gemma 3). each_head: LayerNorm, a weight for
    each (Cohere). whole: RMSNorm over all heads together (OLMo 2). unweighted: RMSNorm over each head without a
    weight, in layers that rotate (Llama 4)."""
    qk_norm_last: bool = False  # the norm of each head comes after the rotation (Hunyuan)
    v_norm: bool = False  # RMSNorm without a weight over each head of v (Gemma 4)
    layer_values_from_keys: tuple[bool, ...] = ()
    """Per layer whether its values are its keys before norm and rotation, with one matrix for both; empty: none."""
    attention_gate: str | None = None
    """interleaved: each head's output is multiplied by the sigmoid of a gate, whose rows follow the head's own in
    q_proj (Qwen3-Next). matrix: the gates are a matrix of their own, gate_proj (Trinity)."""
    clip_qkv: float | None = None  # OLMo 1
    positions: str = "rope"  # alibi (Bloom), learned (GPT-2), none (Granite 4 H)
    position_offset: int = 0  # rows of that table before position 0 (OPT)
    alibi_scale: float = 1.0  # on the slopes
    query_scaling: float | None = None  # Ministral 3: growth of queries with their position
    rope_interleaved: bool = False  # dimensions that rotate together are neighbours in the checkpoint (GPT-J)
    sliding_window: int | None = None  # tokens that a windowed layer sees, including the current one
    layer_is_windowed: tuple[bool, ...] = ()  # per layer; empty: none
    layer_kv_shapes: tuple[tuple[int, int], ...] = ()
    """Per layer the KV heads and their size; empty: num_kv_heads of head_dim in all (Gemma 4 has two shapes)."""
    kv_source: tuple[int, ...] = ()  # per layer the layer whose K and V it reads; empty: each its own (Gemma 4 shares)
    held_groups: tuple[KVGroup, ...] = ()  # of a rank: the whole model's groups with what the rank holds (shard.py)
    layer_has_rope: tuple[bool, ...] = ()  # per layer; empty: all (SmolLM3 omits every fourth)
    local_rope: RopeSpec | None = None  # rope of windowed layers if different (Gemma 3)
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attention_softcap: float | None = None  # Gemma 2
    attention_sinks: bool = False  # each head has an extra score without a value (gpt-oss)
    latent: LatentSpec | None = None  # attention over one short vector per token (DeepSeek)
    recurrent: RecurrentSpec | None = None  # a part that keeps a state of fixed size, instead of attention
    layer_kinds: tuple[LayerPart, ...] = ()  # per layer what mixes tokens; empty: attention
    mixture: MixtureSpec | None = None  # experts instead of the feed-forward part
    final_softcap: float | None = None
    embedding_scale: float | None = None  # Gemma: sqrt(hidden_size)
    scales_given_embeds: bool = False  # embeddings supplied by a request are scaled too (Granite)
    embedding_norm: bool = False  # Bloom
    residual_multiplier: float | None = None  # on the outputs of attention and feed-forward (Granite)
    attention_factor: float = 1.0  # on the output of attention (Falcon-H1)
    mlp_factors: tuple[float, ...] = ()  # on the gate before its activation, and on the output; empty: none (Falcon-H1)
    logits_multiplier: float | None = None  # Cohere
    eos_token_ids: tuple[int, ...] = ()  # from generation_config.json, else config.json
    bos_token_id: int | None = None
    task: Task = "generate"  # embed and score: models/pooling
    drafter: DrafterPlan | None = None  # guesses tokens of this model; counted by fit and loaded with it
    implementation: str = "localllm"  # whose code computes it: localllm, transformers, or remote (the checkpoint's)
    quantization: Mapping[str, Any] | None = None  # quantization_config, unchanged; None: plain matrices
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)  # temperature, top_p, ... of generation_config

    def layer_kind(self, layer: int) -> LayerPart:
        """Return what mixes tokens in a layer."""
        return self.layer_kinds[layer] if self.layer_kinds else "attention"

    def has_attention(self, layer: int) -> bool:
        """Return whether a layer attends to keys and values."""
        return self.layer_kind(layer) in ("attention", "both")

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Return the layers that keep a recurrent state."""
        return tuple(layer for layer in range(self.num_layers) if self.layer_kind(layer) in ("recurrent", "both"))


@dataclass(frozen=True, slots=True)
class DrafterPlan:
    """A drafter by its checkpoint's headers, and how it reads the model that it drafts for."""

    method: DraftMethod
    path: Path  # folder or GGUF file of the drafter; with MTP layers the target's own
    spec: ModelSpec  # of the drafter's own layers: sizes of their K and V, rotary embedding
    stored_bytes: int  # of its tensors as stored in `spec.dtype`, without those that it shares with the target
    taps: tuple[int, ...] = ()  # layers whose input it reads (see Drafter.taps)
    first_key: int = 0  # first slot with keys: 1 if it computes pairs of a feature and a token
    num_drafts: int = 4  # most drafts at a time
    quantization: str | None = None  # at load, of a draft model or MTP layers
