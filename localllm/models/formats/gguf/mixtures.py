"""The architectures of GGUF files with many small experts beside shared ones, and those with latent attention.

A layer is a mixture if the file has a router for it: keys count only the first dense layers.
Does not know: tensors' names, block types.
"""

from __future__ import annotations

from localllm.errors import UnsupportedModel
from localllm.models.spec.gguf import Architecture, Config, GGUFTensors, Metadata, has, layer_types

_SOFTMAX, _SIGMOID = 1, 2  # expert_gating_func
_SCORES = {_SOFTMAX: "softmax", _SIGMOID: "sigmoid"}


def _scoring(metadata: Metadata, *supported: int) -> int | None:
    """Return how experts are scored, one of `supported`; None: the file does not say."""
    stated = metadata.optional_count("expert_gating_func")
    if stated not in (None, 0, *supported):
        raise UnsupportedModel(
            f"{metadata.file.name} scores its experts by {_SCORES.get(stated or 0, f'function {stated}')}.",
            f"Supported for {metadata.architecture}: {', '.join(_SCORES[each] for each in supported)}.",
        )
    return stated or None


def _mixed_layers(checkpoint: GGUFTensors, config: Config) -> Config:
    layers = range(config["num_hidden_layers"])
    kinds = ["sparse" if has(checkpoint, "ffn_gate_inp.weight", layer) else "dense" for layer in layers]
    return {"mlp_layer_types": kinds}


def _sigmoid(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    _scoring(metadata, _SIGMOID)
    return _mixed_layers(checkpoint, config)


def _glm4_moe(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    """Return the fields of GLM-4.5 and of Solar Open, which has no dense layers: their size may be missing."""
    return {
        **_mixed_layers(checkpoint, config),
        "intermediate_size": config.get("intermediate_size") or metadata.count("expert_feed_forward_length"),
        "use_qk_norm": has(checkpoint, "attn_q_norm.weight"),
        "attention_bias": has(checkpoint, "attn_q.bias"),
    }


def _ernie(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    _scoring(metadata, _SOFTMAX)
    return _mixed_layers(checkpoint, config)


def _hunyuan(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    _scoring(metadata, _SOFTMAX)
    return {"use_qk_norm": has(checkpoint, "attn_q_norm.weight")}


def _hunyuan3(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    shared = metadata.optional_count("expert_shared_feed_forward_length") or 0
    return {
        **_sigmoid(metadata, checkpoint, config),
        "num_shared_experts": shared // metadata.count("expert_feed_forward_length"),
    }


def _cohere2(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    scoring = _scoring(metadata, _SOFTMAX, _SIGMOID) or _SIGMOID
    return {
        **_mixed_layers(checkpoint, config),
        "layer_types": layer_types(metadata),
        "expert_selection_fn": _SCORES[scoring],
        "prefix_dense_intermediate_size": config["intermediate_size"],
        "intermediate_size": metadata.count("expert_feed_forward_length"),
    }


def _exaone(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    window = config.get("sliding_window")
    types = {"sliding_window": None} if window is None else {"layer_types": layer_types(metadata)}
    return {**_sigmoid(metadata, checkpoint, config), **types}


def _deepseek2(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    """Return the fields of DeepSeek-V2 and V3, and of models trained with their code.

    key_length is the cache's size and key_length_mla a head's; older files only have a head's, in key_length.
    """
    rope_size = metadata.count("rope.dimension_count")
    head, value = (
        metadata.optional_count(f"attention.{kind}_length_mla") or metadata.count(f"attention.{kind}_length")
        for kind in ("key", "value")
    )
    scoring = _scoring(metadata, _SOFTMAX, _SIGMOID)
    is_v3 = scoring == _SIGMOID or has(checkpoint, "exp_probs_b.bias", config["num_hidden_layers"] - 1)
    config.pop("head_dim", None)
    config.pop("partial_rotary_factor", None)
    groups = metadata.optional_count("expert_group_count") or 1
    return {
        "architectures": ["DeepseekV3ForCausalLM" if is_v3 else "DeepseekV2ForCausalLM"],
        "num_key_value_heads": config["num_attention_heads"],
        "qk_rope_head_dim": rope_size,
        "qk_nope_head_dim": head - rope_size,
        "v_head_dim": value,
        "n_group": groups,
        "topk_group": metadata.optional_count("expert_group_used_count") or 1,
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        **_mixed_layers(checkpoint, config),
        **({"norm_topk_prob": bool(metadata.get("expert_weights_norm"))} if is_v3 else {}),
    }


def _indexed(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    """Return the fields of DeepSeek-V3.2 and GLM-5: V3's, and the tokens that the indexer chooses."""
    metadata.count("attention.indexer.top_k")
    name = "DeepseekV32ForCausalLM" if metadata.architecture == "deepseek32" else "GlmMoeDsaForCausalLM"
    fields = _deepseek2(metadata, checkpoint, config)
    return {**fields, "norm_topk_prob": bool(metadata.get("expert_weights_norm")), "architectures": [name]}


def _mistral4(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    """Return Mistral 4's fields. Many files omit the growth of queries, which is 0.1 in all released models."""
    _scoring(metadata, _SOFTMAX)
    growth = metadata.number("attention.temperature_scale") or 0.1
    rope = {"llama_4_scaling_beta": growth, **config.pop("rope_scaling", {})}
    return {
        **_deepseek2(metadata, checkpoint, config),
        "architectures": ["Mistral4ForCausalLM"],
        "norm_topk_prob": bool(metadata.get("expert_weights_norm")),
        "rope_parameters": {"rope_theta": config.get("rope_theta", 10_000.0), **rope},
    }


def _afmoe(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    """Return Trinity's fields. All released models scale their embeddings, which files do not say."""
    return {**_sigmoid(metadata, checkpoint, config), "mup_enabled": True}


def _llama4(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    """Return Llama 4's fields. Files do not say whether q and k are normed: in Maverick they are not."""
    _scoring(metadata, _SIGMOID)
    count, kinds = metadata.count("expert_count"), _mixed_layers(checkpoint, config)["mlp_layer_types"]
    return {
        "use_qk_norm": count != 128,
        "intermediate_size_mlp": config["intermediate_size"],
        "intermediate_size": metadata.count("expert_feed_forward_length"),
        "moe_layers": [layer for layer, kind in enumerate(kinds) if kind == "sparse"],
    }


_FINE_EXPERTS = {
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "n_shared_experts": "expert_shared_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
}
_ROUTING = {
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
_LATENT = {**_FINE_EXPERTS, "kv_lora_rank": "attention.kv_lora_rank", "q_lora_rank": "attention.q_lora_rank"}
_INDEXED = {**_LATENT, "index_topk": "attention.indexer.top_k"}
MIXTURES: dict[str, Architecture] = {
    "glm4moe": Architecture("Glm4MoeForCausalLM", {**_FINE_EXPERTS, **_ROUTING}, _glm4_moe),
    "deepseek2": Architecture("DeepseekV2ForCausalLM", _LATENT, _deepseek2),
    "deepseek32": Architecture("DeepseekV32ForCausalLM", _INDEXED, _indexed),
    "glm-dsa": Architecture("GlmMoeDsaForCausalLM", _INDEXED, _indexed),
    "mistral4": Architecture("Mistral4ForCausalLM", _LATENT, _mistral4),
    "llama4": Architecture(
        "Llama4ForCausalLM",
        {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        _llama4,
    ),
    "afmoe": Architecture(
        "AfmoeForCausalLM",
        {
            "num_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "num_shared_experts": "expert_shared_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "route_scale": "expert_weights_scale",
            "route_norm": "expert_weights_norm",
        },
        _afmoe,
    ),
    "dots1": Architecture("Dots1ForCausalLM", {**_FINE_EXPERTS, **_ROUTING}, _sigmoid),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_MoeForCausalLM",
        {
            "moe_num_experts": "expert_count",
            "moe_k": "expert_used_count",
            "moe_num_shared_experts": "expert_shared_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
        _ernie,
    ),
    "minimax-m2": Architecture(
        "MiniMaxM2ForCausalLM",
        {
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
        },
        _sigmoid,
    ),
    "hunyuan-dense": Architecture("HunYuanDenseV1ForCausalLM", more=_hunyuan),
    "hunyuan-moe": Architecture(
        "HunYuanMoEV1ForCausalLM",
        {
            "num_experts": "expert_count",
            "moe_topk": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "num_shared_expert": "expert_shared_count",
        },
        _hunyuan,
    ),
    "hy_v3": Architecture(
        "HYV3ForCausalLM",
        {
            "num_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "router_scaling_factor": "expert_weights_scale",
            "route_norm": "expert_weights_norm",
        },
        _hunyuan3,
    ),
    "cohere2moe": Architecture(
        "Cohere2MoeForCausalLM",
        {
            "logit_scale": "logit_scale",
            "num_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "num_shared_experts": "expert_shared_count",
            "norm_topk_prob": "expert_weights_norm",
        },
        _cohere2,
    ),
    "exaone-moe": Architecture(
        "ExaoneMoeForCausalLM",
        {
            "num_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "num_shared_experts": "expert_shared_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "routed_scaling_factor": "expert_weights_scale",
            **_ROUTING,
        },
        _exaone,
    ),
}
"""By general.architecture."""
