"""The state of a model's ranks for pages and metrics, from what the server knows: no rank is asked.

Does not know: who reads it, records.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from localllm.engine.step import RankMemory, RankStats
from localllm.models.fit import RankPlan
from localllm.ranks.progress import RankProgress
from localllm.ranks.supervisor import Supervisor

RECORDS_PER_STEP = 2
RECENT_S = 10.0  # means and shares are of the time since a reading at least that old
BETWEEN_S = 0.5  # two readings that are kept


class InFlight:
    """A clock that runs while steps are in flight. One thread starts and stops it, any thread reads it."""

    def __init__(self) -> None:
        self._state = 0, 0  # ns of the past, time.monotonic_ns() of the start; 0: it stands still

    def begin(self) -> None:
        """Start the clock, if it stands still."""
        past_ns, since_ns = self._state
        if not since_ns:
            self._state = past_ns, time.monotonic_ns()

    def end(self) -> None:
        """Stop the clock. Idempotent."""
        self._state = self.total_ns, 0

    @property
    def total_ns(self) -> int:
        past_ns, since_ns = self._state
        return past_ns + (time.monotonic_ns() - since_ns if since_ns else 0)


class Reading(NamedTuple):
    """The sums at one time."""

    at_s: float
    in_flight_ns: int
    lines: Sequence[RankProgress]  # by rank


class Recent:
    """The readings of the recent time."""

    def __init__(self) -> None:
        self._kept: deque[Reading] = deque()
        self._turn = threading.Lock()

    def before(self, now: Reading) -> Reading:
        """Return the newest reading that is at least `RECENT_S` old, else the oldest one. Keep `now` for later."""
        with self._turn:
            if not self._kept or now.at_s - self._kept[-1].at_s >= BETWEEN_S:
                self._kept.append(now)
            while len(self._kept) > 1 and now.at_s - self._kept[1].at_s >= RECENT_S:
                self._kept.popleft()
            return self._kept[0]


class RankStates:
    """Reads the state of all ranks of a group, from any thread, also after the group has ended."""

    def __init__(self, supervisor: Supervisor, ranks: Sequence[RankPlan]) -> None:
        self._supervisor, self.ranks = supervisor, ranks
        self.lost: Sequence[RankStats] = ()  # by rank: last states of those that ran the model before; empty: none
        self.device_bytes: Mapping[str, int] = {}  # memory of each device
        self.in_flight = InFlight()
        self._recent = Recent()
        self._recent.before(self._read())

    def read(self) -> tuple[RankStats, ...]:
        now = self._read()
        before = self._recent.before(now)
        furthest = max(line.launched for line in now.lines)
        return tuple(self._state(rank, before, now, furthest) for rank in range(len(now.lines)))

    def _read(self) -> Reading:
        return Reading(time.monotonic(), self.in_flight.total_ns, self._supervisor.progress.read_all())

    def _state(self, rank: int, before: Reading, now: Reading, furthest: int) -> RankStats:
        plan, supervisor, line = self.ranks[rank], self._supervisor, now.lines[rank]
        error, lost = supervisor.loss.error, self.lost[rank] if rank < len(self.lost) else None
        return RankStats(
            rank, plan.stage, plan.shard.index, plan.device, plan.name,
            pid=supervisor.pids[rank],
            is_up=supervisor.is_alive and error is None,
            memory=RankMemory(
                plan.weights_bytes, plan.kv_bytes, plan.activation_bytes,
                plan.graph_bytes + plan.comm_bytes + plan.state_bytes,
            ),
            device_bytes=self.device_bytes.get(plan.device, 0),
            step_s=mean_step_s(before.lines[rank], line),
            busy_ratio=busy_ratio(rank, before, now) if plan.device == "cpu" else None,
            lag_steps=(furthest - line.launched) // RECORDS_PER_STEP,
            restarts=0 if lost is None else lost.restarts + 1,
            last_words=str(error) if rank in supervisor.loss.ranks else "" if lost is None else lost.last_words,
        )  # fmt: skip


def mean_step_s(before: RankProgress, now: RankProgress) -> float:
    """Return the mean duration of the steps between two lines of a rank; of all its steps if there was none."""
    if now.steps > before.steps:
        return (now.step_ns - before.step_ns) / (now.steps - before.steps) / 1e9
    return now.step_ns / now.steps / 1e9 if now.steps else 0.0


def busy_ratio(rank: int, before: Reading, now: Reading) -> float | None:
    """Return the share of the time with steps in flight that a rank computed, 0 to 1; None: no step was in flight."""
    in_flight_ns = now.in_flight_ns - before.in_flight_ns
    if in_flight_ns <= 0:
        return None
    return min(1.0, (now.lines[rank].busy_ns - before.lines[rank].busy_ns) / in_flight_ns)
