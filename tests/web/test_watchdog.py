"""The watchdog: slow is not stuck, stuck is said once, and what it says is what happened."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.cli import main
from localllm.engine.pulse import Pulse, TimedPool
from localllm.engine.step import RunnerStats
from localllm.logs.fault_log import FaultLog
from localllm.web import watchdog as module
from localllm.web.watchdog import STEP_IDLE_S, STEP_SLOW_S, Watchdog, thread_cpu_s, worst
from tests.web.harness import refusal
from tests.web.live_server import LiveServer, PacedRunner, fake_model, settings, wait_until


class Engine:
    """One whose pulse is what a test says."""

    def __init__(self) -> None:
        self.is_alive, self.has_work, self.progress = True, False, 0

    def pulse(self) -> Pulse:
        return Pulse(self.is_alive, self.has_work, self.progress, 1)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def in_this_thread(own: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    """`own` for the thread of the test, and `real` for the watchdogs of other servers in this process, which would
    otherwise see the clock jump, or answer for the watchdog of the test."""
    tester = threading.get_ident()
    return lambda *given: (own if threading.get_ident() == tester else real)(*given)


@pytest.fixture
def watched(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A watchdog over one engine, and a clock that a test turns; `cpu_s` is what the engine's thread has used."""
    clock = SimpleNamespace(now_s=1000.0, cpu_s=0.0)
    model = SimpleNamespace(name="demo", loop=engine, client=SimpleNamespace(compilers=()))
    dog = Watchdog(SimpleNamespace(ready=[model], num_open=0), FaultLog())  # type: ignore[arg-type]
    monotonic = in_this_thread(lambda: clock.now_s, time.monotonic)
    monkeypatch.setattr(
        module, "time", SimpleNamespace(monotonic=monotonic, time=time.time, process_time=time.process_time)
    )
    monkeypatch.setattr(module, "thread_cpu_s", in_this_thread(lambda thread_id: clock.cpu_s, thread_cpu_s))

    def look_for(seconds: int, *, busy: float = 0.0) -> str:
        """The engine's state after so long, a look a second; `busy`: share of a core that its thread uses."""
        for _ in range(seconds):
            clock.now_s += 1
            clock.cpu_s += busy
            dog._look_at_engines(clock.now_s)
            dog._tell()
        [part] = dog._engine_parts(clock.now_s)
        return part.state

    return SimpleNamespace(dog=dog, look_for=look_for)


def test_an_engine_at_rest_is_sound_however_long_it_rests(watched: Any) -> None:
    assert watched.look_for(5000) == "ok"
    assert not watched.dog.faults.count


def test_a_long_step_that_computes_is_slow_and_not_stuck(watched: Any, engine: Engine) -> None:
    engine.has_work = True
    assert watched.look_for(int(STEP_SLOW_S) - 2, busy=0.9) == "ok"
    assert watched.look_for(1500, busy=0.9) == "slow"
    assert worst(watched.dog._engine_parts(module.time.monotonic())) == "slow"
    assert not watched.dog.faults.count


def test_steps_that_end_are_sound_however_long_the_work_lasts(watched: Any, engine: Engine) -> None:
    engine.has_work = True
    for _ in range(100):
        engine.progress += 1
        assert watched.look_for(20) == "ok"


def test_a_step_that_waits_for_what_never_comes_is_stuck_and_said_once(watched: Any, engine: Engine) -> None:
    engine.has_work = True
    assert watched.look_for(int(STEP_IDLE_S)) == "slow"
    assert watched.look_for(int(STEP_SLOW_S) + 5) == "stuck"
    watched.look_for(100)
    assert watched.dog.faults.count == 1
    engine.progress += 1
    assert watched.look_for(5) == "ok"


def test_a_thread_that_has_ended_is_dead(watched: Any, engine: Engine) -> None:
    engine.is_alive = False
    assert watched.look_for(2) == "dead"
    assert watched.dog.faults.count == 1


def test_systemd_gets_a_sign_of_life_unless_an_engine_is_stuck(
    watched: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "notify", in_this_thread(module.notify, lambda *states: None))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))

        def pings() -> list[bytes]:
            watched.dog._ping()
            try:
                return [manager.recv(99)]
            except BlockingIOError:
                return []

        assert pings() == []  # systemd does not ask
        monkeypatch.setenv("WATCHDOG_USEC", "120000000")
        assert pings() == [b"WATCHDOG=1"]
        engine.has_work = True
        assert watched.look_for(1500, busy=0.9) == "slow"
        assert pings() == [b"WATCHDOG=1"]
        assert watched.look_for(2000) == "stuck"
        assert pings() == []
        engine.is_alive = False
        assert watched.look_for(1) == "dead"  # loaded again by itself
        assert pings() == [b"WATCHDOG=1"]
        monkeypatch.setenv("WATCHDOG_PID", "1")
        assert pings() == []


def test_cpu_time_of_a_thread_is_its_own() -> None:
    ended, ids = threading.Event(), []

    def rests() -> None:
        ids.append(threading.get_native_id())
        ended.wait()

    thread = threading.Thread(target=rests)
    thread.start()
    wait_until(lambda: bool(ids))
    if thread_cpu_s(ids[0]) is None:
        ended.set()
        pytest.skip("this system does not tell")
    began, until_s = thread_cpu_s(threading.get_native_id()), time.process_time() + 0.1
    while time.process_time() < until_s:
        pass
    used = thread_cpu_s(threading.get_native_id())
    assert began is not None
    assert used is not None
    assert used > began
    assert thread_cpu_s(ids[0]) == pytest.approx(0, abs=0.05)
    ended.set()
    thread.join()
    assert thread_cpu_s(None) is None


def test_a_pool_stands_still_only_while_no_thread_is_free() -> None:
    pool, go_on = TimedPool(2, "test"), threading.Event()
    first = pool.submit(go_on.wait)
    assert pool.standing_still_s() == 0
    second = pool.submit(go_on.wait)
    wait_until(lambda: pool.standing_still_s() > 0)
    go_on.set()
    assert first.result(5)
    assert second.result(5)
    wait_until(lambda: pool.standing_still_s() == 0)
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 // 0).result(5)
    pool.shutdown()


def test_memory_is_given_back_once_what_was_in_use_may_be_free(monkeypatch: pytest.MonkeyPatch) -> None:
    rss, trims, cpu_s = [400 * 2**20], [], [0.0]
    memory = SimpleNamespace(
        resident_bytes=in_this_thread(lambda: rss[0], module.memory.resident_bytes),
        trim=in_this_thread(lambda: trims.append(rss[0]), lambda: False),
    )
    monkeypatch.setattr(module, "memory", memory)
    monkeypatch.setattr(module, "gc", SimpleNamespace(collect=in_this_thread(lambda: trims.append(-1), lambda: 0)))
    process_time = in_this_thread(lambda: cpu_s[0], time.process_time)
    monkeypatch.setattr(
        module, "time", SimpleNamespace(process_time=process_time, time=time.time, monotonic=time.monotonic)
    )
    dog = Watchdog(SimpleNamespace(ready=[], num_open=0), FaultLog())  # type: ignore[arg-type]
    for now_s in range(100, 200):
        dog._give_back(now_s)
    assert trims == [rss[0], -1, rss[0]]  # at rest once is enough
    trims.clear()
    rss[0] += 200 * 2**20
    dog._give_back(200)
    assert trims == [rss[0], -1, rss[0]], "what trimming leaves may be garbage"
    trims.clear()
    cpu_s[0] = 5.0  # it works on, and frees what it had
    for now_s in range(201, 300):
        dog._give_back(now_s)
    assert trims == [rss[0]]
    cpu_s[0] += 0.3  # the last requests of a busy time end soon after a trim
    for now_s in range(300, 315):
        dog._give_back(now_s)
    assert trims == [rss[0]] * 2


def test_garbage_that_refers_to_itself_is_given_back() -> None:
    """An error keeps the frames that it came from, and these the body of a request."""
    dog = Watchdog(SimpleNamespace(ready=[], num_open=0), FaultLog())  # type: ignore[arg-type]
    dog._give_back(100)
    before = module.memory.resident_bytes()
    with module.memory.paused_collection():
        circle: list[object] = [bytearray(b"1") * (256 * 2**20)]
        circle.append(circle)
        del circle
        assert module.memory.resident_bytes() > before + 200 * 2**20
        dog._give_back(200)
    assert module.memory.resident_bytes() < before + 100 * 2**20


def test_garbage_that_grows_in_small_steps_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is smaller than what counts as grown, and a trim follows each of them."""
    dog = Watchdog(SimpleNamespace(ready=[], num_open=0), FaultLog())  # type: ignore[arg-type]
    works_on = in_this_thread(count().__next__, time.process_time)
    monkeypatch.setattr(
        module, "time", SimpleNamespace(process_time=works_on, time=time.time, monotonic=time.monotonic)
    )
    dog._give_back(100)
    before = module.memory.resident_bytes()
    with module.memory.paused_collection():
        for step in range(1, 17):
            circle: list[object] = [bytearray(b"1") * (16 * 2**20)]
            circle.append(circle)
            del circle
            dog._give_back(100 + 20 * step)
    assert module.memory.resident_bytes() < before + 100 * 2**20


# On a real server ---------------------------------------------------------------------------------------------------


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LiveServer, PacedRunner]]:
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(module, "STEP_SLOW_S", 0.3)
    runner = PacedRunner()
    monkeypatch.setattr(runner, "stats", lambda: RunnerStats(decode_steps="decode steps run through torch: a reason"))
    with LiveServer(fake_model(tmp_path / "tiny", runner), settings()) as server:
        yield server, runner


def held_step(server: LiveServer, runner: PacedRunner) -> threading.Thread:
    runner.gate.clear()
    body = {"prompt": "a", "max_tokens": 2}
    thread = threading.Thread(target=lambda: server.post("/v1/completions", body))
    thread.start()
    return thread


def test_health_says_that_a_step_is_slow_and_stays_green(live: tuple[LiveServer, PacedRunner]) -> None:
    server, runner = live
    assert server.get("/health").json() == {"status": "ok"}
    thread = held_step(server, runner)
    wait_until(lambda: server.get("/health").json()["status"] == "slow")
    told = server.get("/health")
    assert told.status_code == 200
    [part] = told.json()["parts"]
    assert (part["part"], part["state"]) == ("engine tiny", "slow")
    assert part["seconds"] >= 0.3
    runner.gate.set()
    thread.join()
    wait_until(lambda: server.get("/health").json() == {"status": "ok"})


def test_health_is_red_while_an_engine_is_stuck(
    live: tuple[LiveServer, PacedRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, runner = live
    monkeypatch.setattr(module, "LONGEST_STEP_S", 0.4)
    thread = held_step(server, runner)
    wait_until(lambda: server.get("/health").status_code == 503)
    error = refusal(server.get("/health"), 503)
    assert error["code"] == "stands_still"
    assert "finished no step" in error["message"]
    wait_until(lambda: server.get("/localllm/v1/server").json()["num_faults"] == 1)
    runner.gate.set()
    thread.join()
    wait_until(lambda: server.get("/health").status_code == 200)
    assert server.get("/localllm/v1/server").json()["num_faults"] == 1


def test_an_event_loop_that_stood_still_is_told_afterwards_with_its_stacks(
    live: tuple[LiveServer, PacedRunner], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server, _ = live
    monkeypatch.setattr(module, "LOOP_SLOW_S", 0.1)
    monkeypatch.setattr(module, "LOOP_STUCK_S", 0.2)
    dog: Watchdog = server.server.app.state.watchdog
    dog.faults.path = tmp_path / "faults.log"

    def is_told() -> bool:
        return "holds_everybody_up" in (tmp_path / "faults.log").read_text()

    def holds_everybody_up() -> None:
        wait_until(is_told)

    with dog.faults.installed():
        assert dog._loop is not None
        dog._loop.call_soon_threadsafe(holds_everybody_up)
        wait_until(lambda: dog.faults.count > 0 and is_told())
        wait_until(lambda: server.get("/health").json()["status"] == "slow")
        [part] = server.get("/health").json()["parts"]
        assert part["part"] == "event loop"
        assert part["seconds"] > 0.2


def test_the_doctor_tells_what_a_running_server_knows(
    live: tuple[LiveServer, PacedRunner], capsys: pytest.CaptureFixture[str]
) -> None:
    server, runner = live
    wait_until(lambda: "tiny" in server.get("/localllm/v1/server").json()["engines"])
    assert main(["doctor", "--server", "--url", server.url]) == 0
    told = capsys.readouterr().out
    for word in (
        "answered at",
        "event loop",
        "engine tiny",
        "idle for",
        "through torch: a reason",
        "resident",
        "0 open",
        "none since the start",
    ):
        assert word in told, told
    thread = held_step(server, runner)
    wait_until(lambda: server.get("/health").json()["status"] == "slow")
    server.server.app.state.watchdog.faults.record("thread x", ValueError("odd"))
    assert main(["doctor", "--server", "--url", server.url]) == 0
    told = capsys.readouterr().out
    for word in ("Its step has run for", "1 open", "thread x: ValueError: odd"):
        assert word in told.replace("in thread x", "thread x"), told
    runner.gate.set()
    thread.join()


def test_the_doctor_says_that_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--server", "--url", "http://127.0.0.1:9"]) == 1
    assert "No localllm answers" in capsys.readouterr().out


def test_a_fault_in_a_handler_is_one_line_with_the_request(
    live: tuple[LiveServer, PacedRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = live
    monkeypatch.setattr(server.manager.loads, "require_working", lambda: 1 // 0)
    assert refusal(server.get("/health"), 500)["type"]
    last = server.server.app.state.watchdog.faults.last
    assert last.what.startswith("ZeroDivisionError")
    assert "path='/health'" in last.where
