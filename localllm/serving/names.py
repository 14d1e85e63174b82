"""The names of a served model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from localllm.config.settings import Settings
from localllm.models.formats.gguf.file_names import whole_stem
from localllm.models.library.names import looks_like_path

if TYPE_CHECKING:
    from localllm.models.library.catalog import ResolvedModel


def names_of(settings: Settings, found: ResolvedModel) -> tuple[str, frozenset[str]]:
    """Return the model's displayed name, and the other names that clients may use."""
    names = settings.server.served_model_name
    aliases = frozenset(names) if names else frozenset({found.name, settings.engine.model})
    return (names[0] if names else short_name(found.name)), aliases


def expected_name(asked: str) -> str:
    """Return the displayed name that a model will have once it has loaded. A name is never a path: every client of the
    server can see it.
    """
    if not looks_like_path(asked):
        return short_name(asked)
    path = Path(asked).expanduser().absolute()
    if path.suffix == ".gguf":
        return whole_stem(path.name)
    is_snapshot = path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--")
    return path.parent.parent.name.rpartition("--")[2] if is_snapshot else short_name(str(path))


def short_name(name: str) -> str:
    """Return the last part of a repository's or a folder's name."""
    return Path(name).name or name
