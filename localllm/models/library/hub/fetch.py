"""Download for `up`, `serve`, `run` and `LLM` a model that is not on this machine, or refuse when offline.

Does not know: how the model is loaded.
"""

from __future__ import annotations

from localllm.models.library.hub import client
from localllm.models.library.hub.plan import DownloadPlan, plan_download
from localllm.models.library.hub.pull import OnProgress, PullProgress, pull
from localllm.units import format_bytes, format_seconds


def plan_fetch(name: str, revision: str | None = None, *, offline: bool = False, code: bool = False) -> DownloadPlan:
    """Return the download that a load of `name` needs. Raises as `plan_download`; `HubOffline` in offline mode."""
    if offline or client.is_offline():
        raise client.offline_error(f"{name}@{revision}" if revision else name)
    return plan_download(name, revision, code=code)


def fetch_model(
    name: str, revision: str | None = None, *, offline: bool = False, code: bool = False, on_progress: OnProgress
) -> None:
    """Download a model. Raises as `plan_fetch` and `pull`."""
    pull(plan_fetch(name, revision, offline=offline, code=code), on_progress)


def progress_line(progress: PullProgress) -> str:
    """Return a progress line: 3.1 GiB of 15.2 GiB · 112 MiB/s · 1 min 50 s left."""
    parts = [f"{format_bytes(progress.bytes_done)} of {format_bytes(progress.bytes_total)}"]
    if progress.note:
        return " · ".join([*parts, progress.note])
    if progress.bytes_per_s >= 1 and progress.bytes_done < progress.bytes_total:
        parts.append(f"{format_bytes(progress.bytes_per_s)}/s")
        parts.append(f"{format_seconds(progress.eta_s)} left" if progress.eta_s is not None else "")
    return " · ".join(part for part in parts if part)
