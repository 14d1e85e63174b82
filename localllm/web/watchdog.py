"""The health of a running server's parts: the event loop, each engine, the threads that compile grammars.

    ok      it makes progress
    slow    longer than usual, possibly for a good reason: a long prompt on a slow CPU
    stuck   it waits for something that does not happen, or has taken longer than any step can
    dead    its thread has ended

One thread checks once a second: it posts a callback to the event loop and reads a few counters. It also returns freed
memory to the system. An engine that computes is slow but not stuck, however long its step is, until `LONGEST_STEP_S`: a
step uses the processor, and a hanging one does not. If a part is stuck, the fault log gets the stack of every thread.
Does not know: how the caller reacts, HTTP.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from localllm.logs.fault_log import Fault, FaultLog
from localllm.machine import memory
from localllm.machine.systemd import notify, watchdog_s
from localllm.units import format_bytes
from localllm.version import __version__
from localllm.web.shape import Shape

if TYPE_CHECKING:
    from localllm.engine.pulse import Pulse
    from localllm.serving.manager import ModelManager

log = logging.getLogger(__name__)

State = Literal["ok", "slow", "stuck", "dead"]
SEVERITY: tuple[State, ...] = ("ok", "slow", "stuck", "dead")

LOOK_EVERY_S = 1.0
LOOP_SLOW_S, LOOP_STUCK_S = 1.0, 10.0
LOOP_MEMORY = 60  # checks: the longest lag of the event loop is reported for one minute
STEP_SLOW_S = 30.0
STEP_IDLE_S = 120.0
"""A step that has used almost no processor time in this period is stuck. No step on a GPU takes this long."""
LONGEST_STEP_S = 1800.0
IDLE_SHARE = 0.02  # of one core
COMPILE_STUCK_S = 60.0
"""No request waits that long for a grammar: it has been refused by then."""
TRIM_GROWN_BYTES = 32 * 2**20
TRIM_EVERY_S = 5.0
TRIM_WORKED_S, TRIM_WORKED_EVERY_S = 0.1, 10.0
"""CPU seconds after which something may have been freed that was in use at the last time. Little work is enough: the
requests that hold most may end in the moment after a trim."""


class PartOfServer(Shape):
    """A part of the server and its state. `seconds`: how long it has been in this state, or how long it was stalled."""

    part: str
    state: State
    seconds: float
    why: str


class ServerReport(Shape):
    """The watchdog's report about the process."""

    object: Literal["server"]
    version: str
    pid: int
    uptime_s: float
    status: State
    parts: list[PartOfServer]
    engines: dict[str, dict[str, float | None]]
    loop_lag_s: float
    longest_loop_lag_s: float
    rss_bytes: int
    num_threads: int
    open_requests: int
    num_faults: int
    last_fault: Fault | None
    fault_file: str | None


@dataclass(slots=True)
class _Engine:
    """The last observations of one engine. Times are `time.monotonic`."""

    pulse: Pulse
    since_s: float  # time of its last progress, or since when it is idle
    cpu: deque[tuple[float, float]] = field(default_factory=deque)  # (time, CPU seconds of its thread)
    told: bool = False


class Watchdog:
    """Call `start` on the serving event loop; `parts` and `report` may be called from any thread."""

    def __init__(self, manager: ModelManager, faults: FaultLog) -> None:
        self.manager, self.faults = manager, faults
        self.started_s = time.time()
        self._engines: dict[str, _Engine] = {}
        self._lags: deque[float] = deque(maxlen=LOOP_MEMORY)
        self._sent_s: float | None = None  # when the pending callback was posted; None if it has run
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_told = self._compilers_told = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._kept_bytes, self._trimmed_s, self._trimmed_cpu_s = 0, 0.0, 0.0
        self._collected_bytes = 0  # resident after the last collection of garbage, or less since

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._watch, name="localllm-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    # Reports ------------------------------------------------------------------------------------------------------

    def parts(self) -> list[PartOfServer]:
        now_s = time.monotonic()
        return [self._event_loop(now_s), *self._engine_parts(now_s), *self._compiler_parts()]

    def report(self) -> ServerReport:
        """Return everything known about this process."""
        now_s, last, parts = time.monotonic(), self.faults.last, self.parts()
        engines = {
            name: {
                "step_age_s": round(now_s - seen.since_s, 3) if seen.pulse.has_work else None,
                "rests_s": None if seen.pulse.has_work else round(now_s - seen.since_s, 3),
                "steps": seen.pulse.progress,
            }
            for name, seen in list(self._engines.items())
        }
        return ServerReport(
            object="server",
            version=__version__,
            pid=os.getpid(),
            uptime_s=round(time.time() - self.started_s, 1),
            status=worst(parts),
            parts=parts,
            engines=engines,
            loop_lag_s=round(self._lag(now_s), 3),
            longest_loop_lag_s=round(max((*self._lags, self._lag(now_s))), 3),
            rss_bytes=memory.resident_bytes(),
            num_threads=threading.active_count(),
            open_requests=self.manager.num_open,
            num_faults=self.faults.count,
            last_fault=last,
            fault_file=str(self.faults.path) if self.faults.path is not None else None,
        )

    def _event_loop(self, now_s: float) -> PartOfServer:
        lag_s = self._lag(now_s)
        longest_s = max((*self._lags, lag_s))
        if lag_s >= LOOP_STUCK_S:
            return PartOfServer("event loop", "stuck", lag_s, f"It has not run for {lag_s:.0f} s.")
        if longest_s >= LOOP_SLOW_S:
            return PartOfServer(
                "event loop", "slow", longest_s, f"It was blocked for {longest_s:.1f} s within the last minute."
            )
        return PartOfServer("event loop", "ok", longest_s, "")

    def _engine_parts(self, now_s: float) -> list[PartOfServer]:
        return [_judge(f"engine {name}", seen, now_s) for name, seen in list(self._engines.items())]

    def _compiler_parts(self) -> list[PartOfServer]:
        parts = []
        for model in self.manager.ready:
            for pool in model.client.compilers:
                busy_s = pool.standing_still_s()
                if busy_s >= COMPILE_STUCK_S:
                    why = f"Each of {pool.num_threads} threads has been compiling the same grammar for {busy_s:.0f} s."
                    parts.append(PartOfServer(f"compilers {model.name}", "stuck", busy_s, why))
        return parts

    def _lag(self, now_s: float) -> float:
        """Return how long the callback that was posted last has been waiting; 0 if none is pending."""
        sent_s = self._sent_s
        return 0.0 if sent_s is None else now_s - sent_s

    # The thread -------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
            try:
                self._look(time.monotonic())
                self._ping()
                self.faults.mark_alive()
            except Exception as error:  # the manager changes while it is read; the next check may succeed
                self.faults.record("watchdog", error)

    def _ping(self) -> None:
        """Tell systemd, if it asks, that nothing is stuck. Only a new process recovers from what is stuck; a dead
        engine is loaded again by itself, and stuck compilers let other requests through."""
        if watchdog_s() is None:
            return
        if not any(each.state == "stuck" and not each.part.startswith("compilers") for each in self.parts()):
            notify("WATCHDOG=1")

    def _look(self, now_s: float) -> None:
        self._look_at_loop(now_s)
        self._look_at_engines(now_s)
        self._tell()
        self._give_back(now_s)

    def _look_at_loop(self, now_s: float) -> None:
        assert self._loop is not None
        if self._sent_s is None:
            self._sent_s = now_s
            try:
                self._loop.call_soon_threadsafe(self._answered)
            except RuntimeError:  # the loop is closed: the server has stopped
                self._ended.set()

    def _answered(self) -> None:
        """The posted callback; runs on the event loop."""
        if self._sent_s is not None:
            self._lags.append(time.monotonic() - self._sent_s)
        self._sent_s, self._loop_told = None, False

    def _look_at_engines(self, now_s: float) -> None:
        pulses = {model.name: model.loop.pulse() for model in self.manager.ready}
        for name in self._engines.keys() - pulses.keys():
            self._engines.pop(name, None)
        for name, pulse in pulses.items():
            seen = self._engines.get(name)
            if seen is None or pulse != seen.pulse:
                self._engines[name] = _Engine(pulse, now_s)
            elif pulse.has_work and now_s - seen.since_s >= STEP_SLOW_S:
                cpu_s = thread_cpu_s(pulse.thread_id)
                if cpu_s is not None:
                    seen.cpu.append((now_s, cpu_s))
                    while seen.cpu[-1][0] - seen.cpu[0][0] > STEP_IDLE_S:
                        seen.cpu.popleft()

    def _tell(self) -> None:
        """Write to the fault log, once each time that a part gets stuck."""
        now_s = time.monotonic()
        loop = self._event_loop(now_s)
        if loop.state == "stuck" and not self._loop_told:
            self._loop_told = True
            self.faults.record_stall(loop.part, loop.why)
        for name, seen in self._engines.items():
            part = _judge(f"engine {name}", seen, now_s)
            if part.state in ("stuck", "dead") and not seen.told:
                seen.told = True
                self.faults.record_stall(part.part, part.why)
        compilers = self._compiler_parts()
        if compilers and not self._compilers_told:
            self.faults.record_stall(compilers[0].part, compilers[0].why)
        self._compilers_told = bool(compilers)

    def _give_back(self, now_s: float) -> None:
        if now_s - self._trimmed_s < TRIM_EVERY_S:
            return
        before_bytes = memory.resident_bytes()
        has_grown = before_bytes - self._kept_bytes >= TRIM_GROWN_BYTES
        has_worked = time.process_time() - self._trimmed_cpu_s >= TRIM_WORKED_S
        if not has_grown and not (has_worked and now_s - self._trimmed_s >= TRIM_WORKED_EVERY_S):
            self._kept_bytes = min(self._kept_bytes, before_bytes)
            return
        memory.trim()
        self._kept_bytes = memory.resident_bytes()
        if self._kept_bytes - self._collected_bytes >= TRIM_GROWN_BYTES:  # in however many small steps
            gc.collect()  # errors and the frames that they came from, with the bodies of bad requests
            memory.trim()
            self._kept_bytes = self._collected_bytes = memory.resident_bytes()
        self._collected_bytes = min(self._collected_bytes, self._kept_bytes)
        self._trimmed_s, self._trimmed_cpu_s = now_s, time.process_time()
        log.debug("trimmed rss=%s to=%s", format_bytes(before_bytes), format_bytes(self._kept_bytes))


def worst(parts: list[PartOfServer]) -> State:
    """Return the worst state of all parts. Stuck compilers count as slow, because requests without a grammar are still
    served.
    """
    states: list[State] = ["slow" if each.part.startswith("compilers") else each.state for each in parts]
    return max(states, key=SEVERITY.index, default="ok")


def _judge(part: str, seen: _Engine, now_s: float) -> PartOfServer:
    for_s = now_s - seen.since_s
    if not seen.pulse.is_alive:
        return PartOfServer(
            part, "dead", for_s, "Its thread has ended. The model is loaded again, at the latest for the next request."
        )
    if not seen.pulse.has_work or for_s < STEP_SLOW_S:
        return PartOfServer(part, "ok", for_s, "")
    if for_s >= LONGEST_STEP_S:
        return PartOfServer(part, "stuck", for_s, f"It has had work for {for_s:.0f} s but finished no step.")
    if len(seen.cpu) > 1 and seen.cpu[-1][0] - seen.cpu[0][0] >= STEP_IDLE_S - 2 * LOOK_EVERY_S:
        share = (seen.cpu[-1][1] - seen.cpu[0][1]) / (seen.cpu[-1][0] - seen.cpu[0][0])
        if share < IDLE_SHARE:
            why = f"Its step has run for {for_s:.0f} s and used {share:.1%} of a core in the last {STEP_IDLE_S:.0f} s."
            return PartOfServer(part, "stuck", for_s, why)
    return PartOfServer(part, "slow", for_s, f"Its step has run for {for_s:.0f} s.")


def thread_cpu_s(thread_id: int | None) -> float | None:
    """Return the CPU seconds of a thread of this process; None if the system does not report them."""
    if thread_id is None or sys.platform != "linux":
        return None
    try:
        told = Path(f"/proc/self/task/{thread_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(told[11]) + int(told[12])) / os.sysconf("SC_CLK_TCK")
