"""Views of a chat that is saved as one HTML file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from localllm.web.pages.chat.message_views import AttachmentChip, Sources, ToolResult
from localllm.web.pages.frame.views import View


@dataclass(frozen=True, slots=True)
class SharedMessage(View):
    """A message without its actions. `html` and `thinking_html` are safe markup."""

    template: ClassVar[str] = "chat/_shared_message.html"
    role: Literal["user", "assistant"]
    author: str
    html: str
    thinking_html: str = ""
    calls: tuple[ToolResult, ...] = ()  # name and arguments of each tool call
    results: tuple[ToolResult, ...] = ()
    files: tuple[AttachmentChip, ...] = ()
    sources: Sources | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class SharedChat(View):
    """The whole document."""

    template: ClassVar[str] = "chat/shared.html"
    title: str
    day: str  # of the export
    messages: tuple[SharedMessage, ...]
    system: str = ""
