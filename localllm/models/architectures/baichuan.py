"""Baichuan 1 and 2: Llama with q, k and v stored fused. The 7B models rotate; the 13B models have ALiBi, and their
config.json, unlike the 7B's, has no max_position_embeddings. Baichuan 2 scales each row of its head to length 1, which
can only be recognised by the size of its vocabulary (arXiv:2309.10305). Its own code on the hub is not run.
"""

from __future__ import annotations

from typing import Any

from localllm.models.spec.family import Config, Family, Storage
from localllm.models.spec.fields import renamed

_BAICHUAN_2_VOCABULARY = 125_696


def _common_names(config: Config) -> Config:
    return {**renamed(config, {"model_max_length": "max_position_embeddings"}), "has_alibi": _has_alibi(config)}


def _has_alibi(config: Config) -> bool:
    return config.get("max_position_embeddings") is None


def _differences(config: Config) -> dict[str, Any]:
    return {
        "positions": "alibi" if config["has_alibi"] else "rope",
        "lm_head_normalized": config["vocab_size"] == _BAICHUAN_2_VOCABULARY,
    }


FAMILY = Family(
    "Baichuan",
    ("BaichuanForCausalLM", "BaiChuanForCausalLM"),
    _differences,
    {"model_max_length": 4096},
    Storage(fused_qkv="W_pack"),
    _common_names,
)
