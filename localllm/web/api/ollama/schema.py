"""Request bodies: the honoured fields and their types.

Does not know: the model, sampling rules, HTTP.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from localllm.web.api.sampler_fields import SamplerFields


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
