"""Request bodies: the honoured fields with their types, the rules of every other field and option that clients send,
and how a body is parsed: JSON is accepted without a content type, as Ollama does.

Does not know: how the rules are applied (api/fields.py), the model, messages and options (conversation.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import msgspec

from localllm.web.api.exchange import ApiRequest, Body, json_body
from localllm.web.api.fields import FieldRules, Refused, SamplerFields, empty, one_of
from localllm.web.api.hints import hints_of
from localllm.web.api.openapi import RequestBody
from localllm.web.api.reading import read

RULES = FieldRules(
    hints=hints_of("ollama"),
    refused={
        "images": Refused("A picture belongs to a message: send messages[].images.", empty),
        "template": Refused("A request may not bring its own template.", empty),
        "context": Refused("Send the conversation to /api/chat.", empty),
        "width": Refused("Supported output: text.", one_of(0)),
        "height": Refused("Supported output: text.", one_of(0)),
        "steps": Refused("Supported output: text.", one_of(0)),
    },
)
"""Rules of chat and generate."""

CHAT_RULES = replace(RULES, refused={**RULES.refused, "suffix": Refused("Use /api/generate with a suffix.", empty)})
"""Of chat."""
GENERATE_RULES = replace(
    RULES,
    refused={name: rule for name, rule in RULES.refused.items() if name != "images"}
    | {"tools": Refused("Use /api/chat to call tools.", empty)},
)
"""Of generate."""

OPTION_RULES = FieldRules(
    hints=hints_of("ollama", "options."),
    refused={
        "tfs_z": Refused("Tail-free sampling is not supported.", one_of(1, 1.0)),
    },
)  # fmt: skip
"""Rules of `options`."""

NO_RULES = FieldRules()
"""Rules of the calls about models and vectors, which have few fields and honour them all."""


class Options(SamplerFields, kw_only=True):
    num_ctx: int | None = None  # capped at the served context: another context needs a reload
    num_predict: int | None = None  # -1 and -2: as many as the context allows
    seed: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None  # penalties look at this many last tokens; default 64
    penalize_newline: bool | None = None  # false only if there is no penalty
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class AskBody(msgspec.Struct, kw_only=True):
    """The fields that chat and generate share."""

    model: str | None = None
    stream: bool | None = None  # default true
    think: bool | Literal["low", "medium", "high"] | None = None
    format: str | dict[str, Any] | None = None  # "json", or a JSON schema
    keep_alive: str | float | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None  # needs logprobs
    options: dict[str, Any] | None = None  # Options


class OllamaInputMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None  # base64; pictures.py says what becomes of them
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatBody(AskBody, kw_only=True):
    messages: list[OllamaInputMessage] | None = None  # None: load the model, or unload it if keep_alive is 0
    tools: list[dict[str, Any]] | None = None  # in OpenAI's format


class OllamaGenerateBody(AskBody, kw_only=True):
    prompt: str | None = None  # None: as for messages
    system: str | None = None
    images: list[str] | None = None
    suffix: str | None = None  # the text behind the gap that the answer fills
    raw: bool | None = None  # the prompt is complete: no template is applied


class EmbedBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    input: str | list[str]
    truncate: bool | None = None  # true: cut inputs that are too long; false: refuse them
    dimensions: int | None = None
    keep_alive: str | float | None = None
    options: dict[str, Any] | None = None


class OllamaEmbeddingsBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str
    keep_alive: str | float | None = None
    options: dict[str, Any] | None = None


class OllamaModelBody(msgspec.Struct, kw_only=True):
    """A body that names the model; older clients use `name`."""

    model: str | None = None
    name: str | None = None


class CopyBody(msgspec.Struct, kw_only=True):
    source: str
    destination: str


class ShowBody(OllamaModelBody, kw_only=True):
    verbose: bool | None = None  # has no effect


class OllamaPullBody(OllamaModelBody, kw_only=True):
    stream: bool | None = None
    insecure: bool | None = None  # only false is allowed


INSIDE = {"options": RequestBody(Options, OPTION_RULES)}


async def read_body(request: ApiRequest, kind: type[Body], rules: FieldRules) -> tuple[Body, list[str]]:
    """Return the parsed body and its warnings. Raises the `RequestError` that names the wrong field."""
    return await read(await json_body(request, may_be_untyped=True), kind, rules)
