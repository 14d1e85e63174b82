"""A model family as data: its differences from Llama, and its layer for multi-token prediction (MTP) if it has one.

`defaults` fill fields that its config.json may omit; `differences` turns the family's own fields into fields of
`ModelSpec`. An MTP layer reads the target's last hidden state and the embedding of the token that followed, both
normed, through one projection, then a whole decoder layer of the family (DeepSeek-V3, arXiv:2412.19437, section 2.2;
MiMo, arXiv:2505.07608).
Does not know: torch, weights, ModelSpec itself (read_spec.py makes it), how drafts are verified.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from localllm.models.spec.gguf import GGUFFacts
from localllm.models.spec.recurrent import RecurrentSpec


@dataclass(frozen=True, slots=True)
class MTPLayout:
    """The names of the parts around the layer, and the differences between the kinds."""

    prefix: str  # of the stored names, with {layer} for the number after the model's own layers
    embed_norm: str
    hidden_norm: str
    projection: str  # [hidden, 2 * hidden]
    hidden_first: bool  # the projection reads [hidden, embedding], not [embedding, hidden]
    final_norm: str  # before the head
    hands_on_normed: bool  # the next draft starts from the output after the final norm, not before it
    embedding: str = ""  # copies of the model's embedding and head that checkpoints may store; "": none do
    head: str = ""
    around: str = ""  # prefix of the parts around the layer, if it is not the layer's own
    reads_normed: bool = True  # it starts from the target's hidden state after the final norm, not before it
    renames: tuple[tuple[str, str], ...] = ()  # (pattern, replacement) of the layer's names, after the family's

    def stored_prefix(self, num_layers: int) -> str:
        """Return the prefix of the MTP layer's tensor names in a model of `num_layers` layers."""
        return self.prefix.format(layer=num_layers)

    def parts_prefix(self, num_layers: int) -> str:
        """Return the prefix of the names of the parts around the layer."""
        return self.around or self.stored_prefix(num_layers)

    def in_gguf(self) -> MTPLayout:
        """Return the layout in GGUF, where the layer follows the model's own and its parts have the same names in all
        architectures."""
        return replace(
            self, prefix="blk.{layer}.", around="", renames=(), embed_norm="nextn.enorm", hidden_norm="nextn.hnorm",
            projection="nextn.eh_proj", final_norm="nextn.shared_head_norm", embedding="nextn.embed_tokens",
            head="nextn.shared_head_head",
        )  # fmt: skip


DEEPSEEK_MTP = MTPLayout(
    prefix="model.layers.{layer}.",
    embed_norm="enorm",
    hidden_norm="hnorm",
    projection="eh_proj",
    hidden_first=False,
    final_norm="shared_head.norm",
    hands_on_normed=False,
    embedding="embed_tokens",
    head="shared_head.head",
)
QWEN_MTP = MTPLayout(
    prefix="mtp.layers.0.",
    around="mtp.",
    embed_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    projection="fc",
    hidden_first=False,
    final_norm="norm",
    hands_on_normed=True,
)
MIMO_MTP = MTPLayout(
    prefix="model.mtp_layers.0.",
    embed_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    projection="input_proj",
    hidden_first=True,
    final_norm="final_layernorm",
    hands_on_normed=True,
)
STEP_MTP = replace(
    DEEPSEEK_MTP,
    final_norm="transformer.shared_head.norm",
    head="transformer.shared_head.output",
    reads_normed=False,
)
MIMO_V2_MTP = MTPLayout(
    prefix="model.mtp.layers.0.",
    embed_norm="enorm",
    hidden_norm="hnorm",
    projection="eh_proj",
    hidden_first=False,
    final_norm="final_layernorm",
    hands_on_normed=True,
    renames=((r"\.post_attention_layernorm\.", ".pre_mlp_layernorm."),),
)


Config = Mapping[str, Any]


def no_differences(config: Config) -> dict[str, Any]:
    return {}


def same_names(config: Config) -> Config:
    return config


class FusedRecurrent(NamedTuple):
    """Matrices of a recurrent part that a checkpoint stores as one."""

    name: str  # last word of its stem
    parts: tuple[str, ...]  # last words of the builder's stems, in order
    rows: Callable[[RecurrentSpec], Sequence[int]]  # stored position of each row of the parts


@dataclass(frozen=True, slots=True)
class Storage:
    """A family's tensor names and row orders in its checkpoints. The builder uses Llama's names."""

    renames: tuple[tuple[str, str], ...] = ()  # (pattern, replacement), in order: Llama's name -> the stored one
    fused_qkv: str | None = None  # name of the fused q, k and v matrix, instead of q_proj
    fused_gate_up: str | None = None  # name of the fused gate and up matrix, instead of gate_proj
    gate_is_last: bool = False  # rows of that matrix: those of up, then those of gate
    qkv_rows: Callable[[int, int, int], Sequence[int]] | None = None
    """(num_heads, num_kv_heads, head_dim) -> stored rows of the fused matrix in the order q, k, v."""
    fused_recurrent: tuple[FusedRecurrent, ...] = ()
    transposed: tuple[str, ...] = ()  # suffixes of stored names whose matrix is [inputs, outputs]
    more_layers: bool = False  # layers past num_layers may exist, for predicting further tokens
    interleaved_experts: bool = False  # experts' gate_up_proj has rows of gate and up alternating
    alternatives: tuple[tuple[str, str], ...] = ()
    """(pattern, replacement): other spellings of a stored name; the first that exists is used."""
    rows: Mapping[str, Callable[[int, int, int], Sequence[int]]] = field(default_factory=dict)
    """Last word of a stem (q_proj): (num_heads, num_kv_heads, head_dim) -> stored position of each row."""
    added: tuple[tuple[str, float], ...] = ()  # (suffix of a stored name, value that was added when it was stored)
    ignored: tuple[str, ...] = ()  # patterns of stored names of tensors that the builder does not need
    without_bias: tuple[str, ...] = ()  # last words of stems that have no bias beside others that have one: it is zero

    def stored_name(self, name: str) -> str:
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name

    def fuses(self, words: Sequence[str]) -> bool:
        """Return whether the matrices whose stems end in these words are stored as one."""
        if words[0] == "q_proj" and len(words) == 3:
            return self.fused_qkv is not None
        if words[0] == "gate_proj" and len(words) == 2:
            return self.fused_gate_up is not None
        return any(fused.parts[0] in words for fused in self.fused_recurrent)

    def spellings(self, stored: str) -> list[str]:
        return [stored, *(re.sub(pattern, replacement, stored) for pattern, replacement in self.alternatives)]


LLAMA_STORAGE = Storage()


@dataclass(frozen=True, slots=True)
class Family:
    """One family: how its config.json becomes a spec, and how its checkpoints store tensors."""

    name: str  # for display
    architectures: tuple[str, ...]  # class names in config.json
    differences: Callable[[Config], dict[str, Any]] = no_differences
    defaults: Mapping[str, Any] = field(default_factory=dict)
    storage: Storage = LLAMA_STORAGE
    common_names: Callable[[Config], Config] = same_names
    """Return a config.json with the field names that most families use: hidden_size, num_hidden_layers, ..."""
    note: str = ""  # for display: parts of a checkpoint that are not run
    gguf: Mapping[str, GGUFFacts] = field(default_factory=dict)  # by general.architecture
    mtp: MTPLayout | None = None  # of a layer that writes drafts, if a checkpoint has one; None: it is not supported


def grouped_qkv_rows(num_heads: int, num_kv_heads: int, head_dim: int) -> list[int]:
    """Return the row order for a matrix that stores, per key head, its query heads, then its k, then its v."""
    per_group = (num_heads // num_kv_heads + 2) * head_dim
    starts = range(0, num_kv_heads * per_group, per_group)
    q = [start + row for start in starts for row in range(per_group - 2 * head_dim)]
    k = [start + row for start in starts for row in range(per_group - 2 * head_dim, per_group - head_dim)]
    return q + k + [row + head_dim for row in k]


def one_window(config: Config) -> dict[str, Any]:
    """Return fields that make all layers windowed if config.json has a window."""
    window = config.get("sliding_window")
    return {"sliding_window": window, "layer_is_windowed": (window is not None,) * config["num_hidden_layers"]}


def windowed_layers(config: Config, default: Callable[[int], bool]) -> tuple[bool, ...]:
    """Return which layers are windowed: from `layer_types`, else by the family's old rule for a layer's index."""
    layer_types = config.get("layer_types")
    if layer_types is None:
        return tuple(default(layer) for layer in range(config["num_hidden_layers"]))
    return tuple(kind == "sliding_attention" for kind in layer_types)
