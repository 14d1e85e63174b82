"""Llama 1 to 3.x (arXiv:2302.13971), and what was trained with its code: Yi, SmolLM, SmolLM2, TinyLlama."""

from __future__ import annotations

from typing import Any

from localllm.models.architectures.family import Config, Family


def _differences(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias"))
    return {"attention_bias": bias, "attention_out_bias": bias, "mlp_bias": bool(config.get("mlp_bias"))}


FAMILY = Family("Llama", ("LlamaForCausalLM",), _differences)
