"""Gemma 4 and Gemma 3n (text): Gemma 3's two kinds of layers, and more in each layer.

Unlike older Gemmas, norms are stored unchanged (not as w - 1), and scores are not scaled. v is normed too, without a
weight. In Gemma 4, full layers have wider and fewer KV heads than windowed ones, and only a quarter of their
frequencies turn. Then, by size of the model:

    E2B, E4B    per-layer embeddings; the last layers read the K and V of the last earlier layer of their kind, and have
                a feed-forward part twice as wide
    12B, 31B    values of full layers are made from their keys' matrix
    26B-A4B     the same, and experts beside the dense feed-forward part

Gemma 3n has the shared K and V, the norms and the per-layer embeddings of Gemma 4, with heads of one size. Also four
residual streams, of which each layer computes one (AltUp), a low-rank matrix beside attention (LAuReL), and in the
first layers a gate of which all but about 5 % is cut off.
Does not know: how a layer computes (decoder/layer.py).
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.models.families import text_part
from localllm.models.spec.family import Config, Family, Storage, windowed_layers
from localllm.models.spec.fields import NormSpec, number, size
from localllm.models.spec.gguf import SANDWICH_NORMS, Fields, GGUFFacts, GGUFTensors, Metadata, has, layer_types
from localllm.models.spec.mixture import MixtureSpec, mixture
from localllm.models.spec.model_spec import AltUpSpec, PerLayerInputSpec

_SHAPE_FIELDS = ("head_dim", "num_key_value_heads")
_RENAMES = (
    (r"\.mlp\.gate\.scale$", ".router.scale"),
    (r"\.mlp\.gate\.expert_scale$", ".router.per_expert_scale"),
    (r"\.mlp\.gate\.", ".router.proj."),
    (r"\.mlp\.experts\.", ".experts."),
)
_GEMMA4_DEFAULTS = {
    "vocab_size": 262_144,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "num_kv_shared_layers": 0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
    "final_logit_softcapping": None,
}
_PER_LAYER_DEFAULTS = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144}
_UNIFIED_DEFAULTS = {"sliding_window": 1024, "max_position_embeddings": 262_144}


def _gemma4_differences(config: Config) -> dict[str, Any]:
    if config.get("use_bidirectional_attention") == "all":
        raise UnsupportedModel("Bidirectional attention is not supported for Gemma 4.", "Supported: causal attention.")
    # The last layer never is windowed, whatever the config says.
    windowed = (*windowed_layers(config, lambda layer: (layer + 1) % 6 != 0)[:-1], False)
    shapes = {
        True: (config["num_key_value_heads"], config["head_dim"]),
        False: (
            config.get("num_global_key_value_heads") or config["num_key_value_heads"],
            size(config, "global_head_dim"),
        ),
    }
    sources = kv_sources(config, windowed)
    from_keys = tuple(bool(config.get("attention_k_eq_v")) and not slides for slides in windowed)
    return shared_differences(config) | {
        "layer_values_from_keys": from_keys if any(from_keys) else (),
        "layer_is_windowed": windowed,
        "layer_kv_shapes": tuple(shapes[slides] for slides in windowed),
        "kv_source": sources,
        "layer_widths": _widths(config, sources),
        "per_layer_input": per_layer_input(config),
        "mixture": _mixture(config),
        "topology": "gemma4",
    }


def shared_differences(config: Config) -> dict[str, Any]:
    """Return the fields of ModelSpec that Gemma 3n and Gemma 4 have in common."""
    bias = bool(config.get("attention_bias"))
    return {
        "hidden_act": config.get("hidden_activation") or "gelu_pytorch_tanh",
        "attention_bias": bias,
        "attention_out_bias": bias,
        "norm": NormSpec(number(config, "rms_norm_eps")),
        "embedding_scale": config["hidden_size"] ** 0.5,
        "attention_scale": 1.0,
        "qk_norm": "head",
        "v_norm": True,
        "sliding_window": config["sliding_window"],
        "final_softcap": config["final_logit_softcapping"],
    }


def kv_sources(config: Config, windowed: tuple[bool, ...]) -> tuple[int, ...]:
    """Return for each layer the layer whose K and V it reads; empty: its own.

    Each of the last num_kv_shared_layers layers reads the K and V of the last earlier layer of its kind (windowed or
    full).
    """
    shared = config.get("num_kv_shared_layers") or 0
    if not shared:
        return ()
    count = len(windowed)
    first = count - shared
    if not 0 < first < count or set(windowed[first:]) - set(windowed[:first]):
        raise CorruptModel(
            f"config.json has num_kv_shared_layers = {shared!r} of {count} layers.",
            "Each of them needs an earlier layer of its kind to read the K and V of.",
        )
    last_of = {slides: first - 1 - windowed[first - 1 :: -1].index(slides) for slides in set(windowed[first:])}
    return (*range(first), *(last_of[slides] for slides in windowed[first:]))


def _widths(config: Config, sources: tuple[int, ...]) -> tuple[int, ...]:
    if not config.get("use_double_wide_mlp") or not sources:
        return ()
    width = size(config, "intermediate_size")
    return tuple(width if source == layer else 2 * width for layer, source in enumerate(sources))


def _mixture(config: Config) -> MixtureSpec | None:
    if not config.get("enable_moe_block"):
        return None
    fields = {**config, "num_experts_per_tok": config.get("top_k_experts")}
    return mixture(fields, beside_mlp=True, expert_scale=True)


def _one_form(config: Config) -> dict[str, Any]:
    """Return a config with the full layers' KV heads as global_head_dim and num_global_key_value_heads.

    transformers writes them as overrides per layer since 5.23; before, num_global_key_value_heads applied only with
    attention_k_eq_v.
    """
    overrides = config.get("per_layer_config")
    if overrides is None:
        heads = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
        return {**config, "num_global_key_value_heads": heads}
    if not isinstance(overrides, dict) or not isinstance(config.get("layer_types"), list):
        raise CorruptModel(f"config.json has per_layer_config = {overrides!r}.", "It must be an object, per layer.")
    full = [str(index) for index, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
    given = {str(index).lstrip("0") or "0": fields for index, fields in overrides.items()}  # transformers pads: "05"
    shape = given.get(full[0]) if full else None
    if not isinstance(shape, dict) or given != dict.fromkeys(full, shape) or set(shape) - set(_SHAPE_FIELDS):
        raise UnsupportedModel(
            "config.json has a per_layer_config that is not supported.",
            f"Supported: the same {' and '.join(_SHAPE_FIELDS)} in all layers with full attention.",
        )
    head_dim = shape.get("head_dim", config.get("head_dim", _GEMMA4_DEFAULTS["head_dim"]))
    return {**config, "global_head_dim": head_dim, "num_global_key_value_heads": shape.get("num_key_value_heads")}


def _gemma4_text(config: Config) -> dict[str, Any]:
    return _one_form(text_part.text_config(config))


_GGUF_PER_LAYER = (
    (r"^model\.embed_tokens_per_layer\.", "per_layer_token_embd."),
    (r"^model\.per_layer_model_projection\.", "per_layer_model_proj."),
    (r"^model\.per_layer_projection_norm\.", "per_layer_proj_norm."),
    (r"\.post_per_layer_input_norm\.", ".post_norm."),
    (r"\.per_layer_input_gate\.", ".inp_gate."),
    (r"\.per_layer_projection\.", ".proj."),
)
_GGUF_GEMMA4 = (
    *SANDWICH_NORMS,
    *_GGUF_PER_LAYER,
    (r"\.post_feedforward_layernorm_([12])\.", r".post_ffw_norm_\1."),
    (r"\.pre_feedforward_layernorm_2\.", ".pre_ffw_norm_2."),
    (r"\.mlp\.gate\.expert_scale$", ".ffn_down_exps.scale"),
    (r"\.mlp\.experts\.gate_up_proj\.", ".ffn_gate_up_exps."),
    (r"\.layer_scalar$", ".layer_output_scale.weight"),
)
_GGUF_GEMMA3N = (
    *SANDWICH_NORMS,
    *_GGUF_PER_LAYER,
    (r"^model\.altup_projections\.", "altup_proj."),
    (r"^model\.altup_unembed_projections\.", "altup_unembd_proj."),
    (r"\.altup\.correct_output_scale$", ".altup_correct_scale.weight"),
    (r"\.altup\.correction_coefs\.", ".altup_correct_coef."),
    (r"\.altup\.prediction_coefs\.", ".altup_predict_coef."),
    (r"\.altup\.modality_router\.", ".altup_router."),
    (r"\.altup\.router_norm\.", ".altup_router_norm."),
    (r"\.laurel\.linear_left\.", ".laurel_l."),
    (r"\.laurel\.linear_right\.", ".laurel_r."),
    (r"\.laurel\.post_laurel_norm\.", ".laurel_post_norm."),
)


def _gguf_gemma4(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    """Return Gemma 4's fields: sizes of heads are stated for full layers and, as *_swa, for windowed ones."""
    layers, types = config["num_hidden_layers"], layer_types(metadata)
    if len(types) != layers:
        metadata.fail("attention.sliding_window_pattern", f"It has {len(types)} values for {layers} layers.")
    heads = metadata.counts("attention.head_count_kv", layers)
    by_type = {kind: {count for count, other in zip(heads, types, strict=True) if other == kind} for kind in set(types)}
    if any(len(counts) > 1 for counts in by_type.values()):
        raise UnsupportedModel(f"{metadata.file.name} has different numbers of KV heads in layers of one kind.")
    full = [layer for layer, kind in enumerate(types) if kind == "full_attention"]
    shape = {"head_dim": metadata.count("attention.key_length"), "num_key_value_heads": heads[-1]}
    windowed_heads = next(iter(by_type.get("sliding_attention", {heads[0]})))
    widths = metadata.counts("feed_forward_length", layers)
    for name in ("head_dim", "partial_rotary_factor", "rope_scaling", "rope_theta"):
        config.pop(name, None)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": types,
        "head_dim": metadata.count("attention.key_length_swa"),
        "num_key_value_heads": windowed_heads,
        "per_layer_config": {str(layer): shape for layer in full},
        "rope_parameters": _gguf_ropes(metadata, checkpoint, shape["head_dim"]),
        "attention_k_eq_v": bool(full) and not has(checkpoint, "attn_v.weight", full[0]),
        "num_kv_shared_layers": metadata.optional_count("attention.shared_kv_layers") or 0,
        "use_double_wide_mlp": len(set(widths)) > 1,
        **_gguf_per_layer_embedding(metadata, checkpoint),
        **({"enable_moe_block": True} if config.get("num_experts") else {}),
    }


def _gguf_ropes(metadata: Metadata, checkpoint: GGUFTensors, head_dim: int) -> Fields:
    """Return the ropes of both kinds of layers. Which frequencies turn is a tensor of divisors: 1, or 1e30 for none."""
    divisors = checkpoint.values("rope_freqs.weight")
    turning = head_dim // 8 if divisors is None else divisors.count(1.0)  # a quarter, as in all released models
    if divisors is not None and (len(divisors) != head_dim // 2 or any(each < 1e20 for each in divisors[turning:])):
        raise UnsupportedModel(f"{metadata.file.name} scales single frequencies of its rotary embedding.")
    local_dim = metadata.count("attention.key_length_swa")
    return {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 2 * turning / head_dim,
            "rope_theta": metadata.number("rope.freq_base") or 1_000_000.0,
        },
        "sliding_attention": {
            "rope_type": "default",
            "partial_rotary_factor": (metadata.optional_count("rope.dimension_count_swa") or local_dim) / local_dim,
            "rope_theta": metadata.number("rope.freq_base_swa") or 10_000.0,
        },
    }


def _gguf_per_layer_embedding(metadata: Metadata, checkpoint: GGUFTensors) -> Fields:
    table = checkpoint.tensors.get("per_layer_token_embd.weight")
    size = metadata.optional_count("embedding_length_per_layer_input") or 0
    if not size or table is None:
        return {"hidden_size_per_layer_input": 0}
    return {"hidden_size_per_layer_input": size, "vocab_size_per_layer_input": table.shape[0]}


_STORAGE = Storage(renames=_RENAMES)
TEXT_STORAGE = Storage(
    renames=_RENAMES,
    alternatives=text_part.STORAGE.alternatives,
    ignored=(r"(model\.)?(vision_tower|vision_embedder|audio_tower|embed_vision|embed_audio)\..*",),
)
NOTE = "Text only: the parts for images and sound are not loaded."
_SEEING_NOTE = f"{text_part.NOTE} Sound is not read."
GEMMA4 = Family(
    "Gemma 4 (text)",
    ("Gemma4ForCausalLM",),
    _gemma4_differences,
    {**_GEMMA4_DEFAULTS, **_PER_LAYER_DEFAULTS},
    _STORAGE,
    _one_form,
    gguf={
        "gemma4": GGUFFacts(
            "Gemma4ForCausalLM",
            {
                "final_logit_softcapping": "final_logit_softcapping",
                "num_experts": "expert_count",
                "top_k_experts": "expert_used_count",
                "moe_intermediate_size": "expert_feed_forward_length",
            },
            _gguf_gemma4,
            varying=("attention.head_count_kv", "feed_forward_length"),
            norms=_GGUF_GEMMA4,
        )
    },
)
GEMMA4_VISION = Family(
    "Gemma 4",
    ("Gemma4ForConditionalGeneration",),
    _gemma4_differences,
    {**_GEMMA4_DEFAULTS, **_PER_LAYER_DEFAULTS},
    TEXT_STORAGE,
    _gemma4_text,
    _SEEING_NOTE,
)
UNIFIED = Family(
    "Gemma 4 Unified (text)",
    ("Gemma4UnifiedForCausalLM",),
    _gemma4_differences,
    {**_GEMMA4_DEFAULTS, **_UNIFIED_DEFAULTS},
    _STORAGE,
    _one_form,
)
UNIFIED_VISION = Family(
    "Gemma 4 Unified",
    ("Gemma4UnifiedForConditionalGeneration",),
    _gemma4_differences,
    {**_GEMMA4_DEFAULTS, **_UNIFIED_DEFAULTS},
    TEXT_STORAGE,
    _gemma4_text,
    _SEEING_NOTE,
)
_GEMMA3N_DEFAULTS = {
    "vocab_size": 262_400,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "altup_num_inputs": 4,
    "num_kv_shared_layers": 15,
    "laurel_rank": 64,
}


def _gemma3n_differences(config: Config) -> dict[str, Any]:
    windowed = windowed_layers(config, lambda layer: (layer + 1) % 5 != 0)
    sizes = per_layer_input(config)
    if sizes is None:
        raise CorruptModel("config.json has no hidden_size_per_layer_input.", "Gemma 3n has per-layer embeddings.")
    return shared_differences(config) | {
        "layer_is_windowed": windowed,
        "kv_source": kv_sources(config, windowed),
        "layer_widths": tuple(config.get("layer_widths") or ()),
        "layer_sparsity": layer_sparsity(config),
        "altup": altup(config),
        "per_layer_input": sizes,
        "topology": "gemma3n",
    }


def _one_width(config: Config) -> Config:
    """Return a config whose intermediate_size, stated per layer, is the largest; layer_widths if they differ."""
    widths = config.get("intermediate_size")
    if not isinstance(widths, list):
        return config
    if len(widths) != config.get("num_hidden_layers") or not all(type(width) is int and width > 0 for width in widths):
        raise CorruptModel(f"config.json has intermediate_size = {widths!r}.", "It must be a size for each layer.")
    return {**config, "intermediate_size": max(widths), "layer_widths": widths if len(set(widths)) > 1 else None}


def _gemma3n_text(config: Config) -> Config:
    return _one_width(text_part.text_config(config))


def _gguf_gemma3n(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    """Return Gemma 3n's fields. Files state the cut-off of a sparse gate in standard deviations, not as a share."""
    layers, cuts = config["num_hidden_layers"], metadata.get("activation_sparsity_scale")
    if not isinstance(cuts, list) or len(cuts) != layers or not all(isinstance(cut, int | float) for cut in cuts):
        metadata.fail("activation_sparsity_scale", f"It is {cuts!r}, not a number for each of {layers} layers.")
    rank = checkpoint.tensors.get("blk.0.laurel_l.weight")
    if rank is None:
        raise CorruptModel(f"{metadata.file.name} has no blk.0.laurel_l.weight.")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": layer_types(metadata),
        "intermediate_size": metadata.counts("feed_forward_length", layers),
        "activation_sparsity_pattern": [0.0 if cut < -10 else NormalDist().cdf(cut) for cut in cuts],
        "num_kv_shared_layers": metadata.optional_count("attention.shared_kv_layers") or 0,
        "altup_active_idx": metadata.optional_count("altup.active_idx") or 0,
        "altup_num_inputs": metadata.count("altup.num_inputs"),
        "altup_correct_scale": has(checkpoint, "altup_correct_scale.weight"),
        "laurel_rank": rank.shape[0],
        "rope_local_base_freq": metadata.number("rope.freq_base_swa") or 10_000.0,
        **_gguf_per_layer_embedding(metadata, checkpoint),
    }


GEMMA3N = Family(
    "Gemma 3n (text)",
    ("Gemma3nForCausalLM",),
    _gemma3n_differences,
    _GEMMA3N_DEFAULTS,
    common_names=_one_width,
    gguf={
        "gemma3n": GGUFFacts(
            "Gemma3nForCausalLM",
            {"final_logit_softcapping": "final_logit_softcapping"},
            _gguf_gemma3n,
            varying=("feed_forward_length",),
            norms=_GGUF_GEMMA3N,
        )
    },
)
GEMMA3N_VISION = Family(
    "Gemma 3n",
    ("Gemma3nForConditionalGeneration",),
    _gemma3n_differences,
    _GEMMA3N_DEFAULTS,
    TEXT_STORAGE,
    _gemma3n_text,
    NOTE,
)


def altup(config: Config) -> AltUpSpec:
    """Parse the fields of a config. Raises `CorruptModel` for impossible ones."""
    count, active = size(config, "altup_num_inputs"), config.get("altup_active_idx", 0)
    if count < 2 or not isinstance(active, int) or not 0 <= active < count:
        raise CorruptModel(f"config.json has altup_active_idx = {active!r} of altup_num_inputs = {count}.")
    return AltUpSpec(count, active, bool(config.get("altup_correct_scale")), size(config, "laurel_rank"))


def layer_sparsity(config: Config) -> tuple[float, ...]:
    """Return for each layer the share of the feed-forward part's gate that becomes zero; empty: none in any layer."""
    layers, pattern = size(config, "num_hidden_layers"), config.get("activation_sparsity_pattern")
    if pattern is None:
        pattern = [0.95] * (10 if layers > 10 else 0) + [0.0] * (layers - (10 if layers > 10 else 0))
    pattern = pattern if isinstance(pattern, list) else [pattern] * layers
    if len(pattern) != layers or not all(isinstance(share, int | float) and 0 <= share < 1 for share in pattern):
        raise CorruptModel("config.json's activation_sparsity_pattern is not a share for each layer, below 1.")
    return tuple(float(share) for share in pattern) if any(pattern) else ()


def per_layer_input(config: Config) -> PerLayerInputSpec | None:
    """Parse the sizes of a config; None: the model has no per-layer embeddings."""
    if not config.get("hidden_size_per_layer_input"):
        return None
    pad = config.get("pad_token_id")
    sizes = size(config, "hidden_size_per_layer_input"), size(config, "vocab_size_per_layer_input")
    return PerLayerInputSpec(*sizes, pad if isinstance(pad, int) else 0)
