"""OLMoE 1B-7B: RMSNorm over all of q and all of k, and a mixture in every layer whose weights need not sum to one
(arXiv:2409.02060).
"""

from __future__ import annotations

from typing import Any

from localllm.errors import UnsupportedModel
from localllm.models.spec.family import Config, Family
from localllm.models.spec.mixture import mixture


def _differences(config: Config) -> dict[str, Any]:
    if config.get("clip_qkv") is not None:
        raise UnsupportedModel("clip_qkv is not supported for OLMoE.", "No released checkpoint uses it.")
    bias, renormalize = bool(config.get("attention_bias")), bool(config.get("norm_topk_prob"))
    return {
        "qk_norm": "whole",
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mixture": mixture(config, size="intermediate_size", renormalize=renormalize),
    }


FAMILY = Family(
    "OLMoE",
    ("OlmoeForCausalLM",),
    _differences,
    {"rms_norm_eps": 1e-5, "num_experts_per_tok": 8},
)
