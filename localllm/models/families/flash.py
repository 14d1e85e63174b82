"""Large mixtures whose windowed layers have other heads, and another rotary base, than the full ones between them.
Experts come after one or more dense layers, and are routed as DeepSeek-V3's.

Step 3.5 and 3.7 Flash: more query heads in windowed layers, which rotate whole, where full ones rotate half of each
head; norms of q and k, a gate for each head, a shared expert, limits on the activations of some layers. Norms are
stored as w - 1 (StepFun, 2026).
MiMo V2 Flash: twice the key heads in windowed layers, which also have a sink per head; values are narrower than keys,
and are scaled (Xiaomi, arXiv:2601.02780).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.models.families import text_part
from localllm.models.spec.family import MIMO_V2_MTP, STEP_MTP, Config, Family, Storage, windowed_layers
from localllm.models.spec.fields import LARGEST, NormSpec, number, optional_number, renamed, size
from localllm.models.spec.gguf import Fields, GGUFFacts, GGUFTensors, Metadata, has, layer_types, sigmoid_experts
from localllm.models.spec.mixture import grouping, sigmoid_mixture, typed_layers

_WINDOWED, _FULL = "sliding_attention", "full_attention"
_OWN_NAMES = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "max_seq_len": "max_position_embeddings",
}
_PREDICTION = "the first multi-token prediction layer is run with --speculative mtp"
_PER_LAYER = ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared", "rope_theta")
"""Lists that also count the layers that predict further tokens."""


def _windowed(config: Config) -> tuple[bool, ...]:
    """Return which layers are windowed: both families list the kinds of their layers."""
    return windowed_layers(config, lambda layer: False)


def _windows(windowed: tuple[bool, ...]) -> dict[str, Any]:
    return {"layer_is_windowed": windowed} if any(windowed) else {"local_rope": None}


def _step_names(config: Config) -> dict[str, Any]:
    """Return the config with the names and the nested rotary embeddings that transformers writes. As published, it has
    lists of a value for each layer."""
    config = renamed(config, _OWN_NAMES)
    count, other = size(config, "num_hidden_layers"), config.get("attention_other_setting") or {}
    further = {name: config[name][count:] for name in _PER_LAYER if isinstance(config.get(name), list)}
    lists = {name: config[name][:count] for name in _PER_LAYER if isinstance(config.get(name), list)}
    kinds = lists.get("layer_types") or [_FULL] * count
    if "mlp_layer_types" not in lists:
        stated = config.get("moe_layers_enum")
        mixed = stated.split(",") if isinstance(stated, str) else range(3, count) if stated is None else stated
        indices = {int(layer) for layer in mixed if str(layer).strip()}
        lists["mlp_layer_types"] = ["sparse" if layer in indices else "dense" for layer in range(count)]
    filled = {
        **config,
        **lists,
        "layer_types": kinds,
        "num_sliding_attention_heads": config.get("num_sliding_attention_heads") or other.get("num_attention_heads"),
        "num_sliding_key_value_heads": other.get("num_attention_groups"),
        "mtp_layer_types": config.get("mtp_layer_types") or further.get("layer_types") or [_WINDOWED],
        "mtp_limits": further.get("swiglu_limits_shared"),
        "rope_scaling": None,
    }
    ropes = config.get("rope_parameters") or {}
    if not any(kind in ropes for kind in kinds):
        filled["rope_parameters"] = {kind: _rope(config, kinds, kind) for kind in dict.fromkeys(kinds)}
    return {**filled, "rope_theta": None}


def _rope(config: Config, kinds: Sequence[str], kind: str) -> dict[str, Any]:
    """Return the rotary embedding of the layers of a kind, which is that of the first of them. Full ones may be
    scaled."""
    first = kinds.index(kind)
    theta, shares = config.get("rope_theta") or 10_000.0, config.get("partial_rotary_factors")
    return {
        "rope_type": "default",
        **(config.get("rope_scaling") or {} if kind == _FULL else {}),
        "rope_theta": theta[first] if isinstance(theta, list) else theta,
        **({"partial_rotary_factor": shares[first]} if shares else {}),
    }


def _step(config: Config) -> dict[str, Any]:
    heads, groups = size(config, "num_attention_heads"), size(config, "num_key_value_heads")
    windowed = _windowed(config)
    own_heads = config["num_sliding_attention_heads"] or heads
    own_groups = config["num_sliding_key_value_heads"] or groups
    each = [(own_heads, own_groups) if slides else (heads, groups) for slides in windowed]
    if uneven := [pair for pair in each if pair[0] % pair[1]]:
        raise CorruptModel(f"config.json's {uneven[0][0]} attention heads cannot share {uneven[0][1]} key/value heads.")
    scalar, bias = optional_number(config, "query_pre_attn_scalar"), bool(config.get("attention_bias"))
    more = config["mtp_limits"] or ()
    further = _limits({"swiglu_limits_shared": more, "num_hidden_layers": len(more)}, "swiglu_limits_shared")
    experts = sigmoid_mixture(
        config,
        layers=typed_layers(config),
        renormalize=config.get("norm_expert_weight") is not False,
        scale=number(config, "moe_router_scaling_factor"),
        shared_size=size(config, "share_expert_dim"),
        layer_limits=_limits(config, "swiglu_limits"),
    )
    return {
        "norm": NormSpec(number(config, "rms_norm_eps"), plus_one=True),
        "qk_norm": "head",
        "attention_gate": "heads",
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": bool(config.get("mlp_bias")),
        "num_heads": max(count for count, _ in each),
        "num_kv_heads": max(count for _, count in each),
        "layer_heads": tuple(count for count, _ in each) if own_heads != heads else (),
        "layer_kv_shapes": tuple((count, config["head_dim"]) for _, count in each) if own_groups != groups else (),
        "sliding_window": config["sliding_window"],
        **_windows(windowed),
        "attention_scale": None if scalar is None else scalar**-0.5,
        "layer_limits": _limits(config, "swiglu_limits_shared"),
        "mtp_is_windowed": any(windowed) and config["mtp_layer_types"][0] == _WINDOWED,
        "mtp_limit": next(iter(further), 0.0),
        "mixture": experts,
    }


def _limits(config: Config, name: str) -> tuple[float, ...]:
    """Return the limit of each layer, 0: none; empty: none has one."""
    limits = [limit or 0.0 for limit in config.get(name) or ()]
    if not all(type(limit) in (int, float) and 0 <= limit < LARGEST for limit in limits):
        raise CorruptModel(f"config.json has {name} = {config[name]!r}.", "It must be numbers, or null for no limit.")
    if limits and len(limits) != config["num_hidden_layers"]:
        raise CorruptModel(f"config.json has {len(limits)} {name} for {config['num_hidden_layers']} layers.")
    return tuple(map(float, limits)) if any(limits) else ()


def _step_gguf(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    """Return the fields. Full layers rotate half of the dimensions that the file states; their factors come first in a
    tensor that is as long as windowed layers need."""
    count, dim = config["num_hidden_layers"], config["head_dim"]
    kinds = layer_types(metadata)[:count]
    heads, groups = (
        dict(zip(kinds, metadata.counts(f"attention.{key}", len(layer_types(metadata))), strict=False))
        for key in ("head_count", "head_count_kv")
    )
    share = (metadata.optional_count("rope.dimension_count") or dim) / dim
    full: Fields = {"rope_type": "default", "rope_theta": config.get("rope_theta"), "partial_rotary_factor": share / 2}
    factors = checkpoint.values("rope_freqs.weight")
    if factors is not None:
        own = factors[: int(dim * share / 2) // 2]
        full |= {"rope_type": "longrope", "short_factor": own, "long_factor": own, "attention_factor": 1.0}
    windowed = {
        "rope_theta": metadata.number("rope.freq_base_swa") or config.get("rope_theta"),
        "partial_rotary_factor": share,
    }
    return {
        **sigmoid_experts(metadata, checkpoint, config),
        "layer_types": kinds,
        "num_attention_heads": heads.get(_FULL, max(heads.values())),
        "num_key_value_heads": groups.get(_FULL, max(groups.values())),
        "attention_other_setting": {
            "num_attention_heads": heads.get(_WINDOWED),
            "num_attention_groups": groups.get(_WINDOWED),
        },
        "rope_parameters": {_FULL: full, _WINDOWED: windowed},
        "swiglu_limits": metadata.get("swiglu_clamp_exp"),
        "swiglu_limits_shared": metadata.get("swiglu_clamp_shexp"),
    }


STEP = Family(
    "Step 3.5 Flash",
    ("Step3p5ForCausalLM",),
    _step,
    {
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "sliding_window": 512,
        "n_routed_experts": 288,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1280,
        "share_expert_dim": 1280,
        "moe_router_scaling_factor": 1.0,
    },
    Storage(
        renames=(
            (r"\.self_attn\.gate_proj\.", ".self_attn.g_proj."),
            (r"\.mlp\.gate\.e_score_correction_bias", ".moe.router_bias"),
            (r"\.mlp\.gate\.", ".moe.gate."),
            (r"\.mlp\.experts\.", ".moe."),
            (r"\.mlp\.shared_expert\.", ".share_expert."),
        ),
        without_bias=("g_proj",),
        more_layers=True,
    ),
    _step_names,
    note=_PREDICTION,
    mtp=STEP_MTP,
    gguf={
        "step35": GGUFFacts(
            "Step3p5ForCausalLM",
            {
                "n_routed_experts": "expert_count",
                "num_experts_per_tok": "expert_used_count",
                "moe_intermediate_size": "expert_feed_forward_length",
                "share_expert_dim": "expert_shared_feed_forward_length",
                "moe_router_scaling_factor": "expert_weights_scale",
                "norm_expert_weight": "expert_weights_norm",
            },
            _step_gguf,
            varying=("attention.head_count", "attention.head_count_kv"),
            added=(("norm.weight", 1.0),),
        )
    },
)
STEP_VISION = replace(
    text_part.of_family("Step 3.7 Flash", ("Step3p7ForConditionalGeneration",), STEP),
    note=f"{text_part.NOTE} T{_PREDICTION[1:]}.",
    mtp=STEP_MTP,
)


def _mimo_names(config: Config) -> dict[str, Any]:
    """Return the config with the fields that transformers writes. As published, it numbers the kinds of its layers, and
    counts the tokens before the query that windowed layers see."""
    config = renamed(config, {"layernorm_epsilon": "rms_norm_eps"})
    count = size(config, "num_hidden_layers")
    pattern = config.get("hybrid_layer_pattern") or [int(layer and (layer + 1) % 6 > 0) for layer in range(count)]
    mixed = config.get("moe_layer_freq") or [int(layer > 0) for layer in range(count)]
    seen = config.get("sliding_window_size")
    share = config.get("partial_rotary_factor", 0.334)
    thetas = {
        _FULL: config.get("rope_theta") or 5_000_000.0,
        _WINDOWED: config.get("swa_rope_theta") or 10_000.0,
    }
    rope: dict[str, Any] = {"rope_type": "default", "partial_rotary_factor": share}
    defaults = {
        "layer_types": [_WINDOWED if slides else _FULL for slides in pattern],
        "mlp_layer_types": ["sparse" if sparse else "dense" for sparse in mixed],
        "rope_parameters": {kind: {**rope, "rope_theta": theta} for kind, theta in thetas.items()},
    }
    own = {name: config[name] for name in defaults if config.get(name) is not None}
    window = config.get("sliding_window") if seen is None else seen + 1
    return {**config, **defaults, **own, "sliding_window": window}


def _mimo(config: Config) -> dict[str, Any]:
    groups, dim, windowed = size(config, "num_key_value_heads"), config["head_dim"], _windowed(config)
    own = config.get("swa_num_key_value_heads") or 2 * groups
    for name, only in (("head_dim", dim), ("v_head_dim", config["v_head_dim"]), ("num_attention_heads", None)):
        other, common = config.get(f"swa_{name}"), config["num_attention_heads"] if only is None else only
        if other not in (None, common):
            raise UnsupportedModel(
                f"swa_{name} = {other} beside {name} = {common} is not supported for MiMo V2 Flash.",
                "Supported: the same in windowed and in full layers, as released.",
            )
    stated = {_WINDOWED: config.get("add_swa_attention_sink_bias"), _FULL: config.get("add_full_attention_sink_bias")}
    default = tuple(stated[kind] if stated[kind] is not None else kind == _WINDOWED for kind in config["layer_types"])
    sinks = tuple(map(bool, config.get("layer_has_sinks") or default))
    scale = optional_number(config, "attention_value_scale")
    return {
        "norm": NormSpec(number(config, "rms_norm_eps")),
        "attention_bias": bool(config.get("attention_bias")),
        "num_kv_heads": max(own, groups) if any(windowed) else groups,
        "layer_kv_shapes": tuple((own if slides else groups, dim) for slides in windowed) if own != groups else (),
        "value_dim": size(config, "v_head_dim"),
        "attention_sinks": any(sinks),
        "layer_has_sinks": sinks,
        "attention_factor": 1.0 if scale is None else scale,
        "sliding_window": config["sliding_window"],
        "mtp_is_windowed": any(windowed),
        **_windows(windowed),
        "mixture": sigmoid_mixture(
            config,
            layers=typed_layers(config),
            renormalize=bool(config["norm_topk_prob"]),
            scale=optional_number(config, "routed_scaling_factor") or 1.0,
            **grouping(config),
        ),
    }


def _mimo_gguf(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    """Return the fields. The window in a file is that of the published config, of the tokens before the query."""
    count = config["num_hidden_layers"]
    kinds = layer_types(metadata)[:count]
    stated = metadata.counts("attention.head_count_kv", len(layer_types(metadata)))
    groups = dict(zip(kinds, stated, strict=False))
    windowed, full = groups.get(_WINDOWED), groups.get(_FULL, max(stated))
    ropes = {
        _FULL: {"rope_theta": config.get("rope_theta")},
        _WINDOWED: {"rope_theta": metadata.number("rope.freq_base_swa") or config.get("rope_theta")},
    }
    return {
        **sigmoid_experts(metadata, checkpoint, config),
        "layer_types": kinds,
        "num_key_value_heads": full,
        "swa_num_key_value_heads": windowed,
        "sliding_window_size": config.get("sliding_window"),
        "rope_parameters": ropes,
        "layer_has_sinks": [has(checkpoint, "attn_sinks.weight", layer) for layer in range(count)],
        "attention_value_scale": metadata.number("attention.value_scale"),
    }


MIMO = Family(
    "MiMo V2 Flash",
    ("MiMoV2FlashForCausalLM",),
    _mimo,
    {
        "rms_norm_eps": 1e-5,
        "head_dim": 192,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "norm_topk_prob": True,
        "attention_value_scale": 0.707,
    },
    Storage(
        renames=((r"\.self_attn\.sinks$", ".self_attn.attention_sink_bias"),),
        alternatives=((r"\.attention_sink_bias$", ".sinks"),),
        ignored=(r"model\.mtp\..*",),
    ),
    _mimo_names,
    note=_PREDICTION,
    mtp=MIMO_V2_MTP,
    gguf={
        "mimo2": GGUFFacts(
            "MiMoV2FlashForCausalLM",
            {
                "n_routed_experts": "expert_count",
                "num_experts_per_tok": "expert_used_count",
                "moe_intermediate_size": "expert_feed_forward_length",
                "routed_scaling_factor": "expert_weights_scale",
                "v_head_dim": "attention.value_length",
            },
            _mimo_gguf,
            varying=("attention.head_count_kv",),
        )
    },
)
