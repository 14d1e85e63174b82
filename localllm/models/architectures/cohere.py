"""Command R and Command A: attention and feed-forward in parallel after one LayerNorm without bias, neighbouring
dimensions rotate together, logits are multiplied. Command R+ also norms q and k with a weight per head. Command R7B and
Command A have windowed layers, which rotate, and full layers without positions (arXiv:2504.00698).
"""

from __future__ import annotations

from typing import Any

from localllm.models.spec.family import Config, Family, windowed_layers
from localllm.models.spec.fields import number, size
from localllm.models.spec.norms import layer_norm

_DEFAULTS = {
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}


def _common_names(config: Config) -> Config:
    """Use the larger of the two lengths in Command R's config (8k and 128k), for which it was trained."""
    longer = config.get("model_max_length")
    return config if longer is None else {**config, "max_position_embeddings": longer}


def _common(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias"))
    return {
        "topology": "parallel_one_norm",
        "norm": layer_norm(config, "layer_norm_eps", bias=False),
        "attention_bias": bias,
        "attention_out_bias": bias,
        "rope_interleaved": True,
        "logits_multiplier": number(config, "logit_scale"),
    }


def _cohere(config: Config) -> dict[str, Any]:
    return {**_common(config), "qk_norm": "each_head" if config.get("use_qk_norm") else None}


def _cohere2(config: Config) -> dict[str, Any]:
    pattern = size(config, "sliding_window_pattern")
    windowed = windowed_layers(config, lambda layer: (layer + 1) % pattern != 0)
    return {
        **_common(config),
        "sliding_window": config["sliding_window"],
        "layer_is_windowed": windowed,
        "layer_has_rope": windowed,
    }


COHERE = Family(
    "Cohere Command R",
    ("CohereForCausalLM",),
    _cohere,
    {**_DEFAULTS, "rope_theta": 500_000.0},
    common_names=_common_names,
)
COHERE2 = Family(
    "Cohere Command A",
    ("Cohere2ForCausalLM",),
    _cohere2,
    {**_DEFAULTS, "sliding_window": 4096, "sliding_window_pattern": 4},
)
