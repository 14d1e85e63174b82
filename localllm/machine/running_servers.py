"""Servers running on this machine: each writes a file while it runs, so that other programs of its user find it.

    $XDG_RUNTIME_DIR/localllm-8000.json      else $XDG_DATA_HOME/localllm/run/localllm-8000.json, one for each port

Does not know: what a server does, who searches for one (cli/server.py).
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from localllm.files.folders import data_folder, make_private, write_whole

SERVICE_FOLDER = Path("/var/lib/localllm/run")
"""Where `localllm service install --system` has these files; only root and the service can read them."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """The facts that a server publishes about itself."""

    url: str
    pid: int
    model: str
    began: float  # start time of its process, from `began`
    host: str  # name of the machine, since machines may share a data folder
    certificate: str = ""  # SHA-256 of the certificate, which verbs of this user trust; empty: no https
    owner_secret: str = field(default="", repr=False)  # an admin key of this run, for programs that can read this file


@contextmanager
def announced(url: str, model: str, certificate: str = "", owner_secret: str = "") -> Iterator[None]:
    """Publish this server until the block ends. A folder that cannot be written is ignored."""
    me = RunningServer(url, os.getpid(), model, began(os.getpid()), socket.gethostname(), certificate, owner_secret)
    facts = {name: value for name, value in asdict(me).items() if value or name != "certificate"}  # as in old versions
    path, mine = _own_folder() / f"localllm-{urlsplit(url).port}.json", json.dumps(facts)
    with suppress(OSError):
        make_private(path.parent)
        write_whole(path, mine)
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            if path.read_text() == mine:  # else another server uses this port on another address
                path.unlink()


def running_servers() -> list[RunningServer]:
    """Return this user's running servers, the newest first."""
    found = [_read(path) for folder in _folders() for path in folder.glob("localllm-*.json")]
    here = [server for server in found if server is not None and server.host == socket.gethostname()]
    running = [server for server in here if is_running(server.pid, server.began)]
    return sorted(running, key=lambda server: server.began, reverse=True)


def listener_in_words(port: int) -> str:
    """Say who listens on a port, as far as this user may know: a localllm of
    this user, or the program; empty if nobody is found."""
    own = next((server for server in running_servers() if urlsplit(server.url).port == port), None)
    if own is not None:
        return f"It is yours: localllm (pid {own.pid}) serves {own.model} at {own.url}."
    try:
        found = [
            connection.pid
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        ]
        pid = next(filter(None, found), None)
        if pid is not None:
            return f"{_program(pid)} (pid {pid}) is listening on it."
        return "A program of another user is listening on it." if found else ""
    except psutil.Error:
        return ""


def _program(pid: int) -> str:
    """Name a program; a server of this package that has no file yet, because its model loads, by its command line."""
    process = psutil.Process(pid)
    is_ours = any(Path(word).name == "localllm" for word in process.cmdline()[:4])  # python -P -m localllm, or a script
    return "localllm" if is_ours else str(process.name())


@cache
def process_mark() -> str:
    """Return a mark that identifies this process, to be stored with data that it is still writing."""
    return f"{os.getpid()} {began(os.getpid())} {socket.gethostname()}"


def is_of_other_process(mark: str) -> bool:
    """Return whether the mark belongs to another process of this machine that is still running."""
    return mark != process_mark() and _is_here(mark) and not has_ended(mark)


def has_ended(mark: str) -> bool:
    """Return whether the mark's process ran on this machine and has ended. False also for a mark that is not one."""
    pid, _, rest = mark.partition(" ")
    try:
        return _is_here(mark) and not is_running(int(pid), float(rest.partition(" ")[0]))
    except ValueError:
        return False


def _is_here(mark: str) -> bool:
    return mark.count(" ") >= 2 and mark.split(" ", 2)[2] == socket.gethostname()


def is_running(pid: int, since: float) -> bool:
    """Return whether the process `pid` that started at `since` is running: a later process may have the same id."""
    try:
        return began(pid) == since
    except (psutil.Error, ValueError, OverflowError):
        return False


def began(pid: int) -> float:
    """Return the start time of a process. With /proc: clock ticks since boot, because psutil's value changes when the
    system clock is set; else seconds since 1970. Raises `psutil.Error` for a process that has ended."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        created_s: float = psutil.Process(pid).create_time()
        return created_s
    if state in "ZX":
        raise psutil.ZombieProcess(pid)
    return float(rest[18])


def _read(path: Path) -> RunningServer | None:
    """Read a server's file. Return None if the file is gone or was written by another version."""
    try:
        server = RunningServer(**json.loads(path.read_text()))
        return server if isinstance(server.began, float) and isinstance(server.pid, int) else None
    except (OSError, ValueError, TypeError):
        return None


def _own_folder() -> Path:
    folder = os.environ.get("XDG_RUNTIME_DIR")
    return Path(folder) if folder and Path(folder).is_dir() else data_folder() / "run"


def _folders() -> set[Path]:
    """Return the folders to search, including that of servers started without XDG_RUNTIME_DIR, for example by cron, and
    for root that of the machine's service.
    """
    of_service = {SERVICE_FOLDER} if hasattr(os, "geteuid") and os.geteuid() == 0 else set()
    return {_own_folder(), data_folder() / "run", *of_service}
