"""ERNIE 4.5 with experts (21B-A3B): ERNIE 4.5 with small experts beside shared ones. Experts are chosen by softmax
scores with a correction, weighted by the scores alone, which then sum to one (ERNIE 4.5 technical report, 2025).
"""

from __future__ import annotations

from typing import Any

from localllm.errors import UnsupportedModel
from localllm.models.spec.family import Config, Family, Storage
from localllm.models.spec.fields import number, renamed
from localllm.models.spec.gguf import SOFTMAX, Fields, GGUFFacts, GGUFTensors, Metadata, expert_scoring, mixed_layers
from localllm.models.spec.mixture import mixture, typed_layers

_NAMES = {
    "moe_num_experts": "num_experts",
    "moe_k": "num_experts_per_tok",
    "moe_num_shared_experts": "num_shared_experts",
}


def _common_names(config: Config) -> Config:
    return renamed(config, _NAMES)


def _differences(config: Config) -> dict[str, Any]:
    if config.get("use_bias"):
        raise UnsupportedModel(
            "use_bias is not supported for ERNIE 4.5 with experts.", "No published checkpoint uses it."
        )
    return {
        "rope_interleaved": True,
        "mixture": mixture(
            config,
            layers=typed_layers(config) or _layers(config),
            correction_bias=True,
            least_sum=number(config, "moe_norm_min"),
            router_in_fp32=True,
            shared_size=config["moe_intermediate_size"] * (config.get("num_shared_experts") or 0),
        ),
    }


def _layers(config: Config) -> tuple[bool, ...]:
    """Return which layers are mixtures: every moe_layer_interval-th one between two indexes."""
    count, every = config["num_hidden_layers"], config["moe_layer_interval"]
    first, last = config["moe_layer_start_index"], config["moe_layer_end_index"]
    last = count - 1 if last == -1 else last
    return tuple((layer + 1) % every == 0 and first <= layer <= last for layer in range(count))


def _gguf(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    expert_scoring(metadata, SOFTMAX)
    return mixed_layers(checkpoint, config)


FAMILY = Family(
    "ERNIE 4.5 (MoE)",
    ("Ernie4_5_MoeForCausalLM",),
    _differences,
    {
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "moe_norm_min": 1e-12,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
    },
    storage=Storage(
        renames=(
            (r"\.mlp\.gate\.e_score", ".mlp.moe_statics.e_score"),
            (r"\.mlp\.shared_expert\.", ".mlp.shared_experts."),
        ),
        ignored=(r"model\.mtp_.*",),
    ),
    common_names=_common_names,
    note="multi-token prediction layers are not run",
    gguf={
        "ernie4_5-moe": GGUFFacts(
            "Ernie4_5_MoeForCausalLM",
            {
                "moe_num_experts": "expert_count",
                "moe_k": "expert_used_count",
                "moe_num_shared_experts": "expert_shared_count",
                "moe_intermediate_size": "expert_feed_forward_length",
            },
            _gguf,
        )
    },
)
