"""The list behind Ctrl K: find chats, pages, models, prompts, projects and commands by typing.

Does not know: keys (palette.js).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import urlencode

from litestar import Request, get
from litestar.response import Response

from localllm.errors import LocalLLMError
from localllm.web.access.caller import owner_of
from localllm.web.pages.chat.palette_views import Palette, PaletteEntry, PaletteGroup
from localllm.web.pages.chat.sidebar_presenters import when
from localllm.web.pages.chat.state import ChatState, chat_state
from localllm.web.pages.chat.store import Chats, FoundChat
from localllm.web.pages.frame.errors import notice
from localllm.web.pages.frame.state import html
from localllm.web.pages.frame.views import ErrorNotice

MOST_OF_A_KIND = 6
Entry = tuple[str, str, str]
"""Title, URL and note."""

COMMANDS: tuple[Entry, ...] = (
    ("New chat", "/", ""),
    ("All chats", "/chats", "choose several, archive, delete by age"),
    ("Archived chats", "/chats?archived=1", ""),
    ("Import or delete chats", "/chats/manage", ""),
    ("Prompts", "/prompts", "the library"),
    ("New prompt", "/prompts/new", ""),
    ("Projects", "/projects", ""),
    ("Keyboard shortcuts", "", "?"),
)


@get("/palette")
async def palette(request: Request[Any, Any, Any]) -> Response[str]:
    """Show everything that matches what was typed."""
    state, owner, query = chat_state(request), owner_of(request), request.query_params.get("q", "")[:200].strip()
    pages = [(entry.title, entry.url, "page") for entry in request.app.state["navigation"]]
    found: list[tuple[str, list[Entry]]] = [("Go to", _matching([*COMMANDS, *pages], query))]
    error: ErrorNotice | None = None
    try:
        found += await _stored(state, owner, query)
    except LocalLLMError as problem:
        error = notice(problem)
    if query:
        models = (await state.picker.choices({})).choices
        names = [(each.name, f"/?{urlencode({'model': each.name})}", f"new chat · {each.note}") for each in models]
        found.append(("Models", _matching([(n, url, note.rstrip(" ·")) for n, url, note in names], query)))
    return html(Palette(tuple(_numbered(found)), error))


async def _stored(state: ChatState, owner: str, query: str) -> list[tuple[str, list[Entry]]]:
    """Return the chats, projects and prompts that match; without a query the newest chats."""
    if not query:
        newest = [FoundChat(each) for each in await state.store.call(Chats.latest, owner, MOST_OF_A_KIND)]
        return [("Latest chats", [_chat(each) for each in newest])]
    chats = await state.store.call(Chats.search, owner, query, MOST_OF_A_KIND)
    projects = await state.store.call(Chats.projects, owner)
    prompts = await state.store.call(Chats.prompts, owner)
    return [
        ("Chats", [_chat(each) for each in chats]),
        ("Projects", _matching([(each.name, f"/projects/{each.id}", "") for each in projects], query)),
        ("Prompts", _matching([(each.name, f"/prompts/{each.id}/use", "new chat") for each in prompts], query)),
    ]


def _chat(found: FoundChat) -> Entry:
    return found.chat.title, f"/c/{found.chat.id}", when(found.chat.updated_s)


def _matching(entries: Iterable[Entry], query: str) -> list[Entry]:
    """Return the entries whose title contains every word, those that begin with the first one first; all without
    words.
    """
    words = query.lower().split()
    found = [each for each in entries if all(word in each[0].lower() for word in words)]
    if not words:
        return found
    return sorted(found, key=lambda each: not each[0].lower().startswith(words[0]))[:MOST_OF_A_KIND]


def _numbered(found: Iterable[tuple[str, list[Entry]]]) -> Iterable[PaletteGroup]:
    number = 0
    for title, entries in found:
        if entries:
            yield PaletteGroup(title, tuple(PaletteEntry(number + at, *each) for at, each in enumerate(entries)))
        number += len(entries)


HANDLERS = (palette,)
