"""Mistral 7B and its successors, among them the mixtures Mixtral and Mistral Small 4.

Mistral 7B: Llama with a window in all layers if config.json has one (arXiv:2310.06825). Ministral 8B has windows only
in the layers that config.json lists. Ministral 3 scales queries with the logarithm of their position beyond the
original context, as Llama 4 does.
Mixtral 8x7B and 8x22B: a mixture in every layer, the weights of the chosen experts summing to one (arXiv:2401.04088).
Phi-3.5-MoE: Mixtral with LayerNorm, biases, LongRoPE, and two experts that SparseMixer weighs, whose weights need not
sum to one (arXiv:2404.14219, arXiv:2409.12136).
Mistral Small 4: DeepSeek's latent attention and small experts beside a shared one. Experts are scored by a softmax,
without groups, and their weights sum to one; queries grow as in Ministral 3.
MiniMax-M2 (230B-A10B) stores experts as Mixtral does: RMSNorm over all of q and all of k, half of each head rotates,
and a mixture in every layer, scored by sigmoids with a correction for the choice, whose weights sum to one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from localllm.errors import UnsupportedModel
from localllm.models.families import deepseek, text_part
from localllm.models.families.deepseek import GGUF_LATENT, STORAGE, fine_experts, latent_attention, latent_gguf
from localllm.models.spec.family import Config, Family, Storage, one_window, windowed_layers
from localllm.models.spec.fields import NormSpec, number, optional_number
from localllm.models.spec.gguf import (
    LLAMA_ROWS,
    LOCAL_EXPERTS,
    SOFTMAX,
    Fields,
    GGUFFacts,
    GGUFTensors,
    Metadata,
    expert_scoring,
    has,
    sigmoid_experts,
)
from localllm.models.spec.mixture import mixture, sigmoid_mixture
from localllm.models.spec.model_spec import QueryGrowth

_MISTRAL4_DEFAULTS = {
    "first_k_dense_replace": 0,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "rope_interleave": True,
    "routed_scaling_factor": 1.0,
}


def _growth(rope: Mapping[str, Any]) -> QueryGrowth | None:
    beta = optional_number(rope, "llama_4_scaling_beta")
    return None if beta is None else QueryGrowth(beta)


def differences(config: Config) -> dict[str, Any]:
    """Return the fields of ModelSpec. Also for a whole model of which this is the text part."""
    config = {**_MISTRAL4_DEFAULTS, **config}
    if (config.get("n_group") or 1) != 1:
        raise UnsupportedModel("n_group above 1 is not supported for Mistral 4.", "No released checkpoint uses it.")
    rope = config.get("rope_parameters") or {}
    # The share of a head that rotates: here the rotated dimensions are counted by themselves.
    plain = {**config, "rope_parameters": {name: rope[name] for name in rope if name != "partial_rotary_factor"}}
    return {
        **latent_attention(plain, interleaved=bool(config["rope_interleave"])),
        "query_growth": _growth(rope),
        "mixture": fine_experts(config, renormalize=bool(config["norm_topk_prob"])),
    }


def _gguf_mistral4(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    """Return Mistral 4's fields. Many files omit the growth of queries, which is 0.1 in all released models."""
    expert_scoring(metadata, SOFTMAX)
    growth = metadata.number("attention.temperature_scale") or 0.1
    rope = {"llama_4_scaling_beta": growth, **config.pop("rope_scaling", {})}
    return {
        **latent_gguf(metadata, checkpoint, config),
        "architectures": ["Mistral4ForCausalLM"],
        "norm_topk_prob": bool(metadata.get("expert_weights_norm")),
        "rope_parameters": {"rope_theta": config.get("rope_theta", 10_000.0), **rope},
    }


MISTRAL4 = Family(
    "Mistral 4",
    ("Mistral4ForCausalLM",),
    differences,
    _MISTRAL4_DEFAULTS,
    STORAGE,
    gguf={"mistral4": GGUFFacts("Mistral4ForCausalLM", GGUF_LATENT, _gguf_mistral4)},
)
_MISTRAL_DEFAULTS = {"sliding_window": 4096, "num_key_value_heads": 8}
_DEFAULTS_3 = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}


def _ministral(config: Config) -> dict[str, Any]:
    window = config["sliding_window"]
    return {
        "sliding_window": window,
        "layer_is_windowed": windowed_layers(config, lambda layer: True) if window is not None else (),
    }


def _ministral3(config: Config) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    return {**one_window(config), "query_growth": _growth(rope)}


def _text_part(config: Config) -> dict[str, Any]:
    """Return the fields of the text part of a model that also sees: Ministral 3, or Mistral 4."""
    return differences(config) if config.get("model_type") == "mistral4" else _ministral3(config)


def _gguf_ministral3(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    scaling = {"llama_4_scaling_beta": metadata.number("attention.temperature_scale"), **config.pop("rope_scaling", {})}
    return {"sliding_window": None, "rope_parameters": {"rope_theta": config.get("rope_theta", 10_000.0), **scaling}}


MISTRAL = Family("Mistral", ("MistralForCausalLM",), one_window, _MISTRAL_DEFAULTS)
MINISTRAL = Family("Ministral", ("MinistralForCausalLM",), _ministral, _MISTRAL_DEFAULTS)
MINISTRAL3 = Family(
    "Ministral 3",
    ("Ministral3ForCausalLM",),
    _ministral3,
    _DEFAULTS_3,
    gguf={"mistral3": GGUFFacts("Ministral3ForCausalLM", more=_gguf_ministral3, rows=LLAMA_ROWS)},
)
MISTRAL3 = Family(
    "Mistral Small 3.1 and 4, Ministral 3",
    ("Mistral3ForConditionalGeneration",),
    _text_part,
    _DEFAULTS_3,
    replace(text_part.STORAGE, renames=deepseek.STORAGE.renames),
    text_part.text_config,
    text_part.NOTE,
)


def _differences(config: Config) -> dict[str, Any]:
    window = config["sliding_window"]
    return {
        "sliding_window": window,
        "layer_is_windowed": (window is not None,) * config["num_hidden_layers"],
        "mixture": mixture(config, size="intermediate_size"),
    }


MIXTRAL_STORAGE = Storage(
    renames=(
        (r"\.mlp\.gate\.e_score", ".block_sparse_moe.e_score"),
        (r"\.mlp\.(gate|experts)\.", r".block_sparse_moe.\1."),
        (r"(\.experts\.\d+)\.gate_proj\.", r"\1.w1."),
        (r"(\.experts\.\d+)\.up_proj\.", r"\1.w3."),
        (r"(\.experts\.\d+)\.down_proj\.", r"\1.w2."),
    ),
    alternatives=((r"\.block_sparse_moe\.", ".mlp."),),
)
MIXTRAL = Family(
    "Mixtral",
    ("MixtralForCausalLM",),
    _differences,
    {
        "sliding_window": None,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_experts_per_tok": 2,
    },
    storage=MIXTRAL_STORAGE,
)


def _phi_moe(config: Config) -> dict[str, Any]:
    if config["num_experts_per_tok"] != 2:
        raise UnsupportedModel(
            f"num_experts_per_tok = {config['num_experts_per_tok']!r} is not supported for Phi-3.5-MoE.",
            "Its routing chooses 2 experts.",
        )
    bias = bool(config.get("attention_bias"))
    tolerance = 2 * number(config, "router_jitter_noise")
    return {
        **one_window(config),
        "norm": NormSpec(number(config, "rms_norm_eps"), "layer", bias=True),
        "attention_bias": bias,
        "attention_out_bias": bias,
        "lm_head_bias": bool(config.get("lm_head_bias")),
        "mixture": mixture(
            config, size="intermediate_size", scoring="sparsemixer", tolerance=tolerance, renormalize=False
        ),
    }


def _phi_moe_gguf(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    return {"attention_bias": has(checkpoint, "attn_q.bias"), "lm_head_bias": "output.bias" in checkpoint.tensors}


PHI_MOE = Family(
    "Phi-3.5-MoE",
    ("PhiMoEForCausalLM", "PhimoeForCausalLM"),
    _phi_moe,
    {
        "sliding_window": None,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.01,
    },
    storage=replace(
        MIXTRAL_STORAGE,
        alternatives=(*MIXTRAL_STORAGE.alternatives, (r"\.block_sparse_moe\.gate\.", ".mlp.router.")),
    ),
    gguf={"phimoe": GGUFFacts("PhiMoEForCausalLM", LOCAL_EXPERTS, _phi_moe_gguf)},
)


def _minimax_differences(config: Config) -> dict[str, Any]:
    for name, only in (("scoring_func", "sigmoid"), ("use_qk_norm", True), ("qk_norm_type", "per_layer")):
        if config.get(name, only) != only:
            raise UnsupportedModel(
                f"{name} = {config[name]!r} is not supported for MiniMax-M2.", f"Supported: {only!r}, as released."
            )
    return {"qk_norm": "whole", "mixture": sigmoid_mixture(config, size="intermediate_size")}


MINIMAX = Family(
    "MiniMax-M2",
    ("MiniMaxM2ForCausalLM",),
    _minimax_differences,
    {"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5_000_000.0, "num_experts_per_tok": 8},
    storage=MIXTRAL_STORAGE,
    gguf={
        "minimax-m2": GGUFFacts(
            "MiniMaxM2ForCausalLM",
            {
                "num_local_experts": "expert_count",
                "num_experts_per_tok": "expert_used_count",
                "intermediate_size": "expert_feed_forward_length",
            },
            sigmoid_experts,
        )
    },
)
