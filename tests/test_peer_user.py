"""Users at the other end of loopback connections, as the kernel says."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

from localllm.machine import peer_user
from localllm.machine.peer_user import is_owner, user_of

pytestmark = pytest.mark.skipif(not peer_user.KNOWS_USERS, reason="only Linux says who is at the other end")
OTHER = 65_534
CONNECT = """
import os, socket, sys
os.setuid(int(sys.argv[1]))
made = socket.socket(socket.AF_INET6 if ":" in sys.argv[2] else socket.AF_INET)
made.connect((sys.argv[2], int(sys.argv[3])))
if sys.argv[4] == "close":
    made.send(b"x"), made.close()
print("connected", flush=True)
sys.stdin.read()
"""


def no_diag(client: object, server: object) -> None:
    raise OSError


def seen(host: str, target: str, uid: int, does: str = "stay") -> int | None:
    """The user that a server at `host` sees for a child process of this user, which connects to `target`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((host, 0))
        listener.listen()
        words = [sys.executable, "-c", CONNECT, str(uid), target, str(listener.getsockname()[1]), does]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"connected\n"
            accepted, client = listener.accept()
            with accepted:
                found = user_of(client[:2], accepted.getsockname()[:2])
            child.kill()
    return found


@pytest.mark.parametrize("by_table", [False, True], ids=["sock_diag", "table"])
@pytest.mark.parametrize(
    ("host", "target"),
    [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1"), ("127.0.0.1", "::ffff:127.0.0.1")],
    ids=["IPv4", "IPv6", "IPv4 to IPv6", "IPv6 to IPv4"],
)
def test_the_user_of_a_connection(
    host: str, target: str, by_table: bool, monkeypatch: pytest.MonkeyPatch, other_user: Callable[[], int]
) -> None:
    if by_table:
        monkeypatch.setattr(peer_user, "_by_sock_diag", no_diag)
    else:
        monkeypatch.setattr(peer_user, "_by_table", no_diag)
    uid = other_user()
    assert seen(host, target, uid) == uid
    assert not is_owner(uid)
    assert seen(host, target, os.getuid()) == os.getuid()
    assert is_owner(os.getuid())


@pytest.mark.parametrize("by_table", [False, True], ids=["sock_diag", "table"])
def test_a_program_that_has_closed_its_end_is_not_taken_for_root(
    by_table: bool, monkeypatch: pytest.MonkeyPatch, other_user: Callable[[], int]
) -> None:
    if by_table:
        monkeypatch.setattr(peer_user, "_by_sock_diag", no_diag)
    assert seen("127.0.0.1", "127.0.0.1", other_user(), "close") is None


def test_addresses_that_belong_to_no_connection() -> None:
    assert user_of(("127.0.0.1", 1), ("127.0.0.1", 2)) is None
    assert user_of(("not an address", 1), ("127.0.0.1", 2)) is None
    assert not is_owner(None)


@pytest.fixture
def other_user() -> Callable[[], int]:
    def uid() -> int:
        if os.getuid() != 0:
            pytest.skip("only root can start a process of another user")
        return OTHER

    return uid
