"""The servers that run on this machine: each writes a file while it serves, so that other programs of its user find it.

    $XDG_RUNTIME_DIR/localllm-8000.json      else $XDG_DATA_HOME/localllm/run/localllm-8000.json, one for each port

Does not know: what a server does, who looks for one (cli/server.py).
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from localllm.folders import data_folder, make_private, open_private


@dataclass(frozen=True, slots=True)
class RunningServer:
    """What a server says of itself."""

    url: str
    pid: int
    model: str
    began: float  # its process, as `began` says
    host: str  # the machine: a data folder may be on a disk that several share


@contextmanager
def announced(url: str, model: str) -> Iterator[None]:
    """Others find this server until the block ends. A folder that cannot be written keeps nobody from serving."""
    me = RunningServer(url, os.getpid(), model, began(os.getpid()), socket.gethostname())
    path, mine = _own_folder() / f"localllm-{urlsplit(url).port}.json", json.dumps(asdict(me))
    with suppress(OSError):
        make_private(path.parent)
        written = path.with_suffix(f".{me.pid}")
        with open(open_private(written), "w") as file:
            file.write(mine)
        written.replace(path)
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            if path.read_text() == mine:  # otherwise another server has that port on another address
                path.unlink()


def running_servers() -> list[RunningServer]:
    """Those of this user whose process lives, the one that began last first."""
    found = [_read(path) for folder in _folders() for path in folder.glob("localllm-*.json")]
    running = [server for server in found if server is not None and _runs(server)]
    return sorted(running, key=lambda server: server.began, reverse=True)


@cache
def process_mark() -> str:
    """What tells this process from every other one, to be kept beside what it is still writing."""
    return f"{os.getpid()} {began(os.getpid())} {socket.gethostname()}"


def is_of_another(mark: str) -> bool:
    """Whether another process of this machine made that mark and still runs."""
    pid, _, rest = mark.partition(" ")
    since, _, host = rest.partition(" ")
    try:
        runs = host == socket.gethostname() and is_running(int(pid), float(since))
    except ValueError:
        return False
    return runs and int(pid) != os.getpid()


def is_running(pid: int, since: float) -> bool:
    """Whether the process of that id is the one that began then, and not a later one."""
    try:
        return began(pid) == since
    except (psutil.Error, ValueError, OverflowError):
        return False


def began(pid: int) -> float:
    """When a process began: clock ticks since the start of the machine where there is /proc, since setting the clock
    moves what psutil tells there; else seconds since 1970. Raises `psutil.Error` for one that has ended."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        created_s: float = psutil.Process(pid).create_time()
        return created_s
    if state in "ZX":
        raise psutil.ZombieProcess(pid)
    return float(rest[18])


def _runs(server: RunningServer) -> bool:
    return server.host == socket.gethostname() and is_running(server.pid, server.began)


def _read(path: Path) -> RunningServer | None:
    """None for what is gone, or was written by another version."""
    try:
        server = RunningServer(**json.loads(path.read_text()))
        return server if isinstance(server.began, float) and isinstance(server.pid, int) else None
    except (OSError, ValueError, TypeError):
        return None


def _own_folder() -> Path:
    folder = os.environ.get("XDG_RUNTIME_DIR")
    return Path(folder) if folder and Path(folder).is_dir() else data_folder() / "run"


def _folders() -> set[Path]:
    """Also where a server looked that was started without the variable, or by cron."""
    return {_own_folder(), data_folder() / "run"}
