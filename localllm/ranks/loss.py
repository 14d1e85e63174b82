"""The loss of a group of ranks: noticed by any thread, for one reason, and final.

Does not know: how a loss is noticed (supervisor.py, links.py).
"""

from __future__ import annotations

import os
import threading

from localllm.errors import RanksLost

HINT = "The model is loaded again: send the request again in a few seconds. The log has the details."


class Loss:
    """The state of a group: lost or not, and why. Its file descriptor becomes readable with the loss, for `poll`."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self._lock = threading.Lock()
        self._declared = threading.Event()
        self.error: RanksLost | None = None

    def fileno(self) -> int:
        return self._read

    def declare(self, what: str, why: str = "") -> RanksLost:
        """Declare the group lost. Return the error, which is the first one that was declared."""
        with self._lock:
            if self.error is None:
                self.error = RanksLost(what, why, HINT)
                os.close(self._write)
                self._declared.set()
            return self.error

    def wait(self, seconds: float) -> bool:
        """Wait for a loss. Return whether there is one."""
        return self._declared.wait(seconds)

    def check(self) -> None:
        """Raise `RanksLost` if the group is lost."""
        if self.error is not None:
            raise RanksLost(self.error.what, self.error.why, self.error.hint)

    def close(self) -> None:
        """Close the file descriptors. The group must be lost or ended."""
        with self._lock:
            if self.error is None:
                self.error = RanksLost("The ranks have ended.", "", HINT)
                os.close(self._write)
                self._declared.set()
        os.close(self._read)
