"""MPT: ALiBi, LayerNorm without bias, no biases anywhere, no gate; q, k and v stored fused, and clipped in some models
(MosaicML NLP Team 2023, mosaicml/mpt-7b).
"""

from __future__ import annotations

from typing import Any

from localllm.errors import UnsupportedModel
from localllm.models.spec.family import Config, Family, Storage
from localllm.models.spec.fields import optional_number, renamed, size
from localllm.models.spec.norms import layer_norm

_SIZES = {
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "max_seq_len": "max_position_embeddings",
}


def _common_names(config: Config) -> Config:
    named = renamed({"max_seq_len": 2048, **config}, _SIZES)
    ratio = size({"expansion_ratio": 4, **config}, "expansion_ratio")
    return {**named, "intermediate_size": ratio * size(named, "hidden_size")}


def _differences(config: Config) -> dict[str, Any]:
    attention = config.get("attn_config") or {}
    if attention.get("alibi") is False or attention.get("qk_ln") or not config["no_bias"]:
        raise UnsupportedModel(
            "Learned positions, qk_ln and biases are not supported for MPT.",
            "The published 7B and 30B checkpoints use none of them.",
        )
    if attention.get("alibi_bias_max", 8) != 8 or attention.get("prefix_lm"):
        raise UnsupportedModel("Custom ALiBi slopes and prefix_lm are not supported for MPT.")
    return {
        "norm": layer_norm(config, "layer_norm_epsilon", bias=False),
        "positions": "alibi",
        "attention_scale": optional_number(attention, "softmax_scale"),
        "clip_qkv": optional_number(attention, "clip_qkv"),
        "logits_multiplier": optional_number(config, "logit_scale"),
        "mlp_gated": False,
    }


FAMILY = Family(
    "MPT",
    ("MPTForCausalLM", "MptForCausalLM"),
    _differences,
    {"hidden_act": "gelu", "layer_norm_epsilon": 1e-5, "no_bias": True, "tie_word_embeddings": True},
    Storage(
        renames=(
            (r"^model\.", "transformer."),
            ("embed_tokens", "wte"),
            (r"transformer\.norm", "transformer.norm_f"),
            (r"\.layers\.", ".blocks."),
            ("input_layernorm", "norm_1"),
            ("post_attention_layernorm", "norm_2"),
            (r"self_attn\.o_proj", "attn.out_proj"),
            ("self_attn", "attn"),
            (r"\.mlp\.", ".ffn."),
        ),
        fused_qkv="Wqkv",
    ),
    _common_names,
)
