"""How a family of models differs from the Llama line, as data.

`defaults` fill what its config.json may leave out; `differences` turns the family's own fields into fields of
`ModelSpec`. Does not know: torch, weights, ModelSpec itself (spec.py builds it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Config = Mapping[str, Any]


def no_differences(config: Config) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class Family:
    """One family. The checkpoint's tensor names are Llama's but for what the two flags say."""

    name: str  # for people
    architectures: tuple[str, ...]  # class names in config.json
    differences: Callable[[Config], dict[str, Any]] = no_differences
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fused_qkv: bool = False  # stored as self_attn.qkv_proj
    fused_gate_up: bool = False  # stored as mlp.gate_up_proj


def windowed_layers(config: Config, default: Callable[[int], bool]) -> tuple[bool, ...]:
    """Which layers slide: from `layer_types`, else by the family's old rule for a layer's index."""
    layer_types = config.get("layer_types")
    if layer_types is None:
        return tuple(default(layer) for layer in range(config["num_hidden_layers"]))
    return tuple(kind == "sliding_attention" for kind in layer_types)
