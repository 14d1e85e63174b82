"""Environment variables of the process's compute threads: their number, and how they wait.

libgomp reads these variables once, when torch loads it. So this runs before torch is imported, on the command line and
in the offline API. Values that the user has set stay.
Does not know: torch.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from localllm.machine.hardware import count_cores

SPIN_COUNT = "10000"


def set_thread_environment(environ: MutableMapping[str, str] | None = None) -> None:
    """Set one thread per physical core that this process may use, and let waiting threads spin for microseconds only.

    By default, a libgomp thread that has finished its share spins for milliseconds. On a machine with other work, such
    as a browser, the spinning thread occupies the core that the last share still needs: a small matrix-vector product
    becomes four times slower. Sleeping at once (OMP_WAIT_POLICY=passive) costs a wake-up per operation, a quarter of a
    decode step. A short spin bridges the gap between two operations.
    """
    environ = os.environ if environ is None else environ
    environ.setdefault("OMP_NUM_THREADS", str(count_cores()))
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
