"""Real processes with a fake model: every way to die is noticed in time, and nothing is left over."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import psutil
import pytest

from localllm.errors import DoesNotFit, EngineError, ModelNotFound, RanksLost
from localllm.ranks.executor import RankExecutor
from localllm.ranks.supervisor import RankPlace, Supervisor, exit_code
from tests.engine.harness import make_engine
from tests.ranks.fakes import COMMAND, Fault
from tests.ranks.group_checks import HARDWARE, PROMPTS, check_tokens, engine_on, nothing_left, opened
from tests.ranks.harness import fake_executor


def test_two_groups_at_once_are_independent_and_leave_nothing() -> None:
    with nothing_left():
        reports: list[str] = []
        one = fake_executor(2, report=reports.append)
        two = fake_executor(1)
        try:
            first, second = opened(one), opened(two, 1)
            check_tokens(first)
            check_tokens(second)
            assert reports == ["2 ranks started", "ranks connected over gloo, a small all-reduce takes 2 µs"]
            assert one.weights_bytes == 2 * (100 + 256)
            assert one.as_if_not_loaded(HARDWARE).ram_available_bytes == 2**30 + one.weights_bytes
            with pytest.raises(ModelNotFound):
                one._links.call(*_adapter("missing"))
            one._links.call(*_adapter("here"))
            one.move_to_host()
            one.move_to_device()
            first.close()
            check_tokens(opened(one))
            os.kill(one.processes[0].pid, signal.SIGKILL)
            with pytest.raises(RanksLost, match="SIGKILL"):
                one._links.call(*_adapter("here"))
            second.reset()  # the other group still answers
        finally:
            two.close()
            one.close()
            one.close()


def _adapter(path: str) -> tuple[object, ...]:
    from localllm.ranks.messages import PutAdapter
    from localllm.ranks.wire import Kind

    return Kind.ADAPTER, PutAdapter(0, path), type(None), 10.0


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault("kill"), "was ended by SIGKILL"),
        (Fault("exit", rank=0, at="sample"), "ended with exit code 3"),
        (Fault("raise"), "RuntimeError: asked to fail"),
        (Fault("stop", rank=0), "No sign of life"),
        (Fault("hang", rank=0), r"Rank 0 \(cpu\).*rank 0 began record \d+ and ended"),
    ],
    ids=lambda value: value.what if isinstance(value, Fault) else "",
)
def test_every_request_hears_of_a_lost_rank(fault: Fault, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.ranks.supervisor.TERM_S", 0.3)  # a stopped process needs SIGKILL
    with nothing_left():
        lost: list[RanksLost] = []
        rank_timeout = 2 if fault.what == "hang" else 60
        executor = fake_executor(2, fault, sleep_s=0.02, rank_timeout=rank_timeout, tick_s=0.4)
        executor.when_lost(lost.append)
        engine = engine_on(opened(executor), max_tokens=40)
        pids = [process.pid for process in executor.processes]
        begun = time.monotonic()
        for _ in range(60):
            engine.loop.step()
        took = time.monotonic() - begun
        assert set(engine.endings) == set(PROMPTS)
        errors = {str(output[0].error) for output in engine.endings.values()}
        assert len(errors) == 1
        assert re.search(words, errors.pop())
        assert isinstance(engine.loop.why_ended, RanksLost)
        assert took < 20  # without a report, the wait would be of 60 s; scripts/bench_ranks measures how long it takes
        executor.close()
        assert [str(error) for error in lost] == [str(engine.loop.why_ended)]
        assert not any(psutil.pid_exists(pid) for pid in pids)
        states = engine.loop.runner.stats().ranks
        assert [state.is_up for state in states] == [False, False]
        assert [bool(state.last_words) for state in states] == [rank == fault.rank for rank in (0, 1)]


def test_an_idle_engine_ends_with_its_ranks() -> None:
    with nothing_left():
        executor = fake_executor(1)
        engine = make_engine(fail_when=lambda plan: False)
        engine.loop.runner = opened(executor, 1)
        ended = threading.Event()
        engine.loop.on_ended = ended.set
        executor.when_lost(engine.loop.lose)
        engine.loop.start()
        assert [(state.device, state.is_up, state.last_words) for state in engine.loop.runner.stats().ranks] == [
            ("cpu", True, "")
        ]
        until = time.monotonic() + 5
        while executor.progress[0].answered < 5 and time.monotonic() < until:  # the engine's only idle work
            time.sleep(0.02)
        time.sleep(0.2)
        os.kill(executor.processes[0].pid, signal.SIGKILL)
        assert ended.wait(5)
        assert isinstance(engine.loop.why_ended, RanksLost)
        with pytest.raises(RanksLost, match="SIGKILL") as refused:  # before the manager loads the model again
            engine.add("late", [1, 2])
        assert refused.value is not engine.loop.why_ended  # whose traceback would grow with each request
        engine.loop.stop()
        executor.close()


def test_a_rank_that_dies_while_it_loads_is_an_error() -> None:
    with nothing_left(), pytest.raises(RanksLost, match="SIGKILL"):
        fake_executor(2, Fault("kill", at="load"))


def test_a_rank_that_dies_while_a_runner_opens_is_an_error() -> None:
    with nothing_left():
        executor = fake_executor(2, Fault("kill", at="open_runner"))
        with pytest.raises(RanksLost, match="SIGKILL"):
            opened(executor)
        executor.close()


def test_a_rank_without_memory_refuses_for_all_and_the_group_goes_on() -> None:
    with nothing_left():
        executor = fake_executor(2, Fault("refuse", at="open_runner"))
        with pytest.raises(DoesNotFit, match="no memory"):
            opened(executor)
        executor.move_to_host()
        executor.close()


def test_a_rank_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.ranks.executor.START_S", 0.5)
    monkeypatch.setenv("FAKE_RANK_HANGS", "1")
    with nothing_left(), pytest.raises(RanksLost, match=r"Missing: .*Rank 1 \(cpu\)"):
        fake_executor(2)


def test_an_interrupt_while_ranks_start_leaves_nothing() -> None:
    def interrupt(loaded: int, total: int) -> None:
        raise KeyboardInterrupt

    with nothing_left(), pytest.raises(KeyboardInterrupt):
        fake_executor(2, progress=interrupt)


def test_ranks_outlive_the_thread_that_asked_for_them() -> None:
    with nothing_left():
        made: list[RankExecutor] = []
        thread = threading.Thread(target=lambda: made.append(fake_executor(1)))
        thread.start()
        thread.join()
        time.sleep(0.2)
        check_tokens(opened(made[0], 1))
        made[0].close()


def test_a_program_that_cannot_be_started_is_an_error() -> None:
    with nothing_left():
        supervisor = Supervisor([RankPlace()], command=["/nowhere/python"])
        with pytest.raises(Exception, match="could not be started"):
            supervisor.start()
        supervisor.stop()


def test_a_group_of_which_one_process_cannot_be_started_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Supervisor._started

    def fail_for_the_second(self: Supervisor, rank: int, *given: Any) -> Any:
        if rank == 1:
            raise OSError("no more processes")
        return start(self, rank, *given)

    monkeypatch.setattr(Supervisor, "_started", fail_for_the_second)
    with nothing_left():
        supervisor = Supervisor([RankPlace(), RankPlace()], command=COMMAND)
        with pytest.raises(EngineError, match="no more processes"):
            supervisor.start()
        assert [process.returncode for process in supervisor.processes] == [-signal.SIGTERM]


def test_a_rank_that_has_died_does_not_disturb_the_end_of_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine notices a late answer before the supervisor notices a death."""
    monkeypatch.setattr(Supervisor, "_check_ended", lambda self, ranks: None)
    with nothing_left():
        supervisor = Supervisor([RankPlace(), RankPlace()], command=COMMAND)
        supervisor.start().answers(0, int, 30, "their start")
        os.kill(supervisor.processes[1].pid, signal.SIGKILL)
        while exit_code(supervisor.processes[1].pid) is None:
            time.sleep(0.01)
        supervisor.lose_hanging("Rank 0 does not answer.", "", [0])
        supervisor.stop()
        assert [process.returncode for process in supervisor.processes] == [-signal.SIGTERM, -signal.SIGKILL]


SERVER = """
import time
from localllm.ranks.supervisor import RankPlace, Supervisor
from tests.ranks.fakes import COMMAND
supervisor = Supervisor([RankPlace(), RankPlace()], command=COMMAND)
supervisor.start().answers(0, int, 30, "their start")
print(*(process.pid for process in supervisor.processes), flush=True)
time.sleep(60)
"""


def test_ranks_end_with_a_server_that_is_killed() -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    pids = server.stdout.readline().split()
    ranks = [psutil.Process(int(pid)) for pid in pids]
    server.kill()
    server.wait()
    server.stdout.close()
    _, alive = psutil.wait_procs(ranks, timeout=2)
    assert not alive


def test_nothing_listens_and_idle_ranks_cost_little() -> None:
    with nothing_left():
        executor = fake_executor(4)
        try:
            opened(executor, 4)
            ranks = [psutil.Process(process.pid) for process in executor.processes]
            assert not [connection for rank in ranks for connection in rank.net_connections("inet")]
            before = sum(sum(rank.cpu_times()[:2]) for rank in ranks)
            time.sleep(1.5)
            assert sum(sum(rank.cpu_times()[:2]) for rank in ranks) - before <= 0.1
        finally:
            executor.close()
