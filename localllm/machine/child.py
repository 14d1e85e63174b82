"""A child process that answers messages over its pipes: native code that reads hostile input runs there, where a crash
or a hang is harmless.

A message is its length as four bytes and then its bytes, in both directions; child_main.py is the child's side. The
child ends with this process, since it reads until its stdin is closed.
Does not know: what the messages say.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from localllm.machine import child_main
from localllm.machine.child_main import LENGTH, LIMITS


class ChildProcess:
    """A running child. `ask` is for one thread at a time."""

    def __init__(self, script: Path, environment: Mapping[str, str], files: Sequence[int] = ()) -> None:
        """Start the script with this Python. files: descriptors that it inherits. Raises `OSError`."""
        self.process = subprocess.Popen(
            [sys.executable, "-P", child_main.__file__, str(script)], env={**os.environ, **environment},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
            pass_fds=files,
        )  # fmt: skip
        self._ended = weakref.finalize(self, _kill, self.process)

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def ask(self, message: bytes, within_s: float, *, memory_bytes: int, cpu_s: float) -> bytes:
        """Return the child's answer. Raises `TimeoutError` after killing a child that takes longer, and `EOFError` or
        `OSError` if the child ends.

        memory_bytes, cpu_s: address space of the child, and CPU time for this message, after which SIGPROF ends it; 0:
        no limit.
        """
        source, sink = self.process.stdout, self.process.stdin
        assert source is not None
        assert sink is not None
        is_late = threading.Event()

        def stop() -> None:
            is_late.set()
            self.process.kill()

        timer = threading.Timer(within_s, stop)
        timer.daemon = True
        timer.start()
        try:
            sink.write(LENGTH.pack(LIMITS.size + len(message)))
            sink.write(LIMITS.pack(memory_bytes, cpu_s))
            sink.write(message)
            sink.flush()
            return _read(source, *LENGTH.unpack(_read(source, LENGTH.size)))
        except (OSError, EOFError):
            if is_late.is_set():
                raise TimeoutError from None
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)  # its pipe closes shortly before it exits
            raise
        finally:
            timer.cancel()

    def end(self) -> int | None:
        """Kill the child, if it still runs, and return its exit status."""
        self._ended()
        return self.process.returncode


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            if pipe is not None:
                pipe.close()


def _read(source: IO[bytes], size: int) -> bytes:
    data = source.read(size)
    if len(data) < size:
        raise EOFError
    return data
