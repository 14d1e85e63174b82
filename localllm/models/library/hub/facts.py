"""Plans and progress as plain values for JSON, with the same fields on the command line and over HTTP.

Does not know: who uses them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localllm.models.library.hub.plan import DownloadPlan
    from localllm.models.library.hub.pull import PullProgress


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
