"""Requests and answers of the Ollama dialect.

Does not know: how answers are made (api/ollama).
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from localllm.web.api.ollama.chat import chat, generate
from localllm.web.api.ollama.embed import embed, embeddings
from localllm.web.api.ollama.fields import GENERATE_RULES, NO_RULES, OPTION_RULES, RULES
from localllm.web.api.ollama.models import blobs, copy, create, delete_model, ps, push, show, tags
from localllm.web.api.ollama.pull import pull
from localllm.web.api.ollama.schema import (
    ChatBody,
    CopyBody,
    EmbedBody,
    EmbeddingsBody,
    GenerateBody,
    ModelBody,
    Options,
    PullBody,
    ShowBody,
)
from localllm.web.openapi.bodies import Body
from localllm.web.openapi.document import OF_MODELS, Operation, Shape, Table


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


_INSIDE = {"options": Body(Options, OPTION_RULES)}
_MODEL = {"model": "demo"}
_CHAT = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "options": {"num_predict": 64}}
_PROMPT = {"prompt": "Why is the sky blue?", "options": {"num_predict": 64}}
_EMBED = Body(EmbedBody, NO_RULES, _INSIDE, {"input": ["Hello"]})
_EMBEDDINGS = Body(EmbeddingsBody, NO_RULES, _INSIDE, {"prompt": "Hello"})
_HUB = (*OF_MODELS, 507)

TABLE: Table = {
    chat: Operation(
        "Answer a conversation.", ChatLine, Body(ChatBody, RULES, _INSIDE, _CHAT), ChatLine, also=OF_MODELS,
    ),
    generate: Operation(
        "Answer a prompt, or continue it (`raw`).", GenerateLine, Body(GenerateBody, GENERATE_RULES, _INSIDE, _PROMPT),
        GenerateLine, also=OF_MODELS,
    ),
    embed: Operation("Embed each text of `input`.", Embedded, _EMBED, also=OF_MODELS),
    embeddings: Operation("Embed `prompt`.", OneEmbedding, _EMBEDDINGS, also=OF_MODELS),
    tags: Operation("List the models that a request can name.", Tags),
    ps: Operation("List the loaded models.", Running),
    show: Operation("Show one model: template, parameters, sizes.", Shown, Body(ShowBody, NO_RULES, example=_MODEL),
                    also=OF_MODELS),
    pull: Operation("Download a model from the Hugging Face hub.", Pulled, Body(PullBody, NO_RULES, example=_MODEL),
                    Progress, also=_HUB),
    delete_model: Operation("Delete a model from the Hugging Face cache, or delete a second name.", None,
                            Body(ModelBody, NO_RULES, example=_MODEL), also=(404, 409)),
    copy: Operation("Give a model a second name, which is kept across restarts.", None,
                    Body(CopyBody, NO_RULES, example={"source": "demo", "destination": "helper"}), also=(404, 409)),
    push: Operation("Unsupported: models cannot be pushed.", also=(501,), success=()),
    create: Operation("Unsupported: models cannot be created from a Modelfile.", also=(501,), success=()),
    blobs: Operation("Unsupported: files cannot be uploaded.", also=(501,), success=()),
}  # fmt: skip
