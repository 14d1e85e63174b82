"""Granite 3 and its line: Llama with four multipliers, on embeddings, attention scores, what each part adds, and (as a
divisor) the logits. They are fields of config.json and stay as they are, no rounding (arXiv:2405.04324; muP,
arXiv:2203.03466)."""

from __future__ import annotations

from typing import Any

from localllm.models.architectures.family import Config, Family
from localllm.models.fields import number


def _differences(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias"))
    return {
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": bool(config.get("mlp_bias")),
        "embedding_scale": number(config, "embedding_multiplier"),
        "attention_scale": number(config, "attention_multiplier"),
        "residual_multiplier": number(config, "residual_multiplier"),
        "logits_multiplier": 1 / number(config, "logits_scaling"),
    }


FAMILY = Family(
    "Granite",
    ("GraniteForCausalLM",),
    _differences,
    {"embedding_multiplier": 1.0, "attention_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0},
)
