"""Windows join and leave a running batch: each is encoded once, none waits for ever, and room is free at the end."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from localllm.engine.pooling import JoiningLoop
from localllm.errors import DeviceLost, EngineStopped, StepFailed
from tests.draws import draws


class Asked(NamedTuple):
    """A window: its name, the steps and rows that it needs, and what fails."""

    name: str
    steps: int = 1
    beams: int = 1
    fails: str = ""  # encode, write, step

    @property
    def length(self) -> int:
        return 3000


@dataclass
class Inside:
    asked: Asked
    left: int


class Sources:
    """A runner whose windows take a number of steps. It keeps what happened."""

    def __init__(self, places: int, rows: int = 8, error: BaseException | None = None) -> None:
        self.places, self.rows = places, rows
        self.inside: dict[int, Inside] = {}
        self.encoded, self.events = Counter[int](), list[str]()
        self.error = error or RuntimeError("broken")

    @property
    def free_rows(self) -> int:
        return self.rows - sum(each.asked.beams for each in self.inside.values())

    def fits(self, each: Asked) -> bool:
        return len(self.inside) < self.places and each.beams <= self.free_rows

    def is_last_place(self) -> bool:
        return min(self.places - len(self.inside), self.free_rows) <= 1

    def join(self, key: int, each: Asked) -> None:
        assert self.fits(each)
        self.encoded[key] += 1
        self.events.append(f"encode {each.name}")
        if each.fails == "encode":
            raise self.error
        self.inside[key] = Inside(each, each.steps)

    def step(self) -> list[tuple[Any, Any]]:
        assert self.inside
        self.events.append("step")
        if any(each.asked.fails == "step" for each in self.inside.values()):
            self.inside.clear()
            raise self.error
        ended = list[tuple[Any, Any]]()
        for key, each in list(self.inside.items()):
            assert self.encoded[key] == 1, "it is read before it is encoded, or was encoded twice"
            each.left -= 1
            if each.asked.fails == "write":
                ended.append((key, ValueError("not this one")))
            elif not each.left:
                ended.append((key, [each.asked.name]))
        for key, _ in ended:
            del self.inside[key]
        return ended

    def drop(self, key: int) -> None:
        del self.inside[key]

    def close(self) -> None: ...


def turns(loop: JoiningLoop, count: int = 1) -> None:
    """Run turns on this thread, as long as there is work."""
    for _ in range(count):
        if loop._inside or loop._window():
            assert loop._turn()


def file(name: str, windows: int, steps: int = 3, **how: Any) -> list[Asked]:
    return [Asked(f"{name}{i}", steps, **how) for i in range(windows)]


class Walk(RuleBasedStateMachine):
    """Files arrive, are cancelled and fail, while windows are written in a few places."""

    @initialize(places=st.integers(1, 4))
    def begin(self, places: int) -> None:
        self.runner = Sources(places)
        self.loop = JoiningLoop(self.runner, max_num_queued=1000)
        self.asked: list[tuple[list[Asked], Future[Any]]] = []

    @rule(windows=st.integers(1, 5), steps=st.integers(1, 4), beams=st.sampled_from([1, 1, 5, 8]),
          fails=st.sampled_from(["", "", "", "encode", "write", "step"]), background=st.booleans())  # fmt: skip
    def arrive(self, windows: int, steps: int, beams: int, fails: str, background: bool) -> None:
        inputs = file(f"{len(self.asked)}.", windows, steps, beams=beams)
        inputs[-1] = inputs[-1]._replace(fails=fails)
        self.asked.append((inputs, self.loop.submit(inputs, is_background=background)))

    @rule(which=st.integers(0, 100))
    def cancel(self, which: int) -> None:
        if self.asked:
            self.asked[which % len(self.asked)][1].cancel()

    @rule(count=st.integers(1, 4))
    def turn(self, count: int) -> None:
        turns(self.loop, count)

    @invariant()
    def the_loop_and_its_runner_agree(self) -> None:
        if hasattr(self, "loop"):
            assert set(self.loop._inside) == set(self.runner.inside)

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        turns(self.loop, 1000)
        assert not self.runner.inside
        assert not self.loop._waiting
        assert set(self.runner.encoded.values()) <= {1}
        for inputs, future in self.asked:
            assert future.done(), inputs
            if not future.cancelled() and future.exception() is None:
                assert future.result() == [[each.name] for each in inputs]
                assert not any(each.fails for each in inputs)


TestWalk = Walk.TestCase
TestWalk.settings = draws(60, stateful_step_count=25)


def test_a_file_leaves_the_last_place_to_others_and_a_dictation_waits_for_one_encode() -> None:
    runner = Sources(4)
    loop = JoiningLoop(runner, max_num_queued=1000)
    loop.submit(file("talk", 9, steps=50))
    turns(loop, 6)
    assert len(runner.inside) == 3
    runner.events.clear()
    dictation = loop.submit(file("word", 1, steps=2))
    turns(loop, 2)
    assert dictation.result(0) == [["word0"]]
    assert runner.events == ["encode word0", "step", "step"]


def test_others_join_before_a_file_that_has_more_windows_inside() -> None:
    runner = Sources(4)
    loop = JoiningLoop(runner, max_num_queued=1000)
    loop.submit(file("talk", 9, steps=2))
    turns(loop)
    loop.submit(file("other", 9, steps=2))
    turns(loop)
    assert runner.events[-2:] == ["encode other0", "step"], "a request without a window inside is the next"
    turns(loop, 11)
    joined = [event for event in runner.events if event != "step"]
    talk, other = (sum(name in event for event in joined) for name in ("talk", "other"))
    assert abs(talk - other) <= 1
    assert all("step" in pair for pair in pairwise(runner.events)), "one encode at a time"


def test_background_windows_wait_and_a_window_of_many_rows_is_not_passed() -> None:
    runner = Sources(3)
    loop = JoiningLoop(runner, max_num_queued=1000)
    loop.submit(file("later", 1), is_background=True)
    loop.submit(file("talk", 2, steps=4))
    turns(loop)
    assert runner.events[0] == "encode talk0"
    wide = loop.submit(file("wide", 1, beams=8))
    turns(loop, 2)
    loop.submit(file("short", 1))
    turns(loop, 30)
    joined = [event.split()[1] for event in runner.events if event.startswith("encode")]
    assert joined.index("wide0") < joined.index("short0") < joined.index("later0")
    assert wide.result(0) == [["wide0"]]


def test_failures_end_their_own_requests_and_a_lost_device_all() -> None:
    runner = Sources(4)
    loop = JoiningLoop(runner, max_num_queued=1000)
    good, bad = loop.submit(file("good", 2)), loop.submit([Asked("bad", fails="encode"), Asked("later")])
    turns(loop, 20)
    assert isinstance(bad.exception(0), StepFailed)
    assert good.result(0) == [["good0"], ["good1"]]
    loop = JoiningLoop(Sources(4, error=DeviceLost("The GPU is gone.")), max_num_queued=1000)
    lost = loop.submit([Asked("lost", fails="step")])
    waiting = loop.submit(file("waiting", 1))
    ended = threading.Event()
    loop.on_ended = ended.set
    loop.start()
    assert [type(each.exception(10)) for each in (lost, waiting)] == [DeviceLost, DeviceLost]
    assert ended.wait(10)


def test_a_stopped_loop_ends_what_is_inside() -> None:
    runner = Sources(2)
    loop = JoiningLoop(runner, max_num_queued=1000)
    endless = loop.submit(file("endless", 2, steps=1 << 40))
    loop.start()
    loop.stop()
    with pytest.raises(EngineStopped):
        endless.result(10)
    assert not runner.inside
