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
    """Return the fields of the text part, completed by those of the whole model.

    The two may contradict each other about a tied head: transformers 5 writes the text part's default beside what is
    meant. It is tied here if one of them says so, and the loader finds out whether the checkpoint stores a head.
    """
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise CorruptModel(f"config.json has text_config = {text!r}.", "It must be an object.")
    tied = bool(config.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    said = {"tie_word_embeddings": tied} if "tie_word_embeddings" in {**config, **text} else {}
    return {**config, **text, **said, "architectures": config["architectures"]}
