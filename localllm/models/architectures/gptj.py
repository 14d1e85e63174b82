"""GPT-J: attention and feed-forward in parallel after one LayerNorm, part of each head rotates, neighbouring dimensions
together, no biases in attention, a bias on the head (Wang & Komatsuzaki 2021, the first model with parallel parts).
"""

from __future__ import annotations

from typing import Any

from localllm.models.architectures.gpt2 import GPT_NAMES, gpt2_names
from localllm.models.spec.family import Config, Family, Storage
from localllm.models.spec.norms import layer_norm

_RENAMES = (
    *GPT_NAMES,
    (r"self_attn\.o_proj", "attn.out_proj"),
    ("self_attn", "attn"),
    ("up_proj", "fc_in"),
    ("down_proj", "fc_out"),
)


def _common_names(config: Config) -> Config:
    return gpt2_names({"n_positions": 2048, "rotary_dim": 64, "tie_word_embeddings": False, **config})


def _differences(config: Config) -> dict[str, Any]:
    return {
        "topology": "parallel_one_norm",
        "norm": layer_norm(config, "layer_norm_epsilon"),
        "rope_interleaved": True,
        "mlp_bias": True,
        "mlp_gated": False,
        "lm_head_bias": True,
    }


FAMILY = Family(
    "GPT-J",
    ("GPTJForCausalLM",),
    _differences,
    {},
    Storage(renames=_RENAMES, ignored=(r".*\.attn\.(masked_)?bias",)),
    _common_names,
)
