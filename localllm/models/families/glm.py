"""GLM-4, in the form for which transformers has a class (repositories ending in -hf): biases on q, k and v, half of
each head rotates, neighbouring dimensions together, gate and up stored fused; the 0414 series also norms the outputs of
the parts (arXiv:2406.12793).

GLM-4.5 and its successors: many small experts beside a shared one, scored by sigmoids with a correction for the
choice, the first layers dense; half of each head rotates (arXiv:2508.06471). Solar Open has the same mixture in every
layer, and Llama's attention.
"""

from __future__ import annotations

from typing import Any

from localllm.models.spec.family import DEEPSEEK_MTP, Config, Family, Storage
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


GLM = Family("GLM-4", ("GlmForCausalLM",), _glm, _GLM_DEFAULTS, Storage(fused_gate_up="gate_up_proj"))
GLM4 = Family(
    "GLM-4 0414", ("Glm4ForCausalLM",), _glm4, _GLM_DEFAULTS, Storage(renames=_SANDWICH, fused_gate_up="gate_up_proj")
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
FAMILY = Family(
    "GLM-4.5 (MoE)",
    ("Glm4MoeForCausalLM",),
    _differences,
    {**_GLM4_MOE_DEFAULTS, "partial_rotary_factor": 0.5, "moe_intermediate_size": 1408, "first_k_dense_replace": 1},
    storage=_STORAGE,
    note="the multi-token prediction layer is run with --speculative mtp",
    mtp=DEEPSEEK_MTP,
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
