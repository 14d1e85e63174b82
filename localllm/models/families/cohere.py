"""Command R and Command A: attention and feed-forward in parallel after one LayerNorm without bias, neighbouring
dimensions rotate together, logits are multiplied. Command R+ also norms q and k with a weight per head. Command R7B and
Command A have windowed layers, which rotate, and full layers without positions (arXiv:2504.00698). Command A+ has a
mixture after a few dense layers, and averages the sums of the routed and of the shared experts.
"""

from __future__ import annotations

from typing import Any

from localllm.errors import UnsupportedModel
from localllm.models.spec.family import Config, Family, Storage, windowed_layers
from localllm.models.spec.fields import NormSpec, layer_norm, number, size
from localllm.models.spec.gguf import (
    SCORES,
    SIGMOID,
    SOFTMAX,
    Fields,
    GGUFFacts,
    GGUFTensors,
    Metadata,
    expert_scoring,
    has,
    layer_types,
    mixed_layers,
)
from localllm.models.spec.mixture import MixtureSpec, layers_after, mixture, typed_layers

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


def _cohere2_moe(config: Config) -> dict[str, Any]:
    layers = typed_layers(config) or layers_after(config, config["first_k_dense_replace"])
    own, pattern = size(config, "prefix_dense_sliding_window_pattern"), size(config, "sliding_window_pattern")
    dense = layers.index(True) if True in layers else len(layers)
    windowed = windowed_layers(
        config, lambda layer: ((layer + 1) % own if layer < dense else (layer - dense + 1) % pattern) != 0
    )
    return {
        **_common(config),
        **({"norm": NormSpec(number(config, "rms_norm_eps"))} if config["rms_norm_eps"] is not None else {}),
        "intermediate_size": size(config, "prefix_dense_intermediate_size"),
        "sliding_window": config["sliding_window"],
        "layer_is_windowed": windowed,
        "layer_has_rope": tuple(w or (own == 1 and not m) for w, m in zip(windowed, layers, strict=True)),
        "mixture": _mixture(config, layers),
    }


def _mixture(config: Config, layers: tuple[bool, ...]) -> MixtureSpec:
    scoring, combining = config["expert_selection_fn"], config["shared_expert_combination_strategy"]
    shared = config["num_shared_experts"]
    if scoring not in ("softmax", "sigmoid") or combining not in ("average", "sum"):
        raise UnsupportedModel(
            f"Experts chosen by {scoring!r} and combined by {combining!r} are not supported.",
            "Supported: softmax and sigmoid; average and sum.",
        )
    return mixture(
        config,
        size="intermediate_size",
        layers=layers,
        scoring=scoring,
        renormalize=scoring == "softmax" or bool(config["norm_topk_prob"]),
        shared_size=config["intermediate_size"] * shared,
        output_scale=0.5 if shared and combining == "average" else 1.0,
    )


def _moe_names(config: Config) -> Config:
    """Return the config with the size of dense layers, which may be missing: it is then that of the experts."""
    dense = config.get("prefix_dense_intermediate_size") or config.get("intermediate_size")
    return {**config, "prefix_dense_intermediate_size": dense, "rms_norm_eps": config.get("rms_norm_eps")}


def _gguf_cohere(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    return {"use_qk_norm": has(checkpoint, "attn_q_norm.weight")}


def _gguf_cohere2_moe(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    scoring = expert_scoring(metadata, SOFTMAX, SIGMOID) or SIGMOID
    return {
        **mixed_layers(checkpoint, config),
        "layer_types": layer_types(metadata),
        "expert_selection_fn": SCORES[scoring],
        "prefix_dense_intermediate_size": config["intermediate_size"],
        "intermediate_size": metadata.count("expert_feed_forward_length"),
    }


COHERE = Family(
    "Cohere Command R",
    ("CohereForCausalLM",),
    _cohere,
    {**_DEFAULTS, "rope_theta": 500_000.0},
    common_names=_common_names,
    gguf={"command-r": GGUFFacts("CohereForCausalLM", {"logit_scale": "logit_scale"}, _gguf_cohere)},
)
COHERE2 = Family(
    "Cohere Command A",
    ("Cohere2ForCausalLM",),
    _cohere2,
    {**_DEFAULTS, "sliding_window": 4096, "sliding_window_pattern": 4},
    gguf={"cohere2": GGUFFacts("Cohere2ForCausalLM", {"logit_scale": "logit_scale"})},
)
COHERE2_MOE = Family(
    "Cohere Command A+",
    ("Cohere2MoeForCausalLM",),
    _cohere2_moe,
    {
        **_DEFAULTS,
        "head_dim": 128,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "prefix_dense_sliding_window_pattern": 1,
        "first_k_dense_replace": 0,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_shared_experts": 0,
        "shared_expert_combination_strategy": "average",
        "expert_selection_fn": "softmax",
        "norm_topk_prob": True,
    },
    Storage(renames=((r"\.mlp\.shared_expert\.", ".mlp.shared_experts."),), more_layers=True),
    common_names=_moe_names,
    note="multi-token prediction layers are not run",
    gguf={
        "cohere2moe": GGUFFacts(
            "Cohere2MoeForCausalLM",
            {
                "logit_scale": "logit_scale",
                "num_experts": "expert_count",
                "num_experts_per_tok": "expert_used_count",
                "num_shared_experts": "expert_shared_count",
                "norm_topk_prob": "expert_weights_norm",
            },
            _gguf_cohere2_moe,
        )
    },
)
