"""GPT-2 and decoders like it: GPT-J, GPT-NeoX, OPT, StarCoder 1, Phi 1 and 2.

GPT-2, and StarCoder 1, which is GPT-2 with one key head for all: learned positions, LayerNorm, biases, no gate. GPT-2
stores its matrices transposed, and some checkpoints omit the names' prefix (Radford et al. 2019; arXiv:2305.06161).
GPT-J: attention and feed-forward in parallel after one LayerNorm, part of each head rotates, neighbouring dimensions
together, no biases in attention, a bias on the head (Wang & Komatsuzaki 2021, the first model with parallel parts).
GPT-NeoX and Pythia: LayerNorm, biases, no gate; attention and feed-forward in parallel, each with its own norm, unless
config.json says otherwise; q, k and v stored head by head (arXiv:2204.06745).
OPT: learned positions whose table starts two rows late, LayerNorm, biases, ReLU, no gate (arXiv:2205.01068). The 350M
model, which norms after its parts and has narrower embeddings, is not supported.
Phi-1, 1.5 and 2: GPT-J's layout with biases everywhere; half of each head rotates (arXiv:2309.05463).
"""

from __future__ import annotations

from typing import Any

from localllm.errors import UnsupportedModel
from localllm.models.spec.family import Config, Family, Storage, grouped_qkv_rows
from localllm.models.spec.fields import NormSpec, layer_norm, renamed, size
from localllm.models.spec.gguf import GGUFFacts, attention_biases

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
_GPT2_RENAMES = (
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


def _gpt2_differences(config: Config) -> dict[str, Any]:
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
    "renames": _GPT2_RENAMES,
    "fused_qkv": "c_attn",
    "alternatives": ((r"^transformer\.", ""),),
    "ignored": (r".*\.attn\.(masked_)?bias",),
}
GPT2 = Family(
    "GPT-2",
    ("GPT2LMHeadModel",),
    _gpt2_differences,
    {},
    Storage(**_STORAGE, transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight")),
    gpt2_names,
    gguf={
        "gpt2": GGUFFacts(
            "GPT2LMHeadModel", {"layer_norm_epsilon": "attention.layer_norm_epsilon", "n_positions": "context_length"}
        )
    },
)
BIGCODE = Family(
    "StarCoder",
    ("GPTBigCodeForCausalLM",),
    _gpt2_differences,
    {},
    Storage(**_STORAGE),
    _bigcode_names,
    gguf={
        "starcoder": GGUFFacts(
            "GPTBigCodeForCausalLM",
            {"layer_norm_epsilon": "attention.layer_norm_epsilon", "n_positions": "context_length"},
        )
    },
)
_GPTJ_RENAMES = (
    *GPT_NAMES,
    (r"self_attn\.o_proj", "attn.out_proj"),
    ("self_attn", "attn"),
    ("up_proj", "fc_in"),
    ("down_proj", "fc_out"),
)


def _gptj_common_names(config: Config) -> Config:
    return gpt2_names({"n_positions": 2048, "rotary_dim": 64, "tie_word_embeddings": False, **config})


def _gptj_differences(config: Config) -> dict[str, Any]:
    return {
        "topology": "parallel_one_norm",
        "norm": layer_norm(config, "layer_norm_epsilon"),
        "rope_interleaved": True,
        "mlp_bias": True,
        "mlp_gated": False,
        "lm_head_bias": True,
    }


GPTJ = Family(
    "GPT-J",
    ("GPTJForCausalLM",),
    _gptj_differences,
    {},
    Storage(renames=_GPTJ_RENAMES, ignored=(r".*\.attn\.(masked_)?bias",)),
    _gptj_common_names,
)
STORAGE = Storage(
    renames=(
        (r"^lm_head", "embed_out"),
        (r"^model\.", "gpt_neox."),
        ("embed_tokens", "embed_in"),
        (r"^gpt_neox\.norm", "gpt_neox.final_layer_norm"),
        (r"self_attn\.o_proj", "attention.dense"),
        ("self_attn", "attention"),
        ("up_proj", "dense_h_to_4h"),
        ("down_proj", "dense_4h_to_h"),
    ),
    fused_qkv="query_key_value",
    qkv_rows=grouped_qkv_rows,
    ignored=(r".*\.attention\.(masked_)?bias",),
)


def _gpt_neox_common_names(config: Config) -> Config:
    return renamed(config, {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"})


def _gpt_neox_differences(config: Config) -> dict[str, Any]:
    bias = bool(config["attention_bias"])
    return {
        "topology": "parallel" if config["use_parallel_residual"] else "pre_norm",
        "norm": layer_norm(config, "layer_norm_eps"),
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": True,
        "mlp_gated": False,
    }


GPT_NEOX = Family(
    "GPT-NeoX, Pythia",
    ("GPTNeoXForCausalLM",),
    _gpt_neox_differences,
    {
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": True,
        "attention_bias": True,
        "partial_rotary_factor": 0.25,
    },
    STORAGE,
    _gpt_neox_common_names,
    gguf={
        "gptneox": GGUFFacts("GPTNeoXForCausalLM", {"use_parallel_residual": "use_parallel_residual"}, attention_biases)
    },
)


def _opt_common_names(config: Config) -> Config:
    return renamed(
        {"activation_function": "relu", **config}, {"ffn_dim": "intermediate_size", "activation_function": "hidden_act"}
    )


def _opt_differences(config: Config) -> dict[str, Any]:
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


OPT = Family(
    "OPT",
    ("OPTForCausalLM",),
    _opt_differences,
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
    _opt_common_names,
)


def _phi_differences(config: Config) -> dict[str, Any]:
    if config.get("qk_layernorm"):
        raise UnsupportedModel("qk_layernorm is not supported for Phi.", "No published checkpoint uses it.")
    return {
        "topology": "parallel_one_norm",
        "norm": layer_norm(config, "layer_norm_eps"),
        "attention_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "mlp_gated": False,
        "lm_head_bias": True,
    }


PHI = Family(
    "Phi-1, Phi-2",
    ("PhiForCausalLM",),
    _phi_differences,
    {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    Storage(
        renames=(
            (r"^model\.norm", "model.final_layernorm"),
            (r"self_attn\.o_proj", "self_attn.dense"),
            ("up_proj", "fc1"),
            ("down_proj", "fc2"),
        )
    ),
    gguf={"phi2": GGUFFacts("PhiForCausalLM")},
)
