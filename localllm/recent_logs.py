"""The last lines of this process's log, in memory, for a page or a program that watches them.

Each line has a number that grows by one, so a reader who remembers the last one it saw asks for what came after, and
sees from a gap that it was too slow. Bounded in lines and in the length of each.
Does not know: who reads, the file that keeps more of them (log_file.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

KEPT = 2000
LONGEST = 8000
"""Characters of one line; a longer one, a traceback perhaps, keeps its end, where the reason stands."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """One record. `text` is all of it, formatted, and may hold several lines."""

    number: int
    at_s: float  # time.time()
    level: str
    logger: str
    text: str


class RecentLogs(logging.Handler):
    """Keeps what is logged in any thread. Readers may be in another thread or on an event loop."""

    def __init__(self, kept: int = KEPT) -> None:
        super().__init__()
        self._lines: deque[LogLine] = deque(maxlen=kept)
        self._number = 0
        self._wakers: set[Callable[[], object]] = set()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception:
            self.handleError(record)
            return
        if len(text) > LONGEST:
            text = "… " + text[-LONGEST:]
        self._number += 1
        self._lines.append(LogLine(self._number, record.created, record.levelname, record.name, text))
        for wake in self._wakers:
            try:
                wake()
            except RuntimeError:  # its event loop is closed
                pass

    def after(self, number: int = 0) -> list[LogLine]:
        """Lines newer than that number, the oldest first; 0: all that are kept."""
        with self._records():
            return [line for line in self._lines if line.number > number]

    async def wait_after(self, number: int) -> list[LogLine]:
        """The same, once there is at least one."""
        news = asyncio.Event()
        wake = partial(asyncio.get_running_loop().call_soon_threadsafe, news.set)
        with self._records():
            self._wakers.add(wake)
        try:
            while not (lines := self.after(number)):  # a line that comes between the look and the wait sets `news`
                await news.wait()
                news.clear()
            return lines
        finally:
            with self._records():
                self._wakers.discard(wake)

    @contextmanager
    def _records(self) -> Iterator[None]:
        """Nothing is emitted meanwhile: the lock is the one under which `emit` is called."""
        self.acquire()
        try:
            yield
        finally:
            self.release()


def installed() -> RecentLogs | None:
    """The one that this process's log goes to, if the command that started it put one up."""
    return next((each for each in logging.getLogger().handlers if isinstance(each, RecentLogs)), None)
