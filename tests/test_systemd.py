"""The interface of systemd to a service: passed sockets, states, credentials, and the program that uses a port."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from localllm import up
from localllm.config.resolve import resolve
from localllm.config.settings import ServerConfig
from localllm.errors import ConfigError, PortInUse
from localllm.machine import systemd
from tests.passed_socket import with_socket

TAKE = """
import os
from localllm.machine.systemd import inherited_socket
taken = inherited_socket()
left = sorted(set(os.environ) & {"LISTEN_PID", "LISTEN_FDS"})
print(taken and taken.getsockname(), taken and taken.get_inheritable(), left)
"""
OTHER_SERVER = """
import socket, sys
from contextlib import nullcontext
from localllm.machine.running_servers import announced
with socket.create_server(("127.0.0.1", 0)) as listener:
    port = listener.getsockname()[1]
    with announced(f"http://127.0.0.1:{port}", "tiny") if "ready" in sys.argv else nullcontext():
        print(port, flush=True)
        sys.stdin.read()
"""


def take(passed: socket.socket, *, number: str = "1", pid: str = "") -> subprocess.CompletedProcess[str]:
    """Start a process that takes the socket which it is passed."""
    command = with_socket(passed, sys.executable, "-c", TAKE, number=number, pid=pid)
    return subprocess.run(command, pass_fds=[passed.fileno()], capture_output=True, text=True)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_a_passed_socket_is_taken_once_and_not_by_children(listener: socket.socket) -> None:
    assert take(listener).stdout == f"{listener.getsockname()} False []\n"


@pytest.mark.parametrize(("number", "pid"), [("1", "1"), ("0", ""), ("", "")])
def test_a_socket_for_another_process_is_left_alone(listener: socket.socket, number: str, pid: str) -> None:
    assert take(listener, number=number, pid=pid).stdout == "None None []\n"


def _connected() -> socket.socket:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return socket.create_connection(server.getsockname())


def _unix() -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind("")  # an abstract name that the kernel chooses
    made.listen()
    return made


@pytest.mark.parametrize(
    ("make", "number", "said"),
    [
        (_connected, "1", "It is AF_INET, SOCK_STREAM, and does not listen"),
        (_unix, "1", "It is AF_UNIX, SOCK_STREAM; localllm needs"),
        (lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM), "1", "It is AF_INET, SOCK_DGRAM"),
        (_unix, "2", "systemd passed 2 sockets, and localllm listens on one."),
    ],
)
def test_other_sockets_are_refused(make: Callable[[], socket.socket], number: str, said: str) -> None:
    with make() as passed:
        done = take(passed, number=number)
    assert done.returncode == 1
    assert said in done.stderr


# ---- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_abstract", [False, True])
def test_states_reach_the_socket_of_the_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_abstract: bool
) -> None:
    name = f"localllm-{os.getpid()}" if is_abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name}" if is_abstract else name)
        manager.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}" if is_abstract else name)
        systemd.notify("READY=1", "STATUS=serving a\nb")
        assert manager.recv(999) == b"READY=1\nSTATUS=serving a b"


@pytest.mark.parametrize("name", ["", "/nowhere/notify", "vsock:2:1234", "relative"])
def test_a_manager_that_is_not_there_is_not_missed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", name)
    systemd.notify("READY=1")


# ---- credentials and addresses ---------------------------------------------------------------------------------------


def test_the_api_key_of_a_credential_is_used_unless_another_is_given(tmp_path: Path) -> None:
    (tmp_path / "api-key").write_text("sk-1\n")
    environ = {"CREDENTIALS_DIRECTORY": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    assert resolve({}, environ).server.api_keys == ("sk-1",)
    assert resolve({}, environ | {"LOCALLLM_API_KEY": "sk-2"}).server.api_keys == ("sk-2",)
    (tmp_path / "api-key").write_text("")
    with pytest.raises(ConfigError, match="is empty"):
        resolve({}, environ)
    (tmp_path / "api-key").unlink()
    assert resolve({}, environ).server.api_keys == ()


def test_rules_of_keys_follow_the_address_of_the_socket() -> None:
    asked = ServerConfig(host="127.0.0.1", port=9)
    with closing(socket.create_server(("0.0.0.0", 0))) as passed, pytest.raises(ConfigError, match="without a key"):
        up.bind_address(asked.at(passed.getsockname()[:2]), passed)
    with closing(socket.create_server(("127.0.0.1", 0))) as passed:
        assert up.bind_address(ServerConfig(host="0.0.0.0").at(passed.getsockname()[:2]), passed) is passed


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("ready", "It is yours: localllm (pid {pid}) serves tiny at http://127.0.0.1:{port}."),
        ("", "localllm (pid {pid}) is listening on it."),
    ],
)
def test_a_server_of_ours_that_uses_the_port_is_named(tmp_path: Path, state: str, said: str) -> None:
    script = tmp_path / "localllm"
    script.write_text(OTHER_SERVER)
    command = [sys.executable, str(script), *([state] if state else [])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        port = int(other.stdout.readline())
        with pytest.raises(PortInUse) as refused:
            up.bind_address(ServerConfig(port=port))
        other.communicate("")
    assert refused.value.why == said.format(pid=other.pid, port=port)
    assert f"--port {port + 1}, or stop" in str(refused.value.hint)
