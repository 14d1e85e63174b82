"""GLM-4 and its successors, dense and with experts, and Solar Open.

GLM-4, in the form for which transformers has a class (repositories ending in -hf): biases on q, k and v, half of each
head rotates, neighbouring dimensions together, gate and up stored fused; the 0414 series also norms the outputs of the
parts (arXiv:2406.12793).
GLM-4.5 and its successors: many small experts beside a shared one, scored by sigmoids with a correction for the choice,
the first layers dense; half of each head rotates (arXiv:2508.06471). Solar Open has the same mixture in every layer,
and Llama's attention.
GLM-4.1V to 4.6V are vision-language models with these text parts.
"""

from __future__ import annotations

from typing import Any

from localllm.models.families.text_part import of_family
from localllm.models.spec.family import DEEPSEEK_MTP, Config, Family, Storage
from localllm.models.spec.gguf import (
    EXPERT_GROUPS,
    FINE_EXPERTS,
    NORM_BEFORE_MLP,
    SANDWICH_NORMS,
    Fields,
    GGUFFacts,
    GGUFTensors,
    Metadata,
    attention_biases,
    has,
    mixed_layers,
)
from localllm.models.spec.mixture import grouping, layers_after, sigmoid_mixture, typed_layers

_GLM_DEFAULTS = {
    "head_dim": 128,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1.5625e-07,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 131072,
}
_SANDWICH = (
    (r"post_attention_layernorm", "post_self_attn_layernorm"),
    (r"pre_feedforward_layernorm", "post_attention_layernorm"),
    (r"post_feedforward_layernorm", "post_mlp_layernorm"),
)


def _glm(config: Config) -> dict[str, Any]:
    return {
        "attention_bias": bool(config["attention_bias"]),
        "rope_interleaved": bool(config.get("rope_interleave", True)),
    }


def _glm4(config: Config) -> dict[str, Any]:
    return {**_glm(config), "topology": "sandwich"}


def _gguf_glm4(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    """Return GLM-4's fields. In files of models that also see, dimensions that rotate together are moved apart."""
    sees = metadata.get("rope.dimension_sections") is not None
    return {**attention_biases(metadata, checkpoint, config), "rope_interleave": not sees}


GLM = Family(
    "GLM-4",
    ("GlmForCausalLM",),
    _glm,
    _GLM_DEFAULTS,
    Storage(fused_gate_up="gate_up_proj"),
    gguf={"chatglm": GGUFFacts("GlmForCausalLM", more=attention_biases, fused_gate_up="up_proj")},
)
GLM4 = Family(
    "GLM-4 0414",
    ("Glm4ForCausalLM",),
    _glm4,
    _GLM_DEFAULTS,
    Storage(renames=_SANDWICH, fused_gate_up="gate_up_proj"),
    gguf={"glm4": GGUFFacts("Glm4ForCausalLM", more=_gguf_glm4, norms=SANDWICH_NORMS, fused_gate_up="up_proj")},
)


def _differences(config: Config) -> dict[str, Any]:
    return {
        "attention_bias": bool(config.get("attention_bias")),
        "qk_norm": "head" if config["use_qk_norm"] else None,
        "mixture": sigmoid_mixture(
            config,
            layers=typed_layers(config) or layers_after(config, config["first_k_dense_replace"]),
            renormalize=bool(config["norm_topk_prob"]),
            scale=float(config["routed_scaling_factor"]),
            shared_size=config["moe_intermediate_size"] * (config["n_shared_experts"] or 0),
            **grouping(config),
        ),
    }


def _solar_names(config: Config) -> Config:
    """Return the config with the size of a dense layer, which may be missing: Solar Open has none."""
    return {"intermediate_size": config.get("moe_intermediate_size"), **config}


_GLM4_MOE_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "use_qk_norm": False,
}
_STORAGE = Storage(renames=((r"\.mlp\.shared_expert\.", ".mlp.shared_experts."),), more_layers=True)


def _gguf_glm4_moe(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    """Return the fields of GLM-4.5 and of Solar Open, which has no dense layers: their size may be missing."""
    return {
        **mixed_layers(checkpoint, config),
        "intermediate_size": config.get("intermediate_size") or metadata.count("expert_feed_forward_length"),
        "use_qk_norm": has(checkpoint, "attn_q_norm.weight"),
        "attention_bias": has(checkpoint, "attn_q.bias"),
    }


GLM4_MOE = Family(
    "GLM-4.5 (MoE)",
    ("Glm4MoeForCausalLM",),
    _differences,
    {**_GLM4_MOE_DEFAULTS, "partial_rotary_factor": 0.5, "moe_intermediate_size": 1408, "first_k_dense_replace": 1},
    storage=_STORAGE,
    note="the multi-token prediction layer is run with --speculative mtp",
    mtp=DEEPSEEK_MTP,
    gguf={
        "glm4moe": GGUFFacts(
            "Glm4MoeForCausalLM", {**FINE_EXPERTS, **EXPERT_GROUPS}, _gguf_glm4_moe, norms=NORM_BEFORE_MLP
        )
    },
)
SOLAR = Family(
    "Solar Open",
    ("SolarOpenForCausalLM",),
    _differences,
    {
        **_GLM4_MOE_DEFAULTS,
        "head_dim": 128,
        "rope_theta": 1_000_000.0,
        "moe_intermediate_size": 1280,
        "first_k_dense_replace": 0,
    },
    storage=_STORAGE,
    common_names=_solar_names,
)
GLM4V = of_family(
    "GLM-4.1V, GLM-4.6V-Flash",
    ("Glm4vForConditionalGeneration", "Glm46VForConditionalGeneration"),
    GLM4,
    rms_norm_eps=1e-5,
    head_dim=None,
    partial_rotary_factor=1.0,
)
GLM4V_MOE = of_family("GLM-4.5V, GLM-4.6V", ("Glm4vMoeForConditionalGeneration",), GLM4_MOE, attention_bias=True)
