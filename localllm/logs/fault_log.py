"""Unhandled exceptions and stuck threads: one line in the log says what happened, where, and what to report.

    $XDG_DATA_HOME/localllm/logs/faults-8000.log     tracebacks, stacks of all threads, output of native crashes

The file is bounded and readable by its owner only; a run without faults leaves no file. A process that crashes or is
killed cannot log anything: its file has no line at the end, so the next server on that port, and `localllm doctor`,
say how it ended, and when it was last alive.
Does not know: who looks for stuck threads (web/watchdog.py), what is done about faults.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from localllm.logs.log_file import log_folder
from localllm.machine.running_servers import has_ended, process_mark

log = logging.getLogger(__name__)

FILE_BYTES = 2 * 1024**2
"""Most bytes written by one run; the stacks of a hundred faults take a tenth of it."""
REPORT = "localllm doctor --report"
_CRASH = "Fatal Python error"  # first words of faulthandler's output
_STARTED, _ENDED = "started by process ", "ended in order\n"  # the first line, and the last one after an orderly end
_ALIVE_EVERY_S = 10.0
KILLED = "killed without a word, perhaps because memory ran out"
OUT_OF_MEMORY = "journalctl -k | grep -i oom"
"""The command that shows whether Linux killed a process for memory."""
_LONGEST = 300  # characters of an error's text in the line


def fault_path(port: int) -> Path:
    return log_folder() / f"faults-{port}.log"


@dataclass(frozen=True, slots=True)
class Fault:
    """An unhandled exception, or a part of the server that was stuck."""

    at_s: float  # time.time()
    where: str  # the thread, task or request
    what: str  # one line


class Crash(NamedTuple):
    """The end of a server that could not log its end: a native crash, as faulthandler wrote it, or a kill."""

    path: Path
    what: str  # one line: Fatal Python error: Segmentation fault; KILLED
    at_s: float  # time.time() at which the process was last known to be alive
    pid: str = ""  # empty: a file of an older version


def last_crash(folder: Path | None = None) -> Crash | None:
    """Return the latest crash or kill of any server of this user; None: there is none in the logs."""
    found = [crash_in(path) for path in (folder or log_folder()).glob("faults-*.log*")]
    return max(filter(None, found), key=lambda crash: crash.at_s, default=None)


def crash_in(path: Path) -> Crash | None:
    """Return how the server that wrote the file ended, unless it ended in order or still runs."""
    try:
        with path.open(errors="replace") as file:
            lines, at_s = file.readlines(), os.fstat(file.fileno()).st_mtime
    except OSError:
        return None
    mark = lines[0].removeprefix(_STARTED).strip() if lines and lines[0].startswith(_STARTED) else ""
    crashes = [line.strip() for line in lines if line.startswith(_CRASH)]
    was_killed = lines[-1:] != [_ENDED] and has_ended(mark)
    what = crashes[-1] if crashes else KILLED if was_killed else ""
    return Crash(path, what, at_s, mark.partition(" ")[0]) if what else None


class FaultLog:
    """Records the last fault and the number of faults; `installed` hooks it to all unhandled exceptions. Any thread may
    call any method. Without a path, no file is written."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.last: Fault | None = None
        self.count = 0
        self._lock = threading.Lock()
        self._file: TextIO | None = None
        self._first_bytes = 0  # the length of the first line
        self._alive_s = 0.0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Record exceptions that end a thread or the process, and native crashes, until the block ends."""
        self._open()
        before = sys.excepthook, threading.excepthook, sys.unraisablehook
        sys.excepthook = lambda kind, error, tb: self._record_and_call(before[0], kind, error, tb)
        threading.excepthook = self._on_thread
        sys.unraisablehook = self._on_unraisable
        try:
            yield
        finally:
            sys.excepthook, threading.excepthook, sys.unraisablehook = before
            self._close()

    def record(self, where: str, error: BaseException) -> None:
        """Log the line, and write the traceback to the file."""
        at = traceback.extract_tb(error.__traceback__)
        has_file = self._file is not None
        place = f"{'/'.join(Path(at[-1].filename).parts[-3:])}:{at[-1].lineno}" if at else "-"
        said = " ".join(str(error).split())[:_LONGEST]
        what = f"{type(error).__name__}: {said}" if said else type(error).__name__
        self._write("".join(traceback.format_exception(error)), f"{where}: {what}")
        self._store(Fault(time.time(), where, f"{what} at {place}"))
        log.error(
            "unhandled fault where=%r error=%r at=%s details=%s report=%r", where, what, place, self._details, REPORT,
            exc_info=None if has_file else error,
        )  # fmt: skip

    def record_stall(self, where: str, what: str) -> None:
        """Log the line, and write the stacks of all threads to the file."""
        with self._lock:
            if self._file is not None and self._has_room():
                with suppress(OSError, ValueError):
                    self._file.write(f"\n{_now()} {where}: {what}\n")
                    self._file.flush()
                    faulthandler.dump_traceback(self._file, all_threads=True)
        self._store(Fault(time.time(), where, what))
        log.error("thread is stuck where=%r what=%r stacks=%s report=%r", where, what, self._details, REPORT)

    def on_event_loop(self, loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        """Handle exceptions of an event loop: from a callback, or from a task that nothing awaited."""
        error = context.get("exception")
        source = context.get("task") or context.get("future") or context.get("handle") or "event loop"
        name = f"task {source.get_name()}" if isinstance(source, asyncio.Task) else " ".join(repr(source).split())[:120]
        if isinstance(error, BaseException):
            self.record(name, error)
        else:  # no exception, only a message of asyncio
            log.warning("event loop: %s where=%r", context.get("message", "?"), name)

    # Hooks ------------------------------------------------------------------------------------------------------

    def _on_thread(self, args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            self.record(f"thread {args.thread.name if args.thread else '?'}", args.exc_value)

    def _on_unraisable(self, args: sys.UnraisableHookArgs) -> None:
        if args.exc_value is not None:
            self.record(f"clean-up of {args.object!r}"[:120], args.exc_value)

    def _record_and_call(self, before: Any, kind: Any, error: BaseException, tb: Any) -> None:
        if not isinstance(error, KeyboardInterrupt):
            self.record("main thread", error)
        before(kind, error, tb)

    # The file ---------------------------------------------------------------------------------------------------

    @property
    def _details(self) -> str:
        return str(self.path) if self._file is not None else "-"

    def _store(self, fault: Fault) -> None:
        """Count it, once it is in the file: who sees the count finds the text."""
        with self._lock:
            self.last, self.count = fault, self.count + 1

    def _open(self) -> None:
        if self.path is None:
            return
        try:
            self._log_end_of_last_run(self.path)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            private = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            self._file = open(private, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115 (until the end)
            self._first_bytes = self._file.write(f"{_STARTED}{process_mark()}\n")
            self._file.flush()
            faulthandler.enable(self._file)
        except OSError as error:
            log.warning("the fault log cannot be written path=%s error=%s", self.path, error.strerror or error)

    def _log_end_of_last_run(self, path: Path) -> None:
        if not path.exists() or not path.stat().st_size:
            return
        crash = crash_in(path)
        was_killed = crash is not None and crash.what == KILLED
        # A file without stacks does not replace one with stacks.
        older = path.with_name(f"{path.name}.{'killed' if was_killed and path.stat().st_size < _LONGEST else '1'}")
        path.replace(older)
        if crash is not None and crash.what == KILLED:
            last = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(crash.at_s))
            log.error(
                "the last server on this port was %s pid=%s last_alive=%r try=%r",
                KILLED,
                crash.pid,
                last,
                OUT_OF_MEMORY,
            )
        elif crash is not None:
            log.error("the last server on this port crashed error=%r stacks=%s report=%r", crash.what, older, REPORT)

    def mark_alive(self) -> None:
        """Set the file's time to now, so that a kill is known to have come later. Called every second or so."""
        now_s = time.monotonic()
        if self._file is not None and now_s - self._alive_s >= _ALIVE_EVERY_S:
            self._alive_s = now_s
            with suppress(OSError, ValueError):
                os.utime(self._file.fileno())

    def _close(self) -> None:
        if self._file is None or self.path is None:
            return
        faulthandler.disable()
        with suppress(OSError, ValueError):
            self._file.write(_ENDED)
            self._file.flush()
        is_empty = os.fstat(self._file.fileno()).st_size <= self._first_bytes + len(_ENDED)
        with suppress(OSError):  # a full disk: what could not be written is lost
            self._file.close()
        self._file = None
        if is_empty:
            with suppress(OSError):
                self.path.unlink()

    def _write(self, text: str, title: str) -> None:
        with self._lock:
            if self._file is not None and self._has_room():
                with suppress(OSError, ValueError):
                    self._file.write(f"\n{_now()} {title}\n{text}")
                    self._file.flush()

    def _has_room(self) -> bool:
        assert self._file is not None
        return os.fstat(self._file.fileno()).st_size < FILE_BYTES


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
