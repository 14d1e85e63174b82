"""Gemma 4 (text): Gemma 3's two kinds of layers, with heads of different sizes, and more in each layer.

Unlike older Gemmas, norms are stored as they are (not w - 1), and scores are not scaled. Full layers have wider and
fewer KV heads than windowed ones, and only a quarter of their frequencies turn. v is normed too, without a weight.
Then, by size of the model:

    E2B, E4B    per-layer embeddings; the last layers read the K and V of the last layer of their kind that has some,
                and have a feed-forward part twice as wide
    12B, 31B    values of full layers are made from their keys' matrix
    26B-A4B     the same, and experts beside the dense feed-forward part

Does not know: how a layer computes (layer.py: Gemma4Layer).

Gemma 3n (text): Gemma 4's shared K and V, norms and per-layer embeddings, with heads of one size. Also four
residual streams, of which each layer computes one (AltUp), a low-rank matrix beside attention (LAuReL), and in the
first layers a gate of which all but about 5 % is cut off.

Does not know: how a layer computes (layer.py: Gemma3nLayer).
"""

from __future__ import annotations

from typing import Any

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.models.families import text_part
from localllm.models.spec.family import Config, Family, Storage, windowed_layers
from localllm.models.spec.fields import NormSpec, number, size
from localllm.models.spec.gemma import altup, layer_sparsity, per_layer_input
from localllm.models.spec.mixture import MixtureSpec, mixture

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
    windowed = _windowed(config)
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


def _windowed(config: Config) -> tuple[bool, ...]:
    """Return which layers are windowed. The last one never is, whatever the config says."""
    windowed = windowed_layers(config, lambda layer: (layer + 1) % 6 != 0)
    return (*windowed[:-1], False)


def kv_sources(config: Config, windowed: tuple[bool, ...]) -> tuple[int, ...]:
    """Return for each layer the layer whose K and V it reads; empty: its own.

    The last num_kv_shared_layers layers read those of the last layer before them that is windowed as they are.
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


_STORAGE = Storage(renames=_RENAMES)
TEXT_STORAGE = Storage(
    renames=_RENAMES,
    alternatives=text_part.STORAGE.alternatives,
    ignored=(r"(model\.)?(vision_tower|vision_embedder|audio_tower|embed_vision|embed_audio)\..*",),
)
NOTE = "Text only: the parts for images and sound are not loaded."
GEMMA4 = Family(
    "Gemma 4 (text)",
    ("Gemma4ForCausalLM",),
    _gemma4_differences,
    {**_GEMMA4_DEFAULTS, **_PER_LAYER_DEFAULTS},
    _STORAGE,
    _one_form,
)
GEMMA4_VISION = Family(
    "Gemma 4",
    ("Gemma4ForConditionalGeneration",),
    _gemma4_differences,
    {**_GEMMA4_DEFAULTS, **_PER_LAYER_DEFAULTS},
    TEXT_STORAGE,
    _gemma4_text,
    NOTE,
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
    NOTE,
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


GEMMA3N = Family(
    "Gemma 3n (text)", ("Gemma3nForCausalLM",), _gemma3n_differences, _GEMMA3N_DEFAULTS, common_names=_one_width
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
