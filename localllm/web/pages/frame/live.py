"""Live parts of the pages: server-sent events, and streams of them that end when the server stops, or when their
client has opened too many others since.

Does not know: templates, what an event shows.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any

from litestar import Request
from litestar.datastructures import State
from litestar.response import Stream

from localllm.web.access.auth import client_of
from localllm.web.access.caller import key_of
from localllm.web.activity import Closing

PING_S = 15.0
ASLEEP = "asleep"
"""The event that closes a live connection for good (`hx-sse:close`): the server ends because nothing was asked."""
MOST_OF_CLIENT = 32
"""Live connections of one client. A browser opens six at a time; the oldest one is closed for one more."""
_LINE_END = re.compile(r"\r\n|\r|\n")


def sse(data: str, event: str = "") -> bytes:
    """Return one server-sent event. htmx swaps an event without a name; one with a name becomes a DOM event."""
    name = f"event: {event}\n" if event else ""
    if "\r" in data:
        data = _LINE_END.sub("\n", data)
    lines = data.replace("\n", "\ndata: ")
    return f"{name}data: {lines}\n\n".encode()


def live_stream(request: Request[Any, Any, Any], events: AsyncIterator[bytes]) -> Stream:
    """Return the response that carries events until the server stops; its headers tell proxies not to buffer."""
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return Stream(_counted(request, events), media_type="text/event-stream", headers=headers)


async def _counted(request: Request[Any, Any, Any], events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    state = request.app.state
    streams: LiveStreams = state.get("live_streams") or LiveStreams()
    state["live_streams"] = streams
    with streams.counted(client_of(request.scope, key_of(request))) as superseded:
        async with aclosing(until_closing(events, closing(state), superseded)) as until:
            async for event in until:
                yield event


class LiveStreams:
    """The live connections of each client, oldest first."""

    def __init__(self) -> None:
        self._open: dict[str, OrderedDict[asyncio.Future[None], None]] = {}

    @contextmanager
    def counted(self, client: str) -> Iterator[asyncio.Future[None]]:
        """Count a connection while the block runs. The future is done once the client has opened too many others."""
        own = self._open.setdefault(client, OrderedDict())
        superseded = asyncio.get_running_loop().create_future()
        own[superseded] = None
        if len(own) > MOST_OF_CLIENT:
            own.popitem(last=False)[0].set_result(None)
        try:
            yield superseded
        finally:
            own.pop(superseded, None)
            if not own and self._open.get(client) is own:
                del self._open[client]


def changed(parts: Mapping[str, str], sent: dict[str, str]) -> dict[str, str]:
    """Return the parts that differ from those last sent to a page, and record them as sent."""
    news = {name: drawn for name, drawn in parts.items() if sent.get(name) != drawn}
    sent |= news
    return news


def closing(state: State) -> asyncio.Event:
    """Return the event that is set when the server is about to stop. Streams then end, because open tabs would
    otherwise delay the shutdown.
    """
    event = state.get("closing")
    if event is None:
        event = asyncio.Event()
        state["closing"] = event
    return event


async def until_closing(
    events: AsyncIterator[bytes], closing: asyncio.Event, superseded: asyncio.Future[None] | None = None
) -> AsyncGenerator[bytes]:
    """Yield the events until the server stops or `superseded` is done, with a comment during pauses so that dead
    connections are noticed.
    """
    stop = asyncio.create_task(closing.wait())
    ends: set[asyncio.Future[Any]] = {stop} if superseded is None else {stop, superseded}
    news: asyncio.Task[bytes] | None = None
    try:
        while not (closing.is_set() or (superseded is not None and superseded.done())):
            news = news or asyncio.ensure_future(_next(events))
            await asyncio.wait({news, *ends}, timeout=PING_S, return_when=asyncio.FIRST_COMPLETED)
            if not news.done():
                if not any(each.done() for each in ends):
                    yield b": ping\n\n"
                continue
            finished, news = news, None
            try:
                event = finished.result()
            except StopAsyncIteration:
                return
            yield event
        if isinstance(closing, Closing) and closing.is_idle:
            yield sse("", ASLEEP)
    finally:
        stop.cancel()
        if news is not None:
            news.cancel()
            await asyncio.gather(news, return_exceptions=True)
        close: Callable[[], Any] | None = getattr(events, "aclose", None)
        if close is not None:
            await close()


async def _next(events: AsyncIterator[bytes]) -> bytes:
    return await anext(events)
