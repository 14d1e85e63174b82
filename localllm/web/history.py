"""The last hour, seen or not: a figure every five seconds, from the totals of two snapshots.

    history.start()             # with the server
    history.samples             # oldest first
    await history.stop()

What a page draws of the last minute comes from live.py, which looks only while somebody does. An hour that begins when
somebody looks would be empty, so this one is kept all the time; a look costs microseconds.
Does not know: pages, plots.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from localllm.engine.stats import EngineStats
from localllm.web.live import Sample

log = logging.getLogger(__name__)

EVERY_S = 5.0
KEPT = 720
"""Samples kept: one hour."""


class History:
    """Averages since the look before: what happened between two looks is in the totals, however short it was."""

    def __init__(self, read: Callable[[], EngineStats | None], every_s: float = EVERY_S) -> None:
        """read: the engine of the model that is served, None while none is."""
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
        """One sample more, where the same engine was seen before."""
        before, now = self._before, self._read()
        if before is not None and now is not None and now.goes_on_from(before) and now.taken_s > before.taken_s:
            self._samples.append(_between(before, now))
        self._before = now

    async def _run(self) -> None:
        while True:
            try:
                self.look()
            except Exception:  # an hour is not lost to one bad snapshot
                log.exception("a look at the engine failed")
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
