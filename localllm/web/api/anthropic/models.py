"""Models as Anthropic's clients read them.

Does not know: HTTP (model_list.py has the handlers).
"""

from __future__ import annotations

from datetime import UTC, datetime

from localllm.web.api.anthropic import shapes
from localllm.web.api.model_facts import ModelFacts


def anthropic_object(model: ModelFacts) -> shapes.AnthropicModel:
    card = model.entry.card if model.entry is not None else None
    created = datetime.fromtimestamp(card.created_s if card is not None else 0, UTC)
    can = {"image_input": model.abilities.vision, "thinking": model.abilities.reasoning}
    return shapes.AnthropicModel(
        type="model",
        id=model.name,
        display_name=model.name,
        created_at=created.isoformat(timespec="seconds").replace("+00:00", "Z"),
        max_input_tokens=model.context,
        max_tokens=model.context,
        capabilities={name: {"supported": has} for name, has in can.items()},
    )


def anthropic_list(models: list[ModelFacts]) -> shapes.AnthropicModels:
    objects = [anthropic_object(each) for each in models]
    first, last = (objects[0].id, objects[-1].id) if objects else (None, None)
    return shapes.AnthropicModels(objects, has_more=False, first_id=first, last_id=last)
