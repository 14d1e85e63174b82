"""The text part of a vision-language model: its fields, its tensors, and the tensors to ignore.

Does not know: which families have such models.
"""

from __future__ import annotations

from typing import Any

from localllm.errors import CorruptModel
from localllm.models.spec.family import Config, Storage

NOTE = "Text only: the vision part is not loaded."
STORAGE = Storage(
    alternatives=((r"^", "language_model."), (r"^model\.", "model.language_model.")),
    ignored=(r"(model\.)?(vision_tower|multi_modal_projector)\..*",),
)
"""language_model.model.layers as published, model.language_model.layers as transformers 5 writes it."""


def text_config(config: Config) -> dict[str, Any]:
    """Return the fields of the text part, completed by those of the whole model."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise CorruptModel(f"config.json has text_config = {text!r}.", "It must be an object.")
    return {**config, **text, "architectures": config["architectures"]}
