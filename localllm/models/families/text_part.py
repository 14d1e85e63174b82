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
_OUTSIDE = rf"(?!{WITHIN}|lm_head\.).*"
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
    alternatives = (*family.storage.alternatives, *storage("text_model", text.storage).alternatives)
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
