"""Live parts of the pages: server-sent events, and streams of them that end when the server stops.

Does not know: templates, what an event shows.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from litestar.datastructures import State
from litestar.response import Stream

from localllm.web.activity import Closing

PING_S = 15.0
ASLEEP = "asleep"
"""The event that closes a live connection for good (`hx-sse:close`): the server ends because nothing was asked."""
_LINE_END = re.compile(r"\r\n|\r|\n")


def sse(data: str, event: str = "") -> bytes:
    """Return one server-sent event. htmx swaps an event without a name; one with a name becomes a DOM event."""
    name = f"event: {event}\n" if event else ""
    if "\r" in data:
        data = _LINE_END.sub("\n", data)
    lines = data.replace("\n", "\ndata: ")
    return f"{name}data: {lines}\n\n".encode()


def event_stream(events: AsyncIterator[bytes]) -> Stream:
    """Return the response that carries events; its headers tell proxies not to buffer."""
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return Stream(events, media_type="text/event-stream", headers=headers)


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


async def until_closing(events: AsyncIterator[bytes], closing: asyncio.Event) -> AsyncIterator[bytes]:
    """Yield the events until the server stops, with a comment during pauses so that dead connections are noticed."""
    stop = asyncio.create_task(closing.wait())
    news: asyncio.Task[bytes] | None = None
    try:
        while not closing.is_set():
            news = news or asyncio.ensure_future(_next(events))
            await asyncio.wait({news, stop}, timeout=PING_S, return_when=asyncio.FIRST_COMPLETED)
            if not news.done():
                if not closing.is_set():
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
