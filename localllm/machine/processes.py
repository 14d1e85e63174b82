"""The life of a child process, and the processors that it runs on.

Does not know: what the process does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from localllm.machine.hardware import count_cores

PR_SET_PDEATHSIG = 1
NODES = Path("/sys/devices/system/node")


def end_with_parent(parent: int) -> None:
    """Have the system kill this process when the thread that started it ends, and end it now if that has happened.

    parent: id of the process that should be the parent. Only Linux can do this; elsewhere nothing happens.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def bind_to_node(node: int) -> None:
    """Keep this process on the processors of a NUMA node, if it may use any of them. -1: leave it where it is."""
    cores = cores_of_node(node) if node >= 0 else set()
    allowed = cores & os.sched_getaffinity(0) if cores else cores
    if allowed:
        os.sched_setaffinity(0, allowed)


def cores_of_node(node: int, nodes: Path = NODES) -> set[int]:
    """Return the processors of a NUMA node, e.g. of the list "0-3,8"; empty: unknown."""
    try:
        listed = (nodes / f"node{node}" / "cpulist").read_text().strip()
    except OSError:
        return set()
    spans = [part.partition("-") for part in listed.split(",") if part]
    return {core for first, _, last in spans for core in range(int(first), int(last or first) + 1)}


def threads_per_process(processes: int, environ: Mapping[str, str]) -> str:
    """Return OMP_NUM_THREADS for each of several processes that compute at the same time on this machine.

    A number that the user has set stays. That of this process alone (threads.py) is divided.
    """
    cores = count_cores()
    set_by_user = environ.get("OMP_NUM_THREADS", "")
    return set_by_user if set_by_user not in ("", str(cores)) else str(max(1, cores // processes))
