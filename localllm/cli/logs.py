"""`localllm logs`: print the end of a server's log, or follow it.

Does not know: what is logged, how the file is rotated (logs/log_file.py).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from time import sleep
from typing import TextIO
from urllib.parse import urlsplit

from localllm.cli.talk import CONTROLS
from localllm.config.flags import add_debug_flag
from localllm.errors import ConfigError
from localllm.logs.log_file import log_folder, log_path, rotated_files
from localllm.machine.running_servers import running_servers

LOOK_EVERY_S = 0.2


def logs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--follow", "-f", action="store_true", help="keep printing new lines until Ctrl-C")
    parser.add_argument("--lines", "-n", type=int, default=100, metavar="N", help="number of last lines to print")
    help = "the log of the server on that port; default: the running server's, or the last one's"
    parser.add_argument("--port", type=int, metavar="N", help=help)
    parser.add_argument("--path", action="store_true", help="only print the path of the log file")
    add_debug_flag(parser)


def logs(options: argparse.Namespace) -> int:
    if options.lines < 0:
        raise ConfigError(f"-n {options.lines} is out of range.", "Allowed: 0 and more.", param="lines")
    path = _path(options.port)
    if options.path:
        print(path)
        return 0
    file = _open(path)
    try:
        _print(_end(file.read(), path, options.lines))
        while options.follow:
            sleep(LOOK_EVERY_S)
            _print(file.read())
            if _is_turned(file, path):
                _print(file.read())  # lines written before the rotation
                file.close()
                file = _open(path)
    except KeyboardInterrupt:  # Ctrl-C is the normal way to leave
        pass
    finally:
        file.close()
    return 0


def _path(asked: int | None) -> Path:
    """Return the log of the given port, else of the running server, else the log written last."""
    url = next((server.url for server in running_servers()), None)
    port = asked if asked is not None else urlsplit(url).port if url else None
    if port is not None and log_path(port).exists():
        return log_path(port)
    found = sorted(log_folder().glob("server-*.log"), key=lambda path: path.stat().st_mtime)
    if asked is not None or not found:
        where = log_folder() if asked is None else log_path(asked)
        known = f"Logs: {', '.join(path.name for path in found)}." if found else "A running server writes it."
        raise ConfigError(f"There is no log at {where}.", known, "localllm up")
    return found[-1]


def _open(path: Path) -> TextIO:
    try:
        return path.open(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"Cannot read {path}.", f"{error.strerror or error}.") from error


def _end(text: str, path: Path, count: int) -> str:
    """Return the last lines, reading older files if this one has too few."""
    lines = text.splitlines(keepends=True)
    for earlier in rotated_files(path):
        if len(lines) >= count or not earlier.exists():
            break
        with _open(earlier) as file:
            lines = file.read().splitlines(keepends=True) + lines
    return "".join(lines[-count:]) if count else ""


def _is_turned(file: TextIO, path: Path) -> bool:
    """Return whether the log was rotated or truncated since `file` was opened."""
    try:
        now = path.stat()
    except FileNotFoundError:  # during a rotation
        return False
    mine = os.fstat(file.fileno())
    return (now.st_dev, now.st_ino) != (mine.st_dev, mine.st_ino) or now.st_size < os.lseek(
        file.fileno(), 0, os.SEEK_CUR
    )


def _print(text: str) -> None:
    if text:
        sys.stdout.write(text.translate(CONTROLS) if sys.stdout.isatty() else text)
        sys.stdout.flush()
