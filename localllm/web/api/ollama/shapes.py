"""Answers of the Ollama dialect, as they are sent.

Does not know: where the values come from.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from localllm.web.shape import Shape


class OllamaCalledFunction(Shape):
    name: str
    arguments: dict[str, Any]


class OllamaCall(Shape):
    function: OllamaCalledFunction


class OllamaMessage(Shape):
    role: Literal["assistant"]
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


DoneReason = Literal["stop", "length", "load", "unload", "abort"]


class ChatLine(Shape):
    """Durations are in nanoseconds. Optional fields are present only in the last line."""

    model: str
    created_at: str
    message: OllamaMessage
    done: bool
    logprobs: list[dict[str, Any]] | UnsetType = UNSET  # of the tokens of this line
    done_reason: DoneReason | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class GenerateLine(Shape, kw_only=True):
    """Durations are in nanoseconds. Optional fields but `thinking` are present only in the last line."""

    model: str
    created_at: str
    thinking: str | UnsetType = UNSET
    response: str
    done: bool
    logprobs: list[dict[str, Any]] | UnsetType = UNSET  # of the tokens of this line
    done_reason: DoneReason | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


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


class OllamaProgress(Shape):
    status: str
    digest: str | UnsetType = UNSET
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET
