"""Hunyuan 0.5B to 7B and A13B (Hunyuan v1), and Hy3 (v3).

v1: Llama with RMSNorm over each head of q and k *after* the rotation, and a rotary base that a fixed `alpha` scales,
which config.json calls dynamic. A13B has a mixture in every layer, softmax with weights that sum to one, beside a
shared expert (Hunyuan-A13B technical report, 2025). v3: the norm comes before the rotation, and experts are scored by
sigmoids with a correction for the choice.
"""

from __future__ import annotations

from typing import Any

from localllm.errors import UnsupportedModel
from localllm.models.spec.family import Config, Family, Storage
from localllm.models.spec.fields import number
from localllm.models.spec.gguf import (
    SOFTMAX,
    Fields,
    GGUFFacts,
    GGUFTensors,
    Metadata,
    expert_scoring,
    has,
    sigmoid_experts,
)
from localllm.models.spec.mixture import layers_after, mixture, sigmoid_mixture, typed_layers

_NORMS = (
    (r"\.self_attn\.q_norm\.", ".self_attn.query_layernorm."),
    (r"\.self_attn\.k_norm\.", ".self_attn.key_layernorm."),
)
_DEFAULTS = {"rms_norm_eps": 1e-5, "use_qk_norm": True}


def _static_rope(config: Config) -> Config:
    """Return the config with the rotary base that `alpha` implies, and without scaling."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type") or rope.get("type")
    if kind != "dynamic" or not rope.get("alpha"):
        return config
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    base = float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    theta = base * number(rope, "alpha") ** (dim / (dim - 2))
    return {**config, "rope_theta": theta, "rope_scaling": None, "rope_parameters": {"rope_theta": theta}}


def _dense(config: Config) -> dict[str, Any]:
    if config.get("use_cla"):
        raise UnsupportedModel("use_cla is not supported for Hunyuan.", "Layers that share keys and values differ.")
    bias = bool(config.get("attention_bias"))
    return {
        "qk_norm": "head" if config["use_qk_norm"] else None,
        "qk_norm_last": True,
        "attention_bias": bias,
        "attention_out_bias": bias,
    }


def _moe(config: Config) -> dict[str, Any]:
    width = config["intermediate_size"]
    config = {
        **config,
        "num_experts": _of_all_layers(config, "num_experts"),
        "num_experts_per_tok": _of_all_layers(config, "moe_topk", "num_experts_per_tok"),
        "expert_size": _of_all_layers(config, "moe_intermediate_size") or width,
    }
    shared = _of_all_layers(config, "num_shared_expert")
    experts = mixture(
        config,
        size="expert_size",
        layers=layers_after(config, config.get("moe_layer_num_skipped") or 0),
        router_in_fp32=True,
        shared_size=width * (1 if shared is None else shared),
    )
    return {**_dense(config), "mixture": experts}


def _of_all_layers(config: Config, *names: str) -> Any:
    """Return the first of these fields that config.json has; of a list with one value per layer, the common value."""
    name = next((name for name in names if config.get(name) is not None), names[0])
    value = config.get(name)
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise UnsupportedModel(f"Layers that differ in {name} are not supported.", f"config.json has {value}.")
    return value[0]


def _v3(config: Config) -> dict[str, Any]:
    if not config.get("route_norm", True):
        raise UnsupportedModel("route_norm = false is not supported for Hy3.", "No published checkpoint uses it.")
    bias = bool(config.get("attention_bias"))
    return {
        "qk_norm": "head",
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": bool(config.get("mlp_bias")),
        "mixture": sigmoid_mixture(
            config,
            layers=typed_layers(config) or layers_after(config, config["first_k_dense_replace"]),
            scale=number(config, "router_scaling_factor"),
            shared_size=config["moe_intermediate_size"] * (config.get("num_shared_experts") or 0),
        ),
    }


def _gguf(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    expert_scoring(metadata, SOFTMAX)
    return {"use_qk_norm": has(checkpoint, "attn_q_norm.weight")}


def _gguf_v3(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    shared = metadata.optional_count("expert_shared_feed_forward_length") or 0
    return {
        **sigmoid_experts(metadata, checkpoint, config),
        "num_shared_experts": shared // metadata.count("expert_feed_forward_length"),
    }


DENSE = Family(
    "Hunyuan",
    ("HunYuanDenseV1ForCausalLM",),
    _dense,
    _DEFAULTS,
    Storage(renames=_NORMS),
    common_names=_static_rope,
    gguf={"hunyuan-dense": GGUFFacts("HunYuanDenseV1ForCausalLM", more=_gguf)},
)
MOE = Family(
    "Hunyuan (MoE)",
    ("HunYuanMoEV1ForCausalLM",),
    _moe,
    _DEFAULTS,
    Storage(
        renames=(
            *_NORMS,
            (r"\.mlp\.gate\.", ".mlp.gate.wg."),
            (r"\.mlp\.shared_expert\.", ".mlp.shared_mlp."),
        )
    ),
    common_names=_static_rope,
    gguf={
        "hunyuan-moe": GGUFFacts(
            "HunYuanMoEV1ForCausalLM",
            {
                "num_experts": "expert_count",
                "moe_topk": "expert_used_count",
                "moe_intermediate_size": "expert_feed_forward_length",
                "num_shared_expert": "expert_shared_count",
            },
            _gguf,
        )
    },
)
V3 = Family(
    "Hy3",
    ("HYV3ForCausalLM",),
    _v3,
    {
        "rms_norm_eps": 1e-5,
        "rope_theta": 11_158_840.0,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_experts": 192,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 1536,
        "router_scaling_factor": 2.826,
        "first_k_dense_replace": 1,
    },
    Storage(
        renames=(
            (r"\.mlp\.gate\.e_score_correction_bias", ".mlp.expert_bias"),
            (r"\.mlp\.gate\.", ".mlp.router.gate."),
            (r"\.mlp\.shared_expert\.", ".mlp.shared_mlp."),
        ),
        more_layers=True,
    ),
    note="multi-token prediction layers are not run",
    gguf={
        "hy_v3": GGUFFacts(
            "HYV3ForCausalLM",
            {
                "num_experts": "expert_count",
                "num_experts_per_tok": "expert_used_count",
                "moe_intermediate_size": "expert_feed_forward_length",
                "router_scaling_factor": "expert_weights_scale",
                "route_norm": "expert_weights_norm",
            },
            _gguf_v3,
        )
    },
)
