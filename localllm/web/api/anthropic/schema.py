"""Request bodies: the honoured fields with their types, and the rules of every other field that clients send.

Does not know: how the rules are applied (api/fields.py), the model, content blocks (conversation.py), HTTP.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from localllm.web.api.fields import FieldRules, Refused, empty, one_of
from localllm.web.api.hints import hints_of

RULES = FieldRules(
    harmless=frozenset({
        "metadata", "inference_geo", "user_profile_id", "workspace_id",  # fields of a hosted service
        "billing_policy", "fallback_credit_token", "diagnostics",
        "cache_control",  # the prefix cache needs no hints
    }),
    hints=hints_of("anthropic"),
    refused={
        "container": Refused("This server does not run code."),
        "mcp_servers": Refused("This server does not call other servers.", empty),
        "fallbacks": Refused("There is no fallback: only the named model answers.", empty),
        "compaction": Refused("This server does not shorten conversations.", empty),
        "thread": Refused("This server stores no conversations."),
    },
)  # fmt: skip

OUTPUT_RULES = FieldRules(hints=hints_of("anthropic", "output_config."))
"""Rules of `output_config`."""

THINKING_RULES = FieldRules(hints=hints_of("anthropic", "thinking."))
"""Rules of `thinking`."""

TOOL_RULES = FieldRules(
    harmless=frozenset({"cache_control", "eager_input_streaming"}),  # arguments are streamed as they are written
    hints=hints_of("anthropic", "tools."),
    refused={
        "type": Refused("Only tools of the client are supported, not tools that run on the server.", one_of("custom")),
        "allowed_callers": Refused("This server does not run code.", one_of(["direct"])),
    },
)
"""Rules of each item of `tools`."""

CHOICE_RULES = FieldRules()
"""Rules of `tool_choice`."""

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
