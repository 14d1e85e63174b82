"""SmolLM3: Llama in which every fourth layer has no rotary embedding (NoPE, arXiv:2501.18795)."""

from __future__ import annotations

from typing import Any

from localllm.models.spec.family import Config, Family, windowed_layers


def _differences(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias"))
    every = config["no_rope_layer_interval"]
    flags = config.get("no_rope_layers") or [(layer + 1) % every for layer in range(config["num_hidden_layers"])]
    has_rope = tuple(bool(flag) for flag in flags[: config["num_hidden_layers"]])
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    windowed = windowed_layers(config, lambda layer: not has_rope[layer]) if window is not None else ()
    return {
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": bool(config.get("mlp_bias")),
        "layer_has_rope": has_rope,
        "sliding_window": window,
        "layer_is_windowed": windowed,
    }


FAMILY = Family(
    "SmolLM3",
    ("SmolLM3ForCausalLM",),
    _differences,
    {"tie_word_embeddings": True, "rope_theta": 2_000_000.0, "num_key_value_heads": 4, "no_rope_layer_interval": 4},
)
