"""A server that is restarted from its settings page: the real command, which replaces itself."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from localllm.machine import processes

ROOT = Path(__file__).parent.parent
LONGEST_S = 90


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    port = free_port()
    folders = {name: str(tmp_path) for name in ("XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME")}
    environ = {name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"} | folders
    command = [sys.executable, "-m", "localllm", "serve", "demo", "--port", str(port)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log)
    yield process, f"http://127.0.0.1:{port}"
    process.send_signal(signal.SIGKILL)
    process.wait()


def until_it_answers(url: str, path: str, says: str) -> str:
    end = time.monotonic() + LONGEST_S
    while time.monotonic() < end:
        try:
            text = httpx.get(url + path, timeout=LONGEST_S).text
        except httpx.TransportError:
            text = ""
        if says in text:
            return text
        time.sleep(0.05)
    raise AssertionError(f"{path} never said {says!r}")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(os.name != "posix", reason="Windows cannot replace a process")
def test_a_written_setting_is_in_force_after_the_restart(served: tuple[subprocess.Popen[bytes], str]) -> None:
    process, url = served
    until_it_answers(url, "/health", "ok")
    with httpx.Client(base_url=url, timeout=LONGEST_S) as browser:
        written = browser.post("/settings/change", data={"name": "max_num_seqs", "value": "7"}).text
        assert "Restart now" in written
        answer = browser.post("/settings/restart")
    assert answer.status_code == 303
    assert re.fullmatch(r"/settings/restarting\?from=\w+", answer.headers["location"])
    page = until_it_answers(url, "/settings?find=max_num_seqs", "<b>7 requests</b>")
    assert "file" in page
    assert httpx.get(url + answer.headers["location"]).headers["location"] == "/settings"
    assert process.poll() is None  # the same process
    until_it_answers(url, "/health", "ok")
    reply = httpx.post(f"{url}/v1/completions", json={"prompt": "hi", "max_tokens": 2}, timeout=LONGEST_S)
    assert reply.status_code == 200
    process.send_signal(signal.SIGTERM)
    assert process.wait(LONGEST_S) == 0


@pytest.mark.parametrize(
    ("word", "environ", "can"),
    [
        ("/usr/bin/localllm", {}, True),
        ("/site-packages/localllm/__main__.py", {}, True),
        ("/usr/bin/localllm", {"NOTIFY_SOCKET": "/run/notify"}, False),
        ("/home/someone/their_program.py", {}, False),
    ],
)
def test_only_the_command_itself_may_be_replaced(
    monkeypatch: pytest.MonkeyPatch, word: str, environ: dict[str, str], can: bool
) -> None:
    monkeypatch.setattr(sys, "argv", [word, "up"])
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert processes.can_restart() == (can and os.name == "posix")


def test_the_mark_of_a_restart_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(processes.RESTARTED, "1")
    assert [processes.was_restarted(), processes.was_restarted()] == [True, False]
