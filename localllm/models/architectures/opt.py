"""OPT: learned positions whose table starts two rows late, LayerNorm, biases, ReLU, no gate (arXiv:2205.01068). The
350M model, which norms after its parts and has narrower embeddings, is not supported.
"""

from __future__ import annotations

from typing import Any

from localllm.errors import UnsupportedModel
from localllm.models.spec.family import Config, Family, Storage
from localllm.models.spec.fields import renamed
from localllm.models.spec.norms import NormSpec


def _common_names(config: Config) -> Config:
    return renamed(
        {"activation_function": "relu", **config}, {"ffn_dim": "intermediate_size", "activation_function": "hidden_act"}
    )


def _differences(config: Config) -> dict[str, Any]:
    narrow = config.get("word_embed_proj_dim") not in (None, config["hidden_size"])
    if narrow or not config["do_layer_norm_before"] or config.get("_remove_final_layer_norm"):
        raise UnsupportedModel(
            "The layout of OPT-350M is not supported.", "All other published sizes of OPT are supported."
        )
    bias = bool(config["enable_bias"])
    return {
        "norm": NormSpec(1e-5, "layer", bias=True),
        "positions": "learned",
        "position_offset": 2,
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": bias,
        "mlp_gated": False,
    }


FAMILY = Family(
    "OPT",
    ("OPTForCausalLM",),
    _differences,
    {"do_layer_norm_before": True, "enable_bias": True, "tie_word_embeddings": True},
    Storage(
        renames=(
            (r"^model\.norm", "model.final_layer_norm"),
            (r"^model\.", "model.decoder."),
            ("input_layernorm", "self_attn_layer_norm"),
            ("post_attention_layernorm", "final_layer_norm"),
            ("o_proj", "out_proj"),
            (r"mlp\.up_proj", "fc1"),
            (r"mlp\.down_proj", "fc2"),
        ),
        alternatives=((r"^model\.", ""),),
    ),
    _common_names,
)
