"""Request bodies: the fields that are honoured, and their types.

Does not know: the model, content blocks (conversation.py), sampling rules.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Content = str | list[dict[str, Any]]  # text, or content blocks


class InputMessage(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: Content


class Thinking(msgspec.Struct, kw_only=True):
    type: str


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountBody(msgspec.Struct, kw_only=True):
    """What makes the prompt."""

    model: str | None = None
    messages: list[InputMessage]
    system: Content | None = None
    thinking: Thinking | None = None
    output_config: dict[str, Any] | None = None  # OutputConfig


class MessagesBody(CountBody, kw_only=True):
    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
