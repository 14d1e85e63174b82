"""Read the answer of another server within bounds: one JSON object, or server-sent events.

Every bound exists because the other server may be broken or hostile: an event that never ends, bytes without end,
silence, comments in place of an answer, events that are not JSON.
Does not know: what an event means, who is asked, HTTP beyond an iterator of bytes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec

from localllm.units import format_bytes, format_seconds

MAX_EVENT_BYTES = 8 * 1024**2  # logprobs of a large vocabulary take megabytes
MAX_ANSWER_BYTES = 128 * 1024**2
DONE = b"[DONE]"

Event = dict[str, Any]


class BrokenAnswer(Exception):
    """The answer breaks the protocol or a bound. The text says how, as a sentence."""


async def read_whole(chunks: AsyncIterator[bytes]) -> Event:
    """Return the JSON object of an answer in one piece. Raises `BrokenAnswer`."""
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        _require_bounded(len(body), MAX_ANSWER_BYTES, "Its answer")
    return _parse(bytes(body))


async def read_events(chunks: AsyncIterator[bytes], silence_s: float) -> AsyncGenerator[list[Event], None]:
    """Yield the events that have arrived together, until `[DONE]` or the end of the bytes.

    silence_s: longest time without an event; comments do not count. Raises `BrokenAnswer`.
    """
    lines = _Lines()
    deadline_s = time.monotonic() + silence_s
    num_bytes = 0
    while True:
        try:
            async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            break
        except TimeoutError:
            raise BrokenAnswer(f"It sent no part of its answer for {format_seconds(silence_s)}.") from None
        num_bytes += len(chunk)
        _require_bounded(num_bytes, MAX_ANSWER_BYTES, "Its answer")
        events: list[Event] = []
        broken: BrokenAnswer | None = None
        found = lines.feed(chunk)
        is_done = DONE in found
        for data in found[: found.index(DONE)] if is_done else found:
            try:
                events.append(_parse(data))
            except BrokenAnswer as error:
                broken = error
                break
        if events:  # what came before a broken event is a part of the answer
            deadline_s = time.monotonic() + silence_s
            yield events
        if broken is not None:
            raise broken
        if is_done:
            return
    if last := lines.end():
        yield [_parse(last)]


class _Lines:
    """The data of server-sent events, from bytes that may be cut anywhere."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the data of the events that are complete now."""
        self._rest += chunk
        lines = list[bytes]()
        if b"\n" in chunk:  # else nothing is copied: a line of megabytes may come in thousands of chunks
            *lines, rest = bytes(self._rest).replace(b"\r\n", b"\n").split(b"\n")
            self._rest = bytearray(rest)
        _require_bounded(len(self._rest) + sum(map(len, self._data)), MAX_EVENT_BYTES, "An event of its answer")
        found = []
        for line in lines:
            if not line:
                if self._data:
                    found.append(b"\n".join(self._data))
                self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].strip())
        return found

    def end(self) -> bytes:
        """Return the data of an event whose empty line is missing; the end of the bytes ends it as well."""
        if self._rest.startswith(b"data:"):
            self._data.append(bytes(self._rest[5:]).strip())
        last = b"\n".join(self._data)
        return b"" if last == DONE else last


def _parse(data: bytes) -> Event:
    try:
        parsed = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        shown = data[:60].decode(errors="replace")
        raise BrokenAnswer(f"It sent {shown!r}, which is not JSON ({error}).") from None
    if not isinstance(parsed, dict):
        raise BrokenAnswer(f"It sent JSON of type {type(parsed).__name__} in place of an object.")
    return parsed


def _require_bounded(num_bytes: int, most: int, what: str) -> None:
    if num_bytes > most:
        raise BrokenAnswer(f"{what} is longer than {format_bytes(most)}.")
