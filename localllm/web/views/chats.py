"""Views of what stands around a chat: the list, the head, the forms that change, import and wipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from localllm.web.views.shared import ErrorNotice, View


@dataclass(frozen=True, slots=True)
class ContextMeter(View):
    """How much of the model's context the chat fills."""

    template: ClassVar[str] = "chat/_context_meter.html"
    used_tokens: int
    size_tokens: int


@dataclass(frozen=True, slots=True)
class ChatHead(View):
    """The title of what is shown, and what can be done with it."""

    template: ClassVar[str] = "chat/_chat_head.html"
    title: str
    manage_url: str = ""
    meter: ContextMeter | None = None


@dataclass(frozen=True, slots=True)
class ChatRow:
    """A line of the list."""

    title: str
    url: str
    manage_url: str
    current: bool = False
    snippet: tuple[str, str, str] = ("", "", "")  # around what a search found


@dataclass(frozen=True, slots=True)
class ChatGroup:
    """Chats of a day or so."""

    title: str
    rows: tuple[ChatRow, ...]


@dataclass(frozen=True, slots=True)
class ChatList(View):
    """The chats by date, or those that a search found."""

    template: ClassVar[str] = "chat/_chat_list.html"
    groups: tuple[ChatGroup, ...] = ()
    query: str = ""
    has_more: bool = False
    error: ErrorNotice | None = None


@dataclass(frozen=True, slots=True)
class ManageChat(View):
    """What can be done with a chat as a whole."""

    template: ClassVar[str] = "chat/_manage_chat.html"
    url: str
    title: str
    pinned: bool
    error: ErrorNotice | None = None


@dataclass(frozen=True, slots=True)
class ManageChats(View):
    """What can be done with all chats: import one, wipe everything."""

    template: ClassVar[str] = "chat/_manage_chats.html"
    kept_at: str  # where they are kept; empty: in memory
    error: ErrorNotice | None = None


@dataclass(frozen=True, slots=True)
class ChatListPage(View):
    """The list with its search as a page of its own."""

    template: ClassVar[str] = "chat/_chat_list_page.html"
    chats: ChatList


@dataclass(frozen=True, slots=True)
class Undo(View):
    """Says what was deleted and brings it back."""

    template: ClassVar[str] = "chat/_undo.html"
    text: str
    url: str


@dataclass(frozen=True, slots=True)
class ChatsChanged(View):
    """Answer to a change from the list: the list and the head anew."""

    template: ClassVar[str] = "chat/_chats_changed.html"
    chats: ChatList
    head: ChatHead | None
    announcement: str
    undo: Undo | None = None
