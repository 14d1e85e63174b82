"""Faults that nobody handled: one line, the details in a file, and nothing left of a run without any."""

import asyncio
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from localllm.logs.fault_log import FILE_BYTES, KILLED, FaultLog, last_crash


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "localllm.logs.fault_log"]


def broken() -> None:
    raise ValueError("one\ntwo")


def test_a_thread_that_ends_with_an_error_writes_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "faults.log"
    faults = FaultLog(path)
    with faults.installed():
        thread = threading.Thread(target=broken, name="worker")
        thread.start()
        thread.join()
        [line] = lines(caplog)
        assert "\n" not in line
        for part in (
            "thread worker",
            "ValueError: one two",
            "test_fault_log.py:",
            str(path),
            "localllm doctor --report",
        ):
            assert part in line
        assert "in broken" in path.read_text()
    assert faults.count == 1
    assert faults.last is not None
    assert faults.last.where == "thread worker"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_task_that_nobody_waits_for_writes_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    faults = FaultLog(tmp_path / "faults.log")

    async def live() -> None:
        asyncio.get_running_loop().set_exception_handler(faults.on_event_loop)

        async def fail() -> None:
            broken()

        task = asyncio.create_task(fail(), name="lonely")
        await asyncio.wait({task})
        del task

    with faults.installed():
        asyncio.run(live())
    [line] = lines(caplog)
    assert "task lonely" in line
    assert "ValueError" in line


def test_a_run_without_a_fault_leaves_no_file(tmp_path: Path) -> None:
    with FaultLog(tmp_path / "faults.log").installed():
        assert (tmp_path / "faults.log").exists()
    assert not (tmp_path / "faults.log").exists()


def test_what_is_written_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "faults.log"
    caplog.set_level(logging.CRITICAL)
    faults = FaultLog(path)
    with faults.installed():
        for _ in range(200):
            faults.record("somewhere", ValueError("x" * 50_000))
    assert path.stat().st_size < FILE_BYTES + 200_000
    assert faults.count == 200


def test_stacks_of_all_threads_are_written_where_something_stands_still(tmp_path: Path) -> None:
    go_on = threading.Event()

    def waits_for_ever() -> None:
        go_on.wait()

    thread = threading.Thread(target=waits_for_ever)
    thread.start()
    faults = FaultLog(tmp_path / "faults.log")
    try:
        with faults.installed():
            faults.record_stall("engine demo", "Its step has run for 200 s.")
            assert "waits_for_ever" in (tmp_path / "faults.log").read_text()
    finally:
        go_on.set()
        thread.join()


CRASH = """
import ctypes, sys
from pathlib import Path
from localllm.logs.fault_log import FaultLog
with FaultLog(Path(sys.argv[1])).installed():
    def reads_nowhere():
        ctypes.string_at(0)
    reads_nowhere()
"""


def test_a_native_crash_leaves_its_stack_and_the_next_run_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "faults.log"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", CRASH, str(path)], env=environment, check=False)
    assert ended.returncode < 0
    assert "reads_nowhere" in path.read_text()
    with FaultLog(path).installed():
        [line] = lines(caplog)
        assert "Fatal Python error: Segmentation fault" in line
        assert f"{path}.1" in line
    assert "reads_nowhere" in (tmp_path / "faults.log.1").read_text()
    caplog.clear()
    with FaultLog(path).installed():
        assert not lines(caplog)


KILL = """
import os, signal, sys
from pathlib import Path
from localllm.logs.fault_log import FaultLog
with FaultLog(Path(sys.argv[1])).installed():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_is_named_by_the_next_run_and_by_doctor(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "faults-8000.log"
    (tmp_path / "faults-8000.log.1").write_text("Fatal Python error: Segmentation fault\n")
    os.utime(tmp_path / "faults-8000.log.1", (1e9, 1e9))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", KILL, str(path)], env=environment) as killed:
        assert killed.wait() < 0
    with FaultLog(path).installed():
        [line] = lines(caplog)
        assert f"was killed without a word, perhaps because memory ran out pid={killed.pid} last_alive=" in line
        assert "journalctl -k | grep -i oom" in line
        newest = last_crash(tmp_path)  # and not this run, which is alive
    assert newest is not None
    assert (newest.what, newest.pid) == (KILLED, str(killed.pid))
    assert "Segmentation" in (tmp_path / "faults-8000.log.1").read_text(), "older stacks are kept"


def test_a_run_with_faults_that_ended_in_order_was_not_killed(tmp_path: Path) -> None:
    path = tmp_path / "faults-8000.log"
    command = f"{KILL.partition('    os.kill')[0]}    faults.record('here', ValueError('x'))\n"
    command = command.replace("with FaultLog(Path(sys.argv[1])).installed():", "faults = FaultLog(Path(sys.argv[1]))\n"
                              "with faults.installed():")  # fmt: skip
    subprocess.run([sys.executable, "-c", command, str(path)], check=True, capture_output=True)
    assert "ValueError" in path.read_text()
    assert last_crash(tmp_path) is None


def test_the_file_tells_when_the_process_was_last_alive(tmp_path: Path) -> None:
    path = tmp_path / "faults.log"
    faults = FaultLog(path)
    with faults.installed():
        os.utime(path, (1, 1))
        faults.mark_alive()
        assert path.stat().st_mtime > 1
    assert not path.exists()
