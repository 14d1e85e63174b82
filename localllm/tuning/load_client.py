"""A load client for any OpenAI-compatible server: it streams completions and records when each piece arrived.

Each connection is one `asyncio.Protocol` fed straight from the socket. No queue, task or object per arrival comes
between the arrival and its time stamp, so the client is not the bottleneck.
Does not know: workloads, statistics, localllm's own server.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from localllm.errors import ConfigError
from localllm.tuning.report import RequestTimes
from localllm.tuning.workload import WorkloadRequest

REQUEST_TIMEOUT_S = 3600.0
LONGEST_ERROR = 300


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _CachedTokens | None = None


class _StreamChoice(msgspec.Struct):
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    """The fields of a streamed completion that are used; msgspec skips the others unparsed."""

    choices: Sequence[_StreamChoice] = ()
    usage: _Usage | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a server. `base_path` ends in /v1."""

    host: str
    port: int
    tls: bool
    base_path: str
    api_key: str | None = field(default=None, repr=False)

    @classmethod
    def from_url(cls, url: str, api_key: str | None = None) -> Endpoint:
        """Parse a URL with or without /v1 at the end. Raises `ConfigError`."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            raise _not_a_url(url) from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise _not_a_url(url)
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/")
        base_path = path if path.endswith("/v1") else f"{path}/v1"
        return cls(parts.hostname, port or (443 if tls else 80), tls, base_path, api_key)

    def head(self, method: str, path: str, length: int) -> bytes:
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        name = f"[{self.host}]" if ":" in self.host else self.host
        return (
            f"{method} {self.base_path}{path} HTTP/1.1\r\nHost: {name}:{self.port}\r\n{key}"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        ).encode("latin-1")


def _not_a_url(url: str) -> ConfigError:
    return ConfigError(f"{url!r} is not the URL of a server.", hint="--url http://127.0.0.1:8000", param="url")


class _Response:
    """One response as it arrives. `times`: arrival time of each piece that has a choice."""

    def __init__(self, done: asyncio.Future[None]) -> None:
        self.done = done
        self.status = 0
        self.streams = False
        self.body = bytearray()  # not streamed: the whole body; streamed: the incomplete last event
        self.times: list[float] = []
        self.usage: _Usage | None = None
        self.finished = False
        self.error: str | None = None

    def feed(self, piece: bytes, now_s: float) -> None:
        self.body += piece
        if not self.streams:
            return
        *events, rest = bytes(self.body).replace(b"\r\n", b"\n").split(b"\n\n")
        self.body[:] = rest
        for event in events:
            if event.startswith(b"data:"):
                self._read(event[5:].strip(), now_s)

    def _read(self, data: bytes, now_s: float) -> None:
        if data == b"[DONE]":
            return
        chunk = _decode_chunk(data)
        if chunk.error is not None:
            self.error = str(chunk.error)[:LONGEST_ERROR]
        if chunk.choices:
            self.times.append(now_s)
            self.finished = self.finished or chunk.choices[0].finish_reason is not None
        self.usage = chunk.usage or self.usage


class LoadConnection(asyncio.Protocol):
    """One keep-alive connection that handles one request at a time.
    Its callbacks are called by httptools and asyncio.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: _Response | None = None
        self._now_s = 0.0
        self._keep_alive = True

    @classmethod
    async def open(cls, endpoint: Endpoint) -> LoadConnection:
        """Connect to the endpoint. Raises `OSError` when no server listens."""
        context = ssl.create_default_context() if endpoint.tls else None
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(cls, endpoint.host, endpoint.port, ssl=context)
        return connection

    async def exchange(self, request: bytes) -> _Response:
        """Send a request and wait for the whole response."""
        assert self._transport is not None
        answer = self._answer = _Response(asyncio.get_running_loop().create_future())
        self._transport.write(request)
        await answer.done
        return answer

    @property
    def is_usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing() and self._keep_alive

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, msgspec.DecodeError):
                raise  # a bug of ours; asyncio reports it and closes the connection
            self._give_up(f"unreadable response: {error.__context__}")
        except httptools.HttpParserError as error:
            self._give_up(f"unreadable response: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._fail(f"connection lost: {exc or 'closed by the server'}")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._answer is not None and name.lower() == b"content-type":
            self._answer.streams = value.startswith(b"text/event-stream")

    def on_headers_complete(self) -> None:
        if self._answer is not None:
            self._answer.status = self._parser.get_status_code()
            self._keep_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        if self._answer is not None:
            self._answer.feed(body, self._now_s)

    def on_message_complete(self) -> None:
        if self._answer is not None:
            _resolve(self._answer.done)
            self._answer = None

    def _give_up(self, message: str) -> None:
        self._fail(message)
        self.close()

    def _fail(self, message: str) -> None:
        if self._answer is not None:
            self._answer.error = message
            _resolve(self._answer.done)
            self._answer = None


def _resolve(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


class LoadClient:
    """Send requests to one endpoint, `concurrency` at a time, and return the times of each."""

    def __init__(self, endpoint: Endpoint, model: str, *, ignore_eos: bool = True) -> None:
        self._endpoint, self._model, self._ignore_eos = endpoint, model, ignore_eos

    async def run(self, requests: Sequence[WorkloadRequest], concurrency: int) -> list[RequestTimes]:
        """Run a closed loop: each of `concurrency` streams sends its next request when its last one is answered."""
        encoded = [msgspec.json.encode(self.fields(request)) for request in requests]
        bodies = [self._endpoint.head("POST", "/completions", len(body)) + body for body in encoded]
        times: list[RequestTimes | None] = [None] * len(bodies)
        waiting = iter(range(len(bodies)))

        async def stream() -> None:
            connection: LoadConnection | None = None
            for index in waiting:
                connection, times[index] = await self._ask(connection, bodies[index])
            if connection is not None:
                connection.close()

        await asyncio.gather(*(stream() for _ in range(min(concurrency, len(bodies)))))
        return [one for one in times if one is not None]

    def fields(self, request: WorkloadRequest) -> dict[str, Any]:
        """Return the body of a request. Subclasses override this for servers that need other fields."""
        fields: dict[str, Any] = {
            "model": self._model,
            "prompt": request.prompt_token_ids,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._ignore_eos:
            fields["ignore_eos"] = True
        return fields

    async def _ask(
        self, connection: LoadConnection | None, request: bytes
    ) -> tuple[LoadConnection | None, RequestTimes]:
        started_s = time.perf_counter()
        is_fresh = connection is None or not connection.is_usable
        try:
            if connection is None or is_fresh:
                connection = await LoadConnection.open(self._endpoint)
                started_s = time.perf_counter()  # measure as a client with an open connection
            answer = await asyncio.wait_for(connection.exchange(request), REQUEST_TIMEOUT_S)
        except TimeoutError:
            if connection is not None:
                connection.close()
            return None, _failed(started_s, f"no answer within {REQUEST_TIMEOUT_S:.0f} s")
        except OSError as error:
            return None, _failed(started_s, f"cannot connect: {error.strerror or error}")
        if not answer.status and not is_fresh and not connection.is_usable:
            return await self._ask(None, request)  # the server closed the connection before it read the request
        return connection, _times(started_s, answer)


async def fetch_json(endpoint: Endpoint, path: str) -> Any:
    """GET a JSON document. Raises `ConfigError` when the server is not reachable or refuses."""
    address = f"http{'s' if endpoint.tls else ''}://{endpoint.host}:{endpoint.port}"
    try:
        connection = await asyncio.wait_for(LoadConnection.open(endpoint), 10)
    except (OSError, TimeoutError) as error:
        raise ConfigError(
            f"No server answers at {address}.", str(error), "Start one with: localllm up   (or give --url)", param="url"
        ) from error
    try:
        answer = await asyncio.wait_for(connection.exchange(endpoint.head("GET", path, 0)), 30)
    except TimeoutError as error:
        raise ConfigError(f"{address} accepts connections but does not answer.", param="url") from error
    finally:
        connection.close()
    if answer.error or answer.status != 200:
        why = answer.error or f"GET {endpoint.base_path}{path} returned status {answer.status}."
        hint = "Give the server's key with --api-key." if answer.status in (401, 403) else ""
        raise ConfigError(f"{address} does not answer as an OpenAI-compatible server.", why, hint, param="url")
    try:
        return msgspec.json.decode(answer.body)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{address}{endpoint.base_path}{path} is not JSON.", str(error), param="url") from error


def _failed(started_s: float, message: str) -> RequestTimes:
    return RequestTimes(started_s, time.perf_counter(), error=message[:LONGEST_ERROR])


def _times(started_s: float, answer: _Response) -> RequestTimes:
    if (error := _what_went_wrong(answer)) is not None:
        return _failed(started_s, error)
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    cached_tokens = (details.cached_tokens or 0) if details is not None else 0
    return RequestTimes.streamed(
        started_s, answer.times, prompt_tokens=answer.usage.prompt_tokens,
        output_tokens=answer.usage.completion_tokens or 0, cached_tokens=cached_tokens,
    )  # fmt: skip


def _what_went_wrong(answer: _Response) -> str | None:
    if answer.error is not None:
        return answer.error
    if answer.status != 200:
        return f"status {answer.status}: {bytes(answer.body).decode('utf-8', 'replace')[:LONGEST_ERROR]}"
    if not answer.times or not answer.finished:
        return "the stream ended early: no finish_reason"
    if answer.usage is None:
        return "the stream carried no usage, so its tokens cannot be counted"
    return None
