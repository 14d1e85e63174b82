"""Gemma 3n (text): Gemma 4's shared K and V, norms and per-layer embeddings, with heads of one size. Also four
residual streams, of which each layer computes one (AltUp), a low-rank matrix beside attention (LAuReL), and in the
first layers a gate of which all but about 5 % is cut off.

Does not know: how a layer computes (layer.py: Gemma3nLayer).
"""

from __future__ import annotations

from typing import Any

from localllm.errors import CorruptModel
from localllm.models.architectures import text_part
from localllm.models.architectures.gemma4 import NOTE, TEXT_STORAGE, kv_sources, shared_differences
from localllm.models.spec.altup import altup, layer_sparsity
from localllm.models.spec.family import Config, Family, windowed_layers
from localllm.models.spec.per_layer_input import per_layer_input

_DEFAULTS = {
    "vocab_size": 262_400,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "altup_num_inputs": 4,
    "num_kv_shared_layers": 15,
    "laurel_rank": 64,
}


def _differences(config: Config) -> dict[str, Any]:
    windowed = windowed_layers(config, lambda layer: (layer + 1) % 5 != 0)
    sizes = per_layer_input(config)
    if sizes is None:
        raise CorruptModel("config.json has no hidden_size_per_layer_input.", "Gemma 3n has per-layer embeddings.")
    return shared_differences(config) | {
        "layer_is_windowed": windowed,
        "kv_source": kv_sources(config, windowed),
        "layer_widths": tuple(config.get("layer_widths") or ()),
        "layer_sparsity": layer_sparsity(config),
        "altup": altup(config),
        "per_layer_input": sizes,
        "topology": "gemma3n",
    }


def _one_width(config: Config) -> Config:
    """Return a config whose intermediate_size, stated per layer, is the largest; layer_widths if they differ."""
    widths = config.get("intermediate_size")
    if not isinstance(widths, list):
        return config
    if len(widths) != config.get("num_hidden_layers") or not all(type(width) is int and width > 0 for width in widths):
        raise CorruptModel(f"config.json has intermediate_size = {widths!r}.", "It must be a size for each layer.")
    return {**config, "intermediate_size": max(widths), "layer_widths": widths if len(set(widths)) > 1 else None}


def _text(config: Config) -> Config:
    return _one_width(text_part.text_config(config))


GEMMA3N = Family("Gemma 3n (text)", ("Gemma3nForCausalLM",), _differences, _DEFAULTS, common_names=_one_width)
GEMMA3N_VISION = Family(
    "Gemma 3n", ("Gemma3nForConditionalGeneration",), _differences, _DEFAULTS, TEXT_STORAGE, _text, NOTE
)
