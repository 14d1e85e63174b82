"""The thread environment of the process: how many threads compute, and what they do while they wait.

libgomp reads these variables once, when it is loaded, and torch loads it: so this runs before torch is imported, at
the top of every road that leads there (the command line, the offline API). What the user has set stays.
Does not know: torch.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from localllm.hardware import count_cores


def set_thread_environment(environ: MutableMapping[str, str] | None = None) -> None:
    """One thread per physical core that this process may use, and waiting threads that sleep.

    By default a thread that has finished its share spins until the next one comes. On a machine that does anything
    else besides, an API process or a browser, the spinning takes the very core that the last share still needs: a
    small matrix-vector product becomes four times slower.
    """
    environ = os.environ if environ is None else environ
    environ.setdefault("OMP_NUM_THREADS", str(count_cores()))
    environ.setdefault("OMP_WAIT_POLICY", "passive")
