"""Trinity (AFMoE): norms before and after each part, a gate on what attention returns, windowed layers that rotate
between full layers without positions, and after a few dense layers a mixture that routes as DeepSeek-V3's does, beside
shared experts (Arcee Trinity technical report, 2026). Muse Glimmer: the same norms, gate and windows with dense layers;
q and k are normed without a weight, and so are embeddings; norms after a part have an epsilon of their own, and logits
a factor and a cap (Meta, 2026).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from localllm.errors import UnsupportedModel
from localllm.models.families import text_part
from localllm.models.spec.family import Config, Family, Storage, windowed_layers
from localllm.models.spec.fields import NormSpec, number, optional_number, renamed, size
from localllm.models.spec.gguf import SANDWICH_NORMS, Fields, GGUFFacts, GGUFTensors, Metadata, sigmoid_experts
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
