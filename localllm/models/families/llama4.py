"""Llama 4 (Scout, Maverick): Llama with a mixture in every layer or every other, in which one expert, whose input is
multiplied by a sigmoid of its score, stands beside a shared one. Every fourth layer has no rotary embedding. The others
attend within chunks of their context, and norm q and k after the rotation, which for a norm without a weight is the
same as before it.

From the end of the first chunk on, attention is limited to a token's own chunk, and layers without rotation scale their
queries. Neither is implemented, so the context ends there.
"""

from __future__ import annotations

from typing import Any

from localllm.errors import UnsupportedModel
from localllm.models.families.text_part import of_family
from localllm.models.spec.family import Config, Family, Storage
from localllm.models.spec.fields import size
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
from localllm.units import format_count


def _differences(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias"))
    return {
        "intermediate_size": size(config, "intermediate_size_mlp"),
        "attention_bias": bias,
        "attention_out_bias": bias,
        "rope_interleaved": True,
        "qk_norm": "unweighted" if config["use_qk_norm"] else None,
        "layer_has_rope": _rotated_layers(config),
        "mixture": _mixture(config),
        **_context(config),
    }


def _rotated_layers(config: Config) -> tuple[bool, ...]:
    count, every = config["num_hidden_layers"], size(config, "no_rope_layer_interval")
    flags = config.get("no_rope_layers") or [(layer + 1) % every for layer in range(count)]
    return tuple(bool(flag) for flag in flags)


def _has_chunks(config: Config) -> bool:
    """Return whether a layer attends within chunks; without `layer_types`, layers that rotate do."""
    kinds = set(config.get("layer_types") or ("chunked_attention",))
    if unknown := kinds - {"chunked_attention", "full_attention"}:
        raise UnsupportedModel(
            f"Layers of type {', '.join(sorted(map(str, unknown)))} are not supported for Llama 4.",
            "Supported: chunked_attention, full_attention.",
        )
    return "chunked_attention" in kinds


def _context(config: Config) -> dict[str, Any]:
    """Return the context up to which every token is in the first chunk, and no query is scaled."""
    limits = [config.get("attention_chunk_size")] if _has_chunks(config) else []
    if config["attn_temperature_tuning"] and not all(_rotated_layers(config)):
        limits.append(size(config, "floor_scale") - 1)
    most, trained = min([limit for limit in limits if limit], default=0), size(config, "max_position_embeddings")
    if not most or trained <= most:
        return {}
    limit = (
        f"Beyond {format_count(most)} tokens this model attends within chunks and scales queries, which is not "
        "supported."
    )
    return {"max_position": most, "context_limit": limit}


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
