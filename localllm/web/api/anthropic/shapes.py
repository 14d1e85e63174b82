"""Answers of the Anthropic dialect, as they are sent, and models as its clients read them.

Does not know: HTTP, where an answer's values come from.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

from localllm.web.api.model_facts import ModelFacts
from localllm.web.shape import Shape


class AnthropicUsage(Shape):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class TextBlock(Shape, tag="text"):
    text: str


class AnthropicThinkingBlock(Shape, tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(Shape, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | AnthropicThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class Started(Shape):
    """A message before its first token."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: None
    stop_sequence: None
    usage: AnthropicUsage


class AnthropicMessage(Shape):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason
    stop_sequence: str | None
    usage: AnthropicUsage


class MessageStart(Shape, tag="message_start"):
    message: Started


class Ping(Shape, tag="ping"):
    pass


class BlockStart(Shape, tag="content_block_start"):
    index: int
    content_block: Block


class AnthropicTextDelta(Shape, tag="text_delta"):
    text: str


class ThinkingDelta(Shape, tag="thinking_delta"):
    thinking: str


class InputDelta(Shape, tag="input_json_delta"):
    partial_json: str


Delta = AnthropicTextDelta | ThinkingDelta | InputDelta


class BlockDelta(Shape, tag="content_block_delta"):
    index: int
    delta: Delta


class BlockStop(Shape, tag="content_block_stop"):
    index: int


class End(Shape):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Shape, tag="message_delta"):
    delta: End
    usage: AnthropicUsage


class MessageStop(Shape, tag="message_stop"):
    pass


Event = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


class AnthropicModel(Shape):
    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int | None
    max_tokens: int | None
    capabilities: dict[str, dict[str, bool]]


class AnthropicModels(Shape):
    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


class TokenCount(Shape):
    input_tokens: int


def anthropic_object(model: ModelFacts) -> AnthropicModel:
    card = model.entry.card if model.entry is not None else None
    created = datetime.fromtimestamp(card.created_s if card is not None else 0, UTC)
    can = {"image_input": model.abilities.vision, "thinking": model.abilities.reasoning}
    return AnthropicModel(
        type="model",
        id=model.name,
        display_name=model.name,
        created_at=created.isoformat(timespec="seconds").replace("+00:00", "Z"),
        max_input_tokens=model.context,
        max_tokens=model.context,
        capabilities={name: {"supported": has} for name, has in can.items()},
    )


def anthropic_list(models: list[ModelFacts]) -> AnthropicModels:
    objects = [anthropic_object(each) for each in models]
    first, last = (objects[0].id, objects[-1].id) if objects else (None, None)
    return AnthropicModels(objects, has_more=False, first_id=first, last_id=last)
