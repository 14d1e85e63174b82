"""Background requests: every other request runs first, and their outputs stay the same."""

import random
from collections.abc import Callable

import pytest

from localllm.engine.request import BACKGROUND_PRIORITY, Request
from localllm.engine.step import StepPlan
from tests.engine.harness import SmallEngine, check_invariants, make_engine


def background(engine: SmallEngine, name: str, prompt: list[int], max_tokens: int = 8) -> Request:
    return engine.add(name, prompt, max_tokens=max_tokens, is_background=True)


def alone(name: str, prompt: list[int], max_tokens: int = 8) -> list[int]:
    engine = make_engine()
    engine.add(name, prompt, max_tokens=max_tokens)
    return engine.run()[name]


def rows_of(engine: SmallEngine, step: int) -> set[str]:
    slots = {request.slot: name for name, request in engine.scheduler.requests.items()}
    return {slots[row.slot] for row in engine.plans[step].rows if row.slot in slots}


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_request_enters_at_once_and_runs_before_all_background_requests(policy: str) -> None:
    engine = make_engine(max_num_seqs=2, policy=policy)
    for i in range(6):
        background(engine, f"b{i}", [i, 1, 2, 3], max_tokens=16)
    for _ in range(4):
        engine.loop.step()
    assert all(request.priority == BACKGROUND_PRIORITY for request in engine.scheduler.running)
    engine.add("now", [9, 8, 7, 6, 5], max_tokens=4)
    engine.loop.step()
    assert rows_of(engine, -1) == {"now"}, "its prompt shares the step with no background request"
    tokens = engine.run()
    assert tokens["now"] == alone("now", [9, 8, 7, 6, 5], 4)
    for i in range(6):
        assert tokens[f"b{i}"] == alone("b", [i, 1, 2, 3], 16), "a preempted request continues where it was"


def test_background_requests_give_up_their_blocks() -> None:
    engine = make_engine(num_blocks=12, max_num_seqs=4)
    for i in range(3):
        background(engine, f"b{i}", [i] * 8, max_tokens=8)
    for _ in range(4):
        engine.loop.step()
    prompt = [7, 5, 3, 1] * 6
    engine.add("now", prompt, max_tokens=2)
    engine.loop.step()
    check_invariants(engine)
    assert [request.request_id for request in engine.scheduler.running if request.request_id == "now"] == ["now"]
    tokens = engine.run()
    assert tokens["now"] == alone("now", prompt, 2)
    assert all(tokens[f"b{i}"] == alone("b", [i] * 8) for i in range(3))


def test_background_requests_end_while_others_keep_coming() -> None:
    engine = make_engine(max_num_seqs=2)
    background(engine, "b", [1, 2, 3], max_tokens=6)
    for i in range(40):
        engine.add(f"r{i}", [i % 30, 4], max_tokens=3)
        engine.loop.step()
        engine.loop.step()
        engine.loop.step()
    assert engine.run()["b"] == alone("b", [1, 2, 3], 6)


class Arrivals:
    """What comes in while a step runs. A fake runner asks it at the start of each forward."""

    def __init__(self) -> None:
        self.next: list[Callable[[], object]] = []

    def __call__(self, plan: StepPlan) -> bool:
        while self.next:
            self.next.pop()()
        return False


def test_a_step_of_background_requests_ends_when_another_request_arrives() -> None:
    arrivals = Arrivals()
    engine = make_engine(fail_when=arrivals)
    for i in range(3):
        background(engine, f"b{i}", [i, 1, 2, 3, 4, 5, 6, 7], max_tokens=12)
    for _ in range(4):
        engine.loop.step()
    before = {name: len(tokens) for name, tokens in engine.tokens.items()}
    arrivals.next.append(lambda: engine.add("now", [9, 8, 7], max_tokens=1))
    engine.loop.step()
    assert {name: len(tokens) for name, tokens in engine.tokens.items()} == before, "its rows are not computed"
    engine.loop.step()
    assert rows_of(engine, -1) == set(), "the request has ended with its only token"
    assert engine.tokens["now"] == alone("now", [9, 8, 7], 1)
    tokens = engine.run()
    assert all(tokens[f"b{i}"] == alone("b", [i, 1, 2, 3, 4, 5, 6, 7], 12) for i in range(3))
    assert not engine.scheduler.recorder.num_failed_steps


def test_a_step_with_another_request_or_for_another_batch_does_not_end() -> None:
    arrivals = Arrivals()
    engine = make_engine(fail_when=arrivals)
    background(engine, "b", [1, 2, 3])
    engine.loop.step()
    arrivals.next.append(lambda: background(engine, "c", [5, 5, 5]))
    engine.loop.step()
    assert len(engine.tokens["b"]) == 2
    engine.add("first", [4, 4, 4], max_tokens=8)
    engine.loop.step()
    arrivals.next.append(lambda: engine.add("second", [9, 8, 7]))
    engine.loop.step()
    assert len(engine.tokens["first"]) == 2


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
@pytest.mark.parametrize("depth", [1, 2])
def test_texts_stay_the_same_however_often_steps_end_early(windows: tuple[int | None, ...], depth: int) -> None:
    """Prompts share their beginnings and continue what others have generated, so that a name of a block which was not
    computed would be found."""
    rng = random.Random(len(windows) * 10 + depth)
    arrivals = Arrivals()
    engine = make_engine(
        fail_when=arrivals, windows=windows, depth=depth, num_blocks=(40,) * len(windows), max_num_seqs=5,
        max_num_batched_tokens=24,
    )  # fmt: skip
    asked: dict[str, tuple[list[int], int]] = {}
    ended_early = 0
    take_back = engine.scheduler.take_back

    def count_and_take_back() -> None:
        nonlocal ended_early
        ended_early += 1
        take_back()
        check_invariants(engine)

    engine.scheduler.take_back = count_and_take_back  # type: ignore[method-assign]
    openings = [[rng.randrange(9) for _ in range(70)] for _ in range(6)]
    for number in range(100):
        for name in [f"long {number}", f"short {number}"]:
            opening = openings[number % 5 if rng.random() < 0.5 else -1][: rng.randrange(70 if "l" in name else 40)]
            asked[name] = [*opening, rng.randrange(9)], rng.randrange(1, 20)
            background(engine, name, *asked[name])
        asked[f"now {number}"] = openings[rng.randrange(6)][: rng.randrange(1, 50)], rng.randrange(1, 3)
        arrivals.next.append(lambda name=f"now {number}": engine.add(name, asked[name][0], max_tokens=asked[name][1]))
        for _ in range(rng.randrange(1, 12)):
            engine.loop.step()
            check_invariants(engine)
    tokens = engine.run()
    assert ended_early > 30
    late = len(arrivals.next)  # requests that no step was there to receive
    assert len(tokens) == len(asked) - late
    assert all(of == alone(name, *asked[name]) for name, of in tokens.items())
