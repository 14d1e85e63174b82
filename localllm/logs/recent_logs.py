"""The last lines of this process's log, in memory, for the logs page and for programs that watch it.

Lines are numbered in sequence. A reader asks for the lines after the last one it saw, and a gap shows that the reader
was too slow. The number of lines and the length of each are bounded.
Does not know: who reads, the log file (log_file.py).
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
"""Most characters of one line. A longer one, such as a traceback, keeps its end, which holds the reason."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """One log record. `text` is the whole formatted record and may hold several lines."""

    number: int
    at_s: float  # time.time()
    level: str
    logger: str
    text: str


class RecentLogs(logging.Handler):
    """A log handler that keeps the last records of all threads. Readers may be in a thread or on an event loop."""

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
            except RuntimeError:  # the reader's event loop is closed
                pass

    def after(self, number: int = 0) -> list[LogLine]:
        """Return the lines after that number, oldest first; 0: all kept lines."""
        with self._records():
            return [line for line in self._lines if line.number > number]

    async def wait_after(self, number: int) -> list[LogLine]:
        """Wait until there is a line after that number, then return all of them."""
        news = asyncio.Event()
        wake = partial(asyncio.get_running_loop().call_soon_threadsafe, news.set)
        with self._records():
            self._wakers.add(wake)
        try:
            while not (lines := self.after(number)):  # a line that arrives between the check and the wait sets `news`
                await news.wait()
                news.clear()
            return lines
        finally:
            with self._records():
                self._wakers.discard(wake)

    @contextmanager
    def _records(self) -> Iterator[None]:
        """Return a copy of the records, under the lock that `emit` is called with."""
        self.acquire()
        try:
            yield
        finally:
            self.release()


def installed() -> RecentLogs | None:
    """Return this process's `RecentLogs`, if the command that started it installed one."""
    return next((each for each in logging.getLogger().handlers if isinstance(each, RecentLogs)), None)
