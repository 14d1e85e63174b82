"""The list of chats, beside a chat by project and date and as a page of its own; the head of a page, forms, and the
list behind Ctrl K.

Does not know: handlers, where chats are stored.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from urllib.parse import urlencode

from localllm.errors import LocalLLMError
from localllm.web.pages.chat.composer.views import ContextMeter
from localllm.web.pages.chat.state import ChatState
from localllm.web.pages.chat.store import Chat, Chats, FoundChat, Project
from localllm.web.pages.chat.store.records import ChatTotals
from localllm.web.pages.frame.errors import notice
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
    link: ChatLinkForm | None = None
    error: ErrorNotice | None = None


@view("chat/_chat_link.html")
class ChatLinkForm(View):
    """The link with which others may read a chat, or the button that makes one."""

    url: str  # of the chat
    link: str = ""  # empty: there is none
    is_behind: bool = False  # the chat has newer messages than the link shows
    is_empty: bool = False  # the chat has no message to show
    is_local: bool = False  # the server answers on this machine alone


@view("chat/_import_refused.html")
class ImportRefused(View):
    """Files that were not imported and why; and the list, if it has new chats from the other files."""

    errors: tuple[ErrorNotice, ...]
    chats: ChatList | None = None


@view("chat/_manage_chats.html")
class ManageChats(View):
    """The form with the actions of all chats: import some, export all."""

    refused: ImportRefused | None = None
    links: tuple[tuple[str, str], ...] = ()  # title and address of each chat that a link shows
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


LISTED = 60
LISTED_OF_PROJECT = 5
PINNED = "Pinned"

PAGE = 100
"""Chats on one page of the list."""

MOST_PAGES = 1000

AGES = {30: "30 days", 90: "90 days", 180: "6 months", 365: "1 year"}
"""Days without a change, after which chats can be deleted together."""

DAY_S = 24 * 3600

PLAIN = str.maketrans("", "", "*`#|")
"""Removes Markdown characters from a snippet."""


async def chat_list(state: ChatState, owner: str, current: Chat | None, query: str = "") -> ChatList:
    """Return the chats by project and date, or the results of a search. If the store cannot be read, the list shows
    the error.
    """
    try:
        if query.strip():
            found = await state.store.call(Chats.search, owner, query, LISTED)
            rows = tuple(row(each, current) for each in found)
            return ChatList(_told_apart([ChatGroup("Found", rows)]) if rows else (), query)
        projects = await state.store.call(Chats.projects, owner)
        filed = await state.store.call(Chats.in_projects, owner, LISTED_OF_PROJECT) if projects else []
        others = await state.store.call(Chats.outside_projects, owner, LISTED + 1)
    except LocalLLMError as error:
        return ChatList(query=query, error=notice(error))
    has_more = len(others) > LISTED or any(each.num_chats > LISTED_OF_PROJECT for each in projects)
    groups: dict[str, list[ChatRow]] = {}
    for chat in others[:LISTED]:
        groups.setdefault(_period(chat), []).append(row(FoundChat(chat), current))
    pinned = [ChatGroup(PINNED, tuple(groups.pop(PINNED)))] if PINNED in groups else []
    by_date = [ChatGroup(title, tuple(rows)) for title, rows in groups.items()]
    return ChatList(_told_apart([*pinned, *_project_groups(projects, filed, current), *by_date]), has_more=has_more)


def _project_groups(projects: Sequence[Project], chats: Sequence[Chat], current: Chat | None) -> list[ChatGroup]:
    rows: dict[str | None, list[ChatRow]] = {}
    for chat in chats:
        rows.setdefault(chat.project_id, []).append(replace(row(FoundChat(chat), current), note=""))
    return [
        ChatGroup(each.name, tuple(rows.get(each.id, [])), f"/projects/{each.id}", f"/?project={each.id}")
        for each in projects
    ]


def row(found: FoundChat, current: Chat | None = None) -> ChatRow:
    chat = found.chat
    is_current = current is not None and current.id == chat.id
    before, word, after = (part.translate(PLAIN) for part in found.snippet)
    note = "archived" if chat.archived else chat.project_name
    url = f"/c/{chat.id}"
    return ChatRow(
        chat.id, chat.title, url, f"{url}/manage", when(chat.updated_s), is_current, (before, word, after), note=note
    )


def when(unix_s: float) -> str:
    """Return a time in the server's time zone, such as 23 Nov 2026, 08:14; of today, the time alone."""
    then, today = datetime.fromtimestamp(unix_s), datetime.fromtimestamp(time.time()).date()
    return then.strftime("%H:%M" if then.date() == today else "%d %b %Y, %H:%M").lstrip("0").rjust(5, "0")


def _told_apart(groups: Sequence[ChatGroup]) -> tuple[ChatGroup, ...]:
    """Return the groups; rows with the same title show their time."""
    counts = Counter(each.title for group in groups for each in group.rows)
    return tuple(
        replace(group, rows=tuple(replace(each, shows_time=counts[each.title] > 1) for each in group.rows))
        for group in groups
    )


def _period(chat: Chat) -> str:
    """Return the group of a chat, by days in the server's time zone."""
    if chat.pinned:
        return PINNED
    day, today = datetime.fromtimestamp(chat.updated_s).date(), datetime.fromtimestamp(time.time()).date()
    if day >= today:
        return "Today"
    if day == today - timedelta(days=1):
        return "Yesterday"
    return "Last 7 days" if day > today - timedelta(days=7) else day.strftime("%B %Y")


# Pages and forms ---------------------------------------------------------------------------------------------------


async def list_page(state: ChatState, owner: str, query: str, page: int, *, archived: bool) -> ChatListPage:
    """Return one page of the list, or the results of a search."""
    projects = choices(await state.store.call(Chats.projects, owner), None)
    if query.strip():
        found = await state.store.call(Chats.search, owner, query, PAGE)
        return ChatListPage(tuple(row(each) for each in found), query, archived, projects)
    chats = await state.store.call(Chats.latest, owner, PAGE + 1, (page - 1) * PAGE, archived=archived)
    return ChatListPage(
        rows=tuple(row(FoundChat(each)) for each in chats[:PAGE]),
        archived=archived,
        projects=projects,
        ages=await _ages(state, owner),
        newer_url=_page_url(page - 1, archived) if page > 1 else "",
        older_url=_page_url(page + 1, archived) if len(chats) > PAGE else "",
    )


def _page_url(page: int, archived: bool) -> str:
    query = {**({"archived": "1"} if archived else {}), **({"page": page} if page > 1 else {})}
    return f"/chats?{urlencode(query)}" if query else "/chats"


async def _ages(state: ChatState, owner: str) -> tuple[SelectOption, ...]:
    found = []
    for days, text in AGES.items():
        count = await state.store.call(Chats.count_old, owner, time.time() - days * DAY_S)
        if count:
            found.append(SelectOption(str(days), f"{text} ({count} {'chat' if count == 1 else 'chats'})"))
    return tuple(found)


def choices(projects: Sequence[Project], chosen: str | None) -> tuple[SelectOption, ...]:
    """Return the projects to choose from, after the choice of none; empty without projects."""
    found = tuple(SelectOption(each.id, each.name, each.id == chosen) for each in projects)
    return (SelectOption("", "No project", not chosen), *found) if found else ()


async def manage_form(state: ChatState, owner: str, chat: Chat, link: ChatLinkForm) -> ManageChat:
    """Return the form with the actions of a chat, and the sums of its replies."""
    sums = await state.store.call(Chats.totals, chat.id)
    projects = choices(await state.store.call(Chats.projects, owner), chat.project_id)
    return ManageChat(
        f"/c/{chat.id}", chat.title, chat.pinned, chat.archived, when(chat.updated_s), projects, sums, link
    )
