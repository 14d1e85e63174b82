"""Phi-3, Phi-3.5 mini and Phi-4 (mini): Llama with q, k, v and gate, up stored fused, LongRoPE, and in Phi-4-mini
only part of each head rotating (arXiv:2404.14219)."""

from __future__ import annotations

from typing import Any

from localllm.models.architectures.family import Config, Family, Storage


def _differences(config: Config) -> dict[str, Any]:
    window = config.get("sliding_window")
    return {"sliding_window": window, "layer_is_windowed": (window is not None,) * config["num_hidden_layers"]}


FAMILY = Family(
    "Phi-3",
    ("Phi3ForCausalLM",),
    _differences,
    {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    storage=Storage(fused_qkv="qkv_proj", fused_gate_up="gate_up_proj"),
)
