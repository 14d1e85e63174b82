"""Views of tools that servers run: notes at a reply, the choice of servers, and what a user has allowed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from localllm.web.pages.chat.views import ChatMessage
from localllm.web.pages.frame.views import ErrorNotice, View


@dataclass(frozen=True, slots=True)
class CallsProgress(View):
    """A live update of a reply whose calls run: the whole message is drawn again."""

    template: ClassVar[str] = "chat/_calls_progress.html"
    message: ChatMessage
    announcement: str = ""


@dataclass(frozen=True, slots=True)
class ConsentRow:
    """A tool that the user allows always, or never."""

    server: str
    tool: str
    choice: Literal["always", "never"]
    date: str


@dataclass(frozen=True, slots=True)
class ConsentList(View):
    """The tools that a user allows always or never, each with a button that takes the decision back."""

    template: ClassVar[str] = "chat/_consents.html"
    rows: tuple[ConsentRow, ...]
    back: str = ""  # the page to return to


@dataclass(frozen=True, slots=True)
class ToolRow:
    """One tool of a server."""

    name: str
    description: str


@dataclass(frozen=True, slots=True)
class UsableServer:
    """A server whose tools a user may use."""

    name: str
    state: str
    tools: tuple[ToolRow, ...] = ()
    error: ErrorNotice | None = None


@dataclass(frozen=True, slots=True)
class ToolsPanel(View):
    """The tools that a user may use, and what is allowed; in a dialog or as a page."""

    template: ClassVar[str] = "chat/_tools_panel.html"
    servers: tuple[UsableServer, ...]
    consents: ConsentList
