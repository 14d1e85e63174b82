"""The interface of systemd to a running service: the socket it passes, and the states that the service reports.

    LISTEN_PID, LISTEN_FDS    a listening socket, as file descriptor 3 (sd_listen_fds(3))
    NOTIFY_SOCKET             where to send READY=1, STATUS=..., STOPPING=1 and WATCHDOG=1 (sd_notify(3))
    WATCHDOG_USEC             systemd restarts the service if no WATCHDOG=1 arrives for that long

Without these variables every function here does nothing. Does not know: units (setup/units.py), what a server does.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from localllm.errors import ConfigError
from localllm.machine.platforms import is_wsl

FIRST_FD = 3
"""The first passed file descriptor (SD_LISTEN_FDS_START)."""
SEND_S = 1.0
"""Longest wait while the queue of the service manager is full."""
BOOTED = Path("/run/systemd/system")
"""Exists if systemd manages this machine, as sd_booted(3) defines it."""


def inherited_socket() -> socket.socket | None:
    """Return the listening socket that systemd passed to this process; None without one. The first call takes it: the
    variables are removed, so that no child process takes it for its own.

    Raises `ConfigError` for several sockets, and for one that is not a listening TCP socket.
    """
    pid, number = (os.environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS"))
    os.environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or number in ("", "0"):
        return None
    if number != "1":
        why = f"systemd passed {number} sockets, and localllm listens on one."
        raise ConfigError("Cannot use the sockets of systemd.", why, "keep one ListenStream= line in the .socket unit")
    try:
        passed = socket.socket(fileno=FIRST_FD)
        listens = bool(passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError as error:
        why = f"File descriptor {FIRST_FD}: {error.strerror}."
        raise ConfigError("Cannot use the socket of systemd.", why, "systemctl status localllm.socket") from error
    if passed.family not in (socket.AF_INET, socket.AF_INET6) or passed.type != socket.SOCK_STREAM or not listens:
        kind = f"{socket.AddressFamily(passed.family).name}, {socket.SocketKind(passed.type).name}"
        why = f"It is {kind}{'' if listens else ', and does not listen'}; localllm needs a listening TCP socket."
        passed.close()
        hint = "ListenStream=127.0.0.1:8000 and Accept=no in the .socket unit"
        raise ConfigError("Cannot use the socket of systemd.", why, hint)
    passed.set_inheritable(False)
    passed.setblocking(False)
    return passed


def notify(*states: str) -> None:
    """Send states such as "READY=1" to the service manager. Without one, and after an error, nothing happens."""
    name = os.environ.get("NOTIFY_SOCKET", "")
    if not name.startswith(("/", "@")):  # "vsock:..." is for a whole virtual machine
        return
    address = "\0" + name[1:] if name.startswith("@") else name  # @: an abstract name, which is not in a folder
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.settimeout(SEND_S)
        sender.sendto("\n".join(each.replace("\n", " ") for each in states).encode(), address)


def watchdog_s() -> float | None:
    """Return the seconds within which systemd expects a sign of life from this process; None if it expects none."""
    limit_us, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", str(os.getpid()))
    return int(limit_us) / 1e6 if limit_us.isdigit() and int(limit_us) and pid == str(os.getpid()) else None


def why_not_running() -> str:
    """Return why systemd does not manage this machine, and what to do; empty if it does."""
    if BOOTED.exists():
        return ""
    if is_wsl():
        return (
            "systemd is off in this WSL distribution. Put the lines [boot] and systemd=true into /etc/wsl.conf, "
            "then type wsl --shutdown in Windows and open WSL again."
        )
    return "systemd does not manage this machine: it may be a container, or use another init system."
