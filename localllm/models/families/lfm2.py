"""LFM2 and LFM2.5: Llama's layers with norms of q and k, most of them with a gated short convolution in attention's
place (arXiv:2511.23404). LFM2-MoE also has experts in all but the first layers, scored by sigmoids with a correction
for the choice. LFM3 also norms what each part returns, has a gate on each head's output, windows in some of the layers
with attention, and longer convolutions (Liquid AI, 2026).
"""

from __future__ import annotations

from typing import Any

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.models.families.text_part import of_family
from localllm.models.spec.family import Config, Family, Storage, windowed_layers
from localllm.models.spec.fields import NormSpec, number, size
from localllm.models.spec.gguf import (
    EXPERTS,
    PER_LAYER,
    PRE_NORMS,
    Fields,
    GGUFFacts,
    GGUFTensors,
    Metadata,
    counts_of_layers,
    has,
)
from localllm.models.spec.mixture import layers_after, mixture
from localllm.models.spec.recurrent import LayerPart, RecurrentSpec, kinds_of_layers

_OWN_NAMES = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
_KINDS: dict[str, LayerPart] = {"conv": "recurrent", "full_attention": "attention"}


def _common_names(config: Config) -> Config:
    """Return the config with common names. Older ones list the layers with attention instead of every layer's kind,
    and tie the embeddings without saying so."""
    config = {**config, **{common: config[own] for own, common in _OWN_NAMES.items() if config.get(own) is not None}}
    if config.get("layer_types") is None:
        with_attention = config.get("full_attn_idxs")
        layers = range(size(config, "num_hidden_layers"))
        whole = layers if with_attention is None else with_attention
        config["layer_types"] = ["full_attention" if layer in whole else "conv" for layer in layers]
    return config


def _dense_names(config: Config) -> Config:
    config = dict(_common_names(config))
    return {**config, "intermediate_size": _feed_forward_width({**_WIDTH, **config})}


def _feed_forward_width(config: Config) -> int:
    """Return the width of the feed-forward part: two thirds of the stated one, scaled and rounded up, if the config
    adjusts it."""
    width = size(config, "intermediate_size")
    if not config["block_auto_adjust_ff_dim"]:
        return width
    width, unit = 2 * width // 3, size(config, "block_multiple_of")
    if config["block_ffn_dim_multiplier"] is not None:
        width = unit * -(-int(config["block_ffn_dim_multiplier"] * width) // unit)
    return width


def _lfm3_names(config: Config) -> Config:
    """Return the config with the kinds of its layers, which it may leave out: half of them are convolutions."""
    kinds = ("sliding_attention", "conv", "full_attention", "conv")
    stated = config.get("layer_types")
    layers = ["conv", *(kinds[layer % 4] for layer in range(1, size(config, "num_hidden_layers")))]
    return {**config, "layer_types": layers if stated is None else stated}


def _differences(config: Config, **more: LayerPart) -> dict[str, Any]:
    """Return the differences of all families of this file. more: further kinds of layers."""
    hidden, bias = config["hidden_size"], bool(config["conv_bias"])
    return {
        "norm": NormSpec(number(config, "norm_eps")),
        "qk_norm": "head",
        "layer_kinds": kinds_of_layers(config["layer_types"], {**_KINDS, **more}),
        "recurrent": RecurrentSpec(
            "short_conv", size(config, "conv_L_cache"), conv_bias=bias, width=hidden, projection_bias=bias
        ),
    }


def _lfm3(config: Config) -> dict[str, Any]:
    for name, only in (("attention_bias", False), ("use_sandwich_norm", True)):
        if bool(config.get(name, only)) != only:
            raise UnsupportedModel(
                f"{name} = {config[name]!r} is not supported for LFM3.", f"Supported: {only}, as released."
            )
    return {
        **_differences(config, sliding_attention="attention"),
        "topology": "sandwich",
        "attention_gate": "heads" if config["use_attention_gate"] else None,
        "sliding_window": config["sliding_window"],
        "layer_is_windowed": windowed_layers(config, lambda layer: False),
    }


def _moe(config: Config) -> dict[str, Any]:
    first = config["num_dense_layers"]
    if type(first) is not int or first < 0:
        raise CorruptModel(f"config.json has num_dense_layers = {first!r}.", "It must be a whole number.")
    return {
        **_differences(config),
        "mixture": mixture(
            config,
            layers=layers_after(config, first),
            scoring="sigmoid",
            correction_bias=bool(config["use_expert_bias"]),
            renormalize=bool(config["norm_topk_prob"]),
            scale=float(config["routed_scaling_factor"]),
        ),
    }


_WIDTH = {
    "intermediate_size": 12_288,
    "block_auto_adjust_ff_dim": True,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
}
_DEFAULTS = {
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "num_key_value_heads": 8,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 128_000,
    "tie_word_embeddings": True,
}
_RENAMES = (
    (r"^model\.norm\.", "model.embedding_norm."),
    (r"\.input_layernorm\.", ".operator_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.self_attn\.o_proj\.", ".self_attn.out_proj."),
    (r"\.self_attn\.([qk])_norm\.", r".self_attn.\1_layernorm."),
    (r"\.mlp\.gate\.e_score_correction_bias$", ".feed_forward.expert_bias"),
    (r"\.mlp\.", ".feed_forward."),
    (r"\.gate_proj\.", ".w1."),
    (r"\.up_proj\.", ".w3."),
    (r"\.(feed_forward|experts\.\d+)\.down_proj\.", r".\1.w2."),
)
_LFM2_NORMS = (*PRE_NORMS, (r"^model\.norm\.", "token_embd_norm."))


def _gguf(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    heads = counts_of_layers(metadata, "attention.head_count_kv", config)
    first = next((layer for layer, count in enumerate(heads) if not count), 0)
    return {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": metadata.count("shortconv.l_cache"),
        "conv_bias": has(checkpoint, "shortconv.conv.bias", first),
        "use_expert_bias": any(name.endswith("exp_probs_b.bias") for name in checkpoint.tensors),
        "tie_word_embeddings": config["tie_word_embeddings"],
    }


DENSE = Family(
    "LFM2",
    ("Lfm2ForCausalLM",),
    _differences,
    {**_DEFAULTS, **_WIDTH},
    storage=Storage(renames=_RENAMES),
    common_names=_dense_names,
    gguf={
        "lfm2": GGUFFacts(
            "Lfm2ForCausalLM",
            {"norm_eps": "attention.layer_norm_rms_epsilon"},
            _gguf,
            {"block_auto_adjust_ff_dim": False},
            PER_LAYER,
            norms=_LFM2_NORMS,
        )
    },
)
VISION = of_family("LFM2-VL", ("Lfm2VlForConditionalGeneration",), DENSE)
MOE = Family(
    "LFM2-MoE",
    ("Lfm2MoeForCausalLM",),
    _moe,
    {
        **_DEFAULTS,
        "num_dense_layers": 2,
        "num_experts_per_tok": 4,
        "use_expert_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    storage=Storage(renames=_RENAMES),
    common_names=_common_names,
    gguf={
        "lfm2moe": GGUFFacts(
            "Lfm2MoeForCausalLM",
            {
                **EXPERTS,
                "norm_eps": "attention.layer_norm_rms_epsilon",
                "moe_intermediate_size": "expert_feed_forward_length",
                "num_dense_layers": "leading_dense_block_count",
                "routed_scaling_factor": "expert_weights_scale",
            },
            _gguf,
            varying=PER_LAYER,
            norms=_LFM2_NORMS,
        )
    },
)
LFM3 = Family(
    "LFM3",
    ("Lfm3ForCausalLM",),
    _lfm3,
    {
        **_DEFAULTS,
        "head_dim": 128,
        "num_key_value_heads": 4,
        "conv_L_cache": 7,
        "sliding_window": 256,
        "use_attention_gate": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    storage=Storage(
        renames=(
            (r"^model\.norm\.", "model.embedding_norm."),
            (r"\.input_layernorm\.", ".operator_norm."),
            (r"\.post_attention_layernorm\.", ".post_operator_norm."),
            (r"\.pre_feedforward_layernorm\.", ".ffn_norm."),
            (r"\.post_feedforward_layernorm\.", ".post_ffn_norm."),
            (r"\.mlp\.gate_proj\.", ".feed_forward.w1."),
            (r"\.mlp\.up_proj\.", ".feed_forward.w3."),
            (r"\.mlp\.down_proj\.", ".feed_forward.w2."),
        ),
        alternatives=((r"\.self_attn\.gate_proj\.", ".self_attn.g_proj."),),
    ),
    common_names=_lfm3_names,
)
