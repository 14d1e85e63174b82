"""Request bodies: the honoured fields with their types, and the rules of every other field that clients send.

Does not know: how the rules are applied (api/fields.py), the model, input items (items.py), sampling rules.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from localllm.web.api.fields import FieldRules, ListOf, Refused, one_of
from localllm.web.api.hints import hints_of

NOTHING_HERE = ListOf(frozenset({
    "reasoning.encrypted_content",  # reasoning is always readable, and is returned by the client in the same form
    "web_search_call.action.sources", "web_search_call.results", "code_interpreter_call.outputs",
    "computer_call_output.output.image_url", "file_search_call.results", "message.input_image.image_url",
}))  # fmt: skip
"""Values of `include` for data that does not exist here, so they have no effect."""

RULES = FieldRules(
    harmless=frozenset({
        "moderation", "access_programs",  # fields of a hosted service
        "prompt_cache_options", "prompt_cache_retention",  # the prefix cache needs no hints
        "stream_options",  # padding against traffic analysis; a local server sends none
        "image",  # images are not supported
    }),
    hints=hints_of("responses"),
    refused={
        "background": Refused("Background answers are not supported.", one_of(False)),
        "background_options": Refused("Background answers are not supported."),
        "conversation": Refused("Conversations are not supported: send previous_response_id, or every item."),
        "include": Refused("Use /v1/chat/completions for log-probabilities; nothing else is supported.", NOTHING_HERE),
        "prompt": Refused("Stored prompts are not supported: send instructions and input."),
        "top_logprobs": Refused("Use /v1/chat/completions for log-probabilities.", one_of(0)),
    },
)  # fmt: skip

TEXT_RULES = FieldRules(hints=hints_of("responses", "text."))
"""Of `text`."""

REASONING_RULES = FieldRules(hints=hints_of("responses", "reasoning."))
"""Rules of `reasoning`."""

_FINISHED = "Stored responses are complete, so they are not streamed."
QUERY_RULES = FieldRules(
    harmless=frozenset({"include_obfuscation"}),
    refused={
        "stream": Refused(_FINISHED, one_of("false")),
        "starting_after": Refused(_FINISHED),
        "include": Refused("Stored items are returned unchanged."),
        "include[]": Refused("Stored items are returned unchanged."),
    },
)
"""Rules of the query of GET."""


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
