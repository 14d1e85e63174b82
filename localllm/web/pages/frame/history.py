"""The statistics of the last hour: one sample every five seconds, computed from the totals of two snapshots.

    history.start()             # with the server
    history.samples             # oldest first
    await history.stop()

live.py samples the last minute only while a page is open. The hour is recorded all the time, so that a page that opens
later can show it; one sample costs microseconds.
Does not know: pages, plots.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from localllm.engine.stats import EngineStats
from localllm.web.pages.frame.live import Sample

log = logging.getLogger(__name__)

EVERY_S = 5.0
KEPT = 720
"""Samples kept: one hour."""


class History:
    """Averages between consecutive snapshots. They use totals, so they include even the shortest burst between two
    snapshots.
    """

    def __init__(self, read: Callable[[], EngineStats | None], every_s: float = EVERY_S) -> None:
        """`read` returns the engine statistics of the served model, None while no model is served."""
        self._read, self._every_s = read, every_s
        self._samples: deque[Sample] = deque(maxlen=KEPT)
        self._before: EngineStats | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def samples(self) -> tuple[Sample, ...]:
        return tuple(self._samples)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="history")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def look(self) -> None:
        """Add one sample, if the previous snapshot was of the same engine."""
        before, now = self._before, self._read()
        if before is not None and now is not None and now.goes_on_from(before) and now.taken_s > before.taken_s:
            self._samples.append(_between(before, now))
        self._before = now

    async def _run(self) -> None:
        while True:
            try:
                self.look()
            except Exception:  # an hour is not lost to one bad snapshot
                log.exception("reading the engine's statistics failed")
            await asyncio.sleep(self._every_s)


def _between(before: EngineStats, now: EngineStats) -> Sample:
    passed_s = now.taken_s - before.taken_s
    return Sample(
        taken_s=now.taken_s,
        decode_tokens_per_s=(now.generation_tokens - before.generation_tokens) / passed_s,
        prefill_tokens_per_s=(now.prompt_tokens - before.prompt_tokens) / passed_s,
        num_running=now.num_running,
        num_waiting=now.num_waiting,
        kv_usage=now.kv_usage,
    )
