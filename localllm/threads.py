"""The thread environment of the process: how many threads compute, and what they do while they wait.

libgomp reads these variables once, when it is loaded, and torch loads it: so this runs before torch is imported, at
the top of every road that leads there (the command line, the offline API). What the user has set stays.
Does not know: torch.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from localllm.hardware import count_cores

SPIN_COUNT = "10000"


def set_thread_environment(environ: MutableMapping[str, str] | None = None) -> None:
    """One thread per physical core that this process may use, and waiting threads that spin for microseconds only.

    libgomp's default lets a thread that has finished its share spin for milliseconds. On a machine that does anything
    else besides, an API process or a browser, that takes the very core which the last share still needs: a small
    matrix-vector product becomes four times slower. Sleeping at once (OMP_WAIT_POLICY=passive) is the other extreme
    and costs a wake-up per operation, a quarter of a decode step. A short spin bridges the gap between two operations.
    """
    environ = os.environ if environ is None else environ
    environ.setdefault("OMP_NUM_THREADS", str(count_cores()))
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
