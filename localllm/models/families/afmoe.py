"""Trinity (AFMoE): norms before and after each part, a gate on what attention returns, windowed layers that rotate
between full layers without positions, and after a few dense layers a mixture that routes as DeepSeek-V3's does, beside
shared experts (Arcee Trinity technical report, 2026). Muse Glimmer: the same norms, gate and windows with dense layers;
q and k are normed without a weight, and so are embeddings; norms after a part have an epsilon of their own, and logits
a factor and a cap (Meta, 2026). Laguna: Llama's norms, norms of q and k, softplus gates on what attention returns, one
for each head or for each number, and Trinity's mixture; windowed layers may have more query heads than full ones, whose
heads rotate in half (poolside, 2026).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.models.families import text_part
from localllm.models.spec.family import Config, Family, Storage, windowed_layers
from localllm.models.spec.fields import NormSpec, number, optional_number, renamed, size
from localllm.models.spec.gguf import (
    SANDWICH_NORMS,
    Fields,
    GGUFFacts,
    GGUFTensors,
    Metadata,
    layer_types,
    ropes_of_windows,
    sigmoid_experts,
)
from localllm.models.spec.mixture import layers_after, sigmoid_mixture, typed_layers


def _differences(config: Config) -> dict[str, Any]:
    for name, only in (("score_func", "sigmoid"), ("route_norm", True), ("n_group", 1)):
        if (config.get(name) or only) != only or config.get(name) is False:
            raise UnsupportedModel(
                f"{name} = {config[name]!r} is not supported for Trinity.", f"Supported: {only!r}, as released."
            )
    every = size(config, "global_attn_every_n_layers")
    windowed = windowed_layers(config, lambda layer: (layer + 1) % every != 0)
    bias = bool(config.get("attention_bias"))
    return {
        "topology": "sandwich",
        "qk_norm": "head",
        "attention_gate": "matrix",
        "attention_bias": bias,
        "attention_out_bias": bias,
        "sliding_window": config["sliding_window"],
        "layer_is_windowed": windowed,
        "layer_has_rope": windowed,
        "embedding_scale": config["hidden_size"] ** 0.5 if config["mup_enabled"] else None,
        "mixture": sigmoid_mixture(
            config,
            layers=typed_layers(config) or layers_after(config, config["num_dense_layers"]),
            scale=number(config, "route_scale"),
            shared_size=config["moe_intermediate_size"] * (config["num_shared_experts"] or 0),
        ),
    }


def _gguf(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    """Return Trinity's fields. All released models scale their embeddings, which files do not say."""
    return {**sigmoid_experts(metadata, checkpoint, config), "mup_enabled": True}


def _muse_differences(config: Config) -> dict[str, Any]:
    count = config["num_hidden_layers"]
    windowed = windowed_layers(config, lambda layer: (count - 1 - layer) % 4 != 0)
    thetas = config.get("layer_rope_theta")
    bias = bool(config.get("attention_bias"))
    return {
        "topology": "sandwich",
        "norm": NormSpec(number(config, "rms_norm_eps"), plus_one=True, after_eps=number(config, "post_norm_eps")),
        "qk_norm": "unweighted",
        "embedding_norm": "unweighted",
        "attention_gate": "matrix",
        "attention_bias": bias,
        "attention_out_bias": bias,
        "sliding_window": config["sliding_window"],
        "layer_is_windowed": windowed,
        "layer_has_rope": windowed if thetas is None else tuple(bool(theta) for theta in thetas),
        "attention_scale": number(config, "qk_scale_factor") * config["head_dim"] ** -0.5,
        "logits_multiplier": number(config, "output_multiplier"),
        "final_softcap": optional_number(config, "final_logit_softcapping"),
    }


def _muse_gguf(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    """Return Muse Glimmer's fields. The factor of the queries is stored as the weight of a norm that has none."""
    factors = checkpoint.values("blk.0.attn_q_norm.weight")
    return {} if factors is None else {"qk_scale_factor": factors[0]}


_GATES = {True: "heads", "per-head": "heads", "per-element": "matrix"}


def _laguna(config: Config) -> dict[str, Any]:
    for name in ("attention_bias", "moe_apply_router_weight_on_input", "moe_router_logit_softcapping"):
        if config.get(name):
            raise UnsupportedModel(f"{name} is not supported for Laguna.", "No released checkpoint uses it.")
    gating = config["gating"]
    if not isinstance(gating, bool | str) or gating not in _GATES:
        raise UnsupportedModel(f"gating = {gating!r} is not supported for Laguna.", "Supported: per-head, per-element.")
    windowed = windowed_layers(config, lambda layer: False)
    heads = _laguna_heads(config, windowed)
    return {
        "num_heads": max(heads),
        "layer_heads": () if len(set(heads)) == 1 else heads,
        "qk_norm": "head",
        "attention_gate": _GATES[gating],
        "gate_activation": "softplus",
        "sliding_window": config["sliding_window"],
        "layer_is_windowed": windowed,
        **({} if any(windowed) else {"local_rope": None}),
        "mixture": sigmoid_mixture(
            config,
            layers=typed_layers(config) or layers_after(config, 1),
            scale=number(config, "moe_routed_scaling_factor"),
            shared_size=size(config, "shared_expert_intermediate_size"),
        ),
    }


def _laguna_heads(config: Config, windowed: tuple[bool, ...]) -> tuple[int, ...]:
    """Return the query heads of each layer. Raises `UnsupportedModel` if layers that share their blocks differ."""
    layers, groups = size(config, "num_hidden_layers"), size(config, "num_key_value_heads")
    stated = config.get("num_attention_heads_per_layer")
    heads = [size(config, "num_attention_heads")] * layers if stated is None else stated
    if not isinstance(heads, list) or len(heads) != layers or any(type(n) is not int or n < 1 for n in heads):
        raise CorruptModel(
            f"config.json has num_attention_heads_per_layer = {heads!r}.", f"It must list {layers} numbers above 0."
        )
    if any(count % groups for count in heads):
        raise CorruptModel(
            f"config.json's attention heads, {sorted(set(heads))} by layer, cannot share {groups} key/value heads.",
            "Each must be a multiple of that.",
        )
    if len(set(zip(heads, windowed, strict=True))) > len(set(windowed)):
        raise UnsupportedModel(
            f"config.json has layers of one kind with {sorted(set(heads))} attention heads.",
            "Supported: one number in windowed layers, and one in full ones.",
        )
    return tuple(heads)


def _laguna_gguf(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    """Return Laguna's fields. Files need not say which layers have a window: all but every fourth, from the first."""
    layers = config["num_hidden_layers"]
    heads, gate = metadata.counts("attention.head_count", layers), checkpoint.tensors.get("blk.0.attn_gate.weight")
    kinds = ["sliding_attention" if layer % 4 else "full_attention" for layer in range(layers)]
    if isinstance(metadata.get("attention.sliding_window_pattern"), list):
        kinds = layer_types(metadata)
    return {
        **sigmoid_experts(metadata, checkpoint, config),
        **ropes_of_windows(metadata, config),
        "num_attention_heads_per_layer": heads,
        "gating": "per-head" if gate is not None and gate.shape[0] == heads[0] else "per-element",
        "layer_types": kinds if config.get("sliding_window") else ["full_attention"] * layers,
    }


MUSE_GLIMMER = Family(
    "Muse Glimmer",
    ("MuseGlimmerForConditionalGeneration",),
    _muse_differences,
    {
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "sliding_window": 2048,
        "qk_scale_factor": 3.87,
        "output_multiplier": 256**0.5 / 6656**0.5,
        "post_norm_eps": 1e-8,
        "final_logit_softcapping": 20.0,
    },
    replace(text_part.STORAGE, added=(("model.norm.weight", 1.0),)),  # stored as w, and the norms of layers as w - 1
    lambda config: renamed(text_part.text_config(config), {"hidden_activation": "hidden_act"}),
    text_part.NOTE,
    gguf={
        "muse-glimmer": GGUFFacts(
            "MuseGlimmerForConditionalGeneration",
            {"output_multiplier": "logit_scale", "final_logit_softcapping": "final_logit_softcapping"},
            _muse_gguf,
            norms=SANDWICH_NORMS,
            added=(("norm.weight", 1.0),),
            ignored=(r"blk\.\d+\.attn_[qk]_norm\.weight",),
        )
    },
)
FAMILY = Family(
    "Trinity",
    ("AfmoeForCausalLM",),
    _differences,
    {
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "sliding_window": 1024,
        "global_attn_every_n_layers": 4,
        "mup_enabled": False,
        "num_dense_layers": 1,
        "num_shared_experts": 2,
        "num_experts_per_tok": 6,
        "route_scale": 1.0,
    },
    Storage(
        renames=(
            (r"\.(pre|post)_feedforward_layernorm\.", r".\1_mlp_layernorm."),
            (r"\.mlp\.gate\.e_score_correction_bias", ".mlp.expert_bias"),
            (r"\.mlp\.gate\.", ".mlp.router.gate."),
            (r"\.mlp\.shared_expert\.", ".mlp.shared_experts."),
        )
    ),
    gguf={
        "afmoe": GGUFFacts(
            "AfmoeForCausalLM",
            {
                "num_experts": "expert_count",
                "num_experts_per_tok": "expert_used_count",
                "num_shared_experts": "expert_shared_count",
                "moe_intermediate_size": "expert_feed_forward_length",
                "route_scale": "expert_weights_scale",
                "route_norm": "expert_weights_norm",
            },
            _gguf,
            norms=SANDWICH_NORMS,
        )
    },
)
LAGUNA = Family(
    "Laguna",
    ("LagunaForCausalLM",),
    _laguna,
    {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "sliding_window": 512,
        "gating": True,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "moe_routed_scaling_factor": 1.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
        },
    },
    Storage(
        renames=(
            (r"\.self_attn\.gate_proj\.", ".self_attn.g_proj."),
            (r"\.mlp\.gate\.e_score", ".mlp.experts.e_score"),
        ),
        alternatives=(
            (r"\.mlp\.experts\.e_score", ".mlp.gate.e_score"),
            (r"\.mlp\.shared_expert\.", ".mlp.shared_experts."),
        ),
    ),
    gguf={
        "laguna": GGUFFacts(
            "LagunaForCausalLM",
            {
                "num_experts": "expert_count",
                "num_experts_per_tok": "expert_used_count",
                "moe_intermediate_size": "expert_feed_forward_length",
                "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
                "moe_routed_scaling_factor": "expert_weights_scale",
            },
            _laguna_gguf,
            varying=("attention.head_count",),
        )
    },
)
