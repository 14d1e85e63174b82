"""The text part of a vision-language model: its fields, its tensors, and the tensors to ignore.

Does not know: which families have such models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.models.spec.family import Config, Family, Storage

NOTE = "Text only: the vision part is not loaded."
WITHIN = r"(?:model\.)?(?:language_model|text_model)\."
"""Begins the names of tensors of a text part under one of its usual names."""
_OUTSIDE = rf"(?!{WITHIN}|(?:thinker\.)?lm_head\.|thinker\.model\.).*"
_VISION = (
    "vision_tower",
    "vision_model",
    "visual",
    "multi_modal_projector",
    "connector",
    "vision_adapter",
    "vision_projection",
    "vit_large_projector",
)
_ALONE = ("image_newline",)  # tensors of the whole model that the text part does not have


def storage(text: str = "language_model", of: Storage | None = None) -> Storage:
    """Return the storage of a model whose text part is named `text`. of: the text part's own; None: Llama's names.

    language_model.model.layers as many models are published, model.language_model.layers as transformers 5 writes it.
    """
    plain = Storage() if of is None else of
    return replace(
        plain,
        alternatives=(*plain.alternatives, (r"^", f"{text}."), (r"^model\.", f"model.{text}.")),
        ignored=(*plain.ignored, rf"(model\.)?({'|'.join(_VISION)})\..*", rf"(model\.)?({'|'.join(_ALONE)})"),
    )


STORAGE = storage()


def is_text_part(own: Storage) -> bool:
    """Return whether the storage is that of a text part."""
    return any(pattern == r"^" for pattern, _ in own.alternatives)


def text_config(config: Config) -> dict[str, Any]:
    """Return the fields of the text part, and of the whole model where they say whether embeddings are tied.

    Some models have both parts' fields in one place.
    """
    text = config.get("text_config")
    if text is None and "hidden_size" in config:
        return dict(config)
    if not isinstance(text, dict):
        raise CorruptModel(f"config.json has text_config = {text!r}.", "It must be an object.")
    whole = {name: config[name] for name in ("architectures", "tie_word_embeddings") if config.get(name) is not None}
    return {**config, **text, **whole}


_TOWER_FIELDS = (
    "activation_function", "d_model", "downsample_hidden_size", "encoder_attention_heads", "encoder_ffn_dim",
    "encoder_layers", "n_window", "n_window_infer", "num_mel_bins", "output_dim", "scale_embedding",
)  # fmt: skip
_MROPE_FIELDS = ("interleaved", "mrope_interleaved", "mrope_section", "type")
QWEN_ENDS = (151643, 151645)
"""Tokens that end a text of Qwen, where no file names them."""


def is_thinker(config: Config) -> bool:
    """Return whether a config.json is that of Qwen3-ASR as Qwen publishes it: inside of a `thinker`."""
    return config.get("model_type") == "qwen3_asr" and "thinker_config" in config


def without_thinker(config: Config) -> dict[str, Any]:
    """Return the config of `is_thinker` in the form that transformers gives it. The three positions of a token are
    equal for text and for sound, so one is left. Raises `CorruptModel`, `UnsupportedModel`."""
    thinker = config["thinker_config"]
    parts: list[Any] = []
    if isinstance(thinker, dict):
        parts = [thinker.get(name) for name in ("text_config", "audio_config")]
    if not parts or not all(isinstance(part, dict) for part in parts):
        what = f"config.json has thinker_config = {str(thinker)[:60]}."
        raise CorruptModel(what, "It must be an object with text_config and audio_config.")
    if "classify_num" in thinker:
        what, why = "Qwen3-ForcedAligner is not supported.", "It finds the times of a known text, and writes none."
        raise UnsupportedModel(what, why, "localllm pull Qwen/Qwen3-ASR-0.6B transcribes.")
    text, audio = parts
    scaling = {name: each for name, each in (text.get("rope_scaling") or {}).items() if name not in _MROPE_FIELDS}
    scaling = {} if scaling.get("rope_type", "default") == "default" else scaling
    text = {**text, "model_type": "qwen3", "rope_scaling": scaling or None}
    whole = {name: value for name, value in config.items() if name not in ("thinker_config", "support_languages")}
    return {
        "eos_token_id": list(QWEN_ENDS), **whole, "text_config": text, "audio_token_id": thinker.get("audio_token_id"),
        "audio_config": {name: audio[name] for name in _TOWER_FIELDS if name in audio},
    }  # fmt: skip


def of_family(
    name: str, architectures: tuple[str, ...], text: Family, *, prefix: str = "language_model", **defaults: Any
) -> Family:
    """Return the family of models whose text part is of the family `text`. defaults: replace `text`'s."""

    def common_names(config: Config) -> Config:
        return text.common_names(text_config(config))

    return replace(
        text,
        name=name,
        architectures=architectures,
        defaults={**text.defaults, **defaults},
        storage=storage(prefix, text.storage),
        common_names=common_names,
        note=NOTE,
        gguf={},
        mtp=None,
    )


def unlisted(architecture: str, text: Family) -> Family:
    """Return the family of a model that no module here describes, from the family of its text part."""
    family = of_family(f"{architecture} ({text.name})", (architecture,), text)
    alternatives = (*family.storage.alternatives, *storage("text_model", text.storage).alternatives, (r"^", "thinker."))
    ignored = (*text.storage.ignored, _OUTSIDE)
    return replace(family, storage=replace(family.storage, alternatives=alternatives, ignored=ignored))


def of_families(
    name: str, architectures: tuple[str, ...], texts: Mapping[str, Family], *, prefix: str = "language_model"
) -> Family:
    """Return the family of models whose text part is of one of several families, by model_type; all store it alike."""

    def chosen(config: Config) -> Family:
        kind = str(config.get("model_type"))
        if kind not in texts:
            raise UnsupportedModel(
                f"{name} with a text part of type {kind!r} is not supported.", f"Supported: {', '.join(sorted(texts))}."
            )
        return texts[kind]

    def common_names(config: Config) -> Config:
        fields = text_config(config)
        family = chosen(fields)
        return {**family.defaults, **family.common_names(fields)}

    def differences(config: Config) -> dict[str, Any]:
        return chosen(config).differences(config)

    return Family(name, architectures, differences, {}, storage(prefix), common_names, NOTE)
