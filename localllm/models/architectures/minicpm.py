"""MiniCPM 1 and 2: Llama trained with muP. Embeddings are multiplied by scale_emb, the parts' outputs by scale_depth
over the square root of the number of layers, and the head reads hidden / (hidden_size / dim_model_base)
(arXiv:2404.06395).
"""

from __future__ import annotations

import math
from typing import Any

from localllm.errors import UnsupportedModel
from localllm.models.spec.family import Config, Family
from localllm.models.spec.fields import number, size


def _differences(config: Config) -> dict[str, Any]:
    if config.get("sparse_config"):
        raise UnsupportedModel(
            "Sparse attention (sparse_config) is not supported for MiniCPM.", "Supported: dense attention."
        )
    return {
        "embedding_scale": number(config, "scale_emb"),
        "residual_multiplier": number(config, "scale_depth") / math.sqrt(size(config, "num_hidden_layers")),
        "logits_multiplier": number(config, "dim_model_base") / size(config, "hidden_size"),
    }


FAMILY = Family(
    "MiniCPM",
    ("MiniCPMForCausalLM",),
    _differences,
    {"scale_emb": 1.0, "scale_depth": 1.0, "dim_model_base": 1, "tie_word_embeddings": True},
)
