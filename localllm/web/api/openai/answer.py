"""From a translated request to its answer, whole or as a stream: what chat and completions have in common.

Does not know: how a body is read, shapes of responses.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from litestar.response.base import ASGIResponse

from localllm.engine.client import GenerationRequest
from localllm.engine.params import SamplingParams
from localllm.served import ServedModel
from localllm.web.api.disconnect import EventStream, unless_disconnected
from localllm.web.api.exchange import ApiRequest, json_response, warning_headers
from localllm.web.api.generation import Choice, Generation, collect
from localllm.web.api.openai.chunks import Encoder, stream
from localllm.web.api.openai.params import cache_salt
from localllm.web.api.openai.prompts import Prompt
from localllm.web.api.openai.schema import GenerateBody


def generation_of(
    model: ServedModel, body: GenerateBody, params: SamplingParams, prompts: Sequence[Prompt]
) -> Generation:
    model.require_queue_room(params.n * len(prompts))
    salt, name, priority = cache_salt(body), uuid.uuid4().hex, body.priority or 0
    return Generation(
        model.generator,
        [
            GenerationRequest(f"{name}-{i}", prompt.token_ids, params, priority, salt, model.adapter)
            for i, prompt in enumerate(prompts)
        ],
    )


async def streamed(
    request: ApiRequest, generation: Generation, encoder: Encoder, warnings: Sequence[str]
) -> ASGIResponse:
    """Admitted first, so that a refusal is still a status code; everything later is an event."""
    await generation.__aenter__()
    return EventStream(stream(generation, encoder, request.scope), generation.aclose, warning_headers(warnings))


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
