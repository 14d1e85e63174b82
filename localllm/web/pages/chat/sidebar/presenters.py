"""The list of chats: beside a chat by project and date, and as a page of its own.

Does not know: routes, templates, messages.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from urllib.parse import urlencode

from localllm.errors import LocalLLMError
from localllm.web.pages.chat.sidebar.views import ChatGroup, ChatList, ChatListPage, ChatRow, ManageChat, SelectOption
from localllm.web.pages.chat.state import ChatState
from localllm.web.pages.chat.store import Chat, Chats, FoundChat, Project
from localllm.web.pages.frame.errors import notice

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
    """Return a time in the server's time zone, such as 23 Nov 2026, 08:14."""
    return datetime.fromtimestamp(unix_s).strftime("%d %b %Y, %H:%M").lstrip("0")


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


async def manage_form(state: ChatState, owner: str, chat: Chat) -> ManageChat:
    """Return the form with the actions of a chat, and the sums of its replies."""
    sums = await state.store.call(Chats.totals, chat.id)
    projects = choices(await state.store.call(Chats.projects, owner), chat.project_id)
    return ManageChat(f"/c/{chat.id}", chat.title, chat.pinned, chat.archived, when(chat.updated_s), projects, sums)
