"""Qwen 1: Llama with other names and biases on q, k and v. The supported context is seq_length: beyond it the model
changes its rotary base and scales its queries, which only its own code on the hub does (arXiv:2309.16609).
"""

from __future__ import annotations

from typing import Any

from localllm.models.architectures.gpt2 import GPT_NAMES
from localllm.models.spec.family import Config, Family, Storage
from localllm.models.spec.fields import number, size
from localllm.models.spec.norms import NormSpec


def _common_names(config: Config) -> Config:
    return {
        "head_dim": config.get("kv_channels"),
        "rope_theta": config.get("rotary_emb_base"),
        "partial_rotary_factor": config.get("rotary_pct"),
        **config,
        "hidden_act": "silu",
        "intermediate_size": size(config, "intermediate_size") // 2,  # the config counts gate and up together
        "max_position_embeddings": config.get("seq_length", 2048),
    }


def _differences(config: Config) -> dict[str, Any]:
    return {
        "norm": NormSpec(number(config, "layer_norm_epsilon")),
        "attention_bias": True,
        "attention_out_bias": not config["no_bias"],
        "mlp_bias": not config["no_bias"],
    }


FAMILY = Family(
    "Qwen",
    ("QWenLMHeadModel",),
    _differences,
    {"layer_norm_epsilon": 1e-6, "no_bias": True},
    Storage(
        renames=(
            *GPT_NAMES,
            (r"self_attn\.o_proj", "attn.c_proj"),
            ("self_attn", "attn"),
            (r"mlp\.gate_proj", "mlp.w2"),
            (r"mlp\.up_proj", "mlp.w1"),
            (r"mlp\.down_proj", "mlp.c_proj"),
        ),
        fused_qkv="c_attn",
    ),
    _common_names,
)
