"""Request bodies: the fields that are honoured, and their types.

Does not know: the model, sampling rules, HTTP.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Options(msgspec.Struct, kw_only=True):
    num_ctx: int | None = None  # a wish that is granted or refused: another context would mean another load
    num_predict: int | None = None  # -1 and -2: as many as the context holds
    seed: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None  # penalties look at so many of the last tokens; 64 unless told otherwise
    penalize_newline: bool | None = None  # false only where there is no penalty
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class AskBody(msgspec.Struct, kw_only=True):
    """What chat and generate share."""

    model: str | None = None
    stream: bool | None = None  # unless false
    think: bool | Literal["low", "medium", "high"] | None = None
    format: str | dict[str, Any] | None = None  # "json", or a JSON schema
    keep_alive: str | float | None = None
    options: dict[str, Any] | None = None  # Options


class Message(msgspec.Struct, kw_only=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None  # refused by name
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ChatBody(AskBody, kw_only=True):
    messages: list[Message] | None = None  # none: load the model, or unload it with keep_alive 0
    tools: list[dict[str, Any]] | None = None  # in OpenAI's shape


class GenerateBody(AskBody, kw_only=True):
    prompt: str | None = None  # none: as with messages
    system: str | None = None
    raw: bool | None = None  # the prompt is the whole prompt: no template


class EmbedBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    input: str | list[str]
    truncate: bool | None = None  # true: cut what the model cannot read; else it is refused
    dimensions: int | None = None
    keep_alive: str | float | None = None
    options: dict[str, Any] | None = None


class EmbeddingsBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str
    keep_alive: str | float | None = None
    options: dict[str, Any] | None = None


class ModelBody(msgspec.Struct, kw_only=True):
    """Which model is meant; `name` is what older clients say."""

    model: str | None = None
    name: str | None = None


class CopyBody(msgspec.Struct, kw_only=True):
    source: str
    destination: str


class ShowBody(ModelBody, kw_only=True):
    verbose: bool | None = None  # nothing more is known


class PullBody(ModelBody, kw_only=True):
    stream: bool | None = None
    insecure: bool | None = None  # false only
