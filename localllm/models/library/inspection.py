"""Look at a checkpoint by any name: a local one, or the headers of a remote one.

Does not know: which of its facts are wanted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.models.library.catalog import ResolvedModel, is_for_the_hub, resolve_model

if TYPE_CHECKING:
    from localllm.models.library.hub.plan import DownloadPlan


@dataclass(frozen=True, slots=True)
class InspectedCheckpoint:
    """A checkpoint to look at. `path` is valid until the `with` block of `inspect_checkpoint` ends."""

    name: str
    path: Path
    model: ResolvedModel | None = None  # None: not on this machine
    plan: DownloadPlan | None = None  # the download of it; None: it is on this machine
    fetched_bytes: int = 0  # bytes downloaded by this look

    @property
    def download_bytes(self) -> int | None:
        return self.plan.needed_bytes if self.plan is not None else None


@contextmanager
def inspect_checkpoint(name: str, revision: str | None = None, *, paths: bool = True) -> Iterator[InspectedCheckpoint]:
    """Yield the checkpoint; ask the hub only if it is not local. Raises as `resolve_model` and `peek` do."""
    if is_for_the_hub(name, revision, paths=paths):
        from localllm.models.library.hub.peek import peek

        with peek(name, revision) as remote:
            yield InspectedCheckpoint(remote.name, remote.path, None, remote.plan, remote.fetched_bytes)
    else:
        model = resolve_model(name, revision, paths=paths)
        yield InspectedCheckpoint(model.name, model.path, model)
