"""MiniMax-M2 (230B-A10B): RMSNorm over all of q and all of k, half of each head rotates, and a mixture in every layer,
scored by sigmoids with a correction for the choice, whose weights sum to one. Attention is full in every layer, unlike
MiniMax-01's.
"""

from __future__ import annotations

from typing import Any

from localllm.errors import UnsupportedModel
from localllm.models.families.mistral import MIXTRAL_STORAGE
from localllm.models.spec.family import Config, Family
from localllm.models.spec.gguf import GGUFFacts, sigmoid_experts
from localllm.models.spec.mixture import sigmoid_mixture


def _differences(config: Config) -> dict[str, Any]:
    for name, only in (("scoring_func", "sigmoid"), ("use_qk_norm", True), ("qk_norm_type", "per_layer")):
        if config.get(name, only) != only:
            raise UnsupportedModel(
                f"{name} = {config[name]!r} is not supported for MiniMax-M2.", f"Supported: {only!r}, as released."
            )
    return {"qk_norm": "whole", "mixture": sigmoid_mixture(config, size="intermediate_size")}


FAMILY = Family(
    "MiniMax-M2",
    ("MiniMaxM2ForCausalLM",),
    _differences,
    {"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5_000_000.0, "num_experts_per_tok": 8},
    storage=MIXTRAL_STORAGE,
    gguf={
        "minimax-m2": GGUFFacts(
            "MiniMaxM2ForCausalLM",
            {
                "num_local_experts": "expert_count",
                "num_experts_per_tok": "expert_used_count",
                "intermediate_size": "expert_feed_forward_length",
            },
            sigmoid_experts,
        )
    },
)
