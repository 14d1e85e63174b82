"""Llama, and families that differ from it by little.

Llama 1 to 3.x (arXiv:2302.13971), and models trained with its code (Yi, SmolLM, SmolLM2, TinyLlama, Falcon 3). Arcee
has squared ReLU and no gate, Helium and ERNIE 4.5 rotate neighbouring dimensions, Seed-OSS has biases on q, k and v.
SmolLM3: every fourth layer has no rotary embedding (NoPE, arXiv:2501.18795).
Baichuan 1 and 2: q, k and v are stored fused. The 7B models rotate; the 13B models have ALiBi, and their config.json,
unlike the 7B's, has no max_position_embeddings. Baichuan 2 scales each row of its head to length 1, which can only be
recognised by the size of its vocabulary (arXiv:2309.10305). Its own code on the hub is not run.
InternLM 2 to 3: other names; q, k and v are stored group by group (arXiv:2403.17297).
MiniCPM 1 and 2: trained with muP. Embeddings are multiplied by scale_emb, the parts' outputs by scale_depth over the
square root of the number of layers, and the head reads hidden / (hidden_size / dim_model_base) (arXiv:2404.06395).
Phi-3, Phi-3.5 mini and Phi-4 (mini): q, k and v, and gate and up, are stored fused; LongRoPE; in Phi-4-mini only part
of each head rotates (arXiv:2404.14219).
CWM: most layers see a window (Code World Model, arXiv:2510.02387).
SmolVLM and Idefics 3 are vision-language models with a Llama as their text part.
"""

from __future__ import annotations

import math
from typing import Any

from localllm.errors import UnsupportedModel
from localllm.models.families.text_part import of_families
from localllm.models.spec.family import Config, Family, Storage, grouped_qkv_rows, one_window, windowed_layers
from localllm.models.spec.fields import number, renamed, size
from localllm.models.spec.gguf import (
    LLAMA_ROWS,
    LOCAL_EXPERTS,
    NORM_BEFORE_MLP,
    Fields,
    GGUFFacts,
    GGUFTensors,
    Metadata,
    has,
)


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


def llama_gguf(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    """Return the fields of Llama, Mistral, Mixtral and models that compute alike: files do not distinguish them."""
    bias, out_bias = has(checkpoint, "attn_q.bias"), has(checkpoint, "attn_output.bias")
    if bias != out_bias:
        raise UnsupportedModel(f"{metadata.file.name} has biases on some of q, k, v and output only.")
    if metadata.optional_count("expert_count"):
        return {"architectures": ["MixtralForCausalLM"]}
    return {"attention_bias": bias, "mlp_bias": has(checkpoint, "ffn_up.bias")}


def _gguf_ernie(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    return {"use_bias": has(checkpoint, "attn_q.bias")}


def _gguf_seed_oss(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    return {
        "attention_bias": has(checkpoint, "attn_q.bias"),
        "attention_out_bias": has(checkpoint, "attn_output.bias"),
        "mlp_bias": has(checkpoint, "ffn_up.bias"),
    }


def _gguf_baichuan(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    """Return the 13B models' fields: they have ALiBi, which a missing field of their config.json implies."""
    return {"model_max_length": config.pop("max_position_embeddings")} if config["num_hidden_layers"] == 40 else {}


def _gguf_minicpm(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    """Return MiniCPM's fields as Granite's, which computes alike; the first files omit the multipliers of its 2B."""
    scales = {
        "embedding_multiplier": metadata.number("embedding_scale") or 12.0,
        "residual_multiplier": metadata.number("residual_scale") or 1.4 / config["num_hidden_layers"] ** 0.5,
        "logits_scaling": metadata.number("logit_scale") or config["hidden_size"] / 256,
    }
    return {**llama_gguf(metadata, checkpoint, config), **scales, "attention_multiplier": config["head_dim"] ** -0.5}


LLAMA = Family(
    "Llama",
    ("LlamaForCausalLM", "Emu3ForCausalLM"),
    _llama,
    gguf={"llama": GGUFFacts("LlamaForCausalLM", LOCAL_EXPERTS, llama_gguf, rows=LLAMA_ROWS)},
)
ARCEE = Family(
    "Arcee",
    ("ArceeForCausalLM",),
    _arcee,
    {"hidden_act": "relu2", "rms_norm_eps": 1e-5},
    gguf={"arcee": GGUFFacts("ArceeForCausalLM", more=llama_gguf, rows=LLAMA_ROWS)},
)
HELIUM = Family(
    "Helium", ("HeliumForCausalLM",), _helium, {"head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 100_000.0}
)
ERNIE = Family(
    "ERNIE 4.5",
    ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
    _ernie,
    {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": True},
    gguf={"ernie4_5": GGUFFacts("Ernie4_5ForCausalLM", more=_gguf_ernie)},
)
SEED_OSS = Family(
    "Seed-OSS",
    ("SeedOssForCausalLM",),
    _seed_oss,
    {"head_dim": 128, "attention_bias": True},
    gguf={"seed_oss": GGUFFacts("SeedOssForCausalLM", more=_gguf_seed_oss, norms=NORM_BEFORE_MLP)},
)


def _cwm(config: Config) -> dict[str, Any]:
    windowed = windowed_layers(config, lambda layer: layer % 4 != 0)
    return {
        "mlp_bias": bool(config.get("mlp_bias")),
        "sliding_window": config["sliding_window"] if any(windowed) else None,
        "layer_is_windowed": windowed if any(windowed) else (),
    }


CWM = Family(
    "CWM",
    ("CwmForCausalLM",),
    _cwm,
    {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": 8192},
)


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
    gguf={"smollm3": GGUFFacts("SmolLM3ForCausalLM", rows=LLAMA_ROWS)},
)
_BAICHUAN_2_VOCABULARY = 125_696


def _common_names(config: Config) -> Config:
    return {
        **renamed(config, {"model_max_length": "max_position_embeddings"}),
        "has_alibi": config.get("max_position_embeddings") is None,
    }


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
    gguf={"baichuan": GGUFFacts("BaichuanForCausalLM", more=_gguf_baichuan, rows=LLAMA_ROWS)},
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
    gguf={"internlm2": GGUFFacts("LlamaForCausalLM", more=llama_gguf, rows=LLAMA_ROWS)},
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
    gguf={"minicpm": GGUFFacts("GraniteForCausalLM", more=_gguf_minicpm, rows=LLAMA_ROWS)},
)
SMOLVLM = of_families(
    "SmolVLM, Idefics 3",
    ("SmolVLMForConditionalGeneration", "Idefics3ForConditionalGeneration"),
    {"llama": LLAMA},
    prefix="text_model",
)
PHI3 = Family(
    "Phi-3",
    ("Phi3ForCausalLM",),
    one_window,
    {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    storage=Storage(fused_qkv="qkv_proj", fused_gate_up="gate_up_proj"),
    gguf={"phi3": GGUFFacts("Phi3ForCausalLM", fused_gate_up="up_proj")},
)
