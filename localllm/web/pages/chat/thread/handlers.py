"""The chat page's handlers: open a chat, send a message, follow and stop a reply, and list the questions of a chat.

A message posted by htmx is answered at once with the user's message and an element that follows the reply over SSE. A
message posted without scripts is answered, after a redirect, with the page that has the whole reply. The outline lists
what the user asked on the shown branch, as links; each link shows the messages around its question.
Does not know: how a reply is generated or saved (replies/), how messages are stored (store/).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from litestar import Request, get, post
from litestar.datastructures import Cookie
from litestar.response import Redirect, Response, Stream

from localllm.config.settings import MAX_UPLOAD_BYTES
from localllm.errors import LocalLLMError, RequestError
from localllm.web.access.caller import owner_of
from localllm.web.api.own.health import is_running
from localllm.web.errors import wants_html
from localllm.web.pages.chat.composer import views as w
from localllm.web.pages.chat.composer.settings import MAX_MODEL_CHARS
from localllm.web.pages.chat.composer.views import ComposerAction, Refusal, SettingRefused
from localllm.web.pages.chat.files.attachments import Attachment
from localllm.web.pages.chat.files.handlers import attached_files
from localllm.web.pages.chat.replies import turns
from localllm.web.pages.chat.replies.active import ActiveReply
from localllm.web.pages.chat.replies.messages import files_of, is_typed
from localllm.web.pages.chat.replies.prompt import ChatFull
from localllm.web.pages.chat.replies.turns import named_project
from localllm.web.pages.chat.sidebar.views import ChatHead, Undo, chat_list
from localllm.web.pages.chat.state import ChatState, chat_state
from localllm.web.pages.chat.store import Chat, Chats, StoredMessage
from localllm.web.pages.chat.store.records import ChatNotFound, ChatsUnavailable
from localllm.web.pages.chat.thread import messages as m
from localllm.web.pages.chat.thread import views as v
from localllm.web.pages.chat.thread.messages import Outline
from localllm.web.pages.chat.thread.views import ChatPage, ChatTurn
from localllm.web.pages.chat.tools.runs import tool_runs_of
from localllm.web.pages.frame.errors import notice
from localllm.web.pages.frame.forms import fields_of, is_scripted
from localllm.web.pages.frame.live import live_stream, sse
from localllm.web.pages.frame.render import render
from localllm.web.pages.frame.state import html

COOKIE = "localllm_chat"
MAX_BODY_BYTES = 2_000_000


@get("/")
async def new_chat(request: Request[Any, Any, Any]) -> Response[str]:
    """Show an empty chat; a program, which does not ask for HTML, is told that the server is running."""
    if not wants_html(request.scope):
        return is_running()
    query = request.query_params
    project = await named_project(chat_state(request), owner_of(request), query)
    settings = {"model": query["model"][:MAX_MODEL_CHARS]} if query.get("model") else None
    undo, shows = undo_of(request, "The chat is deleted."), "behaviour" in query
    page = await v.chat_page(request, None, undo=undo, settings=settings, project=project, shows_behaviour=shows)
    return html(page)


@get("/chat")
async def latest_chat(request: Request[Any, Any, Any]) -> Redirect:
    """Redirect to the latest conversation."""
    chat_id = request.cookies.get(COOKIE, "")
    try:
        chat = await chat_state(request).store.call(Chats.get, owner_of(request), chat_id)
    except (ChatNotFound, ChatsUnavailable):
        return Redirect("/", status_code=303)
    return Redirect(f"/c/{chat.id}", status_code=303)


@get("/c/{conversation_id:str}")
async def open_chat(request: Request[Any, Any, Any]) -> Response[str]:
    """Show a conversation. A reply that is being written continues in its place."""
    chat, query = await requested_chat(request), request.query_params
    if "before" in query and is_scripted(request):
        return html(await v.earlier(request, chat, query["before"]))
    if "news" in query and is_scripted(request):
        return html(await v.update(request, chat, "The chat has gone on in another tab"))
    undo = undo_of(request, "The message is deleted.")
    view = await v.chat_page(
        request,
        chat,
        before=query.get("before"),
        editing=query.get("edit", ""),
        undo=undo,
        shows_behaviour="behaviour" in query,
    )
    return html(view, cookies=[_cookie(chat)])


@post("/chat", status_code=200, request_max_body_size=MAX_UPLOAD_BYTES)
async def send_message(request: Request[Any, Any, Any]) -> Response[Any]:
    """Send a message from the composer, or one of the examples."""
    state, owner, form = chat_state(request), owner_of(request), await fields_of(request)
    files = list[Attachment]()
    try:
        files = await attached_files(request)
        turn = await turns.ask(state, owner, form, files)
    except ChatFull as full:
        return await _chat_full(request, form, files, full)
    except RequestError as error:
        if not is_scripted(request):
            return html(await page_with_error(request, form, error, files), error.status)
        return await refused_in_place(request, form, error)
    state.attachments.drop(files)
    cookies = [_cookie(turn.chat), *model_cookie(turn.chat.settings)]
    if not is_scripted(request):
        await until_written(request, turn.writing)
        return Redirect(f"/c/{turn.chat.id}#m-{turn.writing.message.id}", status_code=303, cookies=cookies)
    if form.get(turns.FULL):  # the messages that were left out are drawn in another way now
        return html(await v.update(request, turn.chat, "Generating", sent=True), cookies=cookies)
    assert turn.user is not None
    messages = [state.replies.current(turn.writing.message)]
    view = ChatTurn(
        user=m.one_message(turn.chat.id, turn.user),
        reply=m.one_message(turn.chat.id, messages[0], turn.writing),
        action=w.composer_action(state.replies, turn.chat.id),
        conversation_id=turn.chat.id,
        head=await head_of(state, turn.chat),
        chats=await chat_list(state, owner, turn.chat),
        chip=w.chip(turn.chat, turn.chat.settings),
    )
    return html(view, headers={"HX-Replace-Url": f"/c/{turn.chat.id}"}, cookies=cookies)


async def head_of(state: ChatState, chat: Chat) -> ChatHead:
    """Return the head of a chat, with the use of the context after its last counted reply."""
    branch = await state.store.call(Chats.branch, chat.id, chat.leaf, limit=v.WINDOW)
    messages = [state.replies.current(message) for message in branch.messages]
    return m.head(chat, messages, w.card_of(state, chat.settings))


async def _chat_full(
    request: Request[Any, Any, Any], form: Mapping[str, str], files: list[Attachment], full: ChatFull
) -> Response[Any]:
    """Answer a message that does not fit: nothing was stored, and the ways on are offered."""
    chat = await _chat_of_form(request, form)
    if is_scripted(request):
        view = w.fit_update(full, chat, files, ComposerAction(), sent=True)
        return html(view, full.status)
    refusal = w.refusal(full, "/chat", chat, files)
    return html(await page_with_error(request, form, full, files, refusal), full.status)


async def refused_in_place(
    request: Request[Any, Any, Any], form: Mapping[str, str], error: RequestError
) -> Response[Any]:
    """Return the error for htmx; a wrong value in the drawer comes with the drawer open at its field."""
    if not v.behaviour_field(error.param):
        raise error
    state = chat_state(request)
    model = {"model": form["model"]} if form.get("model") else {}
    drawer = await w.drawer(state, owner_of(request), w.card_of(state, model), {})
    view = SettingRefused(notice(error), v.refused_drawer(drawer, form, error.param))
    return html(view, error.status)


@get("/c/{conversation_id:str}/m/{message_id:str}/stream")
async def follow_reply(request: Request[Any, Any, Any]) -> Stream:
    """Stream a reply from its beginning: a tab that is reopened misses nothing."""
    writing = _own_reply(request)
    chat, message = (None, writing.message) if writing is not None else await requested_message(request)
    news = _reply_events(chat_state(request), owner_of(request), chat, message, writing)
    return live_stream(request, news)


@post("/c/{conversation_id:str}/m/{message_id:str}/stop", status_code=200)
async def stop_reply(request: Request[Any, Any, Any]) -> Response[Any]:
    """Stop the reply; the text so far is kept."""
    writing = _own_reply(request)
    if writing is None:
        await requested_message(request)
    else:
        writing.reply.cancel()
    if is_scripted(request):
        return Response(None, status_code=204)
    return Redirect(f"/c/{request.path_params['conversation_id']}", status_code=303)


@post("/c/{conversation_id:str}/stop", status_code=200)
async def stop_chat(request: Request[Any, Any, Any]) -> Response[Any]:
    """Stop every reply of a chat that is being written."""
    chat_id = request.path_params["conversation_id"]
    if not chat_state(request).replies.stop(owner_of(request), chat_id):
        await requested_chat(request)
    return Response(None, status_code=204) if is_scripted(request) else Redirect(f"/c/{chat_id}", status_code=303)


async def _reply_events(
    state: ChatState, owner: str, chat: Chat | None, message: StoredMessage, writing: ActiveReply | None
) -> AsyncIterator[bytes]:
    if writing is not None:
        async for progress in writing.reply.follow():
            yield sse(render(m.reply_progress(message.id, writing.reply, progress)))
        message = writing.now
        try:
            chat = await state.store.call(Chats.get, owner, writing.chat_id)
            message = replace(message, versions=(await state.store.call(Chats.message, chat.id, message.id)).versions)
        except (ChatNotFound, ChatsUnavailable):  # deleted, or the file is locked; the text is in memory
            chat = chat or Chat(writing.chat_id, "", False, message.id, {}, 0.0)
    assert chat is not None
    action = w.composer_action(state.replies, chat.id)
    card = w.card_of(state, chat.settings)
    before = await _messages_before(state, chat, message)
    finished = m.reply_finished(chat, before, message, writing, action, card)
    if writing is not None and state.titles.is_pending(chat.id, writing.reply.model):
        finished = replace(finished, head=replace(finished.head, title_url=f"/c/{chat.id}/title"))
    yield sse(render(finished))


async def _messages_before(state: ChatState, chat: Chat, message: StoredMessage) -> list[StoredMessage]:
    try:
        branch = await state.store.call(Chats.branch, chat.id, message.parent_id, limit=v.WINDOW)
    except ChatsUnavailable:
        return []
    return list(branch.messages)


async def until_written(request: Request[Any, Any, Any], writing: ActiveReply) -> None:
    """Wait for the reply, and for those that follow without a consent. If the browser disconnects (its stop button),
    stop the reply.
    """
    written = asyncio.create_task(tool_runs_of(request.app).until_chat_rests(writing.message.id))
    gone = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait({written, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not written.done():
            chat_state(request).replies.cancel(chat_id=writing.chat_id)
            await writing.reply.wait()
    finally:
        gone.cancel()
        written.cancel()


async def _disconnect(request: Request[Any, Any, Any]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


async def requested_chat(request: Request[Any, Any, Any]) -> Chat:
    """Return the chat in the URL. Raises `ChatNotFound`, also for another owner's chat."""
    return await chat_state(request).store.call(Chats.get, owner_of(request), request.path_params["conversation_id"])


async def requested_message(request: Request[Any, Any, Any]) -> tuple[Chat, StoredMessage]:
    chat = await requested_chat(request)
    return chat, await chat_state(request).store.call(Chats.message, chat.id, request.path_params["message_id"])


def _own_reply(request: Request[Any, Any, Any]) -> ActiveReply | None:
    """Return the reply in the URL if it is not saved yet; the store is not used, so a locked one blocks nothing."""
    found = chat_state(request).replies.get(request.path_params["message_id"])
    return found if found is not None and found.owner == owner_of(request) else None


def undo_of(request: Request[Any, Any, Any], text: str) -> Undo | None:
    """Return the undo notice that the URL asks for after a redirect."""
    deletion = request.query_params.get("deleted", "")
    return Undo(text, f"/chats/undo/{deletion}") if re.fullmatch(r"[\w-]{1,64}", deletion) else None


def _cookie(chat: Chat) -> Cookie:
    return Cookie(key=COOKIE, value=chat.id, httponly=True, samesite="strict")


def model_cookie(settings: Mapping[str, str]) -> list[Cookie]:
    """Return the cookie that remembers the chosen model; none if there was no choice."""
    name = settings.get("model", "")
    if not 0 < len(name) <= MAX_MODEL_CHARS:
        return []
    return [Cookie(key=v.MODEL_COOKIE, value=quote(name, safe=""), httponly=True, samesite="strict")]


async def page_with_error(
    request: Request[Any, Any, Any],
    form: Mapping[str, str],
    error: LocalLLMError | None,
    files: Sequence[Attachment] = (),
    refusal: Refusal | None = None,
) -> ChatPage:
    """Return the page with what was typed and attached, for a browser without scripts."""
    chat = await _chat_of_form(request, form)
    project = await named_project(chat_state(request), owner_of(request), form) if chat is None else None
    settings = dict(chat.settings if chat is not None else project.settings if project is not None else {})
    settings |= {name: form[name] for name in ("model", "thinking") if form.get(name)}
    page = await v.chat_page(request, chat, settings=settings, project=project)
    return v.with_error(page, form, error, files, refusal)


async def _chat_of_form(request: Request[Any, Any, Any], form: Mapping[str, str]) -> Chat | None:
    try:
        return await chat_state(request).store.call(Chats.get, owner_of(request), form.get("conversation", ""))
    except ChatNotFound:
        return None


TITLE_CHARS = 120


@get("/c/{conversation_id:str}/outline")
async def show_outline(request: Request[Any, Any, Any]) -> Response[str]:
    """Show the questions of a chat, in a dialog or as a page."""
    chat = await requested_chat(request)
    questions, path = await chat_state(request).store.call(Chats.questions, chat.id, chat.leaf)
    view = Outline(tuple((_title(m), _url(chat, path, place, m)) for place, m in questions if is_typed(m)))
    return html(view if is_scripted(request) else await v.panel_page(request, chat.title, view))


def _title(message: StoredMessage) -> str:
    text = " ".join(message.text.split()) or ", ".join(name for name, _ in files_of(message.details))
    return text if len(text) <= TITLE_CHARS else text[: TITLE_CHARS - 1].rstrip() + "…"


def _url(chat: Chat, path: list[str], place: int, message: StoredMessage) -> str:
    """Return the URL of a page that shows the message: the newest messages, or those around it."""
    is_newest = place >= len(path) - v.WINDOW
    around = "" if is_newest else f"?before={path[place + v.WINDOW // 2]}"
    return f"/c/{chat.id}{around}#m-{message.id}"


HANDLERS = (new_chat, latest_chat, open_chat, send_message, follow_reply, stop_reply, stop_chat, show_outline)
