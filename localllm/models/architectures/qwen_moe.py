"""Qwen's mixtures. Qwen2-MoE (Qwen1.5-MoE, Qwen2-57B): Qwen2 with experts whose weights need not sum to one, and a
shared expert with its own gate (arXiv:2407.10671). Qwen3-MoE: Qwen3 with up to 128 small experts and no shared one
(arXiv:2505.09388).
"""

from __future__ import annotations

from typing import Any

from localllm.models.spec.family import Config, Family, windowed_layers
from localllm.models.spec.mixture import mixture, sparse_layers


def _mixture(config: Config, **shared: Any) -> Any:
    renormalize = bool(config.get("norm_topk_prob"))
    layers = sparse_layers(config)
    return mixture(config, layers=layers, renormalize=renormalize, **shared)


def _qwen2_window(config: Config) -> dict[str, Any]:
    """Return the window fields: with use_sliding_window, every other layer below max_window_layers is windowed."""
    window = config["sliding_window"] if config.get("use_sliding_window") else None
    if not window:
        return {}
    below = config["max_window_layers"]
    layers = windowed_layers(config, lambda layer: layer % 2 == 0 and layer < below)
    return {"sliding_window": window, "layer_is_windowed": layers}


def _qwen2(config: Config) -> dict[str, Any]:
    mixture = _mixture(config, shared_size=config["shared_expert_intermediate_size"], shared_gate=True)
    return {"attention_bias": bool(config["qkv_bias"]), "mixture": mixture, **_qwen2_window(config)}


def _qwen3(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias"))
    window = config["sliding_window"] if config.get("use_sliding_window") else None
    windowed = (window is not None,) * config["num_hidden_layers"]
    return {
        "qk_norm": "head",
        "attention_bias": bias,
        "attention_out_bias": bias,
        "sliding_window": window,
        "layer_is_windowed": windowed,
        "mixture": _mixture(config),
    }


QWEN2_MOE = Family(
    "Qwen2-MoE",
    ("Qwen2MoeForCausalLM",),
    _qwen2,
    {
        "sliding_window": 4096,
        "max_window_layers": 28,
        "qkv_bias": True,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
)
QWEN3_MOE = Family(
    "Qwen3-MoE",
    ("Qwen3MoeForCausalLM",),
    _qwen3,
    {
        "sliding_window": 4096,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "num_key_value_heads": 4,
    },
)
