"""A model's description: a decoder by its differences from Llama, its KV groups, and its recurrent states.

A *KV group* is the layers that share one block table, because they keep the same positions in the same shape. A
windowed layer needs the last `window` tokens and a full layer all of them, so each kind has blocks of its own; most
models have one group. Groups are derived from the spec in the order of their first layers, which is the same on every
rank, also where a pipeline stage holds no layer of a group.
A recurrent layer keeps *states*, whatever the request's length: a request has the same row of every state tensor. The
convolution's inputs are kept in the type of the activations, the matrix in fp32.
Does not know: how config.json becomes a spec (read_spec.py), the machine, the settings, which request holds which block
or state (engine/), the tensors themselves (runner/).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from localllm.config.settings import Task
from localllm.kernels.kv_format import window_name
from localllm.models.spec.family import Storage
from localllm.models.spec.fields import NormSpec
from localllm.models.spec.latent import IndexSpec, LatentSpec
from localllm.models.spec.mixture import MixtureSpec
from localllm.models.spec.recurrent import LayerPart, RecurrentSpec
from localllm.models.spec.rope import RopeSpec
from localllm.models.spec.vision import HearingSpec, VisionSpec


class KVGroup(NamedTuple):
    """Layers that share one block table: the same window, and the same shape of K and V."""

    name: str  # full, window_1024 or chunk_8192; with the shape behind it if that alone does not tell two groups apart
    layers: tuple[int, ...]  # ascending; of a pipeline stage its own numbers, and possibly none
    window: int | None  # which tokens the layers see, as in kernels/kv_format.py; None: all
    num_kv_heads: int
    head_dim: int
    values_are_keys: bool  # one latent is both key and value
    index_size: int = 0  # numbers of a token's index key, in a tensor of its own; 0: there is none

    @property
    def numbers_per_token(self) -> int:
        """Numbers in K, V and index keys of one token position over the group's layers."""
        kept = self.num_kv_heads * self.head_dim * (1 if self.values_are_keys else 2)
        return len(self.layers) * (kept + self.index_size)


def held_blocks(num_tokens: int, window: int | None, block_size: int, step_tokens: int = 0) -> int:
    """Return the most blocks that a request of `num_tokens` holds in a group while it computes `step_tokens` at once.

    A window needs the positions before the first query, and may begin and end inside a block. One token per step is
    part of the window.
    """
    blocks = -(-num_tokens // block_size)
    return blocks if window is None else min(blocks, -(-(abs(window) - 1 + step_tokens) // block_size) + 2)


def main_group(windows: tuple[int | None, ...]) -> int:
    """Return the index of the first group that keeps every token; of the longest window if all have one."""
    return max(range(len(windows)), key=lambda group: (windows[group] is None, abs(windows[group] or 0), -group))


class SourceSpec(NamedTuple):
    """The encoder of an encoder-decoder. It reads the prompt, and each layer of the decoder attends to its states."""

    max_length: int  # tokens of a prompt
    start_ids: tuple[int, ...]  # tokens before each answer: the start token, and a forced first token
    encoder_bytes: int = 0  # of the encoder in float32; 0: not counted yet (models/encoders/source.py)
    forced_end: int | None = None  # the last token of an answer that reaches its limit; None: what the model draws
    not_used: tuple[str, ...] = ()  # wishes of generation_config.json that requests have to make themselves


DraftMethod = Literal["draft_model", "eagle", "eagle3", "mtp"]

FINAL_HIDDEN, FINAL_STREAM = -1, -2
"""The taps of the hidden state after the target's final norm, and of the stream before this norm."""


class QueryGrowth(NamedTuple):
    """Queries at position p are multiplied by 1 + factor * log(1 + (p + offset) // period) (arXiv:2501.19399)."""

    factor: float
    period: int = 0  # positions; 0: the context that rope was scaled from
    offset: int = 0
    rotated: bool = True  # also in layers that rotate


@dataclass(frozen=True, slots=True)
class AltUpSpec:
    """Several residual streams, of which each layer computes one (alternating updates, arXiv:2301.13310)."""

    num_streams: int
    active: int  # the stream that layers compute
    scales_output: bool  # the computed stream is scaled before the per-layer embedding's gate reads it
    laurel_rank: int  # of the low-rank matrix beside attention (LAuReL, arXiv:2411.07501)


@dataclass(frozen=True, slots=True)
class PerLayerInputSpec:
    """Sizes of the table of per-layer embeddings, [vocab_size, layers * size]."""

    size: int  # numbers of one layer's vector
    vocab_size: int  # rows of the table; tokens beyond it use row 0
    pad_id: int = 0  # token that stands for a picture's
    num_layers: int = 0  # layers whose vectors a pipeline stage has: its own and those after it; 0: all of the model


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer, described by its differences from Llama."""

    architecture: str  # class name in config.json, e.g. LlamaForCausalLM
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int  # of the layer with the most query heads
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
    """sandwich, post_norm, sum_norm, parallel, parallel_one_norm, gemma4, gemma3n: see decoder/layer.py."""
    recurrent_topology: str | None = None  # of layers with a recurrent part alone; None: topology (OLMo Hybrid)
    attention_bias: bool = False  # on q, k, v
    attention_out_bias: bool = False  # on o
    mlp_bias: bool = False
    mlp_gated: bool = True
    layer_widths: tuple[int, ...] = ()  # per layer the width of the feed-forward part; empty: intermediate_size in all
    layer_sparsity: tuple[float, ...] = ()
    """Per layer the share of the feed-forward part's gate that becomes zero; empty: none in any (Gemma 3n)."""
    layer_limits: tuple[float, ...] = ()
    """Per layer the limit of the gated activation (kernels/gated.py) of the feed-forward part, or of the shared expert;
    0: none; empty: none in any (Step 3.7)."""
    altup: AltUpSpec | None = None  # several residual streams (Gemma 3n)
    per_layer_input: PerLayerInputSpec | None = None  # a further embedding of the token for each layer (Gemma 3n, 4)
    lm_head_bias: bool = False
    lm_head_normalized: bool = False  # each row is scaled to length 1 (Baichuan 2)
    qk_norm: str | None = None
    """head: RMSNorm over each head of q and k, one weight for all (Qwen3, Gemma 3). each_head: LayerNorm, a weight for
    each (Cohere). whole: RMSNorm over all heads together (OLMo 2). unweighted: RMSNorm over each head without a
    weight (Muse Glimmer). unweighted_rotated: the same, in layers that rotate (Llama 4)."""
    qk_norm_last: bool = False  # the norm of each head comes after the rotation (Hunyuan)
    v_norm: bool = False  # RMSNorm without a weight over each head of v (Gemma 4)
    layer_values_from_keys: tuple[bool, ...] = ()
    """Per layer whether its values are its keys before norm and rotation, with one matrix for both; empty: none."""
    attention_gate: str | None = None
    """interleaved: each head's output is multiplied by the sigmoid of a gate, whose rows follow the head's own in
    q_proj (Qwen3-Next). matrix: the gates are a matrix of their own, gate_proj (Trinity). heads: the same, with one
    gate for each head (LFM3)."""
    gate_activation: Literal["sigmoid", "softplus"] = "sigmoid"  # in place of that sigmoid (Laguna)
    clip_qkv: float | None = None  # OLMo 1
    positions: str = "rope"
    """alibi (Bloom), learned (GPT-2), sinusoids (Marian), sinusoids_to_end (M2M-100, whose last frequency is the
    smallest), buckets (T5), none (Granite 4 H)."""
    position_buckets: tuple[int, int] = (0, 0)  # of distances, and the distance from which on the last one counts
    position_offset: int = 0  # rows of that table before position 0 (OPT)
    alibi_scale: float = 1.0  # on the slopes
    query_growth: QueryGrowth | None = None  # with their position (Ministral 3, Llama 4)
    rope_interleaved: bool = False  # dimensions that rotate together are neighbours in the checkpoint (GPT-J)
    sliding_window: int | None = None  # tokens that a windowed layer sees, including the current one
    window_is_chunk: bool = False  # windows are chunks of that many positions, and do not slide (Llama 4)
    layer_is_windowed: tuple[bool, ...] = ()  # per layer; empty: none
    mtp_is_windowed: bool = False  # the layer for multi-token prediction is as the windowed ones (Mellum 2)
    mtp_limit: float = 0.0  # of its feed-forward part, as in layer_limits (Step 3.5)
    layer_heads: tuple[int, ...] = ()  # per layer the query heads; empty: num_heads in all (Laguna)
    layer_kv_shapes: tuple[tuple[int, int], ...] = ()
    """Per layer the KV heads and their size; empty: num_kv_heads of head_dim in all (Gemma 4 has two shapes)."""
    kv_source: tuple[int, ...] = ()  # per layer the layer whose K and V it reads; empty: each its own (Gemma 4 shares)
    held_groups: tuple[KVGroup, ...] = ()  # of a rank: the whole model's groups with what the rank holds (shard.py)
    layer_has_rope: tuple[bool, ...] = ()  # per layer; empty: all (SmolLM3 omits every fourth)
    local_rope: RopeSpec | None = None  # rope of windowed layers if different (Gemma 3)
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attention_softcap: float | None = None  # Gemma 2
    attention_sinks: bool = False  # each head has an extra score without a value (gpt-oss)
    layer_has_sinks: tuple[bool, ...] = ()  # per layer; empty: all or none (MiMo V2 has some in windowed layers)
    value_dim: int | None = None  # size of a head of v, if it is narrower than head_dim (MiMo V2)
    latent: LatentSpec | None = None  # attention over one short vector per token (DeepSeek)
    recurrent: RecurrentSpec | None = None  # a part that keeps a state of fixed size, instead of attention
    layer_index_sizes: tuple[int, ...] = ()
    """Per layer the numbers of a key by which blocks of keys are chosen, 0: none; empty: none in any (MiniMax M3)."""
    layer_kinds: tuple[LayerPart, ...] = ()  # per layer what mixes tokens; empty: attention
    class_streams: int = 1  # residual streams that a class's own code computes (Qwen4-Exp, DeepSeek V4)
    class_mlp_tensors: int = 3  # that a class's feed-forward part holds: gate, up, their product, and them limited
    reads_token_ids: bool = False  # in some layers, by a class's own code (Qwen4-Exp, DeepSeek V4, Gemma 3n and 4)
    mixture: MixtureSpec | None = None  # experts instead of the feed-forward part
    final_softcap: float | None = None
    embedding_scale: float | None = None  # Gemma: sqrt(hidden_size)
    scales_given_embeds: bool = False  # embeddings supplied by a request are scaled too (Granite)
    embedding_norm: Literal["weighted", "unweighted"] | None = None
    """weighted: of all that the first layer reads (Bloom). unweighted: of rows of the table alone (Muse Glimmer)."""
    residual_multiplier: float | None = None  # on the outputs of attention and feed-forward (Granite)
    attention_factor: float = 1.0  # on the output of attention (Falcon-H1)
    mlp_factors: tuple[float, ...] = ()  # on the gate before its activation, and on the output; empty: none (Falcon-H1)
    logits_multiplier: float | None = None  # Cohere
    eos_token_ids: tuple[int, ...] = ()  # from generation_config.json, else config.json
    bos_token_id: int | None = None
    task: Task = "generate"  # embed and score: models/pooling
    vision: VisionSpec | None = None  # the part that reads pictures; None: there is none, or it is not loaded
    hearing: HearingSpec | None = None  # the part that reads sound, likewise
    source: SourceSpec | None = None  # the encoder that reads the prompt; None: the decoder does
    text_type: str = ""  # model_type of the text part in config.json; empty: the model reads text alone
    why_unseeing: str = ""  # why that part is not read though the checkpoint has one, as sentences
    drafter: DrafterPlan | None = None  # guesses tokens of this model; counted by fit and loaded with it
    implementation: str = "localllm"  # whose code computes it: localllm, transformers, or remote (the checkpoint's)
    recognised: Storage | None = None
    """How tensors are named, of a class that no family describes and localllm's decoder computes all the same
    (transformers_backend/recognition.py)."""
    why_transformers: str = ""  # why transformers' code computes it, as a clause; empty: because it was asked for
    quantization: Mapping[str, Any] | None = None  # quantization_config, unchanged; None: plain matrices
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)  # temperature, top_p, ... of generation_config

    def layer_kind(self, layer: int) -> LayerPart:
        """Return what mixes tokens in a layer."""
        return self.layer_kinds[layer] if self.layer_kinds else "attention"

    def has_attention(self, layer: int) -> bool:
        """Return whether a layer attends to keys and values."""
        return self.layer_kind(layer) in ("attention", "both")

    def growth_of(self, *, rotated: bool) -> QueryGrowth | None:
        """Return how queries grow in layers that rotate, or in the others; None: they do not."""
        growth = self.query_growth
        if growth is None or (rotated and not growth.rotated):
            return None
        return growth._replace(period=growth.period or self.rope.parameters["original_max_position_embeddings"])

    @property
    def index(self) -> IndexSpec | None:
        """Return how keys are chosen before attention; None: queries attend to all keys."""
        return None if self.latent is None else self.latent.index

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

    @property
    def reads_embedding(self) -> bool:
        """Return whether the drafter looks tokens up in its target's embedding."""
        return self.method != "draft_model"


def kv_groups(spec: ModelSpec) -> tuple[KVGroup, ...]:
    """Return the groups of the layers that keep K and V. Layers without attention, and layers that read the K and V of
    another layer (`ModelSpec.kv_source`), are in none."""
    if spec.held_groups:
        return spec.held_groups
    kinds: dict[tuple[int | None, int, int, int], list[int]] = {}
    for layer in range(spec.num_layers):
        if keeps_kv(spec, layer):
            key = (layer_window(spec, layer), *kv_shape(spec, layer), index_size(spec, layer))
            kinds.setdefault(key, []).append(layer)
    groups = []
    for (window, heads, head_dim, index), layers in kinds.items():
        is_latent = spec.latent is not None
        groups.append(KVGroup(window_name(window), tuple(layers), window, heads, head_dim, is_latent, index))
    return _with_distinct_names(groups)


def kv_numbers_per_token(spec: ModelSpec) -> int:
    """Return the numbers in K and V of one token position over all layers that keep them."""
    return sum(group.numbers_per_token for group in kv_groups(spec))


def keeps_kv(spec: ModelSpec, layer: int) -> bool:
    """Return whether a layer has K and V of its own."""
    return spec.has_attention(layer) and (not spec.kv_source or spec.kv_source[layer] == layer)


def group_of_layers(spec: ModelSpec) -> tuple[int, ...]:
    """Return for each layer the index of the group whose blocks it reads: of a layer that reads another layer's K and
    V that layer's group. -1: a layer without attention."""
    groups = {layer: index for index, group in enumerate(kv_groups(spec)) for layer in group.layers}
    sources = spec.kv_source or range(spec.num_layers)
    return tuple(groups.get(sources[layer], -1) for layer in range(spec.num_layers))


def layer_window(spec: ModelSpec, layer: int) -> int | None:
    """Return which tokens a layer's queries see, as in kernels/kv_format.py; None: all."""
    if spec.sliding_window is None or not spec.layer_is_windowed or not spec.layer_is_windowed[layer]:
        return None
    return -spec.sliding_window if spec.window_is_chunk else spec.sliding_window


def query_heads(spec: ModelSpec, layer: int) -> int:
    """Return the query heads of a layer. They are the same in all layers of a KV group."""
    return spec.layer_heads[layer] if spec.layer_heads else spec.num_heads


def kv_shape(spec: ModelSpec, layer: int) -> tuple[int, int]:
    """Return the KV heads of a layer and their size."""
    return spec.layer_kv_shapes[layer] if spec.layer_kv_shapes else (spec.num_kv_heads, spec.head_dim)


def index_size(spec: ModelSpec, layer: int) -> int:
    """Return the numbers of the index key that a layer keeps for each token; 0: it has no indexer."""
    if spec.layer_index_sizes:
        return spec.layer_index_sizes[layer]
    return spec.index.head_dim if spec.index is not None and spec.index.layers[layer] else 0


def _with_distinct_names(groups: Sequence[KVGroup]) -> tuple[KVGroup, ...]:
    uses = Counter(group.name for group in groups)

    def named(group: KVGroup) -> KVGroup:
        if uses[group.name] == 1:
            return group
        index = f"+{group.index_size}" if group.index_size else ""
        return group._replace(name=f"{group.name}_{group.num_kv_heads}x{group.head_dim}{index}")

    return tuple(map(named, groups))


_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class StateTensor(NamedTuple):
    """One tensor of a state. Its rows are places."""

    name: Literal["conv", "matrix", "features"]
    shape: tuple[int, ...]  # of one place: conv [channels, K - 1], matrix [heads, rows, columns], features [F]
    dtype: str  # float32, bfloat16, float16

    @property
    def num_bytes(self) -> int:
        """Bytes of one place."""
        return math.prod(self.shape) * _DTYPE_BYTES[self.dtype]


class StateGroup(NamedTuple):
    """The recurrent layers of a model, which all advance together."""

    layers: tuple[int, ...]  # ascending
    tensors: tuple[tuple[StateTensor, ...], ...]  # per layer of `layers`
    features: StateTensor | None = None  # of the last token, for a drafter that reads some; None: for none

    @property
    def bytes_per_place(self) -> int:
        """Bytes of one request's state over all layers."""
        kept = sum(tensor.num_bytes for layer in self.tensors for tensor in layer)
        return kept + (0 if self.features is None else self.features.num_bytes)


def state_group(spec: ModelSpec, dtype: str) -> StateGroup | None:
    """Return the states of a model whose activations have this dtype; None: the model has no recurrent layer."""
    recurrent = spec.recurrent
    if recurrent is None:
        return None
    tensors = [StateTensor("conv", recurrent.conv_shape, dtype)]
    if recurrent.matrix_shape is not None:
        tensors.append(StateTensor("matrix", recurrent.matrix_shape, "float32"))
    taps = () if spec.drafter is None else spec.drafter.taps
    features = StateTensor("features", (len(taps) * spec.hidden_size,), dtype) if taps else None
    return StateGroup(spec.recurrent_layers, (tuple(tensors),) * len(spec.recurrent_layers), features)


def state_bytes(spec: ModelSpec, dtype: str) -> int:
    """Return the bytes of one request's state; 0 without recurrent layers."""
    group = state_group(spec, dtype)
    return group.bytes_per_place if group is not None else 0
