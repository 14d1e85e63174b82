"""A process that gets a socket as systemd passes one: as file descriptor 3, with LISTEN_PID and LISTEN_FDS."""

import socket
import sys

PASS = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_FDS=sys.argv[2], LISTEN_PID=sys.argv[3] or str(os.getpid()))
os.execv(sys.argv[4], sys.argv[4:])
"""


def with_socket(passed: socket.socket, *command: str, number: str = "1", pid: str = "") -> list[str]:
    """Return the command line that passes the socket to `command`; the caller passes on its file descriptor."""
    return [sys.executable, "-I", "-S", "-c", PASS, str(passed.fileno()), number, pid, *command]
