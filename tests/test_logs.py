"""The log of a server: in memory for who watches, in a bounded file, and `localllm logs`, which reads it."""

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.cli import logs as logs_module
from localllm.cli import main
from localllm.logs import log_file
from localllm.logs.log_file import TRY_AGAIN_S, LogFile, log_path, rotated_files
from localllm.logs.recent_logs import LONGEST, RecentLogs, installed
from localllm.machine.running_servers import announced

Capture = pytest.CaptureFixture[str]


def record(text: str, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("localllm.test", level, __file__, 1, text, (), None)


# ---- in memory -------------------------------------------------------------------------------------------------------


def test_a_reader_gets_what_came_after_the_last_line_it_saw_and_sees_what_it_missed() -> None:
    recent = RecentLogs(kept=3)
    for number in range(5):
        recent.handle(record(f"line {number}"))
    assert [(line.number, line.text) for line in recent.after()] == [(3, "line 2"), (4, "line 3"), (5, "line 4")]
    assert [line.number for line in recent.after(4)] == [5]
    assert recent.after(5) == recent.after(99) == []
    assert (recent.after(4)[0].level, recent.after(4)[0].logger) == ("INFO", "localllm.test")


def test_a_long_record_keeps_its_end() -> None:
    recent = RecentLogs()
    recent.handle(record("x" * 10 * LONGEST + "the reason"))
    (line,) = recent.after()
    assert len(line.text) < LONGEST + 10
    assert line.text.endswith("the reason")


def test_waiting_ends_with_a_line_of_another_thread_and_no_reader_stays_behind() -> None:
    recent = RecentLogs()

    async def read() -> list[str]:
        seen: list[str] = []
        while len(seen) < 50:
            lines = await asyncio.wait_for(recent.wait_after(len(seen)), 10)
            seen += [line.text for line in lines]
        return seen

    async def read_twice() -> list[list[str]]:
        writer = threading.Thread(target=lambda: [recent.handle(record(str(number))) for number in range(50)])
        readers = [asyncio.create_task(read()) for _ in range(2)]
        writer.start()
        both = await asyncio.gather(*readers)
        writer.join()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(recent.wait_after(50), 0.01)
        return both

    assert asyncio.run(read_twice()) == [[str(number) for number in range(50)]] * 2
    assert recent._wakers == set()


def test_it_is_found_where_a_command_has_put_it_up() -> None:
    assert installed() is None
    recent = RecentLogs()
    logging.getLogger().addHandler(recent)
    try:
        assert installed() is recent
    finally:
        logging.getLogger().removeHandler(recent)


# ---- the file --------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], LogFile]:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(log_file, "FILE_BYTES", 100)
    return lambda port: LogFile(log_path(port))


def test_the_file_is_bounded_and_its_owners_alone(small_pages: Callable[[int], LogFile]) -> None:
    handler = small_pages(8000)
    assert not log_path(8000).exists()  # a command that logs nothing leaves nothing
    for number in range(100):
        handler.handle(record(f"line {number} \udce9"))
    handler.close()
    pages = [log_path(8000), *rotated_files(log_path(8000))]
    assert sorted(log_path(8000).parent.iterdir()) == sorted(pages)
    assert all(page.stat().st_size < 120 and page.stat().st_mode & 0o777 == 0o600 for page in pages)
    assert log_path(8000).read_text().endswith("line 99 \\udce9\n")


def test_a_file_that_cannot_be_written_is_said_once_and_tried_again(
    small_pages: Callable[[int], LogFile], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(log_file.time, "monotonic", lambda: now_s)
    folder = log_path(8000).parent
    folder.parent.mkdir(parents=True)
    folder.write_text("a file where the folder should be")
    handler = small_pages(8000)
    for text in ("one", "two"):
        handler.handle(record(text))
    now_s += TRY_AGAIN_S
    handler.handle(record("three"))  # still no room
    said = f"The log file {log_path(8000)} cannot be written: File exists. Retrying every 60 s."
    assert capsys.readouterr().err.splitlines() == [said]
    folder.unlink()
    handler.handle(record("four"))
    assert not folder.exists()  # not yet
    now_s += TRY_AGAIN_S
    for text in ("five", "six"):
        handler.handle(record(text))
    handler.close()
    lines = "".join(
        path.read_text() for path in (*reversed(rotated_files(log_path(8000))), log_path(8000)) if path.exists()
    )
    assert lines.splitlines() == ["4 lines are missing here: the file could not be written", "five", "six"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_line_that_a_full_disk_refused_is_not_written_with_the_next_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(log_file, "TRY_AGAIN_S", 0.0)
    handler = LogFile(Path("/dev/full"))
    handler.handle(record("one"))
    handler.baseFilename = str(tmp_path / "log")
    handler.handle(record("two"))
    handler.close()
    assert (tmp_path / "log").read_text().splitlines() == [
        "1 line is missing here: the file could not be written", "two"
    ]  # fmt: skip


# ---- the verb --------------------------------------------------------------------------------------------------------


def test_the_end_of_the_log_reaches_into_older_files(small_pages: Callable[[int], LogFile], capsys: Capture) -> None:
    handler = small_pages(8000)
    for number in range(30):
        handler.handle(record(f"line number {number:02}"))
    handler.close()
    for count in (0, 1, 9, 20):
        assert main(["logs", "-n", str(count)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines == [f"line number {number:02}" for number in range(30 - count, 30)]
    assert main(["logs", "--path"]) == 0
    assert capsys.readouterr().out.strip() == str(log_path(8000))


def test_following_misses_no_line_when_the_page_is_turned(
    small_pages: Callable[[int], LogFile], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    handler = small_pages(8000)
    numbers = iter(range(40))
    handler.handle(record("line number zero"))

    def write_more(seconds: float) -> None:
        try:
            for _ in range(3):  # never more than a page at a time
                handler.handle(record(f"line number {next(numbers):02}"))
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(logs_module, "sleep", write_more)
    assert main(["logs", "-f", "-n", "1"]) == 0
    handler.close()
    seen = capsys.readouterr().out.splitlines()
    assert seen == ["line number zero", *(f"line number {number:02}" for number in range(39))]


def test_the_servers_own_file_is_taken_where_there_are_several(
    small_pages: Callable[[int], LogFile], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    for port in (8000, 9000):
        handler = small_pages(port)
        handler.handle(record(f"of {port}"))
        handler.close()
    os.utime(log_path(8000), (1, 1))
    assert main(["logs"]) == 0  # written last
    assert main(["logs", "--port", "8000"]) == 0
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with announced("http://127.0.0.1:8000", "m"):
        assert main(["logs"]) == 0
    assert capsys.readouterr().out.splitlines() == ["of 9000", "of 8000", "of 8000"]


def test_refusals(small_pages: Callable[[int], LogFile], capsys: Capture) -> None:
    assert main(["logs"]) == 2
    assert "There is no log at" in capsys.readouterr().err
    assert main(["logs", "-n", "-1"]) == 2
    handler = small_pages(8000)
    handler.handle(record("one"))
    handler.close()
    assert main(["logs", "--port", "9"]) == 2
    assert "Logs: server-8000.log." in capsys.readouterr().err
