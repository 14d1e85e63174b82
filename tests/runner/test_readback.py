"""How the host waits for a step on a GPU, with simulated events, and what a copy to the host holds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from localllm.engine.step import StepPlan
from localllm.runner import readback
from localllm.runner.readback import Pace, PendingReadback, StepTimer
from localllm.runner.upload import parts_to_host

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


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_parts_come_as_they_were(shared: bool, count: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    whole = torch.zeros(8 * 12, dtype=torch.uint8, device=device)
    ids, best = whole[:64].view(torch.int64)[:count], whole[64:].view(torch.float32)[:count]
    if not shared:
        ids, best = ids.clone(), best.clone()
    ids.copy_(torch.arange(7, 7 + count))
    best.copy_(torch.arange(count) / 3)
    with torch.inference_mode():
        host_ids, host_best = parts_to_host(ids, best)
    if device.type == "cuda":
        torch.cuda.synchronize()
    ids.zero_()
    best.zero_()
    assert host_ids.tolist() == list(range(7, 7 + count))
    assert host_best.tolist() == pytest.approx([i / 3 for i in range(count)])
    assert (host_ids.dtype, host_best.dtype) == (torch.int64, torch.float32)
    assert not shared or host_ids.untyped_storage().data_ptr() == host_best.untyped_storage().data_ptr(), "one copy"
