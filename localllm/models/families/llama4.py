"""Llama 4 (Scout, Maverick): Llama with a mixture in every layer or every other, in which one expert, whose input is
multiplied by a sigmoid of its score, stands beside a shared one. Every fourth layer has no rotary embedding. The others
attend within chunks of their context, and norm q and k after the rotation, which for a norm without a weight is the
same as before it. Layers without rotation scale their queries, which grow with the logarithm of their position.
"""

from __future__ import annotations

from typing import Any

from localllm.errors import UnsupportedModel
from localllm.models.families.text_part import of_family
from localllm.models.spec.family import Config, Family, Storage
from localllm.models.spec.fields import number, size
from localllm.models.spec.gguf import (
    SIGMOID,
    Fields,
    GGUFFacts,
    GGUFTensors,
    Metadata,
    expert_scoring,
    mixed_layers,
)
from localllm.models.spec.mixture import MixtureSpec, mixture
from localllm.models.spec.model_spec import QueryGrowth


def _differences(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias"))
    return {
        "intermediate_size": size(config, "intermediate_size_mlp"),
        "attention_bias": bias,
        "attention_out_bias": bias,
        "rope_interleaved": True,
        "qk_norm": "unweighted_rotated" if config["use_qk_norm"] else None,
        "layer_has_rope": _rotated_layers(config),
        "mixture": _mixture(config),
        "query_growth": _growth(config),
        **_chunks(config),
    }


def _rotated_layers(config: Config) -> tuple[bool, ...]:
    count, every = config["num_hidden_layers"], size(config, "no_rope_layer_interval")
    flags = config.get("no_rope_layers") or [(layer + 1) % every for layer in range(count)]
    return tuple(bool(flag) for flag in flags)


def _chunks(config: Config) -> dict[str, Any]:
    """Return which layers attend within chunks; without `layer_types`, layers that rotate do."""
    rotated = _rotated_layers(config)
    kinds = config.get("layer_types") or ["chunked_attention" if rotates else "full_attention" for rotates in rotated]
    if unknown := set(kinds) - {"chunked_attention", "full_attention"}:
        raise UnsupportedModel(
            f"Layers of type {', '.join(sorted(map(str, unknown)))} are not supported for Llama 4.",
            "Supported: chunked_attention, full_attention.",
        )
    chunked = tuple(kind == "chunked_attention" for kind in kinds)
    chunk = size(config, "attention_chunk_size") if config.get("attention_chunk_size") and any(chunked) else None
    if chunk is None or chunk >= size(config, "max_position_embeddings"):
        return {}
    return {"sliding_window": chunk, "window_is_chunk": True, "layer_is_windowed": chunked}


def _growth(config: Config) -> QueryGrowth | None:
    if not config["attn_temperature_tuning"] or all(_rotated_layers(config)):
        return None
    return QueryGrowth(number(config, "attn_scale"), size(config, "floor_scale"), offset=1, rotated=False)


def _mixture(config: Config) -> MixtureSpec | None:
    if not config["interleave_moe_layer_step"]:  # MobileLLM
        return None
    if config.get("num_experts_per_tok", 1) != 1:
        raise UnsupportedModel(
            f"num_experts_per_tok = {config['num_experts_per_tok']} is not supported for Llama 4.",
            "Supported: 1, as in the released checkpoints.",
        )
    count, every = config["num_hidden_layers"], size(config, "interleave_moe_layer_step")
    chosen = config.get("moe_layers")
    mixed = range(every - 1, count, every) if chosen is None else chosen
    return mixture(
        config,
        size="intermediate_size",
        layers=tuple(layer in mixed for layer in range(count)),
        scoring="sigmoid",
        renormalize=False,
        scales_inputs=True,
        shared_size=config["intermediate_size"],
    )


def _gguf(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    """Return Llama 4's fields. Files do not say whether q and k are normed: in Maverick they are not."""
    expert_scoring(metadata, SIGMOID)
    count, kinds = metadata.count("expert_count"), mixed_layers(checkpoint, config)["mlp_layer_types"]
    return {
        "use_qk_norm": count != 128,
        "intermediate_size_mlp": config["intermediate_size"],
        "intermediate_size": metadata.count("expert_feed_forward_length"),
        "moe_layers": [layer for layer, kind in enumerate(kinds) if kind == "sparse"],
    }


TEXT = Family(
    "Llama 4",
    ("Llama4ForCausalLM",),
    _differences,
    {
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        "interleave_moe_layer_step": 1,
        "no_rope_layer_interval": 4,
        "use_qk_norm": True,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    Storage(
        renames=((r"\.mlp\.gate\.", ".feed_forward.router."), (r"\.mlp\.", ".feed_forward.")),
        transposed=(".experts.gate_up_proj", ".experts.down_proj"),
    ),
    gguf={
        "llama4": GGUFFacts(
            "Llama4ForCausalLM",
            {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
            _gguf,
        )
    },
)
VISION = of_family("Llama 4", ("Llama4ForConditionalGeneration",), TEXT)
