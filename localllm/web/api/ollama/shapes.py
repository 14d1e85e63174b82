"""Answers of the Ollama dialect, as they are sent.

Does not know: where the values come from.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from localllm.web.shape import Shape


class CalledFunction(Shape):
    name: str
    arguments: dict[str, Any]


class Call(Shape):
    function: CalledFunction


class Message(Shape):
    role: Literal["assistant"]
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET


class Line(Shape):
    """Durations are in nanoseconds. Optional fields are present only in the last line."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload", "abort"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class ChatLine(Line, kw_only=True):
    message: Message


class GenerateLine(Line, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET


class Embedded(Shape):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OneEmbedding(Shape):
    embedding: list[float]


class Details(Shape):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class Listed(Shape):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details


class Loaded(Listed):
    size_vram: int
    context_length: int | None
    expires_at: str


class Tags(Shape):
    models: list[Listed]


class Running(Shape):
    models: list[Loaded]


class Shown(Shape):
    license: str
    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class Pulled(Shape):
    status: Literal["success"]


class Progress(Shape):
    status: str
    digest: str | UnsetType = UNSET
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET
