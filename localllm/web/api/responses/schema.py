"""Request bodies: the honoured fields and their types.

Does not know: the model, input items (items.py), sampling rules.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec


class TextConfig(msgspec.Struct, kw_only=True):
    format: dict[str, Any] | None = None


class ResponseReasoning(msgspec.Struct, kw_only=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ResponsesBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None  # calls of MCP servers that this response may run
    text: dict[str, Any] | None = None  # TextConfig
    reasoning: dict[str, Any] | None = None  # ResponseReasoning
    max_output_tokens: int | None = None
    truncation: Literal["auto", "disabled"] | None = None  # auto: drop the oldest items of a long prompt
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None  # this field and the next three are repeated in the answer
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    top_k: int | None = None  # vLLM's fields from here on
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    thinking_token_budget: int | None = None


class ItemsQuery(msgspec.Struct, kw_only=True):
    """The query of GET .../input_items."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
