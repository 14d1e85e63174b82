"""Metadata of a GGUF file with type checks, and the facts that a family states of a `general.architecture`.

A family has one `GGUFFacts` for each architecture whose files it describes (models/families). The helpers below serve
several families. A layer is a mixture if the file has a router for it: keys count only the first dense layers. Lists
with a value per layer say which layers have attention, or a feed-forward part: 0 means none. Sizes of a recurrence are
in the keys `ssm.*`, whose meaning depends on its kind.
Does not know: families, how files are read (formats/gguf), block types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

from localllm.errors import CorruptModel, UnsupportedModel

Fields = dict[str, Any]
"""Fields of a config.json."""


class TensorFacts(Protocol):
    """A tensor's shape and type as its header states them."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...


class GGUFTensors(Protocol):
    """The tensors of a GGUF file, as far as a config depends on them."""

    @property
    def tensors(self) -> Mapping[str, TensorFacts]: ...

    def values(self, name: str) -> list[float] | None:
        """Return config values that are stored as a tensor; None: missing."""
        ...


class Metadata:
    """Metadata by key without the architecture's prefix, with type checks."""

    def __init__(self, file: Path, values: Mapping[str, Any]) -> None:
        self.file, self.values = file, values
        self.architecture = str(values["general.architecture"])
        self.varying: tuple[str, ...] = ()  # keys whose values may differ between layers

    def get(self, key: str) -> Any:
        return self.values.get(f"{self.architecture}.{key}")

    def count(self, key: str) -> int:
        value = self.optional_count(key)
        if value is None or value < 1:
            self.fail(key, "It is missing." if value is None else f"It is {value}.")
        return value

    def optional_count(self, key: str) -> int | None:
        """Return a whole number; for a list with one value per layer, the value that all layers share, or the first
        one of a key in `varying`."""
        value = self.get(key)
        if isinstance(value, list) and value and all(type(each) is int for each in value):
            if len(set(value)) > 1 and key not in self.varying:
                raise UnsupportedModel(
                    f"{self.file.name} has layers that differ in {self.architecture}.{key}: {sorted(set(value))}.",
                    "Supported: the same value in every layer.",
                )
            value = value[0]
        if value is not None and type(value) is not int:
            self.fail(key, f"It is {value!r}, not a whole number.")
        return value

    def counts(self, key: str, layers: int) -> list[int]:
        """Return a whole number above 0 for each layer, stored as a list or once for all."""
        value = self.get(key)
        each = value if isinstance(value, list) else [value] * layers
        counts = [count for count in each if isinstance(count, int) and not isinstance(count, bool) and count > 0]
        if not len(counts) == len(each) == layers:
            self.fail(key, f"It is {value!r}, not a whole number above 0 for each of {layers} layers.")
        return counts

    def number(self, key: str) -> float | None:
        value: float | None = self.get(key)
        if value is not None and type(value) not in (int, float):
            self.fail(key, f"It is {value!r}, not a number.")
        return value

    def token_id(self, name: str) -> int | None:
        value = self.values.get(f"tokenizer.ggml.{name}_token_id")
        return value if type(value) is int else None

    def fail(self, key: str, why: str) -> NoReturn:
        raise CorruptModel(f"{self.file.name} has an invalid metadata value: {self.architecture}.{key}.", why)


def nothing(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    return {}


More = Callable[[Metadata, GGUFTensors, Fields], Fields]
Rows = Callable[[int, int, int], Sequence[int]]
"""(num_heads, num_kv_heads, head_dim) -> stored position of each row."""
PRE_NORMS = (
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
)
SANDWICH_NORMS = (
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".post_attention_norm."),
    (r"\.pre_feedforward_layernorm\.", ".ffn_norm."),
    (r"\.post_feedforward_layernorm\.", ".post_ffw_norm."),
)
NORM_BEFORE_MLP = (  # named by place, not by the part they norm
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".post_attention_norm."),
)


def _deinterleave(heads_of: Callable[[int, int], int]) -> Rows:
    """Return the row order: row i of a head's first half is stored at 2 i, row i of its second half at 2 i + 1."""

    def rows(num_heads: int, num_kv_heads: int, head_dim: int) -> Sequence[int]:
        half = head_dim // 2
        inside = [2 * i + part for part in range(2) for i in range(half)]
        return [head * head_dim + row for head in range(heads_of(num_heads, num_kv_heads)) for row in inside]

    return rows


LLAMA_ROWS = {"q_proj": _deinterleave(lambda heads, kv: heads), "k_proj": _deinterleave(lambda heads, kv: kv)}
"""Rows of q and k where ggml rotates neighbouring dimensions and transformers halves: the converter moved them."""


@dataclass(frozen=True, slots=True)
class GGUFFacts:
    """Facts of GGUF files of one `general.architecture`: their metadata, and the names and order of their tensors."""

    name: str  # class name in config.json
    fields: Mapping[str, str] = field(default_factory=dict)  # config's name -> metadata's key without the architecture
    more: More = nothing
    always: Mapping[str, Any] = field(default_factory=dict)
    varying: tuple[str, ...] = ()  # keys whose values may differ between layers; `more` reads all of them
    norms: tuple[tuple[str, str], ...] = PRE_NORMS  # (pattern, replacement): Llama's name -> the stored one
    rows: Mapping[str, Rows] = field(default_factory=dict)  # by the last word of a stem, as in `Storage`
    added: tuple[tuple[str, float], ...] = ()  # (suffix of a stored name, value that was added when it was stored)
    fused_gate_up: str | None = None  # Llama's name of the fused matrix: up_proj
    ignored: tuple[str, ...] = ()  # patterns of stored names of tensors that the builder does not need


def has(checkpoint: GGUFTensors, name: str, layer: int = 0) -> bool:
    return f"blk.{layer}.{name}" in checkpoint.tensors


def layer_types(metadata: Metadata) -> list[str]:
    pattern = metadata.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        metadata.fail("attention.sliding_window_pattern", f"It is {pattern!r}, not one value for each layer.")
    return ["sliding_attention" if slides else "full_attention" for slides in pattern]


def ropes_of_windows(metadata: Metadata, config: Fields) -> Fields:
    """Return the rotary embeddings of full and of windowed layers: only the first may be scaled."""
    full_share = config.get("partial_rotary_factor", 1.0)
    scaling: Fields = {"rope_type": "default", **(config.get("rope_scaling") or {})}
    factor = metadata.number("rope.scaling.yarn_attn_factor")
    if scaling["rope_type"] == "yarn" and factor is not None:
        scaling["attention_factor"] = factor
    full = {**scaling, "rope_theta": config.get("rope_theta"), "partial_rotary_factor": full_share}
    rotary = metadata.optional_count("rope.dimension_count_swa")
    windowed = {
        "rope_type": "default",
        "rope_theta": metadata.number("rope.freq_base_swa") or config.get("rope_theta"),
        "partial_rotary_factor": rotary / config["head_dim"] if rotary else full_share,
    }
    return {"rope_parameters": {"full_attention": full, "sliding_attention": windowed}}


def attention_biases(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    return {"attention_bias": has(checkpoint, "attn_q.bias") or has(checkpoint, "attn_qkv.bias")}


# -- experts

LOCAL_EXPERTS = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
EXPERTS = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
FINE_EXPERTS = {
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "n_shared_experts": "expert_shared_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
}
EXPERT_GROUPS = {
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
SOFTMAX, SIGMOID, SQRT_SOFTPLUS = 1, 2, 4  # expert_gating_func
SCORES = {SOFTMAX: "softmax", SIGMOID: "sigmoid", SQRT_SOFTPLUS: "sqrtsoftplus"}


def expert_scoring(metadata: Metadata, *supported: int) -> int | None:
    """Return how experts are scored, one of `supported`; None: the file does not say."""
    stated = metadata.optional_count("expert_gating_func")
    if stated not in (None, 0, *supported):
        raise UnsupportedModel(
            f"{metadata.file.name} scores its experts by {SCORES.get(stated or 0, f'function {stated}')}.",
            f"Supported for {metadata.architecture}: {', '.join(SCORES[each] for each in supported)}.",
        )
    return stated or None


def mixed_layers(checkpoint: GGUFTensors, config: Fields) -> Fields:
    layers = range(config["num_hidden_layers"])
    kinds = ["sparse" if has(checkpoint, "ffn_gate_inp.weight", layer) else "dense" for layer in layers]
    return {"mlp_layer_types": kinds}


def sigmoid_experts(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    expert_scoring(metadata, SIGMOID)
    return mixed_layers(checkpoint, config)


# -- layers that differ

PER_LAYER = ("attention.head_count_kv", "feed_forward_length")


def counts_of_layers(metadata: Metadata, key: str, config: Fields) -> list[int]:
    """Return a count for each layer that is run; those above 0 are the same."""
    value, layers = metadata.get(key), config["num_hidden_layers"]
    stated = value if isinstance(value, list) else [value] * layers
    counts = [count for count in stated if isinstance(count, int) and not isinstance(count, bool) and count >= 0]
    if len(counts) != len(stated) or len(counts) < layers or not any(counts[:layers]):
        metadata.fail(key, f"It is {value!r}, not a whole number for each of {layers} layers.")
    counts = counts[:layers]
    if len(set(counts) - {0}) > 1:
        raise UnsupportedModel(
            f"{metadata.file.name} has layers that differ in {metadata.architecture}.{key}: {sorted(set(counts))}.",
            "Supported: the same value in every layer that has such a part.",
        )
    return counts


def per_head(metadata: Metadata, key: str, heads: int) -> int:
    """Return a head's share of a size."""
    size = metadata.count(key)
    if size % heads:
        metadata.fail(key, f"It is {size}, which does not divide into {heads} heads.")
    return size // heads
