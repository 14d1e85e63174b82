"""StarCoder2: LayerNorm and biases everywhere, a feed-forward part without a gate (arXiv:2402.19173)."""

from __future__ import annotations

from typing import Any

from localllm.models.spec.family import Config, Family, Storage, one_window
from localllm.models.spec.norms import layer_norm


def _differences(config: Config) -> dict[str, Any]:
    bias = bool(config["use_bias"])
    return {
        "norm": layer_norm(config, "norm_epsilon"),
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": bias,
        "mlp_gated": False,
        **one_window(config),
    }


FAMILY = Family(
    "StarCoder2",
    ("Starcoder2ForCausalLM",),
    _differences,
    {
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
        "norm_epsilon": 1e-5,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    storage=Storage((("up_proj", "c_fc"), ("down_proj", "c_proj"))),
)
