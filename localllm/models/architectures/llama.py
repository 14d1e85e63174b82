"""Llama 1 to 3.x (arXiv:2302.13971), models trained with its code (Yi, SmolLM, SmolLM2, TinyLlama, Falcon 3), and
families that differ by a flag or two: Arcee has squared ReLU and no gate, Helium and ERNIE 4.5 rotate neighbouring
dimensions, Seed-OSS has biases on q, k and v.
"""

from __future__ import annotations

from typing import Any

from localllm.models.spec.family import Config, Family


def _llama(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias"))
    return {"attention_bias": bias, "attention_out_bias": bias, "mlp_bias": bool(config.get("mlp_bias"))}


def _arcee(config: Config) -> dict[str, Any]:
    return {**_llama(config), "mlp_gated": False}


def _helium(config: Config) -> dict[str, Any]:
    return {**_llama(config), "attention_out_bias": False, "rope_interleaved": True}


def _ernie(config: Config) -> dict[str, Any]:
    bias = bool(config.get("use_bias"))
    return {"attention_bias": bias, "attention_out_bias": bias, "mlp_bias": bias, "rope_interleaved": True}


def _seed_oss(config: Config) -> dict[str, Any]:
    return {**_llama(config), "attention_out_bias": bool(config.get("attention_out_bias"))}


FAMILY = Family("Llama", ("LlamaForCausalLM",), _llama)
ARCEE = Family("Arcee", ("ArceeForCausalLM",), _arcee, {"hidden_act": "relu2", "rms_norm_eps": 1e-5})
HELIUM = Family(
    "Helium", ("HeliumForCausalLM",), _helium, {"head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 100_000.0}
)
ERNIE = Family(
    "ERNIE 4.5",
    ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
    _ernie,
    {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": True},
)
SEED_OSS = Family("Seed-OSS", ("SeedOssForCausalLM",), _seed_oss, {"head_dim": 128, "attention_bias": True})
