"""Downloads as the page shows them.

Does not know: how files are downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from localllm.errors import AccessDenied
from localllm.models.library.catalog import hub_cache_dir
from localllm.models.library.hub.cache import free_bytes, incomplete_repositories
from localllm.models.library.hub.downloads import Downloads, DownloadStatus
from localllm.models.library.hub.pull import progress_line
from localllm.units import format_bytes
from localllm.web.pages.frame.errors import notice
from localllm.web.pages.frame.views import ErrorNotice, View, view
from localllm.web.pages.library.fit_checks import FileRow, terms_url
from localllm.web.pages.library.installed_models import ActionButton, page_url


@dataclass(frozen=True, slots=True)
class DownloadCard:
    """One download."""

    id: str
    name: str
    url: str
    state: str  # waiting, running, paused, done, failed, cancelled
    fraction: float
    line: str  # 3.1 GiB of 15.2 GiB · 112 MiB/s · 1 min 50 s left
    files: tuple[FileRow, ...]
    verbs: tuple[ActionButton, ...]
    error: ErrorNotice | None = None
    terms_url: str = ""


@dataclass(frozen=True, slots=True)
class PartialDownload:
    """An unfinished download that was started before this server."""

    repo_id: str
    held: str


@view("library/_downloads.html")
class DownloadsView(View):
    """All downloads of this server, the newest first."""

    cards: tuple[DownloadCard, ...]
    cut: tuple[PartialDownload, ...]
    free_bytes: int
    folder: str


VERBS = {
    "waiting": (ActionButton("pause", "Pause"), ActionButton("discard", "Cancel")),
    "running": (ActionButton("pause", "Pause"), ActionButton("discard", "Cancel")),
    "paused": (ActionButton("resume", "Resume", is_main=True), ActionButton("discard", "Cancel")),
    "failed": (ActionButton("resume", "Try again", is_main=True), ActionButton("discard", "Cancel")),
    "cancelled": (ActionButton("resume", "Download again"), ActionButton("forget", "Dismiss")),
    "done": (ActionButton("load", "Load", is_main=True), ActionButton("forget", "Dismiss")),
}


def download_list(downloads: Downloads) -> DownloadsView:
    """Return all downloads, newest first. Blocking: it reads the disk."""
    known = downloads.list()
    named = {status.plan.repo_id for status in known}
    cut = [(repo_id, held) for repo_id, held in incomplete_repositories().items() if repo_id not in named]
    return DownloadsView(
        cards=tuple(card(status) for status in reversed(known)),
        cut=tuple(PartialDownload(repo_id, format_bytes(held)) for repo_id, held in cut),
        free_bytes=free_bytes(),
        folder=str(hub_cache_dir()),
    )


def num_running(downloads: Downloads) -> int:
    return sum(not status.is_over for status in downloads.list())


def card(status: DownloadStatus) -> DownloadCard:
    denied = isinstance(status.error, AccessDenied)
    error = notice(status.error) if status.error is not None else None
    if error is not None and denied:  # the line below says where to accept the terms
        error = ErrorNotice(error.what)
    return DownloadCard(
        id=status.id,
        name=status.plan.name,
        url=page_url(status.plan.name),
        state=status.state,
        fraction=status.progress.fraction,
        line=_line(status),
        files=_files(status),
        verbs=VERBS[status.state],
        error=error,
        terms_url=terms_url(status.plan.name) if denied else "",
    )


def _line(status: DownloadStatus) -> str:
    progress, total = status.progress, format_bytes(status.plan.total_bytes)
    if status.state == "running":
        count = f"{progress.files_done} of {progress.files_total} files"
        return f"{progress_line(progress)} · {count}"
    if status.state == "done":
        return f"{total}, all files match the hub"
    here = f"{format_bytes(progress.bytes_done)} of {total} downloaded"
    return f"{here}, queued" if status.state == "waiting" else here


def _files(status: DownloadStatus) -> tuple[FileRow, ...]:
    have = status.progress.have
    return tuple(
        FileRow(
            file.name,
            f"{format_bytes(have.get(file.name, 0))} of {format_bytes(file.size)}",
            have.get(file.name, 0) / file.size if file.size else 1.0,
        )
        for file in sorted(status.plan.files, key=lambda file: (-file.size, file.name))
    )
