"""Decisions of a user about a call, the progress of running calls, and the page of tools and consents.

With scripts a decision is answered with the updated messages; without scripts, after a redirect, with the page.
Does not know: how a call is run (runs.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlencode

from litestar import Request, get, post
from litestar.response import Redirect, Response, Stream

from localllm.web.access.caller import owner_of
from localllm.web.pages.chat.replies.claims import usable_servers
from localllm.web.pages.chat.sidebar.views import Undo
from localllm.web.pages.chat.state import chat_state
from localllm.web.pages.chat.store import Chat, Chats, StoredMessage
from localllm.web.pages.chat.thread import messages as m
from localllm.web.pages.chat.thread import views as v
from localllm.web.pages.chat.thread.handlers import MAX_BODY_BYTES, requested_message
from localllm.web.pages.chat.thread.messages import CallsProgress
from localllm.web.pages.chat.tools import views as t
from localllm.web.pages.chat.tools.runs import tool_runs_of
from localllm.web.pages.chat.tools.views import ToolsPanel
from localllm.web.pages.frame.forms import fields_of, is_scripted
from localllm.web.pages.frame.live import live_stream, sse
from localllm.web.pages.frame.navigation import own_path
from localllm.web.pages.frame.render import render
from localllm.web.pages.frame.state import html

CALLS = "/c/{conversation_id:str}/m/{message_id:str}/calls"


@post(
    f"{CALLS}/{{number:int}}/{{decision:str}}",
    status_code=200, request_max_body_size=MAX_BODY_BYTES,
)  # fmt: skip
async def decide(request: Request[Any, Any, Any]) -> Response[Any]:
    """Run a call once or always, decline it this time, never run its tool, or stop it."""
    runs, path = tool_runs_of(request.app), request.path_params
    chat, message = await requested_message(request)
    round_ = await runs.decide(owner_of(request), chat, message, path["number"], path["decision"])
    if is_scripted(request):
        undo = None
        if path["decision"] == "never":
            call = message.details["calls"][path["number"]]
            asked_again = urlencode({"server": call["server"], "tool": call["tool"], "back": f"/c/{chat.id}"})
            undo = Undo(f"{call['tool']} is never run.", f"/chats/tools/revoke?{asked_again}")
        return html(await _update(request, chat, "Running the call" if round_.busy else "", undo))
    await runs.until_done(round_)
    await runs.until_chat_rests(round_.next_id)
    return Redirect(f"/c/{chat.id}#m-{round_.next_id or message.id}", status_code=303)


@get(CALLS)
async def follow_calls(request: Request[Any, Any, Any]) -> Stream:
    """Stream the state of a reply's calls, until they have run or ask; then the messages after them."""
    chat, message = await requested_message(request)
    return live_stream(request, _events(request, chat, message))


async def _events(request: Request[Any, Any, Any], chat: Chat, message: StoredMessage) -> AsyncIterator[bytes]:
    round_ = await tool_runs_of(request.app).until_known(message.id)
    while round_ is not None and round_.busy:
        version = round_.version
        yield await _progress(request, chat, message)
        await round_.next_change(version)
    if round_ is not None and round_.next_id:
        yield sse(render(await _update(request, chat, "Generating")))
    else:
        yield await _progress(request, chat, message, "The call waits for your answer")


async def _progress(request: Request[Any, Any, Any], chat: Chat, message: StoredMessage, says: str = "") -> bytes:
    state = chat_state(request)
    message = await state.store.call(Chats.message, chat.id, message.id)
    now = state.replies.current(message)
    return sse(render(CallsProgress(m.one_message(chat.id, now, state.replies.get(message.id)), says)))


async def _update(request: Request[Any, Any, Any], chat: Chat, announcement: str, undo: Undo | None = None) -> Any:
    chat = await chat_state(request).store.call(Chats.get, owner_of(request), chat.id)
    return await v.update(request, chat, announcement, undo)


@get("/chats/tools")
async def tools_panel(request: Request[Any, Any, Any]) -> Response[str]:
    """Show the servers whose tools the user may use, and what is allowed always or never."""
    state, owner = chat_state(request), owner_of(request)
    consents = await state.store.call(Chats.consents, owner)
    names = [server.name for server in usable_servers(state, owner)]
    panel = ToolsPanel(t.server_list(state.mcp, names), t.consent_list(consents, "/chats/tools"))
    return html(panel if is_scripted(request) else await v.panel_page(request, "Tools", panel))


@post("/chats/tools/revoke", status_code=303)
async def revoke_consent(request: Request[Any, Any, Any]) -> Redirect:
    """Have a tool ask again."""
    form = {**request.query_params, **await fields_of(request)}
    await chat_state(request).store.call(
        Chats.revoke_consent, owner_of(request), form.get("server", ""), form.get("tool", "")
    )
    return Redirect(own_path(form.get("back")), status_code=303)


HANDLERS = (decide, follow_calls, tools_panel, revoke_consent)
