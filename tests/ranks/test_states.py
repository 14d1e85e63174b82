"""The state of ranks between two readings: mean steps, and the share of the time that a rank computed."""

import os
import time
from typing import cast

import pytest
import torch

from localllm.ranks.channel import Channel
from localllm.ranks.group import Pipe
from localllm.ranks.progress import ProgressTable, RankProgress, shared_memory
from localllm.ranks.rank import Rank, Share
from localllm.ranks.states import InFlight, Reading, Recent, busy_ratio, mean_step_s


def line(steps: int, step_ms: int, busy_ms: int) -> RankProgress:
    return RankProgress(0, 0, 0, steps, step_ms * 1_000_000, busy_ms * 1_000_000)


def reading(at_s: float, in_flight_ms: int, *lines: RankProgress) -> Reading:
    return Reading(at_s, in_flight_ms * 1_000_000, lines)


def test_a_step_is_a_mean_of_the_recent_ones() -> None:
    assert mean_step_s(line(10, 500, 0), line(14, 580, 0)) == pytest.approx(0.020)
    assert mean_step_s(line(10, 500, 0), line(10, 500, 0)) == pytest.approx(0.050)  # no new one: of all
    assert mean_step_s(line(0, 0, 0), line(0, 0, 0)) == 0


def test_a_rank_is_busy_for_a_share_of_the_time_with_steps_in_flight() -> None:
    before = reading(0, 100, line(0, 0, 50), line(0, 0, 10))
    now = reading(5, 300, line(9, 0, 200), line(9, 0, 60))
    assert busy_ratio(0, before, now) == pytest.approx(0.75)
    assert busy_ratio(1, before, now) == pytest.approx(0.25)
    assert busy_ratio(0, before, reading(5, 110, line(9, 0, 500))) == 1
    assert busy_ratio(0, before, reading(5, 100, line(0, 0, 50))) is None


def test_the_recent_time_begins_ten_seconds_ago_or_at_the_reading_before() -> None:
    recent = Recent()
    ages = [recent.before(reading(at_s, 0)).at_s for at_s in (0, 0.1, 1, 9, 10.9, 11, 26, 40)]
    assert ages == [0, 0, 0, 0, 0, 1, 10.9, 26]


def test_the_clock_runs_while_steps_are_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])
    clock, seen = InFlight(), []
    for act in (clock.begin, clock.begin, clock.end, clock.end, clock.begin):
        act()
        now[0] += 10
        seen.append(clock.total_ns)
    assert seen == [10, 20, 20, 20, 30]


class Waits:
    """A share whose launches wait for another stage for 90 of 100 ms."""

    answers_later = False

    def __init__(self) -> None:
        self.now_ns = self.waits_ns = 10**6

    def waited_ns(self) -> int:
        return self.waits_ns

    def launch(self) -> None:
        self.now_ns += 100
        self.waits_ns += 90


def test_waits_for_other_stages_are_not_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    fd, share = shared_memory(1), Waits()
    table = ProgressTable(fd, 1)
    rank = Rank(0, cast("Channel", None), table, lambda: cast("Share", share))
    rank._connected = cast("Share", share)
    monkeypatch.setattr(time, "monotonic_ns", lambda: share.now_ns)
    for _ in range(3):
        with rank._computing():
            share.launch()
    assert table.read(0).busy_ns == 30
    share.answers_later = True  # the device waits, and the launch shows nothing of it
    with rank._computing():
        share.launch()
    assert table.read(0).busy_ns == 30
    table.close()
    os.close(fd)


def test_a_pipe_counts_its_waits_for_the_stage_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now, pipe = [0], Pipe(object(), None)

    def receive(*arguments: object, **options: object) -> None:
        now[0] += 70

    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])
    monkeypatch.setattr("torch.distributed.recv", receive)
    for _ in range(2):
        pipe.receive(torch.zeros(1, 4))
    assert pipe.waited_ns == 140
