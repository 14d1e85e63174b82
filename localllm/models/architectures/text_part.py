"""The text part of a model that also sees: its fields, its tensors, and what is left where it lies.

Does not know: which families have such models.
"""

from __future__ import annotations

from typing import Any

from localllm.errors import CorruptModel
from localllm.models.architectures.family import Config, Storage

NOTE = "Text only: the parts that see are not loaded."
STORAGE = Storage(
    alternatives=((r"^", "language_model."), (r"^model\.", "model.language_model.")),
    ignored=(r"(model\.)?(vision_tower|multi_modal_projector)\..*",),
)
"""language_model.model.layers as published, model.language_model.layers as transformers 5 writes it."""


def text_config(config: Config) -> dict[str, Any]:
    """The fields of the text part, and those of the whole that it leaves out."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise CorruptModel(f"config.json has text_config = {text!r}.", "It must be an object.")
    return {**config, **text, "architectures": config["architectures"]}
