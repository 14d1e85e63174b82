"""Whatever the engine's calls raise: every request ends once, nothing stays held, and the next one is answered."""

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from localllm.engine.adapter import Adapter
from localllm.errors import DeviceLost
from tests.engine.harness import make_engine, make_request
from tests.engine.injected_faults import run_walks

PLACES = {
    "deliver", "adapter.begin", "adapter.end", "recorder.on_finish", "recorder.snapshot", "row: NaN", "row: no token",
    "rows: too few", *(f"grammar.{name}" for name in ("fill", "accept", "may_forbid", "is_over")),
    *(f"runner.{name}" for name in ("forward", "sample", "result", "reset", "stats", "use_idle_time")),
}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of tracebacks of exceptions that are meant."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_walks_with_injected_faults() -> None:
    raised = run_walks(range(400))
    assert raised.keys() >= PLACES, f"nothing was raised from {PLACES - raised.keys()}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_walks_with_injected_faults() -> None:
    run_walks(range(1000, 101_000))


def test_an_engine_that_is_interrupted_while_it_ends_holds_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request is ended whose end is interrupted, and the others are not forgotten."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    engine = make_engine(num_blocks=32)
    for name in "abc":
        engine.loop.submit(make_request(name, [1, 2, 3], max_tokens=4))
    engine.loop.step()
    monkeypatch.setattr(engine.scheduler.recorder, "on_finish", interrupt)
    engine.loop.lose(DeviceLost("The device is lost."))
    engine.loop.step()
    assert sorted(engine.endings) == ["a", "b", "c"]
    assert not engine.scheduler.requests
    assert engine.scheduler.ledger.main_pool.num_free == engine.scheduler.ledger.main_pool.capacity


def test_an_engine_that_is_interrupted_while_it_ends_answers_what_it_had_not_taken_in() -> None:
    class Interrupted(Adapter):
        def end(self) -> None:
            raise KeyboardInterrupt

    engine, adapter = make_engine(num_blocks=32), Interrupted("a", 0, "")
    for name in "abc":
        request = make_request(name, [1, 2, 3], max_tokens=4)
        request.options = replace(request.options, adapter=adapter)
        engine.loop.submit(request)
    engine.loop.lose(DeviceLost("The device is lost."))
    engine.loop.step()
    assert sorted(engine.endings) == ["a", "b", "c"]
