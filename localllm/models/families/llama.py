"""Llama 1 to 3.x (arXiv:2302.13971), models trained with its code (Yi, SmolLM, SmolLM2, TinyLlama, Falcon 3), and
families that differ by a flag or two: Arcee has squared ReLU and no gate, Helium and ERNIE 4.5 rotate neighbouring
dimensions, Seed-OSS has biases on q, k and v.

SmolLM3: Llama in which every fourth layer has no rotary embedding (NoPE, arXiv:2501.18795).

Baichuan 1 and 2: Llama with q, k and v stored fused. The 7B models rotate; the 13B models have ALiBi, and their
config.json, unlike the 7B's, has no max_position_embeddings. Baichuan 2 scales each row of its head to length 1, which
can only be recognised by the size of its vocabulary (arXiv:2309.10305). Its own code on the hub is not run.

InternLM 2 to 3: Llama with other names; q, k and v stored group by group (arXiv:2403.17297).

MiniCPM 1 and 2: Llama trained with muP. Embeddings are multiplied by scale_emb, the parts' outputs by scale_depth
over the square root of the number of layers, and the head reads hidden / (hidden_size / dim_model_base)
(arXiv:2404.06395).
"""

from __future__ import annotations

import math
from typing import Any

from localllm.errors import UnsupportedModel
from localllm.models.spec.family import Config, Family, Storage, grouped_qkv_rows, windowed_layers
from localllm.models.spec.fields import number, renamed, size


def _llama(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias"))
    return {"attention_bias": bias, "attention_out_bias": bias, "mlp_bias": bool(config.get("mlp_bias"))}


def _arcee(config: Config) -> dict[str, Any]:
    return {**_llama(config), "mlp_gated": False}


def _helium(config: Config) -> dict[str, Any]:
    return {**_llama(config), "attention_out_bias": False, "rope_interleaved": True}


def _ernie(config: Config) -> dict[str, Any]:
    bias = bool(config.get("use_bias"))
    return {"attention_bias": bias, "attention_out_bias": bias, "mlp_bias": bias, "rope_interleaved": True}


def _seed_oss(config: Config) -> dict[str, Any]:
    return {**_llama(config), "attention_out_bias": bool(config.get("attention_out_bias"))}


LLAMA = Family("Llama", ("LlamaForCausalLM",), _llama)
ARCEE = Family("Arcee", ("ArceeForCausalLM",), _arcee, {"hidden_act": "relu2", "rms_norm_eps": 1e-5})
HELIUM = Family(
    "Helium", ("HeliumForCausalLM",), _helium, {"head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 100_000.0}
)
ERNIE = Family(
    "ERNIE 4.5",
    ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
    _ernie,
    {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": True},
)
SEED_OSS = Family("Seed-OSS", ("SeedOssForCausalLM",), _seed_oss, {"head_dim": 128, "attention_bias": True})


def _smollm3_differences(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias"))
    every = config["no_rope_layer_interval"]
    flags = config.get("no_rope_layers") or [(layer + 1) % every for layer in range(config["num_hidden_layers"])]
    has_rope = tuple(bool(flag) for flag in flags[: config["num_hidden_layers"]])
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    windowed = windowed_layers(config, lambda layer: not has_rope[layer]) if window is not None else ()
    return {
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": bool(config.get("mlp_bias")),
        "layer_has_rope": has_rope,
        "sliding_window": window,
        "layer_is_windowed": windowed,
    }


SMOLLM3 = Family(
    "SmolLM3",
    ("SmolLM3ForCausalLM",),
    _smollm3_differences,
    {"tie_word_embeddings": True, "rope_theta": 2_000_000.0, "num_key_value_heads": 4, "no_rope_layer_interval": 4},
)


_BAICHUAN_2_VOCABULARY = 125_696


def _common_names(config: Config) -> Config:
    return {**renamed(config, {"model_max_length": "max_position_embeddings"}), "has_alibi": _has_alibi(config)}


def _has_alibi(config: Config) -> bool:
    return config.get("max_position_embeddings") is None


def _baichuan_differences(config: Config) -> dict[str, Any]:
    return {
        "positions": "alibi" if config["has_alibi"] else "rope",
        "lm_head_normalized": config["vocab_size"] == _BAICHUAN_2_VOCABULARY,
    }


BAICHUAN = Family(
    "Baichuan",
    ("BaichuanForCausalLM", "BaiChuanForCausalLM"),
    _baichuan_differences,
    {"model_max_length": 4096},
    Storage(fused_qkv="W_pack"),
    _common_names,
)


def _internlm2_differences(config: Config) -> dict[str, Any]:
    bias = bool(config.get("bias"))
    return {"attention_bias": bias, "attention_out_bias": bias}


INTERNLM2 = Family(
    "InternLM 2",
    ("InternLM2ForCausalLM",),
    _internlm2_differences,
    {},
    Storage(
        renames=(
            ("embed_tokens", "tok_embeddings"),
            (r"^lm_head", "output"),
            (r"self_attn\.o_proj", "attention.wo"),
            ("self_attn", "attention"),
            (r"mlp\.gate_proj", "feed_forward.w1"),
            (r"mlp\.up_proj", "feed_forward.w3"),
            (r"mlp\.down_proj", "feed_forward.w2"),
            ("input_layernorm", "attention_norm"),
            ("post_attention_layernorm", "ffn_norm"),
        ),
        fused_qkv="wqkv",
        qkv_rows=grouped_qkv_rows,
    ),
)


def _minicpm_differences(config: Config) -> dict[str, Any]:
    if config.get("sparse_config"):
        raise UnsupportedModel(
            "Sparse attention (sparse_config) is not supported for MiniCPM.", "Supported: dense attention."
        )
    return {
        "embedding_scale": number(config, "scale_emb"),
        "residual_multiplier": number(config, "scale_depth") / math.sqrt(size(config, "num_hidden_layers")),
        "logits_multiplier": number(config, "dim_model_base") / size(config, "hidden_size"),
    }


MINICPM = Family(
    "MiniCPM",
    ("MiniCPMForCausalLM",),
    _minicpm_differences,
    {"scale_emb": 1.0, "scale_depth": 1.0, "dim_model_base": 1, "tie_word_embeddings": True},
)
