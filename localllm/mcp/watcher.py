"""The process between localllm and a server of tools: it starts the server and ends it, and what it started, when
localllm ends, however that happens.

    python watcher.py LIFELINE COMMAND [ARGUMENT...]

LIFELINE is a file descriptor, the reading end of a pipe that localllm holds open and never writes to. The watcher leads
a process group, to which the server belongs; standard input, output and errors are the server's own.
Uses only the standard library, since it runs without site-packages.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def main(lifeline: int, command: list[str]) -> int:
    """Run the command until it ends; return its exit status as a shell does."""
    child = subprocess.Popen(command)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):  # the server alone holds its pipes, so that their ends are seen
        os.dup2(nowhere, number)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    status = child.wait()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)  # what the server has left behind
    return status if status >= 0 else 128 - status


def _end_with(lifeline: int) -> None:
    os.read(lifeline, 1)  # returns when localllm has closed its end, or has ended
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
