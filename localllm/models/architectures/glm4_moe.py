"""GLM-4.5 and its successors: many small experts beside a shared one, scored by sigmoids with a correction for the
choice, the first layers dense; half of each head rotates (arXiv:2508.06471). Solar Open has the same mixture in every
layer, and Llama's attention.
"""

from __future__ import annotations

from typing import Any

from localllm.models.spec.family import Config, Family, Storage
from localllm.models.spec.mixture import grouping, layers_after, sigmoid_mixture, typed_layers
from localllm.models.spec.mtp import DEEPSEEK_MTP


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


_DEFAULTS = {
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
    {**_DEFAULTS, "partial_rotary_factor": 0.5, "moe_intermediate_size": 1408, "first_k_dense_replace": 1},
    storage=_STORAGE,
    note="the multi-token prediction layer is run with --speculative mtp",
    mtp=DEEPSEEK_MTP,
)
SOLAR = Family(
    "Solar Open",
    ("SolarOpenForCausalLM",),
    _differences,
    {
        **_DEFAULTS,
        "head_dim": 128,
        "rope_theta": 1_000_000.0,
        "moe_intermediate_size": 1280,
        "first_k_dense_replace": 0,
    },
    storage=_STORAGE,
    common_names=_solar_names,
)
