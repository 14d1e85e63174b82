"""Views around a chat: the list of chats, the page head, and the forms to change, import and delete chats."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from localllm.web.pages.chat.composer_views import ContextMeter
from localllm.web.pages.frame.views import ErrorNotice, View


@dataclass(frozen=True, slots=True)
class ChatHead(View):
    """The title of the shown chat, with a link to its actions."""

    template: ClassVar[str] = "chat/_chat_head.html"
    title: str
    manage_url: str = ""
    meter: ContextMeter = field(default_factory=ContextMeter)


@dataclass(frozen=True, slots=True)
class ChatRow:
    """One chat in the list."""

    title: str
    url: str
    manage_url: str
    current: bool = False
    snippet: tuple[str, str, str] = ("", "", "")  # text before, inside and after the match of a search


@dataclass(frozen=True, slots=True)
class ChatGroup:
    """Chats of the same period, such as a day."""

    title: str
    rows: tuple[ChatRow, ...]


@dataclass(frozen=True, slots=True)
class ChatList(View):
    """The chats by date, or the results of a search."""

    template: ClassVar[str] = "chat/_chat_list.html"
    groups: tuple[ChatGroup, ...] = ()
    query: str = ""
    has_more: bool = False
    error: ErrorNotice | None = None


@dataclass(frozen=True, slots=True)
class ManageChat(View):
    """The form with the actions of one chat."""

    template: ClassVar[str] = "chat/_manage_chat.html"
    url: str
    title: str
    pinned: bool
    error: ErrorNotice | None = None


@dataclass(frozen=True, slots=True)
class ManageChats(View):
    """The form with the actions of all chats: import one, delete everything."""

    template: ClassVar[str] = "chat/_manage_chats.html"
    kept_at: str  # path of the database; empty: chats are in memory
    error: ErrorNotice | None = None


@dataclass(frozen=True, slots=True)
class ChatListPage(View):
    """The list of chats with its search form, as a separate page."""

    template: ClassVar[str] = "chat/_chat_list_page.html"
    chats: ChatList


@dataclass(frozen=True, slots=True)
class Undo(View):
    """Names what was deleted and offers to restore it."""

    template: ClassVar[str] = "chat/_undo.html"
    text: str
    url: str


@dataclass(frozen=True, slots=True)
class ChatsChanged(View):
    """The answer to an action on the list: the list and the head, drawn again."""

    template: ClassVar[str] = "chat/_chats_changed.html"
    chats: ChatList
    head: ChatHead | None
    announcement: str
    undo: Undo | None = None
