"""Views around a chat: the list of chats, the page head, forms, and the list behind Ctrl K."""

from __future__ import annotations

from dataclasses import dataclass, field

from localllm.web.pages.chat.composer.views import ContextMeter
from localllm.web.pages.chat.store.records import ChatTotals
from localllm.web.pages.frame.views import ErrorNotice, View, view


@view("chat/_chat_head.html")
class ChatHead(View):
    """The title of the shown chat, with a link to its actions."""

    title: str
    manage_url: str = ""
    meter: ContextMeter = field(default_factory=ContextMeter)
    project_name: str = ""
    project_url: str = ""
    time: str = ""  # of the chat's last change
    title_url: str = ""  # answers once the model has written a title; empty: it writes none
    outline_url: str = ""


@dataclass(frozen=True, slots=True)
class ChatRow:
    """One chat in the list."""

    id: str
    title: str
    url: str
    manage_url: str
    time: str  # of its last change, such as 23 Nov 2026, 08:14
    current: bool = False
    snippet: tuple[str, str, str] = ("", "", "")  # text before, inside and after the match of a search
    shows_time: bool = False  # another chat of the list has the same title
    note: str = ""  # "archived", or the name of its project


@dataclass(frozen=True, slots=True)
class ChatGroup:
    """Chats of the same period, such as a day, or of a project."""

    title: str
    rows: tuple[ChatRow, ...]
    url: str = ""  # of the project
    new_url: str = ""  # starts a chat in the project


@view("chat/_chat_list.html")
class ChatList(View):
    """The chats by date, or the results of a search."""

    groups: tuple[ChatGroup, ...] = ()
    query: str = ""
    has_more: bool = False
    error: ErrorNotice | None = None


@dataclass(frozen=True, slots=True)
class SelectOption:
    """One entry of a select."""

    value: str
    title: str
    chosen: bool = False


@view("chat/_manage_chat.html")
class ManageChat(View):
    """The form with the actions of one chat."""

    url: str
    title: str
    pinned: bool
    archived: bool = False
    time: str = ""  # of its last change
    projects: tuple[SelectOption, ...] = ()  # empty: there are none
    sums: ChatTotals | None = None
    error: ErrorNotice | None = None


@view("chat/_import_refused.html")
class ImportRefused(View):
    """Files that were not imported and why; and the list, if it has new chats from the other files."""

    errors: tuple[ErrorNotice, ...]
    chats: ChatList | None = None


@view("chat/_manage_chats.html")
class ManageChats(View):
    """The form with the actions of all chats: import some, export all."""

    refused: ImportRefused | None = None
    wipe: WipeChats | None = None  # for a key that cannot open the settings, where this form is shown


@view("chat/_wipe_chats.html")
class WipeChats(View):
    """The form that deletes all chats; the settings page shows it under Privacy."""


@view("chat/_chat_list_page.html")
class ChatListPage(View):
    """The list of chats as a separate page: search, actions on several chats, and deletion by age."""

    rows: tuple[ChatRow, ...] = ()
    query: str = ""
    archived: bool = False
    projects: tuple[SelectOption, ...] = ()
    ages: tuple[SelectOption, ...] = ()  # days -> how many chats have not changed for so long; empty: none is old
    newer_url: str = ""
    older_url: str = ""
    error: ErrorNotice | None = None


@view("chat/_undo.html")
class Undo(View):
    """Names what was deleted and offers to restore it."""

    text: str
    url: str


@view("chat/_chat_titled.html")
class ChatTitled(View):
    """The head and the list, drawn again once the model has written the title of a chat."""

    chats: ChatList
    head: ChatHead


@view("chat/_chats_changed.html")
class ChatsChanged(View):
    """The answer to an action on the list: the list and the head, drawn again."""

    chats: ChatList
    head: ChatHead | None
    announcement: str
    undo: Undo | None = None


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


@view("chat/_palette.html")
class Palette(View):
    """Everything that matches what was typed."""

    groups: tuple[PaletteGroup, ...] = ()
    error: ErrorNotice | None = None
