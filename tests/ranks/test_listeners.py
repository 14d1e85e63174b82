"""Listening sockets that nobody can connect to any more, and connections that go on."""

import socket
import sys

import pytest

from localllm.ranks.group import closed_to_others

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="filters of sockets are Linux's")


def can_connect(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=0.3).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
def test_only_sockets_of_the_block_are_closed_and_their_connections_stay(family: socket.AddressFamily) -> None:
    host = "127.0.0.1" if family == socket.AF_INET else "::1"

    def listener() -> socket.socket:
        made = socket.socket(family)
        made.bind((host, 0))
        made.listen()
        return made

    with listener() as before:
        with closed_to_others():
            inside = listener()
            client = socket.create_connection(inside.getsockname()[:2])
            server, _ = inside.accept()
            assert can_connect(inside.getsockname()[:2])
        assert not can_connect(inside.getsockname()[:2])
        assert can_connect(before.getsockname()[:2])
        client.sendall(b"still here")
        assert server.recv(20) == b"still here"
        server.sendall(b"and back")
        assert client.recv(20) == b"and back"
        for each in (inside, client, server):
            each.close()
