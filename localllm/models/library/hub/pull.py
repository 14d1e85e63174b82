"""Run a download plan to a complete snapshot: several files at a time, with one progress and one way to stop.

The caller's thread watches and reports, and daemon threads download, so Ctrl-C ends the program at once and loses no
bytes. Reported progress never decreases, even when a file has to start again. Plans and progress also become plain
values for JSON, with the same fields on the command line and over HTTP. `up`, `serve`, `run` and `LLM` download here a
model that is not on this machine, or refuse when offline.
Does not know: terminals, HTTP, how the model is loaded.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localllm.files.folders import write_whole
from localllm.models.library.hub import cache, client
from localllm.models.library.hub.plan import DownloadPlan, PlannedFile, plan_download, require_room
from localllm.models.library.hub.transfer import Meter, cancelled, fetch_file, matches_hub_hash
from localllm.units import format_bytes, format_seconds

log = logging.getLogger(__name__)

FILES_AT_ONCE = 4
REPORT_EVERY_S = 0.2
_RATE_OVER_S = 5.0


@dataclass(frozen=True, slots=True)
class PullProgress:
    """The progress of a download. `bytes_done` and `files_done` never decrease."""

    bytes_done: int  # on disk, including earlier downloads
    bytes_total: int
    files_done: int
    files_total: int
    received_bytes: int = 0  # received in this run
    bytes_per_s: float = 0.0  # over the last seconds
    eta_s: float | None = None  # None: unknown
    note: str = ""  # the reason of a wait
    have: Mapping[str, int] = field(default_factory=dict)  # bytes on disk by file name

    @property
    def fraction(self) -> float:
        return self.bytes_done / self.bytes_total if self.bytes_total else 1.0


OnProgress = Callable[[PullProgress], None]


def pull(
    plan: DownloadPlan, on_progress: OnProgress = lambda progress: None, stop: threading.Event | None = None
) -> Path:
    """Download the missing files; return the snapshot's folder. `on_progress` is called on this thread.

    Raises `DiskFull` before the first byte, `DownloadCancelled` once `stop` is set, and what `fetch_file` raises.
    Received bytes stay, and the next call resumes.
    """
    if not plan.is_cached:
        if client.is_offline():
            raise client.offline_error(plan.name)
        require_room(plan)
    log.info("download begins model=%s bytes=%d cached=%d", plan.name, plan.total_bytes, plan.cached_bytes)
    started_s = time.perf_counter()
    run = _PullRun(plan, stop or threading.Event())
    try:
        run.watch(on_progress)
    finally:
        run.give_up.set()
    _remember_revision(plan)
    log.info(
        "download finished model=%s bytes=%d received=%d seconds=%.1f",
        plan.name, plan.total_bytes, run.meter.received, time.perf_counter() - started_s,
    )  # fmt: skip
    return cache.repository_folder(plan.repo_id) / "snapshots" / plan.commit


def drop_damaged(plan: DownloadPlan, on_file: Callable[[PlannedFile, bool], None] = lambda file, ok: None) -> list[str]:
    """Compare cached files with the hub's sizes and hashes, and delete those that differ. Returns their names.

    `on_file` is called with each checked file and whether it is intact.
    """
    damaged = []
    folder = cache.repository_folder(plan.repo_id)
    for file in plan.files:
        pointer = folder / "snapshots" / plan.commit / file.name
        if not pointer.exists():
            continue
        intact = matches_hub_hash(pointer, file)
        on_file(file, intact)
        if not intact:
            damaged.append(file.name)
            if pointer.is_symlink():
                pointer.resolve().unlink()
            pointer.unlink()
    return damaged


class _PullRun:
    """The threads of one download and their shared state."""

    def __init__(self, plan: DownloadPlan, stop: threading.Event) -> None:
        self.plan, self.stop = plan, stop
        self.give_up = threading.Event()  # stops the threads: the caller stopped, or one of them failed
        self.meter = Meter(have={file.name: file.cached_bytes for file in plan.files})
        self.error: BaseException | None = None
        self.bytes_done = 0
        self._done: list[str] = []
        self._recent: deque[tuple[float, int]] = deque([(time.perf_counter(), 0)])
        self._queue: queue.SimpleQueue[PlannedFile] = queue.SimpleQueue()
        for file in sorted(
            plan.files, key=lambda file: file.needed_bytes
        ):  # the small ones first: a config is soon there
            self._queue.put(file)

    def watch(self, on_progress: OnProgress) -> None:
        threads = [
            threading.Thread(target=self._work, name=f"localllm-download-{i}", daemon=True)
            for i in range(min(FILES_AT_ONCE, len(self.plan.files)))
        ]
        for thread in threads:
            thread.start()
        while True:
            self._wait(threads)
            if self.error is not None:
                raise self.error
            if self.stop.is_set():
                raise cancelled(self.plan.name)
            on_progress(self._progress())
            if not any(thread.is_alive() for thread in threads):
                if self.error is not None:
                    raise self.error
                return

    def _wait(self, threads: list[threading.Thread]) -> None:
        """Wait until it is time to report, or all threads have ended."""
        until_s = time.perf_counter() + REPORT_EVERY_S
        for thread in threads:
            thread.join(max(0.0, until_s - time.perf_counter()))

    def _work(self) -> None:
        while not self.give_up.is_set():
            try:
                file = self._queue.get_nowait()
            except queue.Empty:
                return
            try:
                fetch_file(self.plan.repo_id, self.plan.commit, file, self.meter, self.give_up)
                self._done.append(file.name)
            except BaseException as error:
                self.error = self.error or error
                self.give_up.set()

    def _progress(self) -> PullProgress:
        self.bytes_done = max(self.bytes_done, sum(list(self.meter.have.values())))
        now = time.perf_counter()
        self._recent.append((now, self.meter.received))
        while now - self._recent[0][0] > _RATE_OVER_S and len(self._recent) > 2:
            self._recent.popleft()
        seconds, received = now - self._recent[0][0], self.meter.received - self._recent[0][1]
        rate = received / seconds if seconds > 0 else 0.0
        left = self.plan.total_bytes - self.bytes_done
        return PullProgress(
            bytes_done=self.bytes_done,
            bytes_total=self.plan.total_bytes,
            files_done=len(self._done),
            files_total=len(self.plan.files),
            received_bytes=self.meter.received,
            bytes_per_s=rate,
            eta_s=0.0 if not left else left / rate if rate > 0 else None,
            note="; ".join(f"{name}: {note}" for name, note in list(self.meter.notes.items())),
            have=dict(self.meter.have),
        )


def _remember_revision(plan: DownloadPlan) -> None:
    """Record the branch's or tag's commit once it is complete; until then the name keeps meaning the older commit."""
    if plan.revision == plan.commit:
        return
    ref = cache.repository_folder(plan.repo_id) / "refs" / plan.revision
    ref.parent.mkdir(parents=True, exist_ok=True)
    write_whole(ref, plan.commit, mode=0o666)


def plan_facts(plan: DownloadPlan) -> dict[str, Any]:
    return {
        "model": plan.name,
        "repo_id": plan.repo_id,
        "revision": plan.revision,
        "commit": plan.commit,
        "total_bytes": plan.total_bytes,
        "cached_bytes": plan.cached_bytes,
        "needed_bytes": plan.needed_bytes,
        "free_bytes": plan.free_bytes,
        "fits_on_disk": plan.fits,
        "gated": plan.gated,
        "license": plan.license,
        "files": [{"name": file.name, "size": file.size, "cached_bytes": file.cached_bytes} for file in plan.files],
    }


def progress_facts(progress: PullProgress) -> dict[str, Any]:
    return {
        "bytes_done": progress.bytes_done,
        "bytes_total": progress.bytes_total,
        "files_done": progress.files_done,
        "files_total": progress.files_total,
        "bytes_per_s": round(progress.bytes_per_s),
        "eta_s": None if progress.eta_s is None else round(progress.eta_s, 1),
        "note": progress.note,
    }


def plan_fetch(name: str, revision: str | None = None, *, offline: bool = False, **files: bool) -> DownloadPlan:
    """Return the download that a load of `name` needs. files: code and prediction_layer of `load_files`. Raises as
    `plan_download`; `HubOffline` in offline mode."""
    if offline or client.is_offline():
        raise client.offline_error(f"{name}@{revision}" if revision else name)
    return plan_download(name, revision, (), **files)


def fetch_model(
    name: str, revision: str | None = None, *, offline: bool = False, on_progress: OnProgress, **files: bool
) -> None:
    """Download a model. files: as for `plan_fetch`. Raises as `plan_fetch` and `pull`."""
    pull(plan_fetch(name, revision, offline=offline, **files), on_progress)


def progress_line(progress: PullProgress) -> str:
    """Return a progress line: 3.1 GiB of 15.2 GiB · 112 MiB/s · 1 min 50 s left."""
    parts = [f"{format_bytes(progress.bytes_done)} of {format_bytes(progress.bytes_total)}"]
    if progress.note:
        return " · ".join([*parts, progress.note])
    if progress.bytes_per_s >= 1 and progress.bytes_done < progress.bytes_total:
        parts.append(f"{format_bytes(progress.bytes_per_s)}/s")
        parts.append(f"{format_seconds(progress.eta_s)} left" if progress.eta_s is not None else "")
    return " · ".join(part for part in parts if part)
