"""Nemotron 4 and Minitron: LayerNorm stored as w - 1, squared ReLU without a gate, half of each head rotates
(arXiv:2402.16819).
"""

from __future__ import annotations

from typing import Any

from localllm.models.spec.family import Config, Family
from localllm.models.spec.fields import number, renamed
from localllm.models.spec.norms import NormSpec


def _common_names(config: Config) -> Config:
    return renamed(config, {"rope_percent": "partial_rotary_factor", "rotary_percent": "partial_rotary_factor"})


def _differences(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias"))
    return {
        "norm": NormSpec(number(config, "norm_eps"), "layer", bias=True, plus_one=True),
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": bool(config.get("mlp_bias")),
        "mlp_gated": False,
    }


FAMILY = Family(
    "Nemotron",
    ("NemotronForCausalLM",),
    _differences,
    {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5, "max_position_embeddings": 4096},
    common_names=_common_names,
)
