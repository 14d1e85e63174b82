"""The way of a request through one handler: read, find the model, generate, answer whole or as a stream.

Chat and completions differ in how they read and write; what happens between is the same and stands here.
Does not know: field names, shapes of responses.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from litestar import Request
from litestar.response.base import ASGIResponse

from localllm.engine.client import GenerationRequest
from localllm.engine.params import SamplingParams
from localllm.manager import ModelManager, ServedModel
from localllm.web.api.disconnect import EventStream, unless_disconnected
from localllm.web.api.generation import Choice, Generation, collect
from localllm.web.api.openai.chunks import Encoder, stream
from localllm.web.api.openai.params import cache_salt
from localllm.web.api.openai.prompts import Prompt
from localllm.web.api.openai.schema import GenerateBody
from localllm.web.errors import UnsupportedMediaType

ApiRequest = Request[Any, Any, Any]


async def json_body(request: ApiRequest) -> bytes:
    """The raw body. Raises unless the client says that it sends JSON."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise UnsupportedMediaType(
            "The body must be sent as application/json.",
            f"Its content type is {media_type or 'missing'!r}.",
            "With curl: -H 'content-type: application/json'.",
        )
    return await request.body()


def served_model(request: ApiRequest, name: str | None) -> ServedModel:
    """The model of that name; without a name the one that is served."""
    manager: ModelManager = request.app.state.manager
    return manager.find(name)


def warning_headers(warnings: Sequence[str]) -> dict[str, str]:
    """Header values carry printable ASCII only; a field name is the client's and may be anything."""
    text = "; ".join(warnings).encode("ascii", "backslashreplace").decode()
    return {"x-localllm-warning": "".join(c if c.isprintable() else "?" for c in text)[:2000]} if text else {}


def generation_of(
    model: ServedModel, body: GenerateBody, params: SamplingParams, prompts: Sequence[Prompt]
) -> Generation:
    model.require_queue_room(params.n * len(prompts))
    salt, name = cache_salt(body), uuid.uuid4().hex
    return Generation(
        model.client,
        [
            GenerationRequest(f"{name}-{i}", prompt.token_ids, params, priority=body.priority or 0, cache_salt=salt)
            for i, prompt in enumerate(prompts)
        ],
    )


async def streamed(generation: Generation, encoder: Encoder, warnings: Sequence[str]) -> ASGIResponse:
    """Admitted first, so that a refusal is still a status code; everything later is an event."""
    await generation.__aenter__()
    return EventStream(stream(generation, encoder), generation.aclose, warning_headers(warnings))


async def whole(
    request: ApiRequest,
    generation: Generation,
    respond: Callable[[Sequence[Choice]], dict[str, Any]],
    warnings: Sequence[str],
) -> ASGIResponse:
    """Everything at the end; a client that leaves before it ends the generation."""

    async def work() -> list[Choice]:
        async with generation:
            return await collect(generation)

    choices = await unless_disconnected(request.receive, work())
    return json_response(respond(choices), warning_headers(warnings))


def json_response(content: dict[str, Any], headers: dict[str, str] | None = None) -> ASGIResponse:
    return ASGIResponse(body=msgspec.json.encode(content), media_type="application/json", headers=headers)
