"""Background requests: every other request runs first, and their outputs stay the same."""

from dataclasses import replace

import pytest

from localllm.engine.request import BACKGROUND_PRIORITY, Request
from tests.engine.harness import SmallEngine, check_invariants, make_engine, make_request


def background(engine: SmallEngine, name: str, prompt: list[int], max_tokens: int = 8) -> Request:
    request = make_request(name, prompt, max_tokens=max_tokens)
    request.options = replace(request.options, is_background=True)
    engine.loop.submit(request)
    return request


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
