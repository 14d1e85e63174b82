"""Mixtral 8x7B and 8x22B: Mistral with a mixture in every layer, the weights of the chosen experts summing to one
(arXiv:2401.04088)."""

from __future__ import annotations

from typing import Any

from localllm.models.spec.family import Config, Family, Storage
from localllm.models.spec.mixture import mixture


def _differences(config: Config) -> dict[str, Any]:
    window = config["sliding_window"]
    return {
        "sliding_window": window,
        "layer_is_windowed": (window is not None,) * config["num_hidden_layers"],
        "mixture": mixture(config, size="intermediate_size"),
    }


STORAGE = Storage(
    renames=(
        (r"\.mlp\.gate\.e_score", ".block_sparse_moe.e_score"),
        (r"\.mlp\.(gate|experts)\.", r".block_sparse_moe.\1."),
        (r"(\.experts\.\d+)\.gate_proj\.", r"\1.w1."),
        (r"(\.experts\.\d+)\.up_proj\.", r"\1.w3."),
        (r"(\.experts\.\d+)\.down_proj\.", r"\1.w2."),
    ),
    alternatives=((r"\.block_sparse_moe\.", ".mlp."),),
)
FAMILY = Family(
    "Mixtral",
    ("MixtralForCausalLM",),
    _differences,
    {
        "sliding_window": None,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_experts_per_tok": 2,
    },
    storage=STORAGE,
)
