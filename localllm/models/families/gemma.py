"""Gemma 1 to 3 (text) and VaultGemma.

Gemma 1: Llama with norms stored as w - 1, embeddings scaled by sqrt(hidden_size) rounded to the model's type, and GeGLU
with the tanh approximation, whatever the first config.json files say (arXiv:2403.08295).
Gemma 2 and Gemma 3: also norms on both sides of each part, and alternating windowed and full layers. Gemma 2 caps
scores and logits; Gemma 3 norms q and k instead, and its windowed layers have their own rotary base (arXiv:2408.00118,
arXiv:2503.19786).
VaultGemma 1B: Gemma 2 without the norms after each part, and with full attention in all layers.
"""

from __future__ import annotations

from typing import Any

from localllm.errors import UnsupportedModel
from localllm.models.families import text_part
from localllm.models.spec.family import Config, Family, Storage, windowed_layers
from localllm.models.spec.fields import NormSpec, number
from localllm.models.spec.gguf import SANDWICH_NORMS, Fields, GGUFFacts, GGUFTensors, Metadata

_DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}


def _gemma1(config: Config) -> dict[str, Any]:
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModel("Bidirectional attention is not supported for Gemma.", "Supported: causal attention.")
    bias = bool(config.get("attention_bias"))
    return {
        "hidden_act": config.get("hidden_activation") or "gelu_pytorch_tanh",
        "attention_bias": bias,
        "attention_out_bias": bias,
        "norm": NormSpec(number(config, "rms_norm_eps"), plus_one=True),
        "embedding_scale": config["hidden_size"] ** 0.5,
    }


def _common(config: Config) -> dict[str, Any]:
    return {
        **_gemma1(config),
        "attention_scale": config["query_pre_attn_scalar"] ** -0.5,
        "sliding_window": config["sliding_window"],
        "final_softcap": config["final_logit_softcapping"],
        "topology": "sandwich",
    }


def _gemma2(config: Config) -> dict[str, Any]:
    windowed = windowed_layers(config, lambda layer: layer % 2 == 0)
    return {
        **_common(config),
        "attention_softcap": config["attn_logit_softcapping"],
        "layer_is_windowed": windowed,
    }


def _vault(config: Config) -> dict[str, Any]:
    return {**_gemma2(config), "topology": "pre_norm"}


def _gemma3(config: Config) -> dict[str, Any]:
    if config.get("attn_logit_softcapping"):
        raise UnsupportedModel(
            "attn_logit_softcapping is not supported for Gemma 3.", "No released checkpoint uses it."
        )
    pattern = config.get("_sliding_window_pattern") or config["sliding_window_pattern"]
    windowed = windowed_layers(config, lambda layer: (layer + 1) % pattern != 0)
    return {**_common(config), "qk_norm": "head", "layer_is_windowed": windowed}


def _gguf(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    """Return query_pre_attn_scalar, which files omit: head_dim, or hidden_size / heads for two models."""
    is_27b = (metadata.architecture, config["num_hidden_layers"]) in {("gemma2", 46), ("gemma3", 62)}
    head_dim = config.setdefault("head_dim", 256)
    scalar = config["hidden_size"] / config["num_attention_heads"] if is_27b else head_dim
    return {"query_pre_attn_scalar": scalar, "hidden_activation": "gelu_pytorch_tanh"}


GEMMA1 = Family(
    "Gemma",
    ("GemmaForCausalLM",),
    _gemma1,
    {"head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True},
    gguf={"gemma": GGUFFacts("GemmaForCausalLM", more=_gguf, added=(("norm.weight", 1.0),))},
)
GEMMA2 = Family(
    "Gemma 2",
    ("Gemma2ForCausalLM",),
    _gemma2,
    {**_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    gguf={
        "gemma2": GGUFFacts(
            "Gemma2ForCausalLM",
            {
                "attn_logit_softcapping": "attn_logit_softcapping",
                "final_logit_softcapping": "final_logit_softcapping",
            },
            _gguf,
            norms=SANDWICH_NORMS,
            added=(("norm.weight", 1.0),),
        )
    },
)
VAULT = Family(
    "VaultGemma",
    ("VaultGemmaForCausalLM",),
    _vault,
    {**_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    Storage(renames=(("post_attention_layernorm", "pre_feedforward_layernorm"),)),
)
_DEFAULTS_3 = {
    **_DEFAULTS,
    "num_attention_heads": 8,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "final_logit_softcapping": None,
}
GEMMA3 = Family(
    "Gemma 3 (text)",
    ("Gemma3ForCausalLM",),
    _gemma3,
    _DEFAULTS_3,
    gguf={
        "gemma3": GGUFFacts(
            "Gemma3ForCausalLM",
            {"rope_local_base_freq": "rope.freq_base_swa", "final_logit_softcapping": "final_logit_softcapping"},
            _gguf,
            norms=SANDWICH_NORMS,
            added=(("norm.weight", 1.0),),
        )
    },
)
GEMMA3_VISION = Family(
    "Gemma 3",
    ("Gemma3ForConditionalGeneration",),
    _gemma3,
    _DEFAULTS_3,
    text_part.STORAGE,
    text_part.text_config,
    text_part.NOTE,
)
