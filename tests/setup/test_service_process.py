"""A server as a service: the real command with a passed socket, states for systemd, and an end when it is idle."""

import asyncio
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from localllm.cli import main
from localllm.web.activity import Activity, counts
from localllm.web.pages.frame.live import ASLEEP
from tests.passed_socket import with_socket

ROOT = Path(__file__).parent.parent.parent
LONGEST_S = 90
SLOW_LOAD = """
import sys, time
from localllm import up
from localllm.cli import main
from localllm.serving.phases import Phase
def load(settings, on_phase, limits):
    while True:
        on_phase(Phase("weights", fraction=0.42))
        time.sleep(0.02)
up.build_replicas = load
sys.exit(main(sys.argv[1:]))
"""


class Manager:
    """What systemd is for a service: it listens, passes the socket, and receives states."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.states: list[str] = []
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify.bind(str(folder / "notify"))
        self._notify.settimeout(LONGEST_S)

    def start(self, *words: str, program: tuple[str, ...] = ("-m", "localllm")) -> subprocess.Popen[str]:
        command = with_socket(self.listener, sys.executable, *program, "serve", *words)
        environ = os.environ | {
            "NOTIFY_SOCKET": str(self.folder / "notify"),
            "XDG_RUNTIME_DIR": str(self.folder),
            "XDG_CONFIG_HOME": str(self.folder),
            "OMP_NUM_THREADS": "1",
        }
        with (self.folder / "log").open("a") as log:
            fds = [self.listener.fileno()]
            return subprocess.Popen(command, cwd=ROOT, env=environ, pass_fds=fds, stderr=log, text=True)

    def wait_for(self, state: str) -> str:
        """Receive states until one contains `state`, and return it."""
        while True:
            self.states.append(self._notify.recv(9999).decode())
            if state in self.states[-1]:
                return self.states[-1]

    def wait_for_client(self) -> None:
        """Wait until a client knocks, as systemd does before it starts a server."""
        assert select.select([self.listener], [], [], LONGEST_S)[0]

    def close(self) -> None:
        self.listener.close()
        self._notify.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(tmp_path)
    yield manager
    manager.close()


def ask(url: str) -> str:
    body = {"prompt": "hi", "max_tokens": 4}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=LONGEST_S).json()
    return str(answer["choices"][0]["finish_reason"])


def send(port: int, method: str, path: str, body: Any = None) -> HTTPConnection:
    """Send a request and return its connection. A server that starts later answers the request."""
    connection = HTTPConnection("127.0.0.1", port, timeout=LONGEST_S)
    connection.request(method, path, body and json.dumps(body), {"content-type": "application/json"})
    return connection


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stopped_server_starts_for_a_request_answers_it_and_ends_when_idle(
    manager: Manager, tiny_llama_path: Path
) -> None:
    for _ in range(2):  # the second client knocks at a server that has ended
        client = send(manager.port, "POST", "/v1/completions", {"prompt": "hi", "max_tokens": 4})
        page = send(manager.port, "GET", "/live/status")  # the connection of a page that stays open
        manager.wait_for_client()
        words = (str(tiny_llama_path), "--port", "1", "--exit-when-idle", "1s")
        with manager.start(*words) as server, closing(client), closing(page):
            try:
                assert "READY=1" in manager.wait_for("READY=1")
                assert json.load(client.getresponse())["choices"][0]["finish_reason"] == "length"
                assert server.wait(LONGEST_S) == 0  # although a page was open
                assert b"event: asleep\n" in page.getresponse().read()  # so it does not connect again
            finally:
                server.kill()
    told = "\n".join(manager.states)
    assert "STATUS=loading: weights" in told
    assert manager.wait_for("STOPPING=1")
    assert f"socket of systemd host=127.0.0.1 port={manager.port}" in (manager.folder / "log").read_text()


def test_a_stop_during_the_load_ends_the_server_and_is_no_failure(manager: Manager) -> None:
    with manager.start("demo", program=("-c", SLOW_LOAD)) as server:
        try:
            assert "loading: weights 42%" in manager.wait_for("42%")
            assert httpx.get(f"{manager.url}/health", timeout=LONGEST_S).status_code == 503
            server.send_signal(signal.SIGTERM)
            assert server.wait(LONGEST_S) == 130  # SuccessExitStatus= of the unit
        finally:
            server.kill()
    assert not [state for state in manager.states if "READY=1" in state]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("systemd-socket-activate"), reason="needs systemd-socket-activate")
def test_systemds_own_tool_starts_the_demo_for_a_request(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    kept = ("PATH", "HOME", "PYTHONPATH", "XDG_DATA_HOME", "HF_HUB_OFFLINE")
    passed = [f"--setenv={name}" for name in kept if name in os.environ]
    command = ["systemd-socket-activate", "-l", f"127.0.0.1:{port}", *passed, sys.executable, "-m", "localllm"]
    with subprocess.Popen([*command, "serve", "demo", "--exit-when-idle", "1s"], cwd=ROOT) as server:
        try:
            _wait_until_it_listens(port)
            assert ask(f"http://127.0.0.1:{port}") in ("length", "stop")
            assert server.wait(LONGEST_S) == 0
        finally:
            server.kill()


def _wait_until_it_listens(port: int) -> None:
    """Wait without connecting, which would start the server."""
    wanted = f":{port:04X} 00000000:0000 0A"
    deadline_s = time.monotonic() + LONGEST_S
    while wanted not in Path("/proc/net/tcp").read_text() and time.monotonic() < deadline_s:
        time.sleep(0.05)


@pytest.mark.slow
def test_a_server_whose_home_is_read_only_answers(tmp_path: Path) -> None:
    # Nobody can write to /sys, not even root.
    closed = dict.fromkeys(("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"), "/sys")
    environ = os.environ | closed | {"XDG_CONFIG_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "localllm", "serve", "demo", "--port", "0", "--json"]
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            events = (json.loads(line) for line in server.stdout)
            url = next(event["url"] for event in events if event["event"] == "ready")
            assert ask(url) in ("length", "stop")
            assert httpx.get(url, timeout=LONGEST_S).status_code == 200
            server.send_signal(signal.SIGTERM)
            server.stdout.read()
            assert server.wait(LONGEST_S) == 0
        finally:
            server.kill()


# ---- what counts as use ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "headers", "counted"),
    [
        ("POST", [], True),
        ("DELETE", [], True),
        ("GET", [(b"sec-fetch-mode", b"navigate")], True),  # a person opens a page
        ("GET", [(b"sec-fetch-mode", b"cors")], False),  # a page that is open keeps a connection
        ("GET", [], False),  # a monitor asks every few seconds
        ("HEAD", [], False),
        ("OPTIONS", [], False),
    ],
)
def test_what_only_watches_is_not_use(method: str, headers: list[tuple[bytes, bytes]], counted: bool) -> None:
    scope: Any = {"type": "http", "method": method, "headers": headers}
    assert counts(scope) == counted


@pytest.mark.parametrize("reason", ["request", "model", "download"])
def test_a_server_is_not_idle_while_it_works(reason: str) -> None:
    activity, works = Activity(), [True]
    manager: Any = _Busy(lambda: reason == "model" and works[0])
    downloads: Any = SimpleNamespace(list=lambda: [SimpleNamespace(is_over=not (reason == "download" and works[0]))])

    async def work() -> None:
        await asyncio.sleep(0.3)
        works[0] = False

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await work()

    async def use() -> None:
        scope: Any = {"type": "http", "method": "POST", "headers": []}
        nothing: Any = None
        await activity.around(app)(scope, nothing, nothing)

    async def run() -> float:
        started_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            group.create_task(use() if reason == "request" else work())
            await activity.until_idle(0.1, manager, downloads)
            return time.monotonic() - started_s

    assert asyncio.run(run()) >= 0.3


class _Busy:
    def __init__(self, answer: Any) -> None:
        self._answer = answer

    @property
    def is_busy(self) -> bool:
        return bool(self._answer())


def test_every_live_connection_of_a_page_ends_for_good_when_the_server_is_idle() -> None:
    """A reply's own connection is left out: it ends with the reply, and a server that writes one is not idle."""
    templates = [path.read_text() for path in (ROOT / "localllm" / "web" / "pages").rglob("*.html")]
    live = [tag for text in templates for tag in re.findall(r"<[^>]*hx-sse:connect=[^>]*>", text)]
    assert len(live) >= 3
    assert all(f'hx-sse:close="{ASLEEP}"' in tag for tag in live if "stream_url" not in tag)


def test_offline_without_files_is_refused_with_the_command_that_downloads_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert main(["serve", "no/such-model", "--offline", "--port", "0", "--no-ui"]) == 5
    said = capsys.readouterr().err
    assert "no/such-model is not on this machine, and downloads are disabled." in said
    assert "Try: localllm pull no/such-model" in said
