"""The chat page's handlers: decode, call one function, choose a template.

A message posted by htmx is answered at once with the user's message and a place that follows the reply over SSE;
posted without scripts it is answered, by way of a redirect, with the page that holds the whole reply.
Does not know: how a reply is generated (replies.py) or kept (conversations.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from litestar import Request, get, post
from litestar.datastructures import Cookie
from litestar.response import Redirect, Response, Stream

from localllm.errors import LocalLLMError, RequestError
from localllm.web.api.health import is_running
from localllm.web.errors import wants_html
from localllm.web.live import closing, event_stream, sse, until_closing
from localllm.web.pages.chat import asking, shown
from localllm.web.pages.chat.conversations import Conversation, Exchange
from localllm.web.pages.errors import ChatGone, notice
from localllm.web.pages.render import render
from localllm.web.pages.room import Room, html, room_of
from localllm.web.pages.security import same_origin
from localllm.web.views.chat import ChatPage, ChatTurn, ComposerAction
from localllm.web.views.shared import ErrorNotice

COOKIE = "localllm_chats"
REMEMBERED = 8
MAX_BODY_BYTES = 2_000_000


@get("/", sync_to_thread=False)
def new_chat(request: Request[Any, Any, Any]) -> Response[str]:
    """An empty chat; to a program, which asks for no page, that the server is there."""
    if not wants_html(request.scope):
        return is_running()
    return html(shown.chat_page(request, None, remembered(request, room_of(request))))


@get("/chat", sync_to_thread=False)
def latest_chat(request: Request[Any, Any, Any]) -> Redirect:
    """Back to the conversation at hand."""
    known = remembered(request, room_of(request))
    return Redirect(f"/c/{known[0].id}" if known else "/", status_code=303)


@get("/c/{conversation_id:str}", sync_to_thread=False)
def open_chat(request: Request[Any, Any, Any]) -> Response[str]:
    """A conversation; a reply that is still being written goes on where it is."""
    room = room_of(request)
    return html(shown.chat_page(request, _asked_conversation(request, room), remembered(request, room)))


@post("/chat", guards=[same_origin], status_code=200, request_max_body_size=MAX_BODY_BYTES)
async def send_message(request: Request[Any, Any, Any]) -> Response[Any]:
    """A message from the composer, or from one of the example buttons."""
    room = room_of(request)
    form: Mapping[str, str] = {name: value for name, value in (await request.form()).items() if isinstance(value, str)}
    scripted = "hx-request" in request.headers
    try:
        conversation = _conversation(room, form["conversation"]) if form.get("conversation") else None
        conversation, exchange = await asking.ask(room, conversation, form)
    except LocalLLMError as error:
        if scripted or not isinstance(error, RequestError):
            raise
        return html(_page_with_error(request, room, form, notice(error)), error.status)
    cookie = _remember(request, room, conversation)
    if not scripted:
        await _until_written(request, exchange)
        return Redirect(f"/c/{conversation.id}#m-{exchange.id}", status_code=303, cookies=[cookie])
    turn = ChatTurn(
        user=shown.user_message(exchange),
        reply=shown.assistant_message(conversation, exchange),
        action=ComposerAction(shown.stop_url(conversation, exchange)),
        conversation_id=conversation.id,
    )
    return html(turn, headers={"HX-Replace-Url": f"/c/{conversation.id}"}, cookies=[cookie])


@get("/c/{conversation_id:str}/m/{message_id:str}/stream")
async def follow_reply(request: Request[Any, Any, Any]) -> Stream:
    """A reply as it is written, from its beginning: a tab that comes back misses nothing."""
    conversation = _asked_conversation(request, room_of(request))
    exchange = _asked_exchange(request, conversation)
    return event_stream(until_closing(_news(conversation, exchange), closing(request.app.state)))


@post("/c/{conversation_id:str}/m/{message_id:str}/stop", guards=[same_origin], status_code=200, sync_to_thread=False)
def stop_reply(request: Request[Any, Any, Any]) -> Response[Any]:
    """Stop writing; what is there stays."""
    conversation = _asked_conversation(request, room_of(request))
    _asked_exchange(request, conversation).reply.cancel()
    if "hx-request" in request.headers:
        return Response(None, status_code=204)
    return Redirect(f"/c/{conversation.id}", status_code=303)


async def _news(conversation: Conversation, exchange: Exchange) -> AsyncIterator[bytes]:
    async for progress in exchange.reply.follow():
        yield sse(render(shown.reply_progress(exchange, progress)))
    yield sse(render(shown.reply_finished(conversation, exchange)))


async def _until_written(request: Request[Any, Any, Any], exchange: Exchange) -> None:
    """Wait for the reply; a browser that gives up (its stop button) stops the reply."""
    written = asyncio.create_task(exchange.reply.wait())
    gone = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait({written, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not written.done():
            exchange.reply.cancel()
            await written
    finally:
        gone.cancel()
        written.cancel()


async def _disconnect(request: Request[Any, Any, Any]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


def remembered(request: Request[Any, Any, Any], room: Room) -> list[Conversation]:
    """This browser's conversations that are still kept, newest first."""
    ids = request.cookies.get(COOKIE, "").split(".")[:REMEMBERED]
    return [found for conversation_id in ids if (found := room.conversations.get(conversation_id)) is not None]


def _remember(request: Request[Any, Any, Any], room: Room, conversation: Conversation) -> Cookie:
    ids = [conversation.id, *(c.id for c in remembered(request, room) if c.id != conversation.id)]
    return Cookie(key=COOKIE, value=".".join(ids[:REMEMBERED]), httponly=True, samesite="strict")


def _page_with_error(
    request: Request[Any, Any, Any], room: Room, form: Mapping[str, str], error: ErrorNotice
) -> ChatPage:
    conversation = room.conversations.get(form.get("conversation", ""))
    page = shown.chat_page(request, conversation, remembered(request, room))
    return shown.with_error(page, form, error)


def _conversation(room: Room, conversation_id: str) -> Conversation:
    conversation = room.conversations.get(conversation_id)
    if conversation is None:
        raise ChatGone(
            "This chat is no longer on the server.",
            "Chats live in the server's memory: the latest ones, until it stops.",
            "Copy your message and start a new chat.",
        )
    return conversation


def _asked_conversation(request: Request[Any, Any, Any], room: Room) -> Conversation:
    """The one in the URL."""
    return _conversation(room, request.path_params["conversation_id"])


def _asked_exchange(request: Request[Any, Any, Any], conversation: Conversation) -> Exchange:
    exchange = conversation.find(request.path_params["message_id"])
    if exchange is None:
        raise ChatGone("This message is no longer on the server.", hint="Reload the page.")
    return exchange


HANDLERS = (new_chat, latest_chat, open_chat, send_message, follow_reply, stop_reply)
