"""The log file of a server: bounded, readable by its owner only; a failed write does not stop the server.

    $XDG_DATA_HOME/localllm/logs/server-8000.log     then .log.1, .log.2, .log.3, the oldest last

Each port has its own file, so that two servers do not rotate each other's logs. Lines name requests by their ids;
prompts and answers are never logged.
Does not know: what is logged, who reads it (cli/logs.py).
"""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import suppress
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

from localllm.files.folders import data_folder, make_private, open_private

FILE_BYTES = 5 * 1024**2
OLDER_FILES = 3
TRY_AGAIN_S = 60.0


def log_folder() -> Path:
    """Return $XDG_DATA_HOME/localllm/logs."""
    return data_folder() / "logs"


def log_path(port: int) -> Path:
    return log_folder() / f"server-{port}.log"


def rotated_files(path: Path) -> list[Path]:
    """Return the rotated files, newest first."""
    return [path.with_name(f"{path.name}.{number}") for number in range(1, OLDER_FILES + 1)]


class LogFile(RotatingFileHandler):
    """A rotating log file, opened at the first line. If a line cannot be written (disk full, folder deleted), it warns
    once and retries after `TRY_AGAIN_S`. The file then says how many lines are missing."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=FILE_BYTES, backupCount=OLDER_FILES, encoding="utf-8", delay=True)
        self._num_missing = 0  # lines since the last one that was written
        self._try_again_s = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        missing = self._num_missing
        if missing and time.monotonic() < self._try_again_s:
            self._num_missing += 1
            return
        if missing:
            text = f"{missing} {'line is' if missing == 1 else 'lines are'} missing here: the file could not be written"
            super().emit(logging.makeLogRecord({"name": __name__, "levelno": 30, "levelname": "WARNING", "msg": text}))
        if self._num_missing == missing:  # the write succeeded
            self._num_missing = 0
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        if not self._num_missing:
            what = f"The log file {self.baseFilename} cannot be written: {error.strerror or error}."
            print(f"{what} Retrying every {TRY_AGAIN_S:.0f} s.", file=sys.stderr)
        self._num_missing += 1
        self._try_again_s = time.monotonic() + TRY_AGAIN_S
        stream, self.stream = self.stream, None
        with suppress(OSError):  # drop the buffer, which would otherwise be written with the next line
            if stream is not None:
                stream.close()

    def shouldRollover(self, record: logging.LogRecord) -> bool:
        """Check only the file's size; the standard library's method would format the record a second time."""
        if self.stream is None:
            self.stream = self._open()
        return os.fstat(self.stream.fileno()).st_size >= self.maxBytes

    def doRollover(self) -> None:
        """Rename the files. Windows does not rename a file that another program has open, such as `localllm logs`:
        lines are then added to the same file, and the next one tries again."""
        try:
            super().doRollover()
        except PermissionError:
            if sys.platform != "win32":
                raise

    def _open(self) -> TextIOWrapper:
        path = Path(self.baseFilename)
        make_private(path.parent)
        private = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        return open(private, "a", encoding=self.encoding, errors="backslashreplace")
