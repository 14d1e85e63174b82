"""How a family of models differs from the Llama line, as data.

`defaults` fill what its config.json may leave out; `differences` turns the family's own fields into fields of
`ModelSpec`. Does not know: torch, weights, ModelSpec itself (spec.py builds it).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Config = Mapping[str, Any]


def no_differences(config: Config) -> dict[str, Any]:
    return {}


def same_names(config: Config) -> Config:
    return config


@dataclass(frozen=True, slots=True)
class Storage:
    """How a checkpoint names and orders a family's tensors. The builder asks for everything in Llama's names."""

    renames: tuple[tuple[str, str], ...] = ()  # (pattern, replacement): Llama's name -> the stored one, in this order
    fused_qkv: str | None = None  # q, k and v are one matrix, called this in place of q_proj
    fused_gate_up: str | None = None  # gate and up are one matrix, called this in place of gate_proj
    qkv_rows: Callable[[int, int, int], Sequence[int]] | None = None
    """(num_heads, num_kv_heads, head_dim) -> which stored rows of the fused matrix are q's, then k's, then v's."""
    transposed: tuple[str, ...] = ()  # ends of stored names whose matrix is [inputs, outputs]
    more_layers: bool = False  # layers past num_layers may be there, that predict further tokens; they are not run
    interleaved_experts: bool = False  # experts' gate_up_proj: rows of gate and up in turn
    alternatives: tuple[tuple[str, str], ...] = ()
    """(pattern, replacement): other ways in which checkpoints spell a stored name; the first that is there counts."""
    rows: Mapping[str, Callable[[int, int, int], Sequence[int]]] = field(default_factory=dict)
    """By the last word of a stem, q_proj: (num_heads, num_kv_heads, head_dim) -> its rows' places in the stored one."""
    added: tuple[tuple[str, float], ...] = ()  # (end of a stored name, what was added to its values when stored)
    ignored: tuple[str, ...] = ()  # patterns of the stored names of tensors that carry nothing the builder needs

    def stored_name(self, name: str) -> str:
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name

    def spellings(self, stored: str) -> list[str]:
        return [stored, *(re.sub(pattern, replacement, stored) for pattern, replacement in self.alternatives)]


LLAMA_STORAGE = Storage()


@dataclass(frozen=True, slots=True)
class Family:
    """One family: how its config.json becomes a spec, how its checkpoints store tensors."""

    name: str  # for people
    architectures: tuple[str, ...]  # class names in config.json
    differences: Callable[[Config], dict[str, Any]] = no_differences
    defaults: Mapping[str, Any] = field(default_factory=dict)
    storage: Storage = LLAMA_STORAGE
    common_names: Callable[[Config], Config] = same_names
    """Its config.json under the names that most families use: hidden_size, num_hidden_layers, ..."""
    note: str = ""  # for people: what of a checkpoint is not run


def grouped_qkv_rows(num_heads: int, num_kv_heads: int, head_dim: int) -> list[int]:
    """For a matrix that stores each key head with its query heads: their q, then its k, its v, group after group."""
    per_group = (num_heads // num_kv_heads + 2) * head_dim
    starts = range(0, num_kv_heads * per_group, per_group)
    q = [start + row for start in starts for row in range(per_group - 2 * head_dim)]
    k = [start + row for start in starts for row in range(per_group - 2 * head_dim, per_group - head_dim)]
    return q + k + [row + head_dim for row in k]


def one_window(config: Config) -> dict[str, Any]:
    """All layers slide, where config.json gives a window."""
    window = config.get("sliding_window")
    return {"sliding_window": window, "layer_is_windowed": (window is not None,) * config["num_hidden_layers"]}


def windowed_layers(config: Config, default: Callable[[int], bool]) -> tuple[bool, ...]:
    """Which layers slide: from `layer_types`, else by the family's old rule for a layer's index."""
    layer_types = config.get("layer_types")
    if layer_types is None:
        return tuple(default(layer) for layer in range(config["num_hidden_layers"]))
    return tuple(kind == "sliding_attention" for kind in layer_types)
