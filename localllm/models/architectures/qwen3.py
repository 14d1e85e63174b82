"""Qwen3 (dense): RMSNorm over each head of q and k, no biases by default (arXiv:2505.09388)."""

from __future__ import annotations

from typing import Any

from localllm.models.architectures.qwen2 import qwen_window
from localllm.models.spec.family import Config, Family


def _differences(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias"))
    return {"qk_norm": "head", "attention_bias": bias, "attention_out_bias": bias, **qwen_window(config)}


FAMILY = Family(
    "Qwen3",
    ("Qwen3ForCausalLM",),
    _differences,
    {"head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
)
