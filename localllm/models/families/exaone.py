"""EXAONE 3: Llama with other names (arXiv:2408.03541). EXAONE 4: norms only after each part, RMSNorm over each head of
q and k, and in the 32B windowed layers that rotate between full layers without positions (arXiv:2507.11407). K-EXAONE:
that attention with norms before each part, and the mixture of DeepSeek-V3.
"""

from __future__ import annotations

from typing import Any

from localllm.models.families.gpt2 import GPT_NAMES
from localllm.models.spec.family import Config, Family, Storage, windowed_layers
from localllm.models.spec.fields import NormSpec, number, renamed
from localllm.models.spec.gguf import (
    EXPERT_GROUPS,
    SANDWICH_NORMS,
    Fields,
    GGUFFacts,
    GGUFTensors,
    Metadata,
    layer_types,
    sigmoid_experts,
)
from localllm.models.spec.mixture import grouping, layers_after, sigmoid_mixture, typed_layers

_RENAMES = (
    *GPT_NAMES,
    (r"self_attn\.o_proj", "attn.attention.out_proj"),
    ("self_attn", "attn.attention"),
    ("gate_proj", "c_fc_0"),
    ("up_proj", "c_fc_1"),
    (r"mlp\.down_proj", "mlp.c_proj"),
)


def _common_names(config: Config) -> Config:
    return renamed(config, {"num_layers": "num_hidden_layers", "activation_function": "hidden_act"})


def _exaone3(config: Config) -> dict[str, Any]:
    return {"norm": NormSpec(number(config, "layer_norm_epsilon"))}


def _exaone4(config: Config) -> dict[str, Any]:
    common = {"topology": "post_norm", "qk_norm": "head"}
    if config["sliding_window"] is None:
        return common
    windowed = windowed_layers(config, _window_rule(config))
    return {
        **common,
        "sliding_window": config["sliding_window"],
        "layer_is_windowed": windowed,
        "layer_has_rope": windowed,
    }


def _exaone_moe(config: Config) -> dict[str, Any]:
    experts = sigmoid_mixture(
        config,
        layers=typed_layers(config) or layers_after(config, config["first_k_dense_replace"]),
        renormalize=bool(config["norm_topk_prob"]),
        scale=number(config, "routed_scaling_factor"),
        shared_size=config["moe_intermediate_size"] * (config["num_shared_experts"] or 0),
        **grouping(config),
    )
    return {**_exaone4(config), "topology": "pre_norm", "mixture": experts}


def _window_rule(config: Config) -> Any:
    """Return the rule for windowed layers. A pattern is n (every n-th layer is full) or letters: L local, G global."""
    pattern, last = config["sliding_window_pattern"], config["num_hidden_layers"] - 1
    if isinstance(pattern, str):
        return lambda layer: layer != last and pattern[layer % len(pattern)] == "L"
    return lambda layer: layer != last and (layer + 1) % pattern != 0


def _gguf_exaone4(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    if config.get("sliding_window") is None:
        return {"sliding_window": None}
    return {"layer_types": layer_types(metadata)}


def _gguf_exaone_moe(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    window = config.get("sliding_window")
    types = {"sliding_window": None} if window is None else {"layer_types": layer_types(metadata)}
    return {**sigmoid_experts(metadata, checkpoint, config), **types}


EXAONE3 = Family(
    "EXAONE 3",
    ("ExaoneForCausalLM",),
    _exaone3,
    {"layer_norm_epsilon": 1e-5, "activation_function": "silu"},
    Storage(renames=_RENAMES),
    _common_names,
    gguf={"exaone": GGUFFacts("ExaoneForCausalLM", {"layer_norm_epsilon": "attention.layer_norm_rms_epsilon"})},
)
EXAONE4 = Family(
    "EXAONE 4",
    ("Exaone4ForCausalLM",),
    _exaone4,
    {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
    gguf={"exaone4": GGUFFacts("Exaone4ForCausalLM", more=_gguf_exaone4, norms=SANDWICH_NORMS)},
)
EXAONE_MOE = Family(
    "K-EXAONE",
    ("ExaoneMoeForCausalLM",),
    _exaone_moe,
    {
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "first_k_dense_replace": 1,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    Storage(
        renames=(
            (r"\.mlp\.gate\.e_score", ".mlp.e_score"),
            (r"\.mlp\.shared_expert\.", ".mlp.shared_experts."),
        ),
        ignored=(r"mtp\..*",),
    ),
    note="multi-token prediction layers are not run",
    gguf={
        "exaone-moe": GGUFFacts(
            "ExaoneMoeForCausalLM",
            {
                "num_experts": "expert_count",
                "num_experts_per_tok": "expert_used_count",
                "num_shared_experts": "expert_shared_count",
                "moe_intermediate_size": "expert_feed_forward_length",
                "routed_scaling_factor": "expert_weights_scale",
                **EXPERT_GROUPS,
            },
            _gguf_exaone_moe,
        )
    },
)
