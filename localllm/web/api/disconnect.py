"""Answers that stop working when the client has gone.

A handler with an answer in one piece is not cancelled when its client leaves. An event stream must send its headers
before the first token, show a sign of life during a long prefill, and end the generation when the connection ends or
its reader stops reading. This module does both, for every dialect.
Does not know: what is being generated.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from litestar.response.base import ASGIResponse
from litestar.types import Receive, Scope, Send

from localllm.web.errors import ClientGone

log = logging.getLogger(__name__)

T = TypeVar("T")

PING_INTERVAL_S = 15.0
"""A ping after this many silent seconds keeps proxies and clients from giving up during a long prefill."""

STALLED_S = 60.0
"""A reader that has received nothing for this long, with all buffers full, is considered gone."""

STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


@dataclass(frozen=True, slots=True)
class Framing:
    """The format of a dialect's stream. `ping`: the bytes that keep an idle stream alive; empty: there are none."""

    media_type: str
    ping: bytes


EVENTS = Framing("text/event-stream", b": ping\n\n")


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the client closes the connection first, cancel `work` and raise `ClientGone`.

    `receive` must be past the request body.
    """
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone("The client closed the connection.")
        return working.result()
    finally:
        await _end(working, watching)


class EventStream(ASGIResponse):
    """A streaming response from a generator of encoded bytes: one write per item, closed with the connection."""

    _should_set_content_length = False

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], Awaitable[None]],
        headers: dict[str, str] | None = None,
        framing: Framing = EVENTS,
    ) -> None:
        """`close` ends the source of `events`; it is called even if no event was ever read."""
        super().__init__(media_type=framing.media_type, headers=STREAM_HEADERS | (headers or {}))
        self.framing = framing
        self.events = events
        self.close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.start_response(send)
            await self._stream(receive, _Writer(send, self.framing.ping))
        finally:
            await self.events.aclose()
            await self.close()

    async def _stream(self, receive: Receive, writer: _Writer) -> None:
        writing = asyncio.ensure_future(writer.write_all(self.events))
        watching = asyncio.ensure_future(_disconnected(receive))
        minding = asyncio.ensure_future(writer.mind())
        try:
            await asyncio.wait({writing, watching, minding}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
            elif minding.done():
                minding.result()
                log.info("stream aborted reason=not-read seconds=%.0f", STALLED_S)
        finally:
            await _end(writing, watching, minding)


class _Writer:
    """Writes one response body and remembers the time of its last write. `send` waits while the connection's buffer is
    full.
    """

    def __init__(self, send: Send, ping: bytes) -> None:
        self._send, self._ping = send, ping
        self._last_s = time.monotonic()
        self._waits = False  # True while `send` waits for the reader

    async def write_all(self, events: AsyncGenerator[bytes, None]) -> None:
        async for chunk in events:
            await self._write(chunk)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def mind(self) -> None:
        """Send pings while there is nothing to write; return when the reader has received nothing for `STALLED_S`."""
        while True:
            silent_s = time.monotonic() - self._last_s
            patience_s = STALLED_S if self._waits else PING_INTERVAL_S
            if silent_s < patience_s:
                await asyncio.sleep(min(patience_s - silent_s, PING_INTERVAL_S))
            elif self._waits:
                return
            elif not self._ping:
                await asyncio.sleep(PING_INTERVAL_S)
            else:
                try:
                    await asyncio.wait_for(self._write(self._ping), STALLED_S)
                except TimeoutError:
                    return

    async def _write(self, chunk: bytes) -> None:
        self._last_s, self._waits = time.monotonic(), True
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._waits = False


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks and wait for their clean-up, so that KV blocks are freed before the response ends."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
