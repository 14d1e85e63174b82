"""Fields of a ModelSpec from a checkpoint's config class, for models that `transformers` computes.

The class fills in what config.json omits, so no family needs to be known here. Refused by name: models that are not
causal language models, layers of other kinds than attention and recurrence, models that need the checkpoint's own code.
Does not know: weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from localllm.errors import CorruptModel, ModelError, UnsupportedModel
from localllm.models.spec.recurrent import LayerPart, RecurrentSpec
from localllm.models.transformers_backend.config_class import first_line, load_causal_config, text_part

_LENGTHS = ("max_position_embeddings", "max_seq_len", "seq_length", "n_positions", "model_max_length")
_PARTS: dict[str, LayerPart] = {
    "full_attention": "attention",
    "sliding_attention": "attention",
    "attention": "attention",
    "linear_attention": "recurrent",
    "conv": "recurrent",
    "mamba": "recurrent",
    "hybrid": "both",
    "hybrid_sliding": "both",
    "mlp": "mlp",
    "moe": "moe",
    "minimax_m3_sparse": "attention",
    "indexed_attention": "attention",
    "compressed_sparse_attention": "attention",
    "heavily_compressed_attention": "attention",
}
"""What mixes tokens in a layer, by the kinds of layers that configs name. Others are not supported."""
_WINDOWED = ("sliding_attention", "hybrid_sliding")
_FROM_PADDING = (
    "camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip
"""Types that number positions from after the padding token."""


def transformers_fields(path: Path, architecture: str, *, trust_remote_code: bool) -> dict[str, Any]:
    """Return sizes, layers and context length by ModelSpec's names. Raises `UnsupportedModel`, `CorruptModel`."""
    config = load_causal_config(path, architecture, trust_remote_code=trust_remote_code)
    try:
        if getattr(config, "is_encoder_decoder", False):
            why = "It has an encoder; only decoders are supported."
            raise UnsupportedModel(f"{architecture} is not supported.", why)
        fields = {**sizes_of(config), **layers_of(text_part(config), architecture)}
        fields["max_position"] -= first_position(config)
        text = text_part(config)
        fields["reads_token_ids"] = _reads_token_ids(text)
        fields["class_streams"] = getattr(text, "hc_count", None) or getattr(text, "hc_mult", None) or 1
        fields["class_mlp_tensors"] = 6 if getattr(text, "swiglu_limit", None) else 3
        if any(part in ("recurrent", "both") for part in fields.get("layer_kinds", ())):
            fields["recurrent"] = _recurrent(path, architecture, trust_remote_code=trust_remote_code)
        return fields
    except ModelError:
        raise
    except Exception as error:  # config classes raise many kinds of errors
        raise UnsupportedModel(
            f"{architecture} is not supported.",
            f"Its config cannot be read through transformers: {type(error).__name__}: {first_line(error)}",
        ) from error


def sizes_of(config: Any) -> dict[str, Any]:
    """Return the sizes in a `PreTrainedConfig` by ModelSpec's names.

    Raises `CorruptModel` for sizes that are not whole numbers above 0, `UnsupportedModel` for sizes that it lacks.
    """
    text = text_part(config)
    heads = _whole(text, "num_attention_heads")
    hidden = _whole(text, "hidden_size")
    kinds = getattr(text, "layer_types", None) or [""] * len(_layer_configs(text))
    shapes = tuple(map(_kv_shape, _layer_configs(text), kinds))
    return {
        "num_layers": _whole(text, "num_hidden_layers"),
        "hidden_size": hidden,
        "intermediate_size": max(
            _whole(text, "intermediate_size", 4 * hidden), getattr(text, "dense_intermediate_size", None) or 0
        ),
        "num_heads": heads,
        "num_kv_heads": shapes[0][0],
        "head_dim": shapes[0][1],
        "layer_kv_shapes": shapes if len(set(shapes)) > 1 else (),
        "vocab_size": _whole(text, "unpadded_vocab_size", _whole(text, "vocab_size")),  # that many logits
        "max_position": next(value for name in (*_LENGTHS, None) if (value := _length(text, name))),
        "tie_word_embeddings": bool(getattr(config, "tie_word_embeddings", False)),
    }


def _reads_token_ids(config: Any) -> bool:
    """Return whether layers read token ids: by embeddings of their own, or to choose experts."""
    embeds = getattr(config, "ple_layer_ids", None) or getattr(config, "hidden_size_per_layer_input", None)
    return bool(embeds) or "hash_moe" in (getattr(config, "mlp_layer_types", None) or ())


def first_position(config: Any) -> int:
    """Return the number that the class gives to the first position of a text."""
    return 1 + (config.pad_token_id or 0) if config.model_type in _FROM_PADDING else 0


def layers_of(config: Any, architecture: str) -> dict[str, Any]:
    """Return what mixes tokens in each layer, and which layers are windowed."""
    count = _whole(config, "num_hidden_layers")
    kinds = [str(kind) for kind in getattr(config, "layer_types", None) or ["full_attention"] * count]
    if other := sorted(set(kinds) - set(_PARTS)):
        raise UnsupportedModel(
            f"{architecture} is not supported.",
            f"It has layers of type {', '.join(other)}; supported: {', '.join(_PARTS)}.",
        )
    if len(kinds) != count:
        raise CorruptModel(f"config.json describes {len(kinds)} layers in layer_types and {count} elsewhere.")
    parts = tuple(_PARTS[kind] for kind in kinds)
    if not any(part in ("attention", "both") for part in parts):
        raise UnsupportedModel(f"{architecture} is not supported.", "None of its layers has attention.")
    windowed = tuple(kind in _WINDOWED for kind in kinds)
    indexed = tuple(_index_size(config, layer, kind) for layer, kind in enumerate(kinds))
    return {
        "layer_index_sizes": indexed if any(indexed) else (),
        "layer_kinds": () if set(parts) == {"attention"} else parts,
        "layer_is_windowed": windowed if any(windowed) else (),
        "sliding_window": _window(config, architecture, windowed) if any(windowed) else None,
    }


def _index_size(config: Any, layer: int, kind: str) -> int:
    """Return the numbers that a layer's indexer or compressor keeps for each token; 0: it has none."""
    if kind == "heavily_compressed_attention":
        return 2 * _whole(config, "head_dim")  # a value and its gate
    if kind == "compressed_sparse_attention":  # twice, since windows overlap; the indexer's beside them
        return 4 * (_whole(config, "head_dim") + _whole(config, "index_head_dim"))
    if kind not in ("minimax_m3_sparse", "indexed_attention"):
        return 0
    if (getattr(config, "indexer_types", None) or ["full"] * (layer + 1))[layer] != "full":
        return 0
    size = _whole(config, "indexer_head_dim" if hasattr(config, "indexer_head_dim") else "index_head_dim")
    return 2 * size + 1 if getattr(config, "index_kpool", None) else size  # a key, its gate, and whether it is there


def _window(config: Any, architecture: str, windowed: tuple[bool, ...]) -> int:
    """Return the tokens that windowed layers see."""
    layers = zip(_layer_configs(config), windowed, strict=True)
    found = [getattr(layer, "sliding_window", None) for layer, own in layers if own]
    window = found[0]
    if len(set(map(repr, found))) > 1:
        raise UnsupportedModel(f"{architecture} is not supported.", f"Its layers have windows of {found} tokens.")
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise CorruptModel(
            f"config.json has sliding_window = {window!r}, and layers that use it.", "It must be above 0."
        )
    return window


def _recurrent(path: Path, architecture: str, *, trust_remote_code: bool) -> RecurrentSpec:
    """Return the sizes of the states that the class keeps, from a model without data. Only this needs torch."""
    from localllm.models.transformers_backend.mixers import find_mixers
    from localllm.models.transformers_backend.module import module_on_meta

    mixers = find_mixers(module_on_meta(path, architecture, trust_remote_code=trust_remote_code), architecture)
    if not mixers:
        raise UnsupportedModel(
            f"{architecture} is not supported.",
            "It has recurrent layers, and none of its modules asks the cache of transformers for its states.",
        )
    conv, matrix = (max(mixer.numbers(kind) for mixer in mixers) for kind in ("conv", "matrix"))
    return RecurrentSpec("module", held=(conv, matrix))


def _kv_shape(layer: Any, kind: str) -> tuple[int, int]:
    """Return the KV heads and their size as the class hands them to attention. kind: of the layer, in layer_types."""
    heads = _whole(layer, "num_attention_heads")
    if layer.model_type == "jetmoe":  # keys are repeated for each chosen expert
        return heads, _whole(layer, "kv_channels")
    if layer.model_type == "mimo_v2_flash" and kind in _WINDOWED:
        return 2 * _whole(layer, "num_key_value_heads"), _whole(layer, "head_dim")
    if layer.model_type == "inkling_text" and kind in _WINDOWED:
        return _whole(layer, "swa_num_key_value_heads"), _whole(layer, "swa_head_dim")
    if getattr(layer, "kv_lora_rank", None) is not None:  # keys are made from a latent, for each head
        return heads, _whole(layer, "qk_nope_head_dim") + (layer.qk_rope_head_dim or 0)
    width = _whole(layer, "head_dim", _whole(layer, "hidden_size") // heads)
    return _whole(layer, "num_key_value_heads", heads), width


def _layer_configs(config: Any) -> list[Any]:
    """Return a config for each layer, as they may differ in any field (Gemma 4)."""
    count = _whole(config, "num_hidden_layers")
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config] * count


def _whole(config: Any, name: str, default: int | None = None) -> int:
    differs = name in (getattr(config, "per_layer_attributes", None) or ())
    value = getattr(config.per_layer_config[0] if differs else config, name, None)
    if isinstance(value, list) and value:
        value = max(value)  # layers of different widths: use an upper bound
    value = default if value is None else value
    if value is None:
        kind = getattr(config, "model_type", "?")
        raise UnsupportedModel(
            f"Models of type {kind!r} are not supported.", f"Their config has no {name}, as decoders with attention do."
        )
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CorruptModel(f"config.json has {name} = {value!r}.", "It must be a whole number above 0.")
    return value


def _length(config: Any, name: str | None) -> int:
    if name is None:
        return 2048
    value = getattr(config, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
