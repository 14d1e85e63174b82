"""Servers of this machine find their way to the command line, and keys do not find theirs to other machines."""

import json
import os
import stat
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from localllm.cli.server import ServerClient, ServerRefused
from localllm.machine.running_servers import RunningServer, announced, began, is_running, running_servers


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)


def urls() -> list[str]:
    return [server.url for server in running_servers()]


def write(folder: Path, port: int, pid: int, since: float, host: str | None = None) -> Path:
    """What a server of that process would write."""
    folder.mkdir(parents=True, exist_ok=True)
    host = os.uname().nodename if host is None else host
    told = {"url": f"http://127.0.0.1:{port}", "pid": pid, "model": "m", "began": since, "host": host}
    path = folder / f"localllm-{port}.json"
    path.write_text(json.dumps(told))
    return path


@pytest.mark.parametrize("has_runtime_folder", [True, False])
def test_a_server_is_found_while_it_runs_also_after_a_later_one_has_ended(
    has_runtime_folder: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "data" / "localllm" / "run"
    if has_runtime_folder:
        folder = tmp_path / "runtime"
        folder.mkdir(mode=0o700)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    with announced("http://127.0.0.1:8001", "first"):
        with announced("http://127.0.0.1:8002", "second"):
            assert sorted(urls()) == ["http://127.0.0.1:8001", "http://127.0.0.1:8002"]
            modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())]
            assert modes == [0o700, 0o600, 0o600]
        assert urls() == ["http://127.0.0.1:8001"]
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        assert urls() == ([] if has_runtime_folder else ["http://127.0.0.1:8001"])
    assert list(folder.iterdir()) == []


def test_what_a_server_wrote_that_was_killed_is_not_believed(tmp_path: Path) -> None:
    """Not even where another process has its id by now; nor what another machine or another version wrote."""
    folder = tmp_path / "data" / "localllm" / "run"
    me, since = os.getpid(), began(os.getpid())
    ended = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    ended_since = began(ended.pid)
    assert ended.stdout is not None
    ended.stdout.read()
    while is_running(ended.pid, ended_since):  # ended, and not waited for
        time.sleep(0.01)
    write(folder, 5, ended.pid, ended_since)
    assert urls() == []
    ended.communicate()
    write(folder, 1, me, since)
    write(folder, 2, me, since - 1)
    write(folder, 3, ended.pid, since)
    write(folder, 4, me, since, "elsewhere")
    for number, text in enumerate(("", "[]", "{}", '{"url": 1}', '{"url": "http://h", "pid": 1, "model": "m"}')):
        (folder / f"localllm-{10 + number}.json").write_text(text)
    assert urls() == ["http://127.0.0.1:1"]


def test_the_newest_comes_first(tmp_path: Path) -> None:
    me = os.getpid()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        write(tmp_path / "data" / "localllm" / "run", 1, child.pid, began(child.pid))
        write(tmp_path / "data" / "localllm" / "run", 2, me, began(me))
        assert [server.pid for server in running_servers()] == [child.pid, me]
        child.communicate(b"\n")


def test_a_later_server_on_the_same_port_keeps_its_file(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "localllm" / "run"
    with announced("http://127.0.0.1:8001", "m"):
        (folder / "localllm-8001.json").write_text("{}")
    assert (folder / "localllm-8001.json").read_text() == "{}"


def test_a_folder_that_cannot_be_written_keeps_nobody_from_serving(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")
    with announced("http://127.0.0.1:8001", "m"):
        assert running_servers() == []


def test_the_error_names_the_servers_that_do_run() -> None:
    with announced("http://127.0.0.1:8001", "mine"), pytest.raises(ServerRefused) as caught:
        ServerClient("http://127.0.0.1:9").ask("GET", "/health")
    assert caught.value.hint == "--url http://127.0.0.1:8001 (mine)"


# Keys ---------------------------------------------------------------------------------------------------------------


def key_for(url: str | None, api_key: str | None = None) -> str | None:
    return ServerClient.of(Namespace(url=url, api_key=api_key))._api_key


def test_the_key_of_this_machine_stays_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_API_KEY", "local")
    for url in (None, "http://localhost:1", "127.0.0.1:80", "https://127.9.9.9/v1", "http://[::1]:8000"):
        assert key_for(url) == "local", url
    for url in ("http://gpu.example.org:8000", "http://127.0.0.1.evil.example", "http://localhost.evil.example",
                "http://192.0.2.7:8000", "http://127.0.0.1@evil.example"):  # fmt: skip
        assert key_for(url) is None, url
        assert key_for(url, "given") == "given"
    with announced("http://192.0.2.7:8000", "mine"):
        assert key_for("http://192.0.2.7:8000") == key_for(None) == "local"
    assert key_for("http://192.0.2.7:8000") is None
    monkeypatch.setenv("LOCALLLM_HOST", "192.0.2.7")
    assert key_for("http://192.0.2.7:8000") == "local"


class Redirecting(BaseHTTPRequestHandler):
    """Sends clients to `target`, and notes the keys that come."""

    target: ClassVar[str] = ""
    seen: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        type(self).seen.append(self.headers.get("authorization"))
        if self.path == "/end":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"ended": true}')
        else:
            self.send_response(302)
            self.send_header("location", self.target)
            self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def redirecting() -> Iterator[type[Redirecting]]:
    class Handler(Redirecting):
        seen: ClassVar[list[str | None]] = []

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    Handler.target = f"http://127.0.0.1:{server.server_port}/end"
    yield Handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_redirect_to_another_server_is_not_followed(redirecting: type[Redirecting]) -> None:
    there = redirecting.target.removesuffix("/end")
    assert ServerClient(there, "secret").ask("GET", "/begin") == {"ended": True}
    assert redirecting.seen == ["Bearer secret"] * 2
    redirecting.target = redirecting.target.replace("127.0.0.1", "localhost")
    with pytest.raises(ServerRefused, match="redirects to http://localhost"):
        ServerClient(there, "secret").ask("GET", "/begin")
    assert redirecting.seen == ["Bearer secret"] * 3


def test_a_record_says_everything(tmp_path: Path) -> None:
    with announced("https://[::1]:8001", "mine"):
        [server] = running_servers()
    assert (server.url, server.pid, server.model) == ("https://[::1]:8001", os.getpid(), "mine")
    assert isinstance(server, RunningServer)
