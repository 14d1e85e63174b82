"""Whether an engine gets on, for whoever watches it from another thread.

Does not know: who watches, how long is too long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Pulse(NamedTuple):
    """What an engine's thread has done so far."""

    is_alive: bool
    has_work: bool
    progress: int  # another number after each step, whether it succeeded or not
    thread_id: int | None  # the system's


def pulse_of(thread: threading.Thread | None, *, has_work: bool, progress: int) -> Pulse:
    """One that was not started counts as alive: somebody drives it step by step."""
    return Pulse(
        thread is None or thread.is_alive(), has_work, progress, thread.native_id if thread is not None else None
    )


class TimedPool(ThreadPoolExecutor):
    """An executor that can say how long its work has been running: a job that does not end can be seen, not ended."""

    def __init__(self, num_threads: int, name: str) -> None:
        super().__init__(num_threads, thread_name_prefix=name)
        self.name, self.num_threads = name, num_threads
        self._began_s: dict[Future[Any], float] = {}  # time.monotonic() of what is running
        self._changing = threading.Lock()

    def submit(self, work: Callable[Given, Result], /, *args: Given.args, **kwargs: Given.kwargs) -> Future[Result]:
        key: Future[Any] = Future()

        def timed() -> Result:
            with self._changing:
                self._began_s[key] = time.monotonic()
            try:
                return work(*args, **kwargs)
            finally:
                with self._changing:
                    del self._began_s[key]

        return super().submit(timed)

    def standing_still_s(self) -> float:
        """How long every thread has been busy with one and the same job; 0 while one is free."""
        with self._changing:
            if len(self._began_s) < self.num_threads:
                return 0.0
            return time.monotonic() - max(self._began_s.values())
