"""Mistral 7B and its line: Llama whose layers all slide, where config.json gives a window (arXiv:2310.06825)."""

from __future__ import annotations

from typing import Any

from localllm.models.architectures.family import Config, Family


def _differences(config: Config) -> dict[str, Any]:
    window = config["sliding_window"]
    return {"sliding_window": window, "layer_is_windowed": (window is not None,) * config["num_hidden_layers"]}


FAMILY = Family("Mistral", ("MistralForCausalLM",), _differences, {"sliding_window": 4096, "num_key_value_heads": 8})
