"""GPT-2, and StarCoder 1, which is GPT-2 with one key head for all: learned positions, LayerNorm, biases, no gate.
GPT-2 stores its matrices transposed, and some checkpoints omit the names' prefix (Radford et al. 2019;
arXiv:2305.06161).
"""

from __future__ import annotations

from typing import Any

from localllm.errors import UnsupportedModel
from localllm.models.spec.family import Config, Family, Storage
from localllm.models.spec.fields import renamed, size
from localllm.models.spec.norms import layer_norm

GPT_NAMES = (
    (r"^model\.", "transformer."),
    ("embed_tokens", "wte"),
    ("embed_positions", "wpe"),
    (r"transformer\.norm", "transformer.ln_f"),
    (r"\.layers\.", ".h."),
    ("input_layernorm", "ln_1"),
    ("post_attention_layernorm", "ln_2"),
)
"""Names that several families share with GPT-2; inside attention and feed-forward each has its own."""
_RENAMES = (
    *GPT_NAMES,
    (r"self_attn\.o_proj", "attn.c_proj"),
    ("self_attn", "attn"),
    (r"mlp\.up_proj", "mlp.c_fc"),
    (r"mlp\.down_proj", "mlp.c_proj"),
)
_SIZES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "activation_function": "hidden_act",
}
_DEFAULTS = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "n_positions": 1024,
    "tie_word_embeddings": True,
}


def gpt2_names(config: Config) -> dict[str, Any]:
    """Return the config under common names. The feed-forward width defaults to four times the hidden size."""
    named = renamed({**_DEFAULTS, **config}, _SIZES)
    return {"intermediate_size": 4 * size(named, "hidden_size"), **named}


def _bigcode_names(config: Config) -> dict[str, Any]:
    key_heads = {"num_key_value_heads": 1} if config.get("multi_query", True) else {}
    return {**gpt2_names({"activation_function": "gelu_pytorch_tanh", **config}), **key_heads}


def _differences(config: Config) -> dict[str, Any]:
    for flag in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if config.get(flag):
            raise UnsupportedModel(f"{flag} is not supported for GPT-2.", "The published checkpoints do not use it.")
    return {
        "norm": layer_norm(config, "layer_norm_epsilon"),
        "positions": "learned",
        "attention_bias": True,
        "attention_out_bias": True,
        "attention_scale": None if config["scale_attn_weights"] else 1.0,
        "mlp_bias": True,
        "mlp_gated": False,
    }


_STORAGE: dict[str, Any] = {
    "renames": _RENAMES,
    "fused_qkv": "c_attn",
    "alternatives": ((r"^transformer\.", ""),),
    "ignored": (r".*\.attn\.(masked_)?bias",),
}
GPT2 = Family(
    "GPT-2",
    ("GPT2LMHeadModel",),
    _differences,
    {},
    Storage(**_STORAGE, transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight")),
    gpt2_names,
)
BIGCODE = Family("StarCoder", ("GPTBigCodeForCausalLM",), _differences, {}, Storage(**_STORAGE), _bigcode_names)
