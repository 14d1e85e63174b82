"""The program of a child process (child.py): it reads messages, holds the limits of each, and answers through a script.

    python child_main.py SCRIPT

SCRIPT has a function `worker`, which returns the function that maps a message to its answer. A message begins with its
limits. Started by file name and limited to the standard library, so that a child starts quickly.
Does not know: what the messages say.
"""

from __future__ import annotations

import runpy
import signal
import struct
import sys
from contextlib import suppress

LENGTH = struct.Struct("<I")
LIMITS = struct.Struct("<Qd")
"""Bytes of address space and seconds of CPU time for one message; 0: no limit."""


def main(script: str) -> None:
    source, sink, work = sys.stdin.buffer, sys.stdout.buffer, None
    while len(head := source.read(LENGTH.size)) == LENGTH.size:
        message = source.read(*LENGTH.unpack(head))
        memory_bytes, cpu_s = LIMITS.unpack_from(message)
        _limit_memory(memory_bytes)
        _end_after(cpu_s)
        work = work or runpy.run_path(script)["worker"]()  # its imports are within the limits, too
        answer: bytes = work(message[LIMITS.size :])
        _end_after(0)
        sink.write(LENGTH.pack(len(answer)))
        sink.write(answer)
        sink.flush()


def _end_after(cpu_s: float) -> None:
    """Let SIGPROF end this process after so much CPU time, even inside native code or without its parent. 0: cancel."""
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.setitimer(signal.ITIMER_PROF, cpu_s)


def _limit_memory(most_bytes: int) -> None:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = most_bytes if hard == resource.RLIM_INFINITY else min(most_bytes, hard)
    with suppress(ValueError, OSError):  # the system may refuse
        resource.setrlimit(resource.RLIMIT_AS, (soft or hard, hard))


if __name__ == "__main__":
    main(sys.argv[1])
