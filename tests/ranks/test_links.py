"""The engine over real records: same tokens as without ranks, an end for every request wherever a rank dies."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.engine.memory.block_stores import RamStore
from localllm.engine.step import Row, RunnerStats, StepPlan
from localllm.errors import ModelNotFound, RanksLost
from localllm.ranks.links import Links
from localllm.ranks.messages import PutAdapter, Report
from localllm.ranks.remote import QUIET_S, RankRunner
from localllm.ranks.wire import Kind, Record, encode, encode_plan, encode_record, encode_sample
from tests.draws import draws
from tests.engine.harness import EveryOther, PlannedTransfers, SmallEngine, make_engine
from tests.fake_runner import expected_output
from tests.ranks.harness import ThreadGroup

PROMPTS = {"a": [1, 2, 3, 4, 5], "b": [7] * 9, "c": [3, 1], "d": [1, 2, 3, 4, 5, 6, 7, 8, 9]}


@pytest.fixture(autouse=True)
def no_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for a supervisor to tell how a rank died."""
    monkeypatch.setattr("localllm.ranks.links.CAUSE_S", 0.02)


@contextmanager
def group(size: int = 2, **options: object) -> Iterator[ThreadGroup]:
    made = ThreadGroup(size, **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


def engine_on(runner: RankRunner, depth: int = 2, *, may_fail: bool = False) -> SmallEngine:
    fail_when = (lambda plan: False) if may_fail else None  # else the harness raises what a step raises
    engine = make_engine(depth=depth, num_blocks=runner.num_blocks, fail_when=fail_when)
    engine.loop.runner = runner
    return engine


@pytest.mark.parametrize(("size", "depth"), [(1, 1), (2, 2), (3, 2)])
def test_tokens_are_those_of_one_process(size: int, depth: int) -> None:
    with group(size) as ranks:
        engine = engine_on(ranks.open(), depth)
        for name, prompt in PROMPTS.items():
            engine.add(name, prompt, max_tokens=12)
        assert engine.run() == {name: expected_output(prompt, 12) for name, prompt in PROMPTS.items()}
        assert ranks.loss.error is None


def test_blocks_leave_a_rank_and_come_back() -> None:
    """The model made of memory checks what it reads, so a block in another place or of another prompt is noticed."""
    with group(1) as ranks:
        runner = ranks.open()
        engine = make_engine(
            depth=2,
            num_blocks=runner.num_blocks,
            transfers=PlannedTransfers([RamStore(2**20)]),
            max_num_batched_tokens=16,
        )
        engine.loop.runner = runner
        tiers, prompt = engine.scheduler.cache.tiers, list(range(1, 31))
        assert tiers is not None
        for name in ("a", "b"):
            engine.add(name, prompt)
            assert engine.run()[name] == expected_output(prompt, 8)
            while tiers.transfers.jobs:  # type: ignore[attr-defined]
                tiers.transfers.advance()  # type: ignore[attr-defined]
            engine.loop.step()
            engine.scheduler.ledger.forget_all()
        assert engine.scheduler.recorder.prompt_tokens == 30 + 2
        assert runner.block_bytes == engine.runner.block_bytes


def test_the_blocks_of_several_ranks_do_not_move() -> None:
    with group(2) as ranks:
        assert ranks.open().block_bytes == ()


def test_masks_reach_the_rank_that_draws_and_no_other() -> None:
    with group(2, checks_all=False) as ranks:
        engine = engine_on(ranks.open())
        engine.add("a", [1, 2, 3], max_tokens=8, grammar=EveryOther(6))
        engine.add("b", [4, 5], max_tokens=8)
        assert engine.run() == {
            "a": expected_output([1, 2, 3], 8, grammar=EveryOther(6)), "b": expected_output([4, 5], 8),
        }  # fmt: skip


@given(st.integers(6, 40), st.integers(0, 1))
@draws(25)
def test_every_request_ends_wherever_a_rank_dies(dies_at: int, rank: int) -> None:
    with group(2, dying_rank=rank, dies_at=dies_at) as ranks:
        engine = engine_on(ranks.open(), may_fail=True)
        for name, prompt in PROMPTS.items():
            engine.add(name, prompt, max_tokens=6)
        for _ in range(40):
            engine.loop.step()
        assert set(engine.endings) == set(PROMPTS)
        for name, prompt in PROMPTS.items():
            error, tokens = engine.endings[name][0].error, engine.tokens[name]
            assert error is None or isinstance(error, RanksLost)
            assert tokens == expected_output(prompt, 6)[: len(tokens)]
        assert (ranks.loss.error is None) == all(engine.endings[name][0].error is None for name in PROMPTS)
        if ranks.loss.error is not None:
            assert isinstance(engine.loop.why_ended, RanksLost)
            with pytest.raises(RanksLost):
                engine.loop.runner.forward(StepPlan(1000, ()))


def test_a_reset_takes_the_place_of_an_order_to_sample() -> None:
    with group() as ranks:
        runner = ranks.open()
        engine = engine_on(runner)
        engine.add("a", [1, 2, 3], max_tokens=4)
        engine.loop._receive()
        plan = engine.scheduler.schedule()
        assert plan is not None
        runner.forward(plan)
        runner.reset()
        other = engine_on(runner)
        other.add("a", [1, 2, 3], max_tokens=4)
        assert other.run() == {"a": expected_output([1, 2, 3], 4)}


def test_results_that_nobody_reads_are_dropped_by_a_reset() -> None:
    with group() as ranks:
        runner = ranks.open()
        engine = engine_on(runner)
        engine.add("a", [1, 2, 3], max_tokens=4)
        engine.loop.step()
        runner.reset()
        assert not ranks.links._expected


def test_counts_of_the_runner_come_with_results() -> None:
    with group() as ranks:
        runner = ranks.open()
        assert runner.stats() == RunnerStats()
        engine = engine_on(runner)
        engine.add("a", [1, 2, 3], max_tokens=1)
        engine.run()
        assert runner.stats().launched_steps == 1
        assert runner.use_idle_time()  # not yet: more requests may follow the last step
        time.sleep(QUIET_S)
        assert not runner.use_idle_time()


def test_a_thread_of_its_own_waits_for_results() -> None:
    with group(backend="later") as ranks:
        runner = ranks.open()
        engine = engine_on(runner)
        for name, prompt in PROMPTS.items():
            engine.add(name, prompt, max_tokens=8)
        assert engine.run() == {name: expected_output(prompt, 8) for name, prompt in PROMPTS.items()}
        threads = [rank._share.thread for rank in ranks.ranks]
        assert {thread.name for thread in threads if thread} == {"localllm-rank-results"}
        runner.close()
        assert not any(thread.is_alive() for thread in threads if thread)


def test_another_thread_may_ask_while_a_step_runs() -> None:
    with group() as ranks:
        engine = engine_on(ranks.open())
        for name, prompt in PROMPTS.items():
            engine.add(name, prompt, max_tokens=40)
        failures: list[BaseException] = []
        took_s: list[float] = []

        def put() -> None:
            try:
                for _ in range(30):
                    begun = time.monotonic()
                    ranks.links.call(Kind.ADAPTER, PutAdapter(0, "here"), type(None), 20)
                    took_s.append(time.monotonic() - begun)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=put) for _ in range(2)]
        for thread in threads:
            thread.start()
        assert engine.run() == {name: expected_output(prompt, 40) for name, prompt in PROMPTS.items()}
        for thread in threads:
            thread.join(10)
        assert not failures
        assert max(took_s) < 10  # a thread that another one reads for is woken


def test_a_refused_record_is_an_error_and_the_group_goes_on() -> None:
    with group() as ranks:
        engine = engine_on(ranks.open())
        with pytest.raises(ModelNotFound, match="no such adapter"):
            ranks.links.call(Kind.ADAPTER, PutAdapter(0, "missing"), type(None), 10)
        engine.add("a", [1, 2, 3], max_tokens=4)
        assert engine.run() == {"a": expected_output([1, 2, 3], 4)}


# ---- order -----------------------------------------------------------------------------------------------------------


def words_of(links: Links) -> str:
    """Return why a group is lost."""
    with pytest.raises(RanksLost) as lost:
        links.call(Kind.RESET, None, type(None), 5)
    return str(lost.value)


PLAN = StepPlan(1, (Row(0, "a", 0, 1, ((1,),), True),))


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (encode_record(Kind.STATS, 9), "record 9"),  # a gap
        (encode_record(Kind.SAMPLE, 5, encode_sample(StepPlan(4, ()))), "step 4"),  # nothing was forwarded
        (
            encode_record(Kind.FORWARD, 5, encode_plan(StepPlan(3, ())))
            + encode_record(Kind.SAMPLE, 6, encode_sample(StepPlan(4, ()))),
            "step 4",  # not the step that was forwarded
        ),
        (
            encode_record(Kind.FORWARD, 5, encode_plan(StepPlan(3, ())))
            + encode_record(Kind.FORWARD, 6, encode_plan(StepPlan(4, ()))),
            "before step 3",  # which was not sampled
        ),
        (encode_record(Kind.FORWARD, 5, encode_plan(PLAN)), "KeyError"),  # a row of a slot that is free
        (encode_record(Kind.FORWARD, 5, encode([1])), "plan"),
        (encode_record(Kind.RESULT, 5), "RESULT"),  # an answer is not a record
        (b"\0" * 100, "begins otherwise"),
    ],
    ids=["gap", "no step", "other step", "two steps", "free slot", "other type", "answer", "zeros"],
)
def test_a_rank_that_gets_a_wrong_record_ends_with_an_error(
    raw: bytes, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localllm.ranks.rank.LINGER_S", 0.05)
    with group() as ranks:
        ranks.open()
        ranks.links._channels[1].socket.sendall(raw)
        assert words in words_of(ranks.links)


@pytest.mark.parametrize("kind", [Kind.LOG, Kind.REPORT, Kind.FAILED])
def test_an_answer_of_another_type_ends_the_group(kind: Kind) -> None:
    with group() as ranks:
        ranks.open()
        ranks.ends[1].send(kind, 0, encode([]))
        assert "Rank 1 sent a damaged answer" in words_of(ranks.links)


def test_reports_are_read_by_the_thread_that_asked() -> None:
    """An error of its callback, such as a load that is cancelled, must not end the supervisor's thread."""
    with group() as ranks:
        ranks.open()
        told: list[str] = []

        def stats(record: Record) -> RunnerStats:
            ranks.ends[1].send(Kind.REPORT, record.seq, encode(Report(threading.current_thread().name)))
            asked.wait(5)
            return RunnerStats()

        asked = threading.Event()
        ranks.ranks[1]._acts[Kind.STATS] = stats

        def tell(rank: int, report: Report) -> None:
            told.append(threading.current_thread().name)
            asked.set()

        ranks.links._on_report[0] = tell  # as of a thread that is about to read
        seq = ranks.links.ask(Kind.STATS, [encode(None)])
        time.sleep(0.1)
        ranks.links.drain()
        del ranks.links._on_report[0]
        ranks.links.answers(seq, RunnerStats, 5, "test", tell)
        assert told == [threading.current_thread().name]


def test_a_rank_that_takes_no_answer_in_time_is_named() -> None:
    with group() as ranks:
        ranks.open()
        hold = threading.Event()
        ranks.ranks[1]._acts[Kind.STATS] = lambda record: hold.wait(5)
        with pytest.raises(RanksLost, match=r"1 of 2 ranks answered within 0 s. Missing: Rank 1"):
            ranks.links.call(Kind.STATS, None, RunnerStats, 0.2)
        hold.set()
