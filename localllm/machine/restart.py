"""Restart this process in its place: the same command in the same terminal, with the same id.

Only a process that no other program expects to start differently may do so. A service of systemd may not: systemd's
watchdog is already counting, and would end the new server while it loads a large model. Neither may a process on
Windows, where a process cannot be replaced.
Does not know: what the process serves, who asks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

RESTARTED = "LOCALLLM_RESTARTED"
"""Environment variable of a process that was restarted; `was_restarted` removes it."""
MOST_FILES = 65_536


def can_restart() -> bool:
    """Return whether this process is the command `localllm` on a Unix, and not a service of systemd."""
    is_ours = Path(sys.argv[0]).stem in ("localllm", "__main__") and bool(sys.executable)
    return os.name == "posix" and is_ours and "NOTIFY_SOCKET" not in os.environ


def was_restarted() -> bool:
    """Return whether this process replaced one that restarted. The first call takes the mark from the environment."""
    return bool(os.environ.pop(RESTARTED, ""))


def restart(environ: Mapping[str, str]) -> NoReturn:
    """Replace this process. Call it when everything is stopped; `environ` is the environment it was started with.

    All files but the standard streams are closed first: a library may have opened a device without the mark that
    closes it here, and the memory of a GPU is free only once the device is closed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os.closerange(3, MOST_FILES)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**environ, RESTARTED: "1"})
