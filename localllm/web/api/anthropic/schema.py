"""Request bodies: the honoured fields and their types.

Does not know: the model, content blocks (conversation.py), sampling rules.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Content = str | list[dict[str, Any]]  # text, or content blocks


class InputMessage(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: Content


class AnthropicThinking(msgspec.Struct, kw_only=True):
    type: Literal["enabled", "adaptive", "disabled"]  # adaptive: the model's default
    budget_tokens: int | None = None  # of reasoning; may be less than 1,024 here


class OutputFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Tool(msgspec.Struct, kw_only=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None  # the tool's name
    disable_parallel_tool_use: bool | None = None


class CountBody(msgspec.Struct, kw_only=True):
    """The fields that determine the prompt."""

    model: str | None = None
    messages: list[InputMessage]
    system: Content | None = None
    thinking: dict[str, Any] | None = None  # AnthropicThinking
    output_config: dict[str, Any] | None = None  # OutputConfig
    tools: list[dict[str, Any]] | None = None  # Tool
    tool_choice: dict[str, Any] | None = None  # ToolChoice


class MessagesBody(CountBody, kw_only=True):
    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
