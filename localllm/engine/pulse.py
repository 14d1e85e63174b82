"""Liveness of an engine, for monitors on other threads, and its unexpected end, for tasks that wait for it.

Does not know: who monitors it, how long is too long.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

from localllm.errors import EngineError

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Pulse(NamedTuple):
    """State and progress of an engine's thread."""

    is_alive: bool
    has_work: bool
    progress: int  # changes with each step, whether it succeeded or not
    thread_id: int | None  # of the operating system


def pulse_of(thread: threading.Thread | None, *, has_work: bool, progress: int) -> Pulse:
    """Return the pulse of a thread. Without a thread the engine counts as alive, since its caller runs the steps."""
    return Pulse(
        thread is None or thread.is_alive(), has_work, progress, thread.native_id if thread is not None else None
    )


class EndingLoop(Protocol):
    why_ended: EngineError | None


class LoopClient:
    """The part that the clients of all engine loops share: they wait for the end of the loop, and set `_ended` then."""

    def __init__(self, loop: EndingLoop) -> None:
        self._watched, self._ended = loop, asyncio.Event()

    @property
    def why_ended(self) -> EngineError | None:
        """`DeviceLost` or `EngineCrashed` if the engine ended by itself; None otherwise."""
        return self._watched.why_ended

    async def ended(self) -> EngineError:
        """Wait until the engine ends by itself, and return the error. After `stop` this never returns."""
        await self._ended.wait()
        assert self.why_ended is not None
        return self.why_ended


class TimedPool(ThreadPoolExecutor):
    """An executor that knows how long its jobs have been running, so that a hanging job can be detected (not ended)."""

    def __init__(self, num_threads: int, name: str) -> None:
        super().__init__(num_threads, thread_name_prefix=name)
        self.name, self.num_threads = name, num_threads
        self._began_s: dict[Future[Any], float] = {}  # time.monotonic() at the start of each running job
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
        """Return the seconds for which every thread has been busy with the same job; 0 while one is free."""
        with self._changing:
            if len(self._began_s) < self.num_threads:
                return 0.0
            return time.monotonic() - max(self._began_s.values())
