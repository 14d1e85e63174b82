"""OLMo 1 to 3, OLMo Hybrid, FlexOlmo and OLMoE, each with its own differences from Llama.

OLMo 1: LayerNorm without learned weights, q, k and v clipped in the 7B (arXiv:2402.00838). OLMo 2: a norm after each
part instead of before it, and q and k normed over all their heads at once (arXiv:2501.00656). OLMo 3: OLMo 2 with
windows in three of four layers, which rotate without scaling even if the other layers' rope is scaled
(arXiv:2512.13961). OLMo Hybrid: OLMo 3's layers without windows, and gated delta nets in three of four layers, which
norm before each part, and whose states may have negative eigenvalues; released checkpoints have no positions.
FlexOlmo: OLMo 2 with a mixture in every layer (arXiv:2507.07024).
OLMoE 1B-7B: RMSNorm over all of q and all of k, and a mixture in every layer whose weights need not sum to one
(arXiv:2409.02060).
"""

from __future__ import annotations

from typing import Any

from localllm.errors import UnsupportedModel
from localllm.models.families.qwen3_5 import delta_net
from localllm.models.spec.family import Config, Family, Storage, windowed_layers
from localllm.models.spec.fields import NormSpec, optional_number, size
from localllm.models.spec.gguf import (
    EXPERTS,
    LLAMA_ROWS,
    SANDWICH_NORMS,
    Fields,
    GGUFFacts,
    GGUFTensors,
    Metadata,
    layer_types,
)
from localllm.models.spec.mixture import mixture
from localllm.models.spec.rope import plain_rope


def _olmo1(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias"))
    return {
        "norm": NormSpec(1e-5, "layer", weight=False),
        "attention_bias": bias,
        "attention_out_bias": bias,
        "clip_qkv": optional_number(config, "clip_qkv"),
    }


def _olmo2(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias"))
    return {"topology": "post_norm", "qk_norm": "whole", "attention_bias": bias, "attention_out_bias": bias}


def _olmo3(config: Config) -> dict[str, Any]:
    scaled = bool(config.get("rope_scaling"))  # old configs: meant for layers without a window only
    return {
        **_olmo2(config),
        "sliding_window": config["sliding_window"],
        "layer_is_windowed": windowed_layers(config, lambda layer: (layer + 1) % 4 != 0),
        **({"local_rope": plain_rope(config)} if scaled else {}),
    }


def _hybrid_names(config: Config) -> Config:
    """Return the config with the sizes of its delta nets, which it may leave out."""
    heads = size(config, "num_attention_heads")
    key_heads = config.get("linear_num_key_heads") or heads
    key_size = config.get("linear_key_head_dim") or 3 * size(config, "hidden_size") // (4 * key_heads)
    return {
        **config,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": config.get("linear_num_value_heads") or heads,
        "linear_key_head_dim": key_size,
        "linear_value_head_dim": config.get("linear_value_head_dim") or 2 * key_size,
    }


def _hybrid(config: Config) -> dict[str, Any]:
    theta = (config.get("rope_parameters") or {}).get("rope_theta") or config.get("rope_theta")
    scale = 2.0 if config["linear_allow_neg_eigval"] else 1.0
    return {
        **_olmo2(config),
        **({"positions": "none"} if theta is None else {}),
        "recurrent_topology": "pre_norm",
        **delta_net(config, separate_inputs=True, beta_scale=scale, norm_eps=1e-5),
    }


def _flex_olmo(config: Config) -> dict[str, Any]:
    experts = mixture(config, size="intermediate_size", renormalize=bool(config.get("norm_topk_prob")))
    return {**_olmo2(config), "mixture": experts}


def _gguf_olmo2(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    if config.get("sliding_window") is None:
        return {}
    return {"architectures": ["Olmo3ForCausalLM"], "layer_types": layer_types(metadata)}


OLMO = Family(
    "OLMo",
    ("OlmoForCausalLM",),
    _olmo1,
    gguf={"olmo": GGUFFacts("OlmoForCausalLM", {"clip_qkv": "attention.clamp_kqv"}, rows=LLAMA_ROWS)},
)
OLMO2 = Family(
    "OLMo 2",
    ("Olmo2ForCausalLM",),
    _olmo2,
    {"rms_norm_eps": 1e-5},
    gguf={"olmo2": GGUFFacts("Olmo2ForCausalLM", more=_gguf_olmo2, norms=SANDWICH_NORMS)},
)
OLMO3 = Family("OLMo 3", ("Olmo3ForCausalLM",), _olmo3, {"rms_norm_eps": 1e-5, "sliding_window": 4096})
HYBRID = Family(
    "OLMo Hybrid",
    ("OlmoHybridForCausalLM",),
    _hybrid,
    {"linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True, "full_attention_interval": 4},
    Storage(
        renames=(
            (r"\.linear_attn\.in_proj_z\.", ".linear_attn.g_proj."),
            (r"\.linear_attn\.in_proj_([qkvba])\.", r".linear_attn.\1_proj."),
            (r"\.linear_attn\.norm\.", ".linear_attn.o_norm."),
            (r"\.linear_attn\.out_proj\.", ".linear_attn.o_proj."),
        ),
        alternatives=(
            (r"\.input_layernorm\.", ".attention_layer_norm."),
            (r"\.post_attention_layernorm\.", ".feedforward_layer_norm."),
        ),
    ),
    _hybrid_names,
)
FLEX_OLMO = Family(
    "FlexOlmo",
    ("FlexOlmoForCausalLM",),
    _flex_olmo,
    {"rope_theta": 500_000.0, "num_experts": 7, "num_experts_per_tok": 5},
)


def _differences(config: Config) -> dict[str, Any]:
    if config.get("clip_qkv") is not None:
        raise UnsupportedModel("clip_qkv is not supported for OLMoE.", "No released checkpoint uses it.")
    bias, renormalize = bool(config.get("attention_bias")), bool(config.get("norm_topk_prob"))
    return {
        "qk_norm": "whole",
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mixture": mixture(config, size="intermediate_size", renormalize=renormalize),
    }


OLMOE = Family(
    "OLMoE",
    ("OlmoeForCausalLM",),
    _differences,
    {"rms_norm_eps": 1e-5, "num_experts_per_tok": 8},
    gguf={"olmoe": GGUFFacts("OlmoeForCausalLM", EXPERTS)},
)
