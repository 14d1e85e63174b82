"""Downloads that run beside a server: several at once, each with its progress, each to be cancelled.

Asking twice for the same thing gives the download that runs already. A server that ends takes its downloads with it;
asked for again, they go on where they stopped.
Does not know: HTTP, who asks.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from localllm.errors import DownloadCancelled, LocalLLMError, ModelNotFound
from localllm.models.hub.plan import DownloadPlan, plan_download, require_room
from localllm.models.hub.pull import Progress, pull

log = logging.getLogger(__name__)

State = Literal["waiting", "running", "done", "failed", "cancelled"]
AT_ONCE = 3
KEPT = 50
"""Finished ones that are remembered."""


@dataclass(frozen=True, slots=True)
class DownloadStatus:
    """One download at one moment."""

    id: str
    plan: DownloadPlan
    state: State
    progress: Progress
    started_s: float  # seconds since 1970
    error: LocalLLMError | None = None

    @property
    def is_over(self) -> bool:
        return self.state in ("done", "failed", "cancelled")


class Downloads:
    """All methods may be called from any thread and return at once, but `start`, which asks the hub first."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._lock = threading.Lock()
        self._slots = threading.Semaphore(at_once)
        self._ids = itertools.count(1)
        self._entries: dict[str, _Entry] = {}

    def start(self, name: str, revision: str | None = None, include: Sequence[str] = ()) -> DownloadStatus:
        """Plan and begin. Raises what `plan_download` and `require_room` raise."""
        plan = plan_download(name, revision, include)
        require_room(plan)
        with self._lock:
            for entry in self._entries.values():
                if _what(entry.plan) == _what(plan) and not entry.status().is_over:
                    return entry.status()
            entry = _Entry(str(next(self._ids)), plan)
            self._entries[entry.id] = entry
            self._forget_old()
        threading.Thread(target=entry.run, args=(self._slots,), name=f"localllm-pull-{entry.id}", daemon=True).start()
        return entry.status()

    def list(self) -> list[DownloadStatus]:
        """Newest last."""
        with self._lock:
            return [entry.status() for entry in self._entries.values()]

    def get(self, id: str) -> DownloadStatus:
        return self._entry(id).status()

    def cancel(self, id: str) -> DownloadStatus:
        """Stop it; what it fetched stays. One that is over stays as it is."""
        entry = self._entry(id)
        entry.stop.set()
        entry.over.wait(2)
        return entry.status()

    def close(self) -> None:
        """Stop all."""
        for status in self.list():
            self._entry(status.id).stop.set()

    def _entry(self, id: str) -> _Entry:
        with self._lock:
            if id not in self._entries:
                raise ModelNotFound(f"There is no download {id!r}.", param="id")
            return self._entries[id]

    def _forget_old(self) -> None:
        over = [entry.id for entry in self._entries.values() if entry.status().is_over]
        for id in over[:-KEPT]:
            del self._entries[id]


def _what(plan: DownloadPlan) -> tuple[str, str, tuple[str, ...]]:
    return plan.repo_id, plan.commit, tuple(file.name for file in plan.files)


class _Entry:
    """One download and its thread."""

    def __init__(self, id: str, plan: DownloadPlan) -> None:
        self.id, self.plan, self.started_s = id, plan, time.time()
        self.stop, self.over = threading.Event(), threading.Event()
        self._state: State = "waiting"
        self._error: LocalLLMError | None = None
        self._progress = Progress(plan.cached_bytes, plan.total_bytes, 0, len(plan.files))

    def status(self) -> DownloadStatus:
        return DownloadStatus(self.id, self.plan, self._state, self._progress, self.started_s, self._error)

    def run(self, slots: threading.Semaphore) -> None:
        try:
            while not slots.acquire(timeout=0.2):
                if self.stop.is_set():
                    self._state = "cancelled"
                    return
            try:
                self._state = "running"
                pull(self.plan, self._note, self.stop)
                self._state = "done"
            finally:
                slots.release()
        except DownloadCancelled:
            self._state = "cancelled"
        except LocalLLMError as error:
            self._error, self._state = error, "failed"
            log.warning("download failed model=%s because=%s", self.plan.name, error)
        except Exception as error:
            self._error = LocalLLMError(f"The download of {self.plan.name} failed.", f"{type(error).__name__}: {error}")
            self._state = "failed"
            log.exception("download failed model=%s", self.plan.name)
        finally:
            self.over.set()

    def _note(self, progress: Progress) -> None:
        self._progress = progress
