"""A checkpoint to look at, by any name: one of this machine, or the headers of one that only the hub has.

Does not know: what anybody wants to see in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.models.catalog import ResolvedModel, is_for_the_hub, resolve_model

if TYPE_CHECKING:
    from localllm.models.hub.plan import DownloadPlan


@dataclass(frozen=True, slots=True)
class Looked:
    """What is looked at. `path` may be read until the `with` block of `look_at` ends."""

    name: str
    path: Path
    model: ResolvedModel | None = None  # None: it is not here
    plan: DownloadPlan | None = None  # what a download would fetch; None: it is here
    fetched_bytes: int = 0  # what this look cost

    @property
    def download_bytes(self) -> int | None:
        return self.plan.needed_bytes if self.plan is not None else None


@contextmanager
def look_at(name: str, revision: str | None = None, *, paths: bool = True) -> Iterator[Looked]:
    """Asks the hub only for a name that this machine does not have. Raises as `resolve_model` and `peek` do."""
    if is_for_the_hub(name, revision, paths=paths):
        from localllm.models.hub.peek import peek

        with peek(name, revision) as remote:
            yield Looked(remote.name, remote.path, None, remote.plan, remote.fetched_bytes)
    else:
        model = resolve_model(name, revision, paths=paths)
        yield Looked(model.name, model.path, model)
