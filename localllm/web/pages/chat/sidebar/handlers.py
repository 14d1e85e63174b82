"""Actions on chats: search, rename, pin, archive, move, delete with undo, presets; and the list behind Ctrl K.

The list behind Ctrl K finds chats, pages, models, prompts, projects and commands by typing.
Does not know: how chats are stored (store/), exports and imports (transfer/), keys (palette.js).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

from litestar import Request, get, post
from litestar.response import Redirect, Response

from localllm.errors import InvalidParameter, LocalLLMError
from localllm.web.access.caller import owner_of
from localllm.web.errors import MissingParameter
from localllm.web.pages.chat.composer import views as w
from localllm.web.pages.chat.composer.settings import MAX_MESSAGE_CHARS, typed
from localllm.web.pages.chat.composer.views import Sampling
from localllm.web.pages.chat.replies.turns import named_project
from localllm.web.pages.chat.sidebar.views import (
    AGES,
    DAY_S,
    MOST_PAGES,
    ChatHead,
    ChatLinkForm,
    ChatsChanged,
    ChatTitled,
    Palette,
    PaletteEntry,
    PaletteGroup,
    Undo,
    chat_list,
    list_page,
    manage_form,
    when,
)
from localllm.web.pages.chat.state import ChatState, chat_state
from localllm.web.pages.chat.store import Chat, Chats, FoundChat
from localllm.web.pages.chat.thread import messages as m
from localllm.web.pages.chat.thread import views as v
from localllm.web.pages.chat.thread.handlers import MAX_BODY_BYTES, requested_chat, undo_of
from localllm.web.pages.chat.tools import views as t
from localllm.web.pages.frame.errors import notice
from localllm.web.pages.frame.forms import fields_of, is_scripted
from localllm.web.pages.frame.live import closing
from localllm.web.pages.frame.state import html
from localllm.web.pages.frame.views import ErrorNotice

MAX_TITLE_CHARS, MAX_PRESET_CHARS = 200, 60


@get("/chats")
async def find_chats(request: Request[Any, Any, Any]) -> Response[str]:
    """Show the list, or the results of a search."""
    state, owner, query = chat_state(request), owner_of(request), request.query_params.get("q", "")[:1000]
    if is_scripted(request):
        return html(await chat_list(state, owner, None, query))
    page = request.query_params.get("page", "1")
    number = max(1, min(int(page), MOST_PAGES)) if page.isdecimal() and len(page) < 9 else 1
    found = await list_page(state, owner, query, number, archived="archived" in request.query_params)
    return html(await v.panel_page(request, "Chats", found, undo_of(request, "The chats are deleted.")))


@get("/c/{conversation_id:str}/manage")
async def manage_chat(request: Request[Any, Any, Any]) -> Response[str]:
    """Show the forms that change a whole chat, in a dialog or as a page."""
    chat = await requested_chat(request)
    form = await manage_form(chat_state(request), owner_of(request), chat, await _link_form(request, chat))
    return html(form if is_scripted(request) else await v.panel_page(request, chat.title, form))


async def _link_form(request: Request[Any, Any, Any], chat: Chat) -> ChatLinkForm:
    links = await chat_state(request).store.call(Chats.links, owner_of(request))
    link = next((each for each in links if each.chat_id == chat.id), None)
    if link is None:
        return ChatLinkForm(f"/c/{chat.id}", is_empty=chat.leaf is None)
    address = f"{str(request.base_url).rstrip('/')}/shared/{link.secret}"
    is_local = request.app.state["settings"].server.is_loopback
    return ChatLinkForm(f"/c/{chat.id}", address, is_behind=link.leaf != chat.leaf, is_local=is_local)


@post("/c/{conversation_id:str}/link", status_code=200)
async def change_link(request: Request[Any, Any, Any]) -> Response[Any]:
    """Make the link with which others may read a chat, have it show the newest messages, or end it."""
    state, owner, chat = chat_state(request), owner_of(request), await requested_chat(request)
    if (await fields_of(request)).get("link") == "end":
        await state.store.call(Chats.end_link, owner, chat.id)
    elif chat.leaf is not None:
        await state.store.call(Chats.set_link, owner, chat.id, chat.leaf)
    form = await _link_form(request, chat)
    return html(form) if is_scripted(request) else Redirect(f"/c/{chat.id}/manage", status_code=303)


@post("/c/{conversation_id:str}/rename", status_code=200)
async def rename_chat(request: Request[Any, Any, Any]) -> Response[Any]:
    chat = await requested_chat(request)
    title = " ".join((await fields_of(request)).get("title", "").split())[:MAX_TITLE_CHARS]
    if not title:
        raise InvalidParameter("The title is empty.", hint="Type something first.", param="title")
    await chat_state(request).store.call(Chats.rename, owner_of(request), chat.id, title)
    return await _list_changed(request, "Chat renamed")


@post("/c/{conversation_id:str}/pin", status_code=200)
async def pin_chat(request: Request[Any, Any, Any]) -> Response[Any]:
    chat = await requested_chat(request)
    pinned = bool((await fields_of(request)).get("pinned"))
    await chat_state(request).store.call(Chats.pin, owner_of(request), chat.id, pinned)
    return await _list_changed(request, "Chat pinned" if pinned else "Chat unpinned")


@get("/c/{conversation_id:str}/title")
async def written_title(request: Request[Any, Any, Any]) -> Response[Any]:
    """Wait for the title that the model writes, and show it. If there is none, nothing changes."""
    state, before = chat_state(request), await requested_chat(request)
    await state.titles.wait(before.id, closing(request.app.state))
    chat = await requested_chat(request)
    if not is_scripted(request):
        return Redirect(f"/c/{chat.id}", status_code=303)
    if chat.title == before.title:
        return Response(None, status_code=204)
    return html(ChatTitled(await chat_list(state, owner_of(request), chat), await _head(state, chat)))


@post("/c/{conversation_id:str}/archive", status_code=200)
async def archive_chat(request: Request[Any, Any, Any]) -> Response[Any]:
    chat = await requested_chat(request)
    archived = bool((await fields_of(request)).get("archived"))
    await chat_state(request).store.call(Chats.archive, owner_of(request), [chat.id], archived)
    return await _list_changed(request, "Chat archived" if archived else "Chat returned to the list")


@post("/c/{conversation_id:str}/move", status_code=200)
async def move_chat(request: Request[Any, Any, Any]) -> Response[Any]:
    chat = await requested_chat(request)
    project = (await fields_of(request)).get("project", "")
    await chat_state(request).store.call(Chats.move, owner_of(request), [chat.id], project)
    return await _list_changed(request, "Chat moved")


@post("/chats/selected", status_code=303)
async def change_selected(request: Request[Any, Any, Any]) -> Redirect:
    """Archive, move or delete the chats that were chosen in the list."""
    state, owner, form = chat_state(request), owner_of(request), await request.form()
    ids, action = [each for each in form.getall("chat", []) if isinstance(each, str)], form.get("action", "")
    if not ids:
        raise MissingParameter("No chat was chosen.", hint="Tick the chats in the list first.", param="chat")
    if action == "delete":
        return await _delete(state, owner, ids)
    if action in ("archive", "unarchive"):
        await state.store.call(Chats.archive, owner, ids, action == "archive")
    elif action == "move":
        await state.store.call(Chats.move, owner, ids, str(form.get("project", "")))
    else:
        hint = "archive, unarchive, move or delete."
        raise InvalidParameter(f"Unknown action {str(action)[:20]!r}.", hint=hint, param="action")
    return Redirect("/chats?archived=1" if action == "unarchive" else "/chats", status_code=303)


@post("/chats/old", status_code=303)
async def delete_old_chats(request: Request[Any, Any, Any]) -> Redirect:
    """Delete the chats that have not changed for some days, without pinned ones; with undo for a while."""
    state, owner = chat_state(request), owner_of(request)
    days = {str(each): each for each in AGES}.get((await fields_of(request)).get("days", ""))
    if days is None:
        hint = f"Allowed: {', '.join(map(str, AGES))} days."
        raise InvalidParameter("This age is not one of those to choose from.", hint=hint, param="days")
    return await _delete(state, owner, await state.store.call(Chats.old, owner, time.time() - days * DAY_S))


async def _delete(state: ChatState, owner: str, ids: Sequence[str]) -> Redirect:
    deletion, gone = await state.store.call(Chats.delete_chats, owner, ids)
    for chat_id in gone:
        state.replies.cancel(chat_id=chat_id)
    state.replies.purge_later()
    return Redirect(f"/chats?deleted={deletion}", status_code=303)


@post("/c/{conversation_id:str}/delete", status_code=200)
async def delete_chat(request: Request[Any, Any, Any]) -> Response[Any]:
    """Delete a chat, with undo for a while. A reply that is being written in it stops."""
    state, chat = chat_state(request), await requested_chat(request)
    deletion = await state.store.call(Chats.delete, owner_of(request), chat.id)
    state.replies.cancel(chat_id=chat.id)
    state.replies.purge_later()
    form = await fields_of(request)
    if not is_scripted(request):
        return Redirect(f"/?deleted={deletion}", status_code=303)
    if form.get("conversation") == chat.id:  # the chat on the open page
        return Response(None, status_code=200, headers={"HX-Redirect": f"/?deleted={deletion}"})
    return await _list_changed(request, "Chat deleted", Undo("The chat is deleted.", f"/chats/undo/{deletion}"))


@post("/chats/undo/{deletion:str}", status_code=303)
async def undo_delete(request: Request[Any, Any, Any]) -> Redirect:
    """Restore what was deleted, and show it."""
    found = await chat_state(request).store.call(Chats.undo, owner_of(request), request.path_params["deletion"])
    lists = {"chat": "/chats", "prompt": "/prompts"}
    one = {"project": f"/projects/{found.id}", "prompt": "/prompts"}.get(found.kind, f"/c/{found.id}")
    return Redirect(one if found.count == 1 else lists[found.kind], status_code=303)


@post("/chats/preset/{action:str}", status_code=200, request_max_body_size=MAX_BODY_BYTES)
async def change_presets(request: Request[Any, Any, Any]) -> Response[Any]:
    """Use, save or remove a preset; answer with the drawer, or with the page and the drawer open."""
    state, owner, form = chat_state(request), owner_of(request), await fields_of(request)
    presets = await state.store.call(Chats.presets, owner)
    action, name = request.path_params["action"], form.get("preset", "")
    settings = typed(form, {})
    if action == "use":
        settings = presets.get(name, {})
    elif action == "save":
        name = " ".join(form.get("preset_name", "").split())[:MAX_PRESET_CHARS]
        if not name:
            raise MissingParameter("The preset has no name.", hint="Type one first.", param="preset_name")
        settings.pop("model", None)  # a preset does not set the model
        await state.store.call(Chats.save_preset, owner, name, settings)
    elif action == "remove":
        await state.store.call(Chats.remove_preset, owner, name)
        state.replies.purge_later()
        name = ""
    else:
        raise InvalidParameter(f"Unknown action {action[:20]!r}.", hint="use, save or remove.", param="action")
    names = tuple(await state.store.call(Chats.presets, owner))
    model = {"model": form["model"]} if form.get("model") else {}
    drawer = w.sampling(w.card_of(state, model), settings, names, preset=name, is_open=True)
    drawer = replace(drawer, tool_servers=t.tool_servers(state, owner, settings))
    return html(drawer) if is_scripted(request) else html(await _page_with(request, form, drawer))


async def _page_with(request: Request[Any, Any, Any], form: Any, drawer: Sampling) -> Any:
    chat_id = form.get("conversation")
    chat = await chat_state(request).store.call(Chats.get, owner_of(request), chat_id) if chat_id else None
    project = await named_project(chat_state(request), owner_of(request), form) if chat is None else None
    view = await v.chat_page(request, chat, project=project)
    if view.composer is None:
        return view
    composer = replace(view.composer, sampling=drawer, text=form.get("message", "")[:MAX_MESSAGE_CHARS])
    return replace(view, composer=composer)


async def _list_changed(request: Request[Any, Any, Any], announcement: str, undo: Undo | None = None) -> Response[Any]:
    """Return the updated list, and the head if the changed chat is open."""
    state, owner = chat_state(request), owner_of(request)
    changed = request.path_params["conversation_id"]
    if not is_scripted(request):
        return Redirect(f"/c/{changed}", status_code=303)
    open_id = (await fields_of(request)).get("conversation", "")
    chat = await state.store.call(Chats.get, owner, open_id) if open_id else None
    head = await _head(state, chat) if chat is not None and open_id == changed else None
    return html(ChatsChanged(await chat_list(state, owner, chat), head, announcement, undo))


async def _head(state: ChatState, chat: Chat) -> ChatHead:
    branch = await state.store.call(Chats.branch, chat.id, chat.leaf, limit=v.WINDOW)
    return m.head(chat, branch.messages, w.card_of(state, chat.settings))


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
    ("Memory", "/memory", "notes for every chat"),
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


HANDLERS = (
    find_chats,
    manage_chat,
    change_link,
    rename_chat,
    pin_chat,
    written_title,
    archive_chat,
    move_chat,
    change_selected,
    delete_old_chats,
    delete_chat,
    undo_delete,
    change_presets,
    palette,
)
