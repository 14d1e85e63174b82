"""Downloads beside a running server: several at once, each with progress, and pause, resume and cancel.

A second request for the same files returns the existing download. Downloads end with the server; a later request
resumes them.
Does not know: HTTP, who requested a download.
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
from localllm.models.library.hub import cache
from localllm.models.library.hub.plan import DownloadPlan, as_it_stands, plan_download, require_room
from localllm.models.library.hub.pull import PullProgress, pull

log = logging.getLogger(__name__)

State = Literal["waiting", "running", "paused", "done", "failed", "cancelled"]
AT_ONCE = 3
KEPT = 50
"""Finished downloads to keep in the list."""


@dataclass(frozen=True, slots=True)
class DownloadStatus:
    """The state of one download at one moment."""

    id: str
    plan: DownloadPlan
    state: State
    progress: PullProgress
    started_s: float  # seconds since 1970
    error: LocalLLMError | None = None

    @property
    def is_over(self) -> bool:
        """Return whether it has stopped and will not continue by itself."""
        return self.state not in ("waiting", "running")


class Downloads:
    """The list of downloads. All methods are thread-safe; only `start`, which asks the hub, may take long."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._lock = threading.Lock()
        self._slots = threading.Semaphore(at_once)
        self._ids = itertools.count(1)
        self._entries: dict[str, _Entry] = {}

    def start(self, name: str, revision: str | None = None, include: Sequence[str] = ()) -> DownloadStatus:
        """Plan and start a download, or resume a stopped one. Raises what `plan_download` and `require_room` raise."""
        plan = plan_download(name, revision, include)
        require_room(plan)
        with self._lock:
            same = [entry for entry in self._entries.values() if _identity(entry.plan) == _identity(plan)]
            entry = next((entry for entry in same if entry.status().state != "done"), None)
            if entry is None:
                entry = _Entry(str(next(self._ids)), plan)
                self._entries[entry.id] = entry
                over = [entry.id for entry in self._entries.values() if entry.status().is_over]
                for id in over[:-KEPT]:
                    del self._entries[id]
            entry.begin(self._slots, plan)
        return entry.status()

    def list(self) -> list[DownloadStatus]:
        """Return the status of all downloads, newest last."""
        with self._lock:
            return [entry.status() for entry in self._entries.values()]

    def get(self, id: str) -> DownloadStatus:
        return self._entry(id).status()

    def cancel(self, id: str) -> DownloadStatus:
        """Cancel a download; its files stay. A finished one is not changed."""
        return self._entry(id).halt("cancelled")

    def pause(self, id: str) -> DownloadStatus:
        """Pause a download; its files stay."""
        return self._entry(id).halt("paused")

    def resume(self, id: str) -> DownloadStatus:
        """Resume a paused, cancelled or failed download from the bytes on disk."""
        entry = self._entry(id)
        with self._lock:
            if entry.status().state != "done":
                entry.begin(self._slots, as_it_stands(entry.plan))
        return entry.status()

    def discard(self, id: str) -> int:
        """Cancel a download and delete the files that it wrote. Returns the freed bytes."""
        entry = self._entry(id)
        if entry.halt("cancelled").state in ("running", "done"):  # it does not stop, or it is complete
            return 0
        return entry.discard()

    def forget(self, id: str) -> None:
        """Remove a stopped download from the list."""
        if self._entry(id).status().is_over:
            with self._lock:
                self._entries.pop(id, None)

    def close(self) -> None:
        """Stop all downloads."""
        with self._lock:
            for entry in self._entries.values():
                entry.stop.set()

    def _entry(self, id: str) -> _Entry:
        with self._lock:
            if id not in self._entries:
                raise ModelNotFound(f"There is no download {id!r}.", param="id")
            return self._entries[id]


def _identity(plan: DownloadPlan) -> tuple[str, str, tuple[str, ...]]:
    return plan.repo_id, plan.commit, tuple(file.name for file in plan.files)


class _Entry:
    """One download, with its thread while it runs."""

    def __init__(self, id: str, plan: DownloadPlan) -> None:
        self.id, self.plan, self.started_s = id, plan, time.time()
        self.brings = {file.name for file in plan.files if file.needed_bytes}
        self.stop, self.over = threading.Event(), threading.Event()
        self.over.set()
        self._state: State = "cancelled"  # until it starts
        self._halted_as: State = "cancelled"
        self._error: LocalLLMError | None = None
        self._progress = _initial_progress(plan)

    def status(self) -> DownloadStatus:
        return DownloadStatus(self.id, self.plan, self._state, self._progress, self.started_s, self._error)

    def begin(self, slots: threading.Semaphore, plan: DownloadPlan) -> None:
        """Start a thread, unless one is running."""
        if not self.over.is_set():
            return
        self.plan, self._progress, self._error, self._state = plan, _initial_progress(plan), None, "waiting"
        self.stop, self.over = threading.Event(), threading.Event()
        threading.Thread(target=self._run, args=(slots,), name=f"localllm-pull-{self.id}", daemon=True).start()

    def halt(self, state: State) -> DownloadStatus:
        if not self.over.is_set():
            self._halted_as = state
            self.stop.set()
            self.over.wait(2)
        elif self._state in ("paused", "failed"):
            self._state = state
        return self.status()

    def discard(self) -> int:
        plan = self.plan
        freed = cache.remove_partial(plan.repo_id, [file.etag for file in plan.files])
        if cache.repository_folder(plan.repo_id).is_dir():
            freed += cache.remove(plan.repo_id, plan.commit, self.brings).freed_bytes
        self._progress = _initial_progress(as_it_stands(plan))
        return freed

    def _run(self, slots: threading.Semaphore) -> None:
        try:
            while not slots.acquire(timeout=0.2):
                if self.stop.is_set():
                    self._state = self._halted_as
                    return
            try:
                self._state = "running"
                pull(self.plan, self._note, self.stop)
                self._state = "done"
            finally:
                slots.release()
        except DownloadCancelled:
            self._state = self._halted_as
        except LocalLLMError as error:
            self._error, self._state = error, "failed"
            log.warning("download failed model=%s reason=%s", self.plan.name, error)
        except Exception as error:
            self._error = LocalLLMError(f"The download of {self.plan.name} failed.", f"{type(error).__name__}: {error}")
            self._state = "failed"
            log.exception("download failed model=%s", self.plan.name)
        finally:
            self.over.set()

    def _note(self, progress: PullProgress) -> None:
        self._progress = progress


def _initial_progress(plan: DownloadPlan) -> PullProgress:
    """Return the progress before any byte is received: the bytes already on disk."""
    have = {file.name: file.cached_bytes for file in plan.files}
    done = sum(not file.needed_bytes for file in plan.files)
    return PullProgress(plan.cached_bytes, plan.total_bytes, done, len(plan.files), have=have)
