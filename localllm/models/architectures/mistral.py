"""Mistral 7B and its line: Llama whose layers all slide, where config.json gives a window (arXiv:2310.06825).
Ministral 8B slides in some layers only, where config.json lists them."""

from __future__ import annotations

from typing import Any

from localllm.models.architectures.family import Config, Family, one_window, windowed_layers

_DEFAULTS = {"sliding_window": 4096, "num_key_value_heads": 8}


def _ministral(config: Config) -> dict[str, Any]:
    window = config["sliding_window"]
    return {
        "sliding_window": window,
        "layer_is_windowed": windowed_layers(config, lambda layer: True) if window is not None else (),
    }


MISTRAL = Family("Mistral", ("MistralForCausalLM",), one_window, _DEFAULTS)
MINISTRAL = Family("Ministral", ("MinistralForCausalLM",), _ministral, _DEFAULTS)
