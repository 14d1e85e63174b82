"""Live parts of the pages: server-sent events, and one sampler that runs only while a page is open.

The sampler takes one `EngineStats` snapshot twice a second, keeps those of the last minute, and gives the same `Tick`
to every open page. While no page is open its task does not exist.
Does not know: templates, which tiles there are.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from litestar.datastructures import State
from litestar.response import Stream

from localllm.engine.stats import EngineStats

log = logging.getLogger(__name__)

EVERY_S = 0.5
KEPT = 120
"""Samples kept: one minute."""

PING_S = 15.0
Drawn = TypeVar("Drawn")
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


@dataclass(frozen=True, slots=True)
class Sample:
    """The statistics of one moment, as plotted by pages."""

    taken_s: float
    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    num_running: int
    num_waiting: int
    kv_usage: float


@dataclass(slots=True)
class Tick:
    """One snapshot of the engine. `cache` holds what was rendered from it, so that all pages share one rendering."""

    number: int
    stats: EngineStats | None  # None: no model is being served
    samples: tuple[Sample, ...]
    minute_ago: EngineStats | None  # the oldest snapshot of the last minute
    cache: dict[str, Any] = field(default_factory=dict)

    def drawn(self, name: str, draw: Callable[[], Drawn]) -> Drawn:
        """Return the result of `draw` for this tick; it runs at the first call only."""
        if name not in self.cache:
            self.cache[name] = draw()
        return self.cache[name]  # type: ignore[no-any-return]


class Sampler:
    """One sampling task, shared by all followers."""

    def __init__(self, read: Callable[[], EngineStats | None], every_s: float = EVERY_S) -> None:
        self._read, self._every_s = read, every_s
        self._snapshots: deque[EngineStats] = deque(maxlen=KEPT)
        self._followers = 0
        self._task: asyncio.Task[None] | None = None
        self._latest: Tick | None = None
        self._changed = asyncio.Event()
        self._number = 0

    def look(self) -> Tick:
        """Return a tick now, without following; for the first rendering of a page."""
        self._number += 1
        stats = self._read()
        if stats is not None:
            self._remember(stats)
        samples = tuple(_sample(snapshot) for snapshot in self._snapshots)
        oldest = self._snapshots[0] if self._snapshots else None
        return Tick(self._number, stats, samples, oldest)

    async def follow(self) -> AsyncIterator[Tick]:
        """Yield the latest tick, then each new one. A slow follower misses ticks and does not fall behind."""
        async with self._working():
            seen = 0
            while True:
                while self._latest is None or self._latest.number == seen:
                    await self._changed.wait()
                seen = self._latest.number
                yield self._latest

    def _remember(self, stats: EngineStats) -> None:
        if self._snapshots and not stats.goes_on_from(self._snapshots[-1]):
            self._snapshots.clear()  # snapshots of another engine are not part of this one's history
        if not self._snapshots or stats.taken_s > self._snapshots[-1].taken_s:
            self._snapshots.append(stats)
        while self._snapshots[0].taken_s < stats.taken_s - KEPT * EVERY_S:
            self._snapshots.popleft()

    async def _run(self) -> None:
        while True:
            started = time.monotonic()
            try:
                self._latest = self.look()
            except Exception:  # a follower would wait for ever if one bad snapshot ended this task
                log.exception("reading the engine's statistics failed")
            self._changed.set()
            self._changed = asyncio.Event()
            await asyncio.sleep(max(0.0, self._every_s - (time.monotonic() - started)))

    @asynccontextmanager
    async def _working(self) -> AsyncIterator[None]:
        self._followers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="sampler")
        try:
            yield
        finally:
            self._followers -= 1
            if not self._followers:
                self._task.cancel()
                self._task = self._latest = None


def _sample(stats: EngineStats) -> Sample:
    return Sample(
        taken_s=stats.taken_s,
        decode_tokens_per_s=stats.decode_tokens_per_s,
        prefill_tokens_per_s=stats.prefill_tokens_per_s,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        kv_usage=stats.kv_usage,
    )
