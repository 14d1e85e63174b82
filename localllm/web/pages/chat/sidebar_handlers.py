"""Actions on chats: search, rename, pin, delete with undo, export, import, delete all; and presets.

Does not know: how chats are stored (store/), the format of an exported file (transfer.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import anyio.to_thread
from litestar import Request, get, post
from litestar.datastructures import UploadFile
from litestar.response import Redirect, Response

from localllm.config.settings import MAX_UPLOAD_BYTES
from localllm.errors import InvalidParameter
from localllm.web.access.caller import owner_of
from localllm.web.api.exchange import require_few_values
from localllm.web.errors import MissingParameter
from localllm.web.pages.chat import message_presenters, presenters, tool_presenters, transfer
from localllm.web.pages.chat.handlers import COOKIE, MAX_BODY_BYTES, requested_chat
from localllm.web.pages.chat.markdown_stream import cached_html
from localllm.web.pages.chat.settings import MAX_MESSAGE_CHARS, typed
from localllm.web.pages.chat.sidebar_views import ChatListPage, ChatsChanged, ManageChat, ManageChats, Undo
from localllm.web.pages.chat.state import chat_state
from localllm.web.pages.chat.store import Chats
from localllm.web.pages.chat.views import Sampling
from localllm.web.pages.frame.forms import fields_of, is_scripted
from localllm.web.pages.frame.security import same_origin
from localllm.web.pages.frame.state import html

MAX_TITLE_CHARS, MAX_PRESET_CHARS = 200, 60


@get("/chats")
async def find_chats(request: Request[Any, Any, Any]) -> Response[str]:
    """Show the list, or the results of a search."""
    state, owner, query = chat_state(request), owner_of(request), request.query_params.get("q", "")[:1000]
    if is_scripted(request):
        return html(await presenters.chat_list(state, owner, None, query))
    found = await presenters.chat_list(state, owner, None, query, presenters.MOST_LISTED)
    return html(await presenters.panel_page(request, "Chats", ChatListPage(found)))


@get("/c/{conversation_id:str}/manage")
async def manage_chat(request: Request[Any, Any, Any]) -> Response[str]:
    """Show the forms that change a whole chat, in a dialog or as a page."""
    chat = await requested_chat(request)
    form = ManageChat(f"/c/{chat.id}", chat.title, chat.pinned)
    return html(form if is_scripted(request) else await presenters.panel_page(request, chat.title, form))


@get("/chats/manage")
async def manage_chats(request: Request[Any, Any, Any]) -> Response[str]:
    """Show the forms to import a chat and to delete all chats."""
    path = chat_state(request).store.path
    form = ManageChats(str(path) if path is not None else "")
    return html(form if is_scripted(request) else await presenters.panel_page(request, "Chats", form))


@post("/c/{conversation_id:str}/rename", guards=[same_origin], status_code=200)
async def rename_chat(request: Request[Any, Any, Any]) -> Response[Any]:
    chat = await requested_chat(request)
    title = " ".join((await fields_of(request)).get("title", "").split())[:MAX_TITLE_CHARS]
    if not title:
        raise InvalidParameter("The title is empty.", hint="Type something first.", param="title")
    await chat_state(request).store.call(Chats.rename, owner_of(request), chat.id, title)
    return await _list_changed(request, "Chat renamed")


@post("/c/{conversation_id:str}/pin", guards=[same_origin], status_code=200)
async def pin_chat(request: Request[Any, Any, Any]) -> Response[Any]:
    chat = await requested_chat(request)
    pinned = bool((await fields_of(request)).get("pinned"))
    await chat_state(request).store.call(Chats.pin, owner_of(request), chat.id, pinned)
    return await _list_changed(request, "Chat pinned" if pinned else "Chat unpinned")


@post("/c/{conversation_id:str}/delete", guards=[same_origin], status_code=200)
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


@post("/chats/undo/{deletion:str}", guards=[same_origin], status_code=303)
async def undo_delete(request: Request[Any, Any, Any]) -> Redirect:
    """Restore what was deleted, and show it."""
    chat_id = await chat_state(request).store.call(Chats.undo, owner_of(request), request.path_params["deletion"])
    return Redirect(f"/c/{chat_id}", status_code=303)


@get("/c/{conversation_id:str}/export/{kind:str}")
async def export_chat(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Export the shown branch as Markdown, or everything as JSON."""
    state, chat = chat_state(request), await requested_chat(request)
    kind = request.path_params["kind"]
    branch = await state.store.call(Chats.branch, chat.id, chat.leaf)
    shown_now = [state.replies.current(message) for message in branch.messages]
    if kind == "md":
        body, media_type = transfer.as_markdown(chat, shown_now), "text/markdown"
    elif kind == "json":
        everything = [state.replies.current(m) for m in await state.store.call(Chats.all_messages, chat.id)]
        body, media_type = transfer.as_json(chat, shown_now, everything), "application/json"
    else:
        raise InvalidParameter(f"Chats are not exported as {kind[:20]!r}.", hint="Use md or json.", param="kind")
    disposition = f'attachment; filename="{transfer.file_name(chat)}.{kind}"'
    return Response(body, media_type=media_type, headers={"Content-Disposition": disposition})


@post("/chats/import", guards=[same_origin], status_code=303, request_max_body_size=MAX_UPLOAD_BYTES)
async def import_chat(request: Request[Any, Any, Any]) -> Redirect:
    """Import an exported file, or OpenAI's messages."""
    file = (await request.form()).get("file")
    if not isinstance(file, UploadFile):
        raise MissingParameter("No file was chosen.", hint="Choose a JSON file.", param="file")
    raw = await file.read()
    require_few_values(raw)
    found = await anyio.to_thread.run_sync(transfer.read, raw)
    chat = await chat_state(request).store.call(
        Chats.add_all, owner_of(request), found.title, found.settings, found.messages, found.leaf
    )
    return Redirect(f"/c/{chat.id}", status_code=303)


@post("/chats/wipe", guards=[same_origin], status_code=303)
async def wipe_chats(request: Request[Any, Any, Any]) -> Redirect:
    """Delete everything of the caller, permanently."""
    if not (await fields_of(request)).get("sure"):
        raise MissingParameter("Nothing was deleted.", hint="Tick the box to confirm.", param="sure")
    state, owner = chat_state(request), owner_of(request)
    state.replies.cancel(owner=owner)
    await state.store.call(Chats.wipe, owner)
    cached_html.clear()
    redirect = Redirect("/", status_code=303)
    redirect.delete_cookie(COOKIE)
    return redirect


@post("/chats/preset/{action:str}", guards=[same_origin], status_code=200, request_max_body_size=MAX_BODY_BYTES)
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
        name = ""
    else:
        raise InvalidParameter(f"Unknown action {action[:20]!r}.", hint="use, save or remove.", param="action")
    names = tuple(await state.store.call(Chats.presets, owner))
    model = {"model": form["model"]} if form.get("model") else {}
    drawer = message_presenters.sampling(presenters.card_of(state, model), settings, names, preset=name, is_open=True)
    drawer = replace(drawer, tool_servers=tool_presenters.tool_servers(state, owner, settings))
    return html(drawer) if is_scripted(request) else html(await _page_with(request, form, drawer))


async def _page_with(request: Request[Any, Any, Any], form: Any, drawer: Sampling) -> Any:
    chat_id = form.get("conversation")
    chat = await chat_state(request).store.call(Chats.get, owner_of(request), chat_id) if chat_id else None
    view = await presenters.chat_page(request, chat)
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
    head = None
    if chat is not None and open_id == changed:
        branch = await state.store.call(Chats.branch, chat.id, chat.leaf, limit=presenters.WINDOW)
        head = message_presenters.head(chat, branch.messages, presenters.card_of(state, chat.settings))
    return html(ChatsChanged(await presenters.chat_list(state, owner, chat), head, announcement, undo))


HANDLERS = (
    find_chats,
    manage_chat,
    manage_chats,
    rename_chat,
    pin_chat,
    delete_chat,
    undo_delete,
    export_chat,
    import_chat,
    wipe_chats,
    change_presets,
)
