"""The file that a server keeps of its log: bounded, readable by its owner only, and never a reason to fail.

    $XDG_DATA_HOME/localllm/logs/server-8000.log     then .log.1, .log.2, .log.3, the oldest last

One file for each port, so that two servers do not turn each other's pages. Lines name requests by their ids; prompts
and answers are not logged anywhere.
Does not know: what is logged, who reads (cli/logs.py).
"""

from __future__ import annotations

import logging
import os
import sys
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

from localllm.folders import data_folder

FILE_BYTES = 5 * 1024**2
OLDER_FILES = 3


def log_folder() -> Path:
    """$XDG_DATA_HOME/localllm/logs"""
    return data_folder() / "logs"


def log_path(port: int) -> Path:
    return log_folder() / f"server-{port}.log"


def older(path: Path) -> list[Path]:
    """Where earlier lines are, the newest first."""
    return [path.with_name(f"{path.name}.{number}") for number in range(1, OLDER_FILES + 1)]


class LogFile(RotatingFileHandler):
    """Opened at the first line. What cannot be written is said once, and given up."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=FILE_BYTES, backupCount=OLDER_FILES, encoding="utf-8", delay=True)
        self._given_up = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._given_up:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self._given_up = True
        print(f"The log file {self.baseFilename} is given up: {error.strerror or error}.", file=sys.stderr)

    def shouldRollover(self, record: logging.LogRecord) -> bool:
        """One look at the size; the standard library's would format the record a second time."""
        if self.stream is None:
            self.stream = self._open()
        return os.fstat(self.stream.fileno()).st_size >= self.maxBytes

    def _open(self) -> TextIOWrapper:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        private = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return open(private, "a", encoding=self.encoding, errors="backslashreplace")
