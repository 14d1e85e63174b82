"""Batches of inputs: everybody is answered, with what is theirs, within the limits, the oldest first."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.engine.pooling import PooledValues, PoolingInput, PoolingLoop, PoolingRunner
from localllm.engine.pooling_client import PoolingClient, PoolingLimits
from localllm.errors import DeviceLost, EngineCrashed, EngineStopped, QueueFull, StepFailed
from tests.draws import draws


def tokens(first: int, length: int) -> PoolingInput:
    return PoolingInput((first,) * length)


def answer(each: PoolingInput) -> PooledValues:
    return [float(each.token_ids[0]), float(len(each.token_ids))]


class Recorder:
    """Answers at once, or when `gate` opens, and keeps what came together."""

    def __init__(self) -> None:
        self.batches: list[list[PoolingInput]] = []
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()

    def __call__(self, batch: Sequence[PoolingInput]) -> list[PooledValues]:
        self.batches.append(list(batch))
        self.entered.set()
        assert self.gate.wait(10)
        return [answer(each) for each in batch]

    def close(self) -> None: ...


@contextmanager
def running(run: PoolingRunner, seqs: int = 4, budget: int = 64, queued: int = 1000) -> Iterator[PoolingLoop]:
    loop = PoolingLoop(run, max_num_seqs=seqs, max_num_batched_tokens=budget, max_num_queued=queued)
    loop.start()
    try:
        yield loop
    finally:
        loop.stop()


class Fails(Recorder):
    """With this, for inputs that begin with 0."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def __call__(self, batch: Sequence[PoolingInput]) -> list[PooledValues]:
        answers = super().__call__(batch)
        if any(each.token_ids[0] == 0 for each in batch):
            raise self.error
        return answers


@pytest.mark.parametrize(
    ("error", "why"), [(DeviceLost("The GPU is gone."), DeviceLost), (SystemExit(1), EngineCrashed)]
)
def test_an_engine_that_ends_by_itself_tells_everybody_and_says_why(error: BaseException, why: type[Exception]) -> None:
    run = Fails(error)
    run.gate.clear()
    with running(run, seqs=1) as loop:
        ended = threading.Event()
        loop.on_ended = ended.set
        futures = [loop.submit([tokens(first, 3)]) for first in (0, 1, 2)]
        run.gate.set()
        assert isinstance(futures[0].exception(10), StepFailed)
        assert [type(future.exception(10)) for future in futures[1:]] == [why, why]
        assert ended.wait(10)
        assert isinstance(loop.why_ended, why)
        with pytest.raises(EngineStopped, match="The engine has ended"):
            loop.submit([tokens(1, 3)])


async def test_a_client_hears_that_its_engine_has_ended() -> None:
    loop = PoolingLoop(Fails(DeviceLost("The GPU is gone.")), max_num_seqs=1, max_num_batched_tokens=9,
                       max_num_queued=9)  # fmt: skip
    client = PoolingClient(loop, None, PoolingLimits(9, 1, 9), 2)  # type: ignore[arg-type]
    await client.start()
    assert client.why_ended is None
    with pytest.raises(DeviceLost):
        await client.embed([[0, 0]])
    assert isinstance(await asyncio.wait_for(client.ended(), 10), DeviceLost)
    assert isinstance(client.why_ended, DeviceLost)
    await client.stop()


def test_a_batch_that_fails_ends_its_own_requests() -> None:
    answers: list[list[PooledValues]] = [[], [[1.0, 3.0]]]
    with running(lambda batch: answers.pop(0)) as loop:  # type: ignore[arg-type]
        assert isinstance(loop.submit([tokens(1, 3)]).exception(10), StepFailed)
        assert loop.submit([tokens(1, 3)]).result(10) == [[1.0, 3.0]]
        assert loop.why_ended is None


@draws(60)
@given(
    requests=st.lists(st.lists(st.integers(1, 40), max_size=6), max_size=8),
    seqs=st.integers(1, 5),
    budget=st.integers(40, 120),
)
def test_everybody_gets_their_own_answers(requests: list[list[int]], seqs: int, budget: int) -> None:
    recorder = Recorder()
    asked = [[tokens(10 * i + j, length) for j, length in enumerate(lengths)] for i, lengths in enumerate(requests)]
    with running(recorder, seqs, budget) as loop:
        futures = [loop.submit(inputs) for inputs in asked]
        assert [future.result(10) for future in futures] == [[answer(each) for each in inputs] for inputs in asked]
        assert loop.stats().num_tokens == sum(map(sum, requests))
    for batch in recorder.batches:
        assert len(batch) <= seqs
        assert len(batch) * max(len(each.token_ids) for each in batch) <= budget


def test_an_input_longer_than_the_budget_runs_alone() -> None:
    recorder = Recorder()
    with running(recorder, budget=16) as loop:
        assert loop.submit([tokens(1, 50), tokens(2, 3)]).result(10) == [[1.0, 50.0], [2.0, 3.0]]
    assert [len(batch) for batch in recorder.batches] == [1, 1]


def test_like_lengths_share_a_batch_and_the_oldest_is_always_in_it() -> None:
    recorder = Recorder()
    recorder.gate.clear()
    with running(recorder, seqs=3, budget=1000) as loop:
        first = loop.submit([tokens(0, 1)])
        assert recorder.entered.wait(10)
        rest = loop.submit([tokens(1, 100), tokens(2, 5), tokens(3, 90), tokens(4, 6), tokens(5, 95)])
        recorder.gate.set()
        first.result(10), rest.result(10)
    assert [sorted(len(each.token_ids) for each in batch) for batch in recorder.batches] == [[1], [90, 95, 100], [5, 6]]


def test_a_failed_batch_is_told_and_the_next_one_runs() -> None:
    class Fails(Recorder):
        def __call__(self, batch: Sequence[PoolingInput]) -> list[PooledValues]:
            if any(each.token_ids[0] == 13 for each in batch):
                raise RuntimeError("boom")
            return super().__call__(batch)

    with running(Fails(), seqs=1) as loop:
        bad, good = loop.submit([tokens(13, 2), tokens(1, 2)]), loop.submit([tokens(2, 2)])
        with pytest.raises(StepFailed):
            bad.result(10)
        assert good.result(10) == [[2.0, 2.0]]


def test_a_cancelled_request_leaves_the_queue() -> None:
    recorder = Recorder()
    recorder.gate.clear()
    with running(recorder, seqs=1) as loop:
        first = loop.submit([tokens(0, 1)])
        assert recorder.entered.wait(10)
        gone, kept = loop.submit([tokens(1, 1), tokens(2, 1)]), loop.submit([tokens(3, 1)])
        assert gone.cancel()
        recorder.gate.set()
        assert (first.result(10), kept.result(10)) == ([[0.0, 1.0]], [[3.0, 1.0]])
    assert [batch[0].token_ids[0] for batch in recorder.batches] == [0, 3]


def test_a_full_queue_and_a_stopped_loop_refuse() -> None:
    recorder = Recorder()
    recorder.gate.clear()
    waiting: Future[list[PooledValues]]
    with running(recorder, seqs=1, queued=2) as loop:
        loop.submit([tokens(0, 1)])
        assert recorder.entered.wait(10)
        waiting = loop.submit([tokens(1, 1), tokens(2, 1)])
        loop.submit([tokens(3, 1)])
        with pytest.raises(QueueFull, match="3 inputs of 2 requests are waiting"):
            loop.submit([tokens(4, 1)])
        threading.Timer(0.05, recorder.gate.set).start()
    with pytest.raises(EngineStopped):
        waiting.result(10)
    with pytest.raises(EngineStopped):
        loop.submit([tokens(1, 1)])
    assert loop.submit([]).result(0) == []


def test_a_large_request_does_not_shut_others_out_of_the_queue() -> None:
    recorder = Recorder()
    recorder.gate.clear()
    with running(recorder, seqs=1, queued=8) as loop:
        loop.submit([tokens(0, 1)])
        assert recorder.entered.wait(10)
        for first in (1, 2, 3):
            loop.submit([tokens(first, 1)] * 100)
        small = [loop.submit([tokens(4, 1)]) for _ in range(2)]
        with pytest.raises(QueueFull, match="302 inputs of 5 requests"):
            loop.submit([tokens(5, 1)])
        recorder.gate.set()
        assert [each.result(10) for each in small] == [[[4.0, 1.0]]] * 2


def test_requests_take_turns() -> None:
    recorder = Recorder()
    recorder.gate.clear()
    with running(recorder, seqs=2) as loop:
        loop.submit([tokens(0, 1)])
        assert recorder.entered.wait(10)
        large, small = loop.submit([tokens(1, 9)] * 50), loop.submit([tokens(2, 1)])
        recorder.gate.set()
        small.result(10)
        first = next(place for place, batch in enumerate(recorder.batches) if batch[0].token_ids[0] == 2)
        assert first <= 2  # the one that ran, one of the large request, then its turn
        large.result(10)


def test_the_rest_of_a_failed_request_is_not_computed() -> None:
    class Fails(Recorder):
        def __call__(self, batch: Sequence[PoolingInput]) -> list[PooledValues]:
            super().__call__(batch)
            raise RuntimeError("boom")

    failing = Fails()
    with running(failing, seqs=1) as loop:
        with pytest.raises(StepFailed):
            loop.submit([tokens(1, 1)] * 100).result(10)
        with pytest.raises(StepFailed):
            loop.submit([tokens(2, 1)]).result(10)
    assert [batch[0].token_ids[0] for batch in failing.batches] == [1, 2]
