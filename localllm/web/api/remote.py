"""Answers of other servers (`--upstream`): passed on in OpenAI's dialect, as events in the others.

A body in OpenAI's dialect is sent as it came, since the other server may know fields that this one does not. Another
dialect translates its body to OpenAI's, and writes the events of a `RemoteGeneration` as it writes an engine's.
Does not know: which server answers (localllm/fleet/), any dialect's words but OpenAI's.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Self

import msgspec
from litestar.response.base import ASGIResponse

from localllm.config.settings import Settings
from localllm.engine.outputs import GenerationEvent, Timings, Usage
from localllm.fleet.routing import USUAL_STEP_S, USUAL_TOKENS_PER_S, ReplicaLoad
from localllm.fleet.sse import Event
from localllm.fleet.upstream import FORWARDED, UpstreamFailed, UpstreamRefused
from localllm.fleet.upstreams import NO_PROMPT, Prompt, RemoteModel, Upstreams
from localllm.serving.answers.conversation import Tools
from localllm.serving.answers.generation import Progress, observed
from localllm.serving.answers.pictures import PICTURE_PARTS
from localllm.serving.answers.sounds import SOUND_PARTS
from localllm.serving.register import Register
from localllm.serving.served import ServedModel
from localllm.text.answers.parts import Content, Part, Reasoning, ToolArguments, ToolCallStart
from localllm.web.api.disconnect import EventStream, unless_disconnected
from localllm.web.api.exchange import ApiRequest, held, json_response, manager_of, parse_json, upstreams_of
from localllm.web.api.pictures import UNREAD
from localllm.web.errors import InvalidType, MalformedBody, as_local_error, openai_error

PIN = "x-localllm-upstream"
"""Header that names the upstream which is to answer, or `here`; the answer says with it which one did."""
ADMISSION_S = 2.0
"""How long to wait for a refusal before headers are sent. A server that reads a long prompt may send its own later."""
STOPPED = {"tool_calls": "stop", "function_call": "stop", "content_filter": "stop"}
"""Finish reasons of OpenAI's API in the engine's terms; the others are the same."""


def listed_name(upstreams: Upstreams, register: Register, settings: Settings, name: str | None) -> str | None:
    """Return the model that a request asks for, if other servers list it; None: none of them does.

    Without a name, a request asks for this server's model if there is one, else for the first model of the others.
    """
    if not name:
        entry = register.default
        has_own = settings.source("model") != "default" or (entry is not None and entry.is_running)
        name = None if has_own else next(iter(upstreams.models()), None)
    return name if name and upstreams.lists(name) else None


async def remote_model(request: ApiRequest, name: str | None, parts: Sequence[Any] = ()) -> RemoteModel | None:
    """Return the model of other servers that should answer, held until the answer ends; None: this process should.

    parts: the parts of the prompt, from its beginning. Raises `UpstreamUnavailable` if only other servers list the
    model, and none of them answers.
    """
    upstreams = upstreams_of(request)
    if not upstreams or FORWARDED in request.headers:
        return None
    await upstreams.looked()
    register = manager_of(request).register
    name = listed_name(upstreams, register, request.app.state.settings, name)
    if name is None:
        return None
    entry = register.find(name)
    served = entry.served if entry is not None and entry.is_running else None
    prompt = Prompt.of(name, parts) if parts else NO_PROMPT
    lease = upstreams.choose(name, prompt, request.headers.get(PIN, ""), _load_here(served) if served else None)
    if lease is None:
        return None
    if (facts := observed.get()) is not None:
        facts.model, facts.asked_model = name, name
    return held(lease)


def _load_here(served: ServedModel) -> ReplicaLoad:
    """Return the load of a model of this process, beside which other servers have it, too."""
    stats = served.client.stats()
    return ReplicaLoad(
        prefill_tokens_per_s=stats.prefill_tokens_per_s or USUAL_TOKENS_PER_S,
        running=served.client.num_open,
        max_running=served.plan.max_num_seqs,
        step_s=USUAL_STEP_S,
        full_step_s=2 * USUAL_STEP_S,
    )


# OpenAI's dialect ---------------------------------------------------------------------------------------------------


async def passed_on(request: ApiRequest, raw: bytes, path: str, prompt: str = "") -> ASGIResponse | None:
    """Answer a body in OpenAI's dialect by another server; None: this process should.

    prompt: the field with the prompt; empty: the body has none, and is passed on only if it names its model.
    """
    if not upstreams_of(request):
        return None
    body = parse_json(raw)
    if not isinstance(body, dict):
        raise MalformedBody("The body must be a JSON object.", f"It is of type {type(body).__name__}.")
    name = body.get("model")
    if name is not None and not isinstance(name, str):
        raise InvalidType("Invalid type for 'model'.", "Expected text.", param="model")
    if name is None and not prompt:
        return None
    said = body.get(prompt)
    remote = await remote_model(request, name, said if isinstance(said, list) else [said] if said else [])
    if remote is None:
        return None
    if body.get("stream") is True:
        return await _streamed(request, remote, path, body)
    answer = await unless_disconnected(request.receive, remote.whole(path, body))
    return json_response({**answer, **_named(remote)}, {PIN: remote.answered_by})


async def _streamed(request: ApiRequest, remote: RemoteModel, path: str, body: Mapping[str, Any]) -> ASGIResponse:
    source = remote.stream(path, body)
    first = await _admitted(source)

    async def written() -> AsyncGenerator[bytes, None]:
        try:
            yield b"".join(_chunk(event, remote) for event in await first)
            async for events in source:
                yield b"".join(_chunk(event, remote) for event in events)
            yield b"data: [DONE]\n\n"
        except Exception as error:
            problem = openai_error(as_local_error(error, request.scope))
            yield b"data: " + msgspec.json.encode(problem) + b"\n\n"

    async def close() -> None:
        await _ended(first)
        await source.aclose()

    return EventStream(written(), close, {PIN: remote.answered_by})


def _chunk(event: Event, remote: RemoteModel) -> bytes:
    return b"data: " + msgspec.json.encode({**event, **_named(remote)}) + b"\n\n"


def _named(remote: RemoteModel) -> dict[str, str]:
    return {"model": remote.name}


async def _admitted(source: AsyncGenerator[list[Any], None]) -> asyncio.Future[list[Any]]:
    """Return the first events, which may be still to come. Raises a refusal that arrives within `ADMISSION_S`."""
    first: asyncio.Future[list[Any]] = asyncio.ensure_future(anext(source, []))
    try:
        await asyncio.wait({first}, timeout=ADMISSION_S)
        if first.done():
            first.result()
    except BaseException:
        await _ended(first)
        await source.aclose()
        raise
    return first


async def _ended(first: asyncio.Future[list[Any]]) -> None:
    """Cancel the wait for the first events. Its error, if it has one, was sent or nobody waits for it."""
    first.cancel()
    await asyncio.wait({first})
    if not first.cancelled():
        first.exception()


# Other dialects' bodies -----------------------------------------------------------------------------------------------
# The messages are made for chat templates (text/messages.py), and differ from OpenAI's in three things: arguments of
# calls are objects, pictures know their place in the request, and documents may be unread.


def openai_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages as OpenAI's API has them. Raises the error of a document that could not be read."""
    found = []
    for message in messages:
        plain = dict(message)
        if isinstance(plain.get("content"), list):
            plain["content"] = [_part(part) for part in plain["content"]]
        if plain.get("tool_calls"):
            plain["tool_calls"] = [_call(call) for call in plain["tool_calls"]]
        found.append(plain)
    return found


def openai_tools(tools: Tools) -> dict[str, Any]:
    """Return the fields of a body that offer these tools; none without tools."""
    if not tools.offered:
        return {}
    choice: Any = "required" if tools.must else "auto"
    if tools.must and len(tools.allowed) == 1 and len(tools.offered) > 1:
        choice = {"type": "function", "function": {"name": tools.allowed[0]["function"]["name"]}}
    parallel = {} if tools.parallel else {"parallel_tool_calls": False}
    return {"tools": list(tools.offered), "tool_choice": choice, **parallel}


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part.get("type") == UNREAD:
        if part.get("error") is not None:
            raise part["error"]
        return {"type": "text", "text": part.get("said", "")}
    return (
        {key: value for key, value in part.items() if key != "where"}
        if part.get("type") in (*PICTURE_PARTS, *SOUND_PARTS)
        else dict(part)
    )


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    if not isinstance(function.get("arguments"), str):
        function["arguments"] = msgspec.json.encode(function.get("arguments") or {}).decode()
    return {"type": "function", **call, "function": function}


# Other dialects' answers ----------------------------------------------------------------------------------------------


STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


class RemoteGeneration:
    """The answer of another server as an engine's events: one choice. An `Answering`."""

    def __init__(
        self,
        remote: RemoteModel,
        path: str,
        body: Mapping[str, Any],
        without_tools: Callable[[UpstreamRefused], dict[str, Any]] | None = None,
    ) -> None:
        """body: in OpenAI's dialect, for `path`. without_tools: returns the body for a server that refuses this one;
        None: the refusal is the answer's."""
        self.progress = Progress(n=1, prompt_tokens=0, unfinished=1)
        if (facts := observed.get()) is not None:
            facts.progress = self.progress
        self.engine_id = f"remote-{uuid.uuid4().hex}"
        self._remote = remote
        if without_tools is None:
            chunks = remote.stream(path, {**body, **STREAMED})
        else:
            chunks = remote.stream_with_tools(path, {**body, **STREAMED}, lambda error: without_tools(error) | STREAMED)
        self._source = self._events(chunks)
        self._first: asyncio.Future[list[GenerationEvent]] | None = None

    async def open(self) -> None:
        if self._first is None:
            self._first = await _admitted(self._source)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        if self._first is not None:
            await _ended(self._first)
        await self._source.aclose()

    async def batches(self) -> AsyncGenerator[list[GenerationEvent], None]:
        assert self._first is not None, "enter the context first"
        if batch := await self._first:
            yield batch
        async for batch in self._source:
            yield batch

    async def _events(self, chunks: AsyncGenerator[list[Event], None]) -> AsyncGenerator[list[GenerationEvent], None]:
        answer = _ChunkReader(self._remote)
        try:
            async for arrived in chunks:
                if parts := [part for chunk in arrived for part in answer.read(chunk)]:
                    text = "".join(part.text for part in parts if isinstance(part, Content))
                    yield [GenerationEvent(0, text, parts=tuple(parts))]
        finally:
            await chunks.aclose()
        usage = answer.usage()
        self.progress.prompt_tokens = usage.prompt_tokens
        yield [
            GenerationEvent(
                0,
                finish_reason=answer.finish_reason or "stop",
                stop_reason=answer.stop_reason,
                usage=usage,
                timings=answer.timings(),
                parts=(),
            )
        ]


class _ChunkReader:
    """Reads chunks of a chat or text completion: the parts of choice 0, how it ended, and its usage."""

    def __init__(self, remote: RemoteModel) -> None:
        self._remote = remote
        self.finish_reason: str | None = None
        self.stop_reason: str | None = None  # the stop string, from servers that tell it
        self._usage: Mapping[str, Any] = {}
        self._num_pieces = 0
        self._calls: dict[int, int] = {}  # our number of each call, by the server's
        self._began_s, self._first_s, self._last_s = time.monotonic(), 0.0, 0.0

    def read(self, chunk: Event) -> list[Part]:
        """Return the parts of one chunk. Raises `UpstreamFailed` for one that is not as OpenAI's API has it."""
        usage = chunk.get("usage")
        self._usage = usage if isinstance(usage, dict) else self._usage
        try:
            choices = [each for each in chunk.get("choices") or () if each.get("index", 0) == 0]
            parts = [part for choice in choices for part in self._parts(choice)]
        except (AttributeError, TypeError, KeyError) as error:
            shown = msgspec.json.encode(chunk)[:120].decode(errors="replace")
            raise UpstreamFailed(
                f"{self._remote.answered_by} sent a broken answer.", f"It is not a chunk of a completion: {shown}."
            ) from error
        if parts:
            self._num_pieces += 1
            self._last_s = time.monotonic()
            self._first_s = self._first_s or self._last_s
        return parts

    def _parts(self, choice: Mapping[str, Any]) -> list[Part]:
        if reason := choice.get("finish_reason"):
            self.finish_reason = STOPPED.get(str(reason), str(reason))
            stopped_by = choice.get("stop_reason")
            self.stop_reason = stopped_by if isinstance(stopped_by, str) else None
        delta = choice.get("delta") or {"content": choice.get("text")}
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        parts: list[Part] = [Reasoning(_text(thought))] if thought else []
        if delta.get("content"):
            parts.append(Content(_text(delta["content"])))
        for piece in delta.get("tool_calls") or ():
            parts += self._call(piece, piece.get("function") or {})
        return parts

    def _call(self, piece: Mapping[str, Any], function: Mapping[str, Any]) -> list[Part]:
        index, parts = int(piece.get("index", len(self._calls))), list[Part]()
        if index not in self._calls:
            self._calls[index] = len(self._calls)
            id = piece.get("id") or f"call_{uuid.uuid4().hex[:24]}"
            parts.append(ToolCallStart(self._calls[index], _text(id), _text(function["name"])))
        if function.get("arguments"):
            parts.append(ToolArguments(self._calls[index], _text(function["arguments"])))
        return parts

    def usage(self) -> Usage:
        """Return the server's counts; without them, one token for each piece of the answer."""
        details = self._usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else 0
        said = self._usage.get("completion_tokens")
        return Usage(_count(self._usage.get("prompt_tokens")), _count(said, self._num_pieces), _count(cached))

    def timings(self) -> Timings:
        """Return the times as this server sees them."""
        ttft_s = max(0.0, self._first_s - self._began_s)
        return Timings(prefill_s=ttft_s, ttft_s=ttft_s, decode_s=max(0.0, self._last_s - self._first_s))


def _count(value: object, otherwise: int = 0) -> int:
    return value if type(value) is int and 0 <= value < 2**31 else otherwise


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value
