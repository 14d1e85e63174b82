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

SAME_START_S = 2.0
"""Two looks at when a process began may differ by so much; another process of the same id began later than that."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """What a server says of itself."""

    url: str
    pid: int
    model: str
    started_s: float  # of its process, in seconds since 1970
    host: str  # the machine: a data folder may be on a disk that several share


@contextmanager
def announced(url: str, model: str) -> Iterator[None]:
    """Others find this server until the block ends. A folder that cannot be written keeps nobody from serving."""
    me = RunningServer(url, os.getpid(), model, psutil.Process().create_time(), socket.gethostname())
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
    return sorted(running, key=lambda server: server.started_s, reverse=True)


@cache
def process_mark() -> str:
    """What tells this process from every other one, to be kept beside what it is still writing."""
    return f"{os.getpid()} {psutil.Process().create_time()} {socket.gethostname()}"


def is_of_another(mark: str) -> bool:
    """Whether another process of this machine made that mark and still runs."""
    pid, _, rest = mark.partition(" ")
    started_s, _, host = rest.partition(" ")
    try:
        runs = host == socket.gethostname() and is_running(int(pid), float(started_s))
    except ValueError:
        return False
    return runs and int(pid) != os.getpid()


def is_running(pid: int, started_s: float) -> bool:
    """Whether the process of that id still is the one that began then."""
    try:
        began_s: float = psutil.Process(pid).create_time()
        return abs(began_s - started_s) < SAME_START_S
    except (psutil.Error, ValueError, OverflowError):
        return False


def _runs(server: RunningServer) -> bool:
    return server.host == socket.gethostname() and is_running(server.pid, server.started_s)


def _read(path: Path) -> RunningServer | None:
    """None for what is gone, or was written by another version."""
    try:
        server = RunningServer(**json.loads(path.read_text()))
        return server if isinstance(server.started_s, float) and isinstance(server.pid, int) else None
    except (OSError, ValueError, TypeError):
        return None


def _own_folder() -> Path:
    folder = os.environ.get("XDG_RUNTIME_DIR")
    return Path(folder) if folder and Path(folder).is_dir() else data_folder() / "run"


def _folders() -> set[Path]:
    """Also where a server looked that was started without the variable, or by cron."""
    return {_own_folder(), data_folder() / "run"}
