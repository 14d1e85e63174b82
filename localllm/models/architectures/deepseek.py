"""DeepSeek-V2 and V2-Lite, V3, and models trained with V3's code (Moonlight): latent attention, with one cached key and
value for all heads, and many small experts beside shared ones; the first layers are dense (arXiv:2405.04434).
V3 scores experts by sigmoids with a correction for the choice, in groups (arXiv:2412.19437).
"""

from __future__ import annotations

import math
from typing import Any

from localllm.errors import UnsupportedModel
from localllm.models.spec.family import Config, Family, Storage
from localllm.models.spec.latent import latent
from localllm.models.spec.mixture import by_method, grouping, layers_after, mixture
from localllm.models.spec.rope import RopeSpec, read_ropes

STORAGE = Storage(renames=((r"\.mlp\.shared_expert\.", ".mlp.shared_experts."),), more_layers=True)


def _v2(config: Config) -> dict[str, Any]:
    if config.get("norm_topk_prob"):
        raise UnsupportedModel("norm_topk_prob is not supported for DeepSeek-V2.", "No released checkpoint uses it.")
    groups = by_method(config, {"greedy": {}, "group_limited_greedy": grouping(config)})
    return {**_attention(config, interleaved=True), "mixture": _mixture(config, renormalize=False, **groups)}


def _v3(config: Config) -> dict[str, Any]:
    routing = {"scoring": "sigmoid", "correction_bias": True, "renormalize": bool(config["norm_topk_prob"])}
    return {
        **_attention(config, interleaved=bool(config["rope_interleave"])),
        "mixture": _mixture(config, **routing, **grouping(config)),
    }


def _mixture(config: Config, **routing: Any) -> Any:
    if (config.get("moe_layer_freq") or 1) != 1:
        raise UnsupportedModel(
            "moe_layer_freq above 1 is not supported for DeepSeek.", "No released checkpoint uses it."
        )
    return mixture(
        config,
        layers=layers_after(config, config["first_k_dense_replace"]),
        scale=float(config["routed_scaling_factor"]),
        router_in_fp32=True,
        shared_size=config["moe_intermediate_size"] * (config["n_shared_experts"] or 0),
        **routing,
    )


def _attention(config: Config, *, interleaved: bool) -> dict[str, Any]:
    if config.get("attention_bias"):
        raise UnsupportedModel("attention_bias is not supported for DeepSeek.", "No released checkpoint uses it.")
    sizes = latent(config, interleaved=interleaved)
    rope, _ = read_ropes(config, sizes.rope_size)
    return {
        "latent": sizes,
        "num_kv_heads": 1,
        "head_dim": sizes.cached_size,
        "rope": rope,
        "attention_scale": (sizes.nope_size + sizes.rope_size) ** -0.5 * _yarn_mscale(rope),
    }


def _yarn_mscale(rope: RopeSpec) -> float:
    """Return YaRN's correction of the softmax for long contexts, for keys and queries."""
    weight = rope.parameters.get("mscale_all_dim") if rope.variant == "yarn" else None
    factor = rope.parameters.get("factor", 1.0)
    return 1.0 if not weight or factor <= 1 else (0.1 * float(weight) * math.log(factor) + 1.0) ** 2


_DEFAULTS = {"n_shared_experts": None, "routed_scaling_factor": 1.0, "first_k_dense_replace": 0}
V2 = Family(
    "DeepSeek-V2",
    ("DeepseekV2ForCausalLM",),
    _v2,
    {**_DEFAULTS, "topk_method": "greedy"},
    storage=STORAGE,
)
V3 = Family(
    "DeepSeek-V3",
    ("DeepseekV3ForCausalLM",),
    _v3,
    {
        **_DEFAULTS,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "rope_interleave": True,
        "n_group": 8,
        "topk_group": 4,
    },
    storage=STORAGE,
    note="multi-token prediction layers are not run",
)
