"""The statistics that pages plot: samples of the last minute and of the last hour, taken by one task.

    sampler.start()                         # with the server: record the hour
    async for tick in sampler.follow(): ... # an open page: twice a second
    await sampler.stop()

An average of five seconds is recorded all the time, so that a page that opens later can show the last hour; one costs
microseconds. While a page is open the task takes a snapshot twice a second, keeps the snapshots of the last minute,
and gives the same `Tick` to every open page.
Does not know: templates, plots.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from localllm.engine.stats import EngineStats

log = logging.getLogger(__name__)

EVERY_S, MINUTE_SAMPLES = 0.5, 120
AVERAGE_S, HOUR_SAMPLES = 5.0, 720
Cached = TypeVar("Cached")


@dataclass(frozen=True, slots=True)
class StatsSample:
    """The statistics of one moment, as plotted by pages."""

    taken_s: float
    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    num_running: int
    num_waiting: int
    kv_usage: float
    first_tokens: int = 0  # requests that have had their first token, since the start
    ttft_total_s: float = 0.0  # their times to first token, summed


@dataclass(slots=True)
class Tick:
    """One snapshot of the engine. `cache` holds what was rendered from it, so that all pages share one rendering."""

    number: int
    stats: EngineStats | None  # None: no model is being served
    samples: tuple[StatsSample, ...]
    minute_ago: EngineStats | None  # the oldest snapshot of the last minute
    cache: dict[str, Any] = field(default_factory=dict)

    def cached(self, name: str, make: Callable[[], Cached]) -> Cached:
        """Return the result of `make` for this tick; it runs at the first call only."""
        if name not in self.cache:
            self.cache[name] = make()
        return self.cache[name]  # type: ignore[no-any-return]

    async def drawn(self, view: str, draw: Callable[[], Coroutine[Any, Any, Cached]]) -> Cached:
        """Return the result of `draw` for this tick: the first follower of a view starts it, the others wait for it."""
        drawing: asyncio.Task[Cached] = self.cached(view, lambda: asyncio.ensure_future(draw()))
        return drawing.result() if drawing.done() else await asyncio.shield(drawing)


class Sampler:
    """One sampling task: it exists while the hour is recorded or a page is open."""

    def __init__(self, read: Callable[[], EngineStats | None], every_s: float = EVERY_S) -> None:
        """`read` returns the statistics of the served model, None while no model is served. `every_s`: seconds between
        two ticks for followers.
        """
        self._read, self._every_s = read, every_s
        self._minute: deque[EngineStats] = deque(maxlen=MINUTE_SAMPLES)
        self._hour: deque[StatsSample] = deque(maxlen=HOUR_SAMPLES)
        self._averaged: EngineStats | None = None  # the snapshot that the next average begins with
        self._records = False
        self._followers = 0
        self._task: asyncio.Task[None] | None = None
        self._latest: Tick | None = None
        self._changed = asyncio.Event()
        self._number = 0

    @property
    def hour(self) -> tuple[StatsSample, ...]:
        """Averages of five seconds, oldest first. They use totals, so they include even the shortest burst."""
        return tuple(self._hour)

    def start(self) -> None:
        """Record the hour from now on."""
        self._records = True
        self._restart()

    async def stop(self) -> None:
        task, self._records = self._task, False
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def tick(self) -> Tick:
        """Return a tick now, without following; for the first rendering of a page."""
        self._number += 1
        stats = self._snapshot()
        if stats is not None:
            self._remember(stats)
        samples = tuple(_sample(snapshot) for snapshot in self._minute)
        oldest = self._minute[0] if self._minute else None
        return Tick(self._number, stats, samples, oldest)

    async def follow(self) -> AsyncIterator[Tick]:
        """Yield the latest tick, then each new one. A slow follower misses ticks and does not fall behind."""
        async with self._following():
            seen = 0
            while True:
                while self._latest is None or self._latest.number == seen:
                    await self._changed.wait()
                seen = self._latest.number
                yield self._latest

    def _snapshot(self) -> EngineStats | None:
        """Read a snapshot, and record the average since the last one if that is five seconds old."""
        before, now = self._averaged, self._read()
        if before is None or now is None or not now.goes_on_from(before):
            self._averaged = now
        elif now.taken_s - before.taken_s > AVERAGE_S - self._every_s / 2:
            self._hour.append(_average(before, now))
            self._averaged = now
        return now

    def _remember(self, stats: EngineStats) -> None:
        if self._minute and not stats.goes_on_from(self._minute[-1]):
            self._minute.clear()  # snapshots of another engine are not part of this one's history
        if not self._minute or stats.taken_s > self._minute[-1].taken_s:
            self._minute.append(stats)
        while self._minute[0].taken_s < stats.taken_s - MINUTE_SAMPLES * EVERY_S:
            self._minute.popleft()

    async def _run(self) -> None:
        while True:
            started_s, every_s = time.monotonic(), self._every_s if self._followers else AVERAGE_S
            try:
                if self._followers:
                    self._latest = self.tick()
                else:
                    self._snapshot()
            except Exception:  # one bad snapshot must not end this task: followers would wait for ever
                log.exception("reading the engine's statistics failed")
            self._changed.set()
            self._changed = asyncio.Event()
            await asyncio.sleep(max(0.0, every_s - (time.monotonic() - started_s)))

    def _restart(self) -> None:
        """Run the task at the rate that is needed now, or end it."""
        if self._task is not None:
            self._task.cancel()
        needed = self._records or self._followers > 0
        self._task = asyncio.create_task(self._run(), name="sampler") if needed else None
        self._latest = None

    @asynccontextmanager
    async def _following(self) -> AsyncIterator[None]:
        self._followers += 1
        if self._followers == 1:
            self._restart()
        try:
            yield
        finally:
            self._followers -= 1
            if not self._followers:
                self._restart()


def _sample(stats: EngineStats) -> StatsSample:
    return StatsSample(
        taken_s=stats.taken_s,
        decode_tokens_per_s=stats.decode_tokens_per_s,
        prefill_tokens_per_s=stats.prefill_tokens_per_s,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        kv_usage=stats.kv_usage,
        first_tokens=stats.ttft.count,
        ttft_total_s=stats.ttft.total,
    )


def _average(before: EngineStats, now: EngineStats) -> StatsSample:
    """Return the average rates between two snapshots, and the other statistics of the later one."""
    passed_s = now.taken_s - before.taken_s
    return replace(
        _sample(now),
        decode_tokens_per_s=(now.generation_tokens - before.generation_tokens) / passed_s,
        prefill_tokens_per_s=(now.prompt_tokens - before.prompt_tokens) / passed_s,
    )
