"""Turn a translated request into its answer, whole or streamed; an encoder writes it in its dialect.

Does not know: how a body is read, shapes of responses.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from litestar.response.base import ASGIResponse
from litestar.types import Scope

from localllm.engine.client import GenerationRequest
from localllm.engine.outputs import GenerationEvent
from localllm.engine.params import SamplingParams
from localllm.engine.request import NO_OPTIONS, RequestOptions
from localllm.engine.step import PromptEmbeds
from localllm.errors import LocalLLMError, UnsupportedParameter
from localllm.serving.served import ServedModel
from localllm.text.answers.reader import AnswerReader
from localllm.web.access.caller import salted
from localllm.web.api.disconnect import EVENTS, EventStream, Framing, unless_disconnected
from localllm.web.api.engine_ids import EngineIds
from localllm.web.api.exchange import ApiRequest, json_response, warning_headers
from localllm.web.api.generation import Answering, Choice, Generation, Progress, collect
from localllm.web.api.off_loop import off_loop
from localllm.web.errors import as_local_error, request_id_of
from localllm.web.shape import Shape


class Encoder(Protocol):
    """Writes events in one dialect. `event` may return several chunks, or none."""

    def event(self, event: GenerationEvent, progress: Progress) -> bytes: ...

    def end(self, progress: Progress) -> bytes: ...

    def error(self, error: LocalLLMError) -> bytes: ...


def generation_of(
    model: ServedModel,
    params: SamplingParams,
    prompts: Sequence[Sequence[int]],
    options: RequestOptions = NO_OPTIONS,
    *,
    new_reader: Callable[[], AnswerReader] | None = None,
    embeds: Mapping[int, PromptEmbeds] | None = None,
) -> Generation:
    """Return the generation for these prompts. `embeds`: prompt index -> embeddings in place of the prompt's tokens."""
    form = params.structured_outputs
    if options.length_penalty is not None and form is not None and form.opened_by:
        params = replace(params, structured_outputs=None)  # calls that are not enforced
    elif options.length_penalty is not None and form is not None:
        raise UnsupportedParameter(
            f"{form.param!r} cannot be combined with a beam search.",
            "A beam search does not support grammars.",
            "Leave out one of the two.",
            param=form.param,
        )
    model.require_queue_room(params.n * len(prompts))
    salt = salted(model.prefix_owner, options.cache_salt)
    given = embeds or {}
    options = replace(
        options,
        cache_salt=salt,
        owner=model.owner,
        adapter=model.adapter,
        source=model.source,
        key_name=model.key_name,
        is_background=model.is_background,
        replica=model.replica,
    )
    name = uuid.uuid4().hex
    requests = [
        GenerationRequest(f"{name}-{i}", token_ids, params, options, given.get(i))
        for i, token_ids in enumerate(prompts)
    ]
    return Generation(model.generator, requests, new_reader)


async def streamed(
    request: ApiRequest,
    generation: Answering,
    encoder: Encoder,
    warnings: Sequence[str],
    framing: Framing = EVENTS,
) -> ASGIResponse:
    """Return a streaming answer. The request is admitted first, so a refusal still has a status code; later errors are
    events.
    """
    note_id(request, generation)
    await generation.__aenter__()
    events = stream(generation, encoder, request.scope)
    return EventStream(events, generation.aclose, warning_headers(warnings), framing)


async def stream(generation: Answering, encoder: Encoder, scope: Scope) -> AsyncGenerator[bytes, None]:
    """Yield the bytes to write, one item per engine step. An error after the headers becomes an error event."""
    progress = generation.progress
    try:
        async for batch in generation.batches():
            if written := await off_loop(_num_logprobs(batch), partial(_written, batch, progress, encoder)):
                yield written
        yield encoder.end(progress)
    except Exception as error:
        yield encoder.error(as_local_error(error, scope))


def _written(batch: Sequence[GenerationEvent], progress: Progress, encoder: Encoder) -> bytes:
    return b"".join([_counted(event, progress, encoder) for event in batch])


def _counted(event: GenerationEvent, progress: Progress, encoder: Encoder) -> bytes:
    progress.count(event)
    return encoder.event(event, progress)


def _num_logprobs(said: Iterable[GenerationEvent | Choice]) -> int:
    """Return how many logprobs must be written; a whole vocabulary takes a good part of a second."""
    return sum(len(entry.token_ids) for each in said for entry in (*each.logprobs, *(each.prompt_logprobs or ())))


def note_id(request: ApiRequest, generation: Answering) -> None:
    """Remember the engine's id of a request, by which it can be found and ended."""
    ids: EngineIds = request.app.state.engine_ids
    ids.note(request_id_of(request.scope), generation.engine_id)


async def whole(
    request: ApiRequest,
    generation: Answering,
    respond: Callable[[Sequence[Choice]], Shape],
    warnings: Sequence[str],
) -> ASGIResponse:
    """Return the answer in one piece. If the client leaves before the end, the generation is cancelled."""

    note_id(request, generation)

    async def work() -> list[Choice]:
        async with generation:
            return await collect(generation)

    choices = await unless_disconnected(request.receive, work())
    headers = warning_headers(warnings)
    return await off_loop(_num_logprobs(choices), lambda: json_response(respond(choices), headers))
