"""dots.llm1 (142B-A14B): the attention of Qwen3 with the mixture of DeepSeek-V3 (arXiv:2506.05767)."""

from __future__ import annotations

from typing import Any

from localllm.models.architectures.deepseek import STORAGE
from localllm.models.spec.family import Config, Family, windowed_layers
from localllm.models.spec.mixture import grouping, layers_after, sigmoid_mixture, typed_layers


def _differences(config: Config) -> dict[str, Any]:
    bias, window = bool(config.get("attention_bias")), config.get("sliding_window")
    below = config["max_window_layers"]
    windowed = windowed_layers(config, lambda layer: layer >= below) if window is not None else ()
    return {
        "qk_norm": "head",
        "attention_bias": bias,
        "attention_out_bias": bias,
        "sliding_window": window,
        "layer_is_windowed": windowed,
        "mixture": sigmoid_mixture(
            config,
            layers=typed_layers(config) or layers_after(config, config["first_k_dense_replace"]),
            renormalize=bool(config["norm_topk_prob"]),
            scale=float(config["routed_scaling_factor"]),
            shared_size=config["moe_intermediate_size"] * (config.get("n_shared_experts") or 0),
            **grouping(config),
        ),
    }


FAMILY = Family(
    "dots.llm1",
    ("Dots1ForCausalLM",),
    _differences,
    {
        "sliding_window": None,
        "max_window_layers": 62,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    storage=STORAGE,
)
