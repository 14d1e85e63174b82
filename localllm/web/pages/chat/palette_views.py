"""The list behind Ctrl K: chats, pages, models, prompts and commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from localllm.web.pages.frame.views import ErrorNotice, View


@dataclass(frozen=True, slots=True)
class PaletteEntry:
    """One thing to open."""

    number: int  # its place in the whole list
    title: str
    url: str  # empty: the list of shortcuts
    note: str = ""


@dataclass(frozen=True, slots=True)
class PaletteGroup:
    """Entries of one kind."""

    title: str
    entries: tuple[PaletteEntry, ...]


@dataclass(frozen=True, slots=True)
class Palette(View):
    """Everything that matches what was typed."""

    template: ClassVar[str] = "chat/_palette.html"
    groups: tuple[PaletteGroup, ...] = ()
    error: ErrorNotice | None = None
