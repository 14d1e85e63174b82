"""GLM-4.5 and its successors: many small experts beside a shared one, scored by sigmoids with a correction for the
choice, the first layers dense; half of each head rotates (arXiv:2508.06471).
"""

from __future__ import annotations

from typing import Any

from localllm.models.spec.family import Config, Family, Storage
from localllm.models.spec.mixture import grouping, layers_after, mixture


def _differences(config: Config) -> dict[str, Any]:
    return {
        "attention_bias": bool(config.get("attention_bias")),
        "qk_norm": "head" if config["use_qk_norm"] else None,
        "mixture": mixture(
            config,
            layers=layers_after(config, config["first_k_dense_replace"]),
            scoring="sigmoid",
            correction_bias=True,
            router_in_fp32=True,
            renormalize=bool(config["norm_topk_prob"]),
            scale=float(config["routed_scaling_factor"]),
            shared_size=config["moe_intermediate_size"] * (config["n_shared_experts"] or 0),
            **grouping(config),
        ),
    }


FAMILY = Family(
    "GLM-4.5 (MoE)",
    ("Glm4MoeForCausalLM",),
    _differences,
    {
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": False,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
    storage=Storage(renames=((r"\.mlp\.shared_expert\.", ".mlp.shared_experts."),), more_layers=True),
    note="multi-token prediction layers are not run",
)
