"""StableLM: Llama with LayerNorm, and a quarter of each head rotates; StableLM 2 12B norms q and k with a weight per
head, and runs its two parts in parallel (arXiv:2402.17834).
"""

from __future__ import annotations

from typing import Any

from localllm.models.spec.family import Config, Family, Storage
from localllm.models.spec.norms import layer_norm


def _differences(config: Config) -> dict[str, Any]:
    return {
        "topology": "parallel_one_norm" if config.get("use_parallel_residual") else "pre_norm",
        "norm": layer_norm(config, "layer_norm_eps"),
        "attention_bias": bool(config.get("use_qkv_bias")),
        "qk_norm": "each_head" if config.get("qk_layernorm") else None,
    }


FAMILY = Family(
    "StableLM",
    ("StableLmForCausalLM",),
    _differences,
    {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "max_position_embeddings": 4096},
    Storage(renames=((r"\.([qk])_norm\.(\d+)\.", r".\1_layernorm.norms.\2."),)),
)
