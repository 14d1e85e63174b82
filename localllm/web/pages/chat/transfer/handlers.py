"""Chats as files: export one or all, import; and delete all of them.

Does not know: the formats (export.py, imports/), how chats are stored (store/).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import anyio.to_thread
from litestar import Request, get, post
from litestar.datastructures import UploadFile
from litestar.response import Redirect, Response, Stream

from localllm.config.settings import MAX_UPLOAD_BYTES
from localllm.errors import InvalidParameter, LocalLLMError, RequestError
from localllm.web.access.caller import may, owner_of
from localllm.web.errors import MissingParameter
from localllm.web.pages.chat.files.pictures import with_pictures
from localllm.web.pages.chat.imports.files import chats_of
from localllm.web.pages.chat.imports.records import NotAChat
from localllm.web.pages.chat.markdown.stream import cached_html, cached_user_html
from localllm.web.pages.chat.sidebar.views import ImportRefused, ManageChats, WipeChats, chat_list
from localllm.web.pages.chat.state import ChatState, chat_state
from localllm.web.pages.chat.store import Chat, Chats
from localllm.web.pages.chat.thread import views as v
from localllm.web.pages.chat.thread.handlers import COOKIE, requested_chat
from localllm.web.pages.chat.transfer import export
from localllm.web.pages.frame.errors import notice
from localllm.web.pages.frame.forms import fields_of, is_scripted
from localllm.web.pages.frame.state import html
from localllm.web.pages.frame.views import ErrorNotice

MAX_PROBLEMS = 10
"""Most files whose errors are shown."""


class AlreadyHere(RequestError):
    """The messages of a file are in chats of this server."""

    code = "already_here"


@get("/chats/manage")
async def manage_chats(request: Request[Any, Any, Any]) -> Response[str]:
    """Show the forms to import chats and to export all."""
    form = await _form(request)
    return html(form if is_scripted(request) else await v.panel_page(request, "Chats", form))


@get("/c/{conversation_id:str}/export/{kind:str}")
async def export_chat(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Export the shown branch as Markdown or as a page, or everything as JSON."""
    state, chat, kind = chat_state(request), await requested_chat(request), request.path_params["kind"]
    branch = await state.store.call(Chats.branch, chat.id, chat.leaf)
    shown_now = [state.replies.current(message) for message in branch.messages]
    if kind == "md":
        body, media_type = export.as_markdown(chat, shown_now), "text/markdown"
    elif kind == "json":
        everything = [state.replies.current(m) for m in await state.store.call(Chats.all_messages, chat.id)]
        everything = await with_pictures(state.store, chat, everything)
        body, media_type = export.as_json(chat, shown_now, everything), "application/json"
    elif kind == "html":
        body, media_type = await anyio.to_thread.run_sync(export.as_html, chat, shown_now), "text/html"
    else:
        raise InvalidParameter(f"Chats are not exported as {kind[:20]!r}.", hint="Use md, html or json.", param="kind")
    return Response(body, media_type=media_type, headers=_as_file(f"{export.file_name(chat)}.{kind}"))


LINK_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Robots-Tag": "noindex",
    "Cache-Control": "no-store",
}
"""The page behind a link: nothing of it runs, and its address is passed on to nobody."""


@get("/shared/{secret:str}")
async def read_by_link(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Show a chat to whoever has its link: the messages up to one, without the system prompt. The page of a link that
    was ended has no navigation: its reader may not open other pages.
    """
    state = chat_state(request)
    link = await state.store.call(Chats.link, request.path_params["secret"])
    if link is None:
        title = "This link shows nothing. It was ended, or the chat was deleted."
        return Response(export.as_page(title, ()), status_code=404, media_type="text/html", headers=LINK_HEADERS)
    branch = await state.store.call(Chats.branch, link.chat_id, link.leaf)
    messages = [state.replies.current(message) for message in branch.messages]
    body = await anyio.to_thread.run_sync(export.as_page, link.title, messages)
    return Response(body, media_type="text/html", headers=LINK_HEADERS)


@get("/chats/export")
async def export_all(request: Request[Any, Any, Any]) -> Stream:
    """Export every chat of the caller: a zip with a JSON file for each, sent while it is written."""
    state, owner = chat_state(request), owner_of(request)
    ids = await state.store.call(Chats.ids, owner)
    name = time.strftime("localllm-chats-%Y-%m-%d.zip")
    return Stream(_archive(state, owner, ids), media_type="application/zip", headers=_as_file(name))


async def _archive(state: ChatState, owner: str, ids: list[str]) -> AsyncIterator[bytes]:
    archive = export.Archive()
    for chat_id in ids:
        try:
            chat = await state.store.call(Chats.get, owner, chat_id)
            branch = await state.store.call(Chats.branch, chat.id, chat.leaf)
            everything = await state.store.call(Chats.all_messages, chat.id)
        except RequestError:  # deleted since the export began
            continue
        shown = [state.replies.current(message) for message in branch.messages]
        current = await with_pictures(state.store, chat, [state.replies.current(message) for message in everything])
        if data := await anyio.to_thread.run_sync(archive.add, chat, shown, current):
            yield data
    yield archive.close()


@get("/chats/ratings")
async def export_ratings(request: Request[Any, Any, Any]) -> Stream:
    """Export the ratings of the caller as JSON lines, sent while they are read."""
    state, owner = chat_state(request), owner_of(request)
    rated = await state.store.call(Chats.rated, owner)
    name = time.strftime("localllm-ratings-%Y-%m-%d.jsonl")
    return Stream(_ratings(state, owner, rated), media_type="application/x-ndjson", headers=_as_file(name))


async def _ratings(state: ChatState, owner: str, rated: list[tuple[str, str]]) -> AsyncIterator[bytes]:
    for chat_id, message_id in rated:
        try:
            chat = await state.store.call(Chats.get, owner, chat_id)
            branch = await state.store.call(Chats.branch, chat_id, message_id)
        except RequestError:  # deleted since the export began
            continue
        if branch.messages and "rating" in branch.messages[-1].details:
            yield export.as_rating(chat, branch.messages)


def _as_file(name: str) -> dict[str, str]:
    return {"Content-Disposition": f'attachment; filename="{name}"'}


@post("/chats/import", status_code=303, request_max_body_size=MAX_UPLOAD_BYTES)
async def import_chats(request: Request[Any, Any, Any]) -> Response[Any]:
    """Import the chats of the chosen files. What cannot be imported is said in the dialog, by the file's name."""
    state, owner = chat_state(request), owner_of(request)
    files = [each for each in (await request.form()).getall("file", []) if isinstance(each, UploadFile)]
    imported, problems = list[Chat](), list[tuple[str, LocalLLMError]]()
    newest = await state.store.call(Chats.newest)
    for file in files:
        with _noted(problems, file.filename):
            await _import_file(state, owner, file, imported, newest)
    if not files:
        problems.append(("", MissingParameter("No file was chosen.", hint="Choose a file.", param="file")))
    if problems:
        return await _refused(request, imported, problems)
    url = f"/c/{imported[0].id}" if len(imported) == 1 else "/chats"
    if is_scripted(request):
        return Response(None, status_code=200, headers={"HX-Redirect": url})
    return Redirect(url, status_code=303)


@contextmanager
def _noted(problems: list[tuple[str, LocalLLMError]], name: str) -> Iterator[None]:
    """Note the error of a file, so that the other files are imported."""
    try:
        yield
    except RequestError as error:
        problems.append((name, error))


async def _import_file(state: ChatState, owner: str, file: UploadFile, imported: list[Chat], newest: int) -> None:
    """Import a file's chats, one by one; those before a broken one stay. What a chat up to `newest` holds already is
    left out."""
    chats, before, held = chats_of(file.file), len(imported), 0
    try:
        while (found := await anyio.to_thread.run_sync(next, chats, None)) is not None:
            if await state.store.call(Chats.holds, owner, newest, found.messages):
                held += 1
                continue
            imported.append(
                await state.store.call(Chats.add_all, owner, found.title, found.settings, found.messages, found.leaf)
            )
    except NotAChat as error:
        if count := len(imported) - before:
            error.hint = f"{_chats(count)} before it {'are' if count > 1 else 'is'} imported."
        raise
    if held:
        raise AlreadyHere(f"{_chats(held)} of this file {'are' if held > 1 else 'is'} here already.")


async def _refused(
    request: Request[Any, Any, Any], imported: list[Chat], problems: list[tuple[str, LocalLLMError]]
) -> Response[Any]:
    """Return what was not imported, in the dialog or in its page, and the list with what was."""
    state, owner = chat_state(request), owner_of(request)
    errors = tuple(_named(name, error) for name, error in problems[:MAX_PROBLEMS])
    if len(problems) > MAX_PROBLEMS:
        errors = (*errors, ErrorNotice(f"{len(problems) - MAX_PROBLEMS} more files were not imported."))
    if imported:
        errors = (*errors, ErrorNotice(f"{_chats(len(imported))} {'are' if len(imported) > 1 else 'is'} imported."))
    if is_scripted(request):
        chats = await chat_list(state, owner, None) if imported else None
        return html(ImportRefused(errors, chats), 400)
    return html(await v.panel_page(request, "Chats", await _form(request, ImportRefused(errors))), 400)


async def _form(request: Request[Any, Any, Any], refused: ImportRefused | None = None) -> ManageChats:
    links = await chat_state(request).store.call(Chats.links, owner_of(request))
    shown = tuple((each.title, f"/c/{each.chat_id}") for each in links)
    return ManageChats(refused, shown, None if may(request, "admin") else WipeChats())


def _named(name: str, error: LocalLLMError) -> ErrorNotice:
    found = notice(error)
    return ErrorNotice(f"{name[-100:]}: {found.what}" if name else found.what, found.why, found.hint)


def _chats(count: int) -> str:
    return "One chat" if count == 1 else f"{count:,} chats"


@post("/chats/wipe", status_code=303)
async def wipe_chats(request: Request[Any, Any, Any]) -> Redirect:
    """Delete everything of the caller, permanently."""
    if not (await fields_of(request)).get("sure"):
        raise MissingParameter("Nothing was deleted.", hint="Tick the box to confirm.", param="sure")
    state, owner = chat_state(request), owner_of(request)
    state.replies.cancel(owner=owner)
    await state.store.call(Chats.wipe, owner)
    cached_html.clear()
    cached_user_html.clear()
    redirect = Redirect("/", status_code=303)
    redirect.delete_cookie(COOKIE)
    return redirect


HANDLERS = (manage_chats, export_chat, read_by_link, export_all, export_ratings, import_chats, wipe_chats)
