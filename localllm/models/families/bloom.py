"""Decoders with ALiBi and LayerNorm: BLOOM, Falcon and MPT.

BLOOM: ALiBi instead of positions, LayerNorm also on the embeddings, biases, no gate; q, k and v stored head by head
(arXiv:2211.05100).
Falcon 1 and 2: LayerNorm, no gate; attention and feed-forward in parallel after one norm (7B, 11B) or two (40B, 180B),
or one after the other with ALiBi (the RefinedWeb models); q, k and v stored group by group (arXiv:2311.16867). ALiBi's
slopes are multiplied by the softmax scale, as Falcon adds them before it scales the scores. Falcon 3 is a Llama.
MPT: ALiBi, LayerNorm without bias, no biases anywhere, no gate; q, k and v stored fused, and clipped in some models
(MosaicML NLP Team 2023, mosaicml/mpt-7b).
"""

from __future__ import annotations

from typing import Any

from localllm.errors import UnsupportedModel
from localllm.models.spec.family import Config, Family, Storage, grouped_qkv_rows
from localllm.models.spec.fields import layer_norm, optional_number, renamed, size
from localllm.models.spec.gguf import Fields, GGUFFacts, GGUFTensors, Metadata, has

_BLOOM_SIZES = {
    "n_embed": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "seq_length": "max_position_embeddings",
}
BLOOM_NAMES = (
    (r"^model\.", "transformer."),
    ("embed_tokens", "word_embeddings"),
    ("embed_norm", "word_embeddings_layernorm"),
    (r"transformer\.norm", "transformer.ln_f"),
    (r"\.layers\.", ".h."),
    (r"self_attn\.o_proj", "self_attention.dense"),
    ("self_attn", "self_attention"),
    ("up_proj", "dense_h_to_4h"),
    ("down_proj", "dense_4h_to_h"),
)


def _bloom_common_names(config: Config) -> Config:
    named = renamed(config, _BLOOM_SIZES)
    return {**named, "intermediate_size": 4 * size(named, "hidden_size")}


def _bloom_differences(config: Config) -> dict[str, Any]:
    if config.get("apply_residual_connection_post_layernorm"):
        raise UnsupportedModel(
            "apply_residual_connection_post_layernorm is not supported for BLOOM.", "No published checkpoint uses it."
        )
    return {
        "norm": layer_norm(config, "layer_norm_epsilon"),
        "positions": "alibi",
        "embedding_norm": "weighted",
        "attention_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "mlp_gated": False,
    }


BLOOM = Family(
    "BLOOM",
    ("BloomForCausalLM",),
    _bloom_differences,
    {"hidden_act": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    Storage(
        renames=BLOOM_NAMES,
        fused_qkv="query_key_value",
        qkv_rows=grouped_qkv_rows,
        alternatives=((r"^transformer\.", ""),),
    ),
    _bloom_common_names,
    gguf={"bloom": GGUFFacts("BloomForCausalLM", {"layer_norm_epsilon": "attention.layer_norm_epsilon"})},
)
_FALCON_SIZES = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "ffn_hidden_size": "intermediate_size",
    "activation": "hidden_act",
}


def _falcon_common_names(config: Config) -> Config:
    named = renamed({"activation": "gelu", **config}, _FALCON_SIZES)
    return {
        "intermediate_size": 4 * size(named, "hidden_size"),
        **named,
        "num_key_value_heads": _num_kv_heads(named),
    }


def _num_kv_heads(config: Config) -> Any:
    if config.get("new_decoder_architecture"):
        return config.get("num_kv_heads") or config.get("n_head_kv")
    return 1 if config.get("multi_query", True) else None


def _falcon_differences(config: Config) -> dict[str, Any]:
    bias = bool(config.get("bias"))
    positions: dict[str, Any] = {}
    if config.get("alibi"):
        head_dim = size(config, "hidden_size") // size(config, "num_attention_heads")
        positions = {"positions": "alibi", "alibi_scale": head_dim**-0.5}
    return {
        "topology": _topology(config),
        "norm": layer_norm(config, "layer_norm_epsilon"),
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": bias,
        "mlp_gated": False,
        **positions,
    }


def _topology(config: Config) -> str:
    if config.get("new_decoder_architecture"):
        return "parallel_one_norm" if config.get("num_ln_in_parallel_attn") == 1 else "parallel"
    return "parallel_one_norm" if config["parallel_attn"] else "pre_norm"


def _gguf_falcon(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    two_norms = has(checkpoint, "attn_norm_2.weight")
    return {
        "new_decoder_architecture": two_norms,
        "multi_query": not two_norms,
        "num_kv_heads": config["num_key_value_heads"],
        "bias": has(checkpoint, "attn_qkv.bias"),
    }


FALCON = Family(
    "Falcon",
    ("FalconForCausalLM",),
    _falcon_differences,
    {"layer_norm_epsilon": 1e-5, "parallel_attn": True, "tie_word_embeddings": True},
    Storage(
        renames=BLOOM_NAMES,
        fused_qkv="query_key_value",
        qkv_rows=grouped_qkv_rows,
        alternatives=(("input_layernorm", "ln_attn"), ("post_attention_layernorm", "ln_mlp")),
    ),
    _falcon_common_names,
    gguf={
        "falcon": GGUFFacts("FalconForCausalLM", {"layer_norm_epsilon": "attention.layer_norm_epsilon"}, _gguf_falcon)
    },
)
_MPT_SIZES = {
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "max_seq_len": "max_position_embeddings",
}


def _mpt_common_names(config: Config) -> Config:
    named = renamed({"max_seq_len": 2048, **config}, _MPT_SIZES)
    ratio = size({"expansion_ratio": 4, **config}, "expansion_ratio")
    return {**named, "intermediate_size": ratio * size(named, "hidden_size")}


def _mpt_differences(config: Config) -> dict[str, Any]:
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


def _gguf_mpt(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    clip, most = metadata.number("attention.clamp_kqv"), metadata.number("attention.max_alibi_bias")
    return {
        "attn_config": {"clip_qkv": clip or None, "alibi": bool(most), "alibi_bias_max": most},
        "no_bias": not any(name.endswith(".bias") for name in checkpoint.tensors),
        "expansion_ratio": config["intermediate_size"] // config["hidden_size"],
    }


MPT = Family(
    "MPT",
    ("MPTForCausalLM", "MptForCausalLM"),
    _mpt_differences,
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
    _mpt_common_names,
    gguf={"mpt": GGUFFacts("MPTForCausalLM", {"layer_norm_epsilon": "attention.layer_norm_epsilon"}, _gguf_mpt)},
)
