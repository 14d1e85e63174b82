"""Views of projects: their list, and the page of one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from localllm.web.pages.chat.prompt_views import SettingsForm
from localllm.web.pages.chat.sidebar_views import ChatRow
from localllm.web.pages.frame.views import ErrorNotice, View


@dataclass(frozen=True, slots=True)
class ProjectRow:
    """One project in the list."""

    name: str
    url: str
    num_chats: int


@dataclass(frozen=True, slots=True)
class ProjectList(View):
    """The page of all projects, with the form for a new one."""

    template: ClassVar[str] = "chat/_project_list.html"
    rows: tuple[ProjectRow, ...] = ()
    name: str = ""  # as typed
    error: ErrorNotice | None = None


@dataclass(frozen=True, slots=True)
class PinnedFile:
    """A file of a project."""

    id: str
    name: str
    num_bytes: int
    text: str = ""  # its beginning


@dataclass(frozen=True, slots=True)
class ProjectPage(View):
    """The page of one project: its chats, its files, its settings, its deletion."""

    template: ClassVar[str] = "chat/_project_page.html"
    url: str
    name: str
    new_url: str  # starts a chat
    num_chats: int = 0
    chats: tuple[ChatRow, ...] = ()
    files: tuple[PinnedFile, ...] = ()
    num_tokens: int | None = None  # of all files; None: not counted
    context_tokens: int = 0
    typed_name: str = ""
    settings: SettingsForm = field(default_factory=SettingsForm)
    error: ErrorNotice | None = None
