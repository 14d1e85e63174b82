"""The names of a served model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from localllm.config.settings import Settings

if TYPE_CHECKING:
    from localllm.models.library.catalog import ResolvedModel


def names_of(settings: Settings, found: ResolvedModel) -> tuple[str, frozenset[str]]:
    """Return the model's displayed name, and the other names that clients may use."""
    names = settings.server.served_model_name
    aliases = frozenset(names) if names else frozenset({found.name, settings.engine.model})
    return (names[0] if names else short_name(found.name)), aliases


def short_name(name: str) -> str:
    """Return the last part of a repository's or a folder's name."""
    return Path(name).name or name
