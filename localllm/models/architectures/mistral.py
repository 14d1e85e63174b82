"""Mistral 7B and its successors: Llama with a window in all layers if config.json has one (arXiv:2310.06825). Ministral
8B has windows only in the layers that config.json lists. Ministral 3 scales queries with the logarithm of their
position beyond the original context, as Llama 4 does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from localllm.models.architectures import deepseek, mistral4, text_part
from localllm.models.spec.family import Config, Family, one_window, windowed_layers
from localllm.models.spec.fields import optional_number

_DEFAULTS = {"sliding_window": 4096, "num_key_value_heads": 8}
_DEFAULTS_3 = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}


def _ministral(config: Config) -> dict[str, Any]:
    window = config["sliding_window"]
    return {
        "sliding_window": window,
        "layer_is_windowed": windowed_layers(config, lambda layer: True) if window is not None else (),
    }


def _ministral3(config: Config) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    return {**one_window(config), "query_scaling": optional_number(rope, "llama_4_scaling_beta")}


def _text_part(config: Config) -> dict[str, Any]:
    """Return the fields of the text part of a model that also sees: Ministral 3, or Mistral 4."""
    return mistral4.differences(config) if config.get("model_type") == "mistral4" else _ministral3(config)


MISTRAL = Family("Mistral", ("MistralForCausalLM",), one_window, _DEFAULTS)
MINISTRAL = Family("Ministral", ("MinistralForCausalLM",), _ministral, _DEFAULTS)
MINISTRAL3 = Family("Ministral 3", ("Ministral3ForCausalLM",), _ministral3, _DEFAULTS_3)
MISTRAL3 = Family(
    "Mistral Small 3.1 and 4, Ministral 3",
    ("Mistral3ForConditionalGeneration",),
    _text_part,
    _DEFAULTS_3,
    replace(text_part.STORAGE, renames=deepseek.STORAGE.renames),
    text_part.text_config,
    text_part.NOTE,
)
