"""The parts of Gemma 3n and Gemma 4 as config.json describes them.

AltUp and activation sparsity are Gemma 3n's. With per-layer embeddings each layer gets its own vector of every token.
Does not know: how they are computed (models/layers/gemma.py, models/layers/mlp.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localllm.errors import CorruptModel
from localllm.models.spec.fields import size


@dataclass(frozen=True, slots=True)
class AltUpSpec:
    """Several residual streams, of which each layer computes one (alternating updates, arXiv:2301.13310)."""

    num_streams: int
    active: int  # the stream that layers compute
    scales_output: bool  # the computed stream is scaled before the per-layer embedding's gate reads it
    laurel_rank: int  # of the low-rank matrix beside attention (LAuReL, arXiv:2411.07501)


def altup(config: Mapping[str, Any]) -> AltUpSpec:
    """Parse the fields of a config. Raises `CorruptModel` for impossible ones."""
    count, active = size(config, "altup_num_inputs"), config.get("altup_active_idx", 0)
    if count < 2 or not isinstance(active, int) or not 0 <= active < count:
        raise CorruptModel(f"config.json has altup_active_idx = {active!r} of altup_num_inputs = {count}.")
    return AltUpSpec(count, active, bool(config.get("altup_correct_scale")), size(config, "laurel_rank"))


def layer_sparsity(config: Mapping[str, Any]) -> tuple[float, ...]:
    """Return for each layer the share of the feed-forward part's gate that becomes zero; empty: none in any layer."""
    layers, pattern = size(config, "num_hidden_layers"), config.get("activation_sparsity_pattern")
    if pattern is None:
        pattern = [0.95] * (10 if layers > 10 else 0) + [0.0] * (layers - (10 if layers > 10 else 0))
    pattern = pattern if isinstance(pattern, list) else [pattern] * layers
    if len(pattern) != layers or not all(isinstance(share, int | float) and 0 <= share < 1 for share in pattern):
        raise CorruptModel("config.json's activation_sparsity_pattern is not a share for each layer, below 1.")
    return tuple(float(share) for share in pattern) if any(pattern) else ()


@dataclass(frozen=True, slots=True)
class PerLayerInputSpec:
    """Sizes of the table of per-layer embeddings, [vocab_size, layers * size]."""

    size: int  # numbers of one layer's vector
    vocab_size: int  # rows of the table; tokens beyond it use row 0
    pad_id: int = 0  # token that stands for a picture's


def per_layer_input(config: Mapping[str, Any]) -> PerLayerInputSpec | None:
    """Parse the sizes of a config; None: the model has no per-layer embeddings."""
    if not config.get("hidden_size_per_layer_input"):
        return None
    pad = config.get("pad_token_id")
    sizes = size(config, "hidden_size_per_layer_input"), size(config, "vocab_size_per_layer_input")
    return PerLayerInputSpec(*sizes, pad if isinstance(pad, int) else 0)
