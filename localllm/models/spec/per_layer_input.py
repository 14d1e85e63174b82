"""Per-layer embeddings as described by config.json (Gemma 3n, Gemma 4): each layer gets a vector of its own per token.

Does not know: how a layer uses its vector (models/layers/per_layer_input.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localllm.models.spec.fields import size


@dataclass(frozen=True, slots=True)
class PerLayerInputSpec:
    """Sizes of the table of per-layer embeddings, [vocab_size, layers * size]."""

    size: int  # numbers of one layer's vector
    vocab_size: int  # rows of the table; tokens beyond it use row 0


def per_layer_input(config: Mapping[str, Any]) -> PerLayerInputSpec | None:
    """Parse the sizes of a config; None: the model has no per-layer embeddings."""
    if not config.get("hidden_size_per_layer_input"):
        return None
    return PerLayerInputSpec(size(config, "hidden_size_per_layer_input"), size(config, "vocab_size_per_layer_input"))
