"""How the host waits for a step on a GPU, with simulated events."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from localllm.engine.step import StepPlan
from localllm.runner import readback
from localllm.runner.readback import Pace, PendingReadback, StepTimer

MILLISECOND = 1.0  # as events give it


class Event:
    """Has happened when it was asked `after` times, or waited for."""

    after = 3.0
    took = MILLISECOND
    log: list[str]

    def __init__(self, **options: Any) -> None:
        self.asked = 0

    def record(self) -> None:
        pass

    def query(self) -> bool:
        self.log.append("query")
        self.asked += 1
        return self.asked >= self.after

    def synchronize(self) -> None:
        self.log.append("sleep" if self.asked < self.after else "done")

    def elapsed_time(self, end: Event) -> float:
        return self.took


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "log", [], raising=False)
    return Event.log


def wait(pace: Pace, log: list[str]) -> list[str]:
    log.clear()
    timers = [StepTimer(torch.device("cuda")).stop() for _ in range(2)]
    PendingReadback(StepPlan(1, ()), *timers, pace=pace).result()
    return list(log)


def test_the_host_polls_for_short_steps_and_sleeps_during_long_ones(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readback, "POLLED_S", 60.0)  # this machine may be busy
    pace = Pace()
    assert wait(pace, log) == ["sleep"]
    assert pace.last_s == pytest.approx(2e-3)
    monkeypatch.setattr(Event, "took", 0.2 * MILLISECOND)
    assert wait(pace, log) == ["sleep"], "the last one was long"
    assert wait(pace, log) == ["query"] * 3 + ["done"]


def test_a_step_that_takes_longer_than_the_last_one_is_not_polled_for_ever(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Event, "after", math.inf)
    monkeypatch.setattr(readback, "POLLED_S", 1e-5)
    assert wait(Pace(1e-4), log)[-1] == "sleep"
