"""Turn a translated request into its answer, whole or streamed; an encoder writes it in its dialect.

An HTTP request's id may be chosen by its client, so that two requests may have the same one; the engine needs unique
ids and makes its own. A log line has the first, the dashboard has the second, and `EngineIds` maps one to the other.
Does not know: how a body is read, shapes of responses.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from litestar.response.base import ASGIResponse
from litestar.types import Scope

from localllm.engine.outputs import GenerationEvent
from localllm.errors import LocalLLMError
from localllm.serving.answers.generation import Choice, Generation, Progress, collect
from localllm.serving.answers.off_loop import off_loop
from localllm.web.api.disconnect import EVENTS, EventStream, Framing, unless_disconnected
from localllm.web.api.exchange import ApiRequest, json_response, warning_headers
from localllm.web.errors import as_local_error, request_id_of
from localllm.web.shape import Shape

MOST = 500


class EngineIds:
    """A dictionary that forgets the oldest entries. Used on the event loop only."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._ids: dict[str, str] = {}

    def note(self, request_id: str, engine_id: str) -> None:
        self._ids.pop(request_id, None)
        self._ids[request_id] = engine_id
        if len(self._ids) > self._most:
            del self._ids[next(iter(self._ids))]

    def pairs(self) -> list[tuple[str, str]]:
        """Return (id of the HTTP request, id of the engine), oldest first."""
        return list(self._ids.items())


class Encoder(Protocol):
    """Writes events in one dialect. `event` may return several chunks, or none."""

    def event(self, event: GenerationEvent, progress: Progress) -> bytes: ...

    def end(self, progress: Progress) -> bytes: ...

    def error(self, error: LocalLLMError) -> bytes: ...


async def streamed(
    request: ApiRequest,
    generation: Generation,
    encoder: Encoder,
    warnings: Sequence[str],
    framing: Framing = EVENTS,
) -> ASGIResponse:
    """Return a streaming answer. The request is admitted first, so a refusal still has a status code; later errors are
    events.
    """
    note_id(request, generation)
    await generation.open()
    events = stream(generation, encoder, request.scope)
    return EventStream(events, generation.aclose, warning_headers(warnings), framing)


async def stream(generation: Generation, encoder: Encoder, scope: Scope) -> AsyncGenerator[bytes, None]:
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


def note_id(request: ApiRequest, generation: Generation) -> None:
    """Remember the engine's id of a request, by which it can be found and ended."""
    ids: EngineIds = request.app.state.engine_ids
    ids.note(request_id_of(request.scope), generation.engine_id)


async def whole(
    request: ApiRequest,
    generation: Generation,
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
