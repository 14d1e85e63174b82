"""Actions on one message: edit, regenerate, continue, switch between versions, delete, show the raw text.

With scripts each is answered with the updated messages; without scripts, after a redirect, with the page.
Does not know: how the actions work (turns.py, store/).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from litestar import Request, get, post
from litestar.response import Redirect, Response

from localllm.errors import RequestError
from localllm.web.access.caller import owner_of
from localllm.web.pages.chat import composer_presenters, message_presenters, presenters, turns
from localllm.web.pages.chat.comparisons import answer_with, stop_others
from localllm.web.pages.chat.handlers import (
    MAX_BODY_BYTES,
    page_with_error,
    refused_in_place,
    requested_message,
    until_written,
)
from localllm.web.pages.chat.prompts import ChatFull
from localllm.web.pages.chat.sidebar_views import Undo
from localllm.web.pages.chat.state import ChatState, chat_state
from localllm.web.pages.chat.store import Chat, Chats, StoredMessage
from localllm.web.pages.chat.turns import Turn
from localllm.web.pages.chat.versions import edit_reply, fork
from localllm.web.pages.chat.views import ChatMessage, OtherModel
from localllm.web.pages.frame.forms import fields_of, is_scripted
from localllm.web.pages.frame.security import same_origin
from localllm.web.pages.frame.state import html

ONE = "/c/{conversation_id:str}/m/{message_id:str}"
Ask = Callable[[ChatState, str, Chat, StoredMessage, Mapping[str, str]], Awaitable[Turn]]


@get(ONE)
async def show_message(request: Request[Any, Any, Any]) -> Response[Any]:
    """Show one message, to replace a cancelled edit form."""
    chat, message = await requested_message(request)
    if not is_scripted(request):
        return Redirect(f"/c/{chat.id}#m-{message.id}", status_code=303)
    replies = chat_state(request).replies
    return html(message_presenters.one_message(chat.id, replies.current(message), replies.get(message.id)))


@get(f"{ONE}/raw")
async def raw_message(request: Request[Any, Any, Any]) -> Response[str]:
    """Return the text as it was written, with its Markdown."""
    _, message = await requested_message(request)
    text = chat_state(request).replies.current(message).text
    return Response(text, media_type="text/plain", headers={"Cache-Control": "no-store"})


@get(f"{ONE}/edit")
async def edit_form(request: Request[Any, Any, Any]) -> Response[Any]:
    """Show the message in a text field."""
    chat, message = await requested_message(request)
    if not is_scripted(request):
        return Redirect(f"/c/{chat.id}?edit={message.id}#m-{message.id}", status_code=303)
    model = str(message.details.get("model") or "Assistant")
    return html(ChatMessage(message.id, message.role, model=model, edit=message_presenters.edit_form(chat.id, message)))


@post(f"{ONE}/edit", guards=[same_origin], status_code=200, request_max_body_size=MAX_BODY_BYTES)
async def edit_message(request: Request[Any, Any, Any]) -> Response[Any]:
    """Send an edited message as a branch beside the original; save an edited reply as a version of it."""
    chat, message = await requested_message(request)
    if message.role == "user":
        return await _answered(request, turns.edit)
    edited = await edit_reply(chat_state(request), chat, message, await fields_of(request))
    return await _updated_page(request, chat, "Version saved", f"#m-{edited.id}")


@post(f"{ONE}/regenerate", guards=[same_origin], status_code=200, request_max_body_size=MAX_BODY_BYTES)
async def regenerate(request: Request[Any, Any, Any]) -> Response[Any]:
    """Write another reply beside this one."""
    return await _answered(request, turns.regenerate)


@post(f"{ONE}/continue", guards=[same_origin], status_code=200, request_max_body_size=MAX_BODY_BYTES)
async def continue_reply(request: Request[Any, Any, Any]) -> Response[Any]:
    """Continue a reply that was cut off."""
    return await _answered(request, turns.continue_reply)


@post(f"{ONE}/results", guards=[same_origin], status_code=200, request_max_body_size=MAX_BODY_BYTES)
async def send_results(request: Request[Any, Any, Any]) -> Response[Any]:
    """Send the results of a reply's tool calls."""
    return await _answered(request, turns.send_results)


@get(f"{ONE}/models")
async def other_models(request: Request[Any, Any, Any]) -> Response[Any]:
    """Show the form that has the message answered by another model, or by two."""
    chat, message = await requested_message(request)
    names = (await chat_state(request).picker.choices(chat.settings)).choices
    own = str(message.details.get("model") or next((each.name for each in names if each.chosen), ""))
    other = next((each.name for each in names if each.name != own), "")
    url = f"/c/{chat.id}/m/{message.id}"
    form = OtherModel(url, names, own, other) if "compare" in request.query_params else OtherModel(url, names, other)
    return html(form if is_scripted(request) else await presenters.panel_page(request, chat.title, form))


@post(f"{ONE}/answer", guards=[same_origin], status_code=200, request_max_body_size=MAX_BODY_BYTES)
async def answer_with_other(request: Request[Any, Any, Any]) -> Response[Any]:
    """Have the message answered by another model, or by two whose replies are shown beside each other."""
    return await _answered(request, answer_with)


@post(f"{ONE}/select", guards=[same_origin], status_code=200)
async def select_version(request: Request[Any, Any, Any]) -> Response[Any]:
    """Show the branch with this message. Of replies that are compared, it is the one that is kept."""
    state = chat_state(request)
    chat, message = await requested_message(request)
    compared = await stop_others(state, chat, message)
    with state.replies.lock(chat.id, beside=message.id if compared else ""):
        await state.store.call(Chats.select, chat.id, message.id)
    at, count = message.versions.index(message.id) + 1, len(message.versions)
    return await _updated_page(request, chat, f"Version {at} of {count}", f"#m-{message.id}", is_redrawn=compared)


@post(f"{ONE}/fork", guards=[same_origin], status_code=200)
async def fork_chat(request: Request[Any, Any, Any]) -> Response[Any]:
    """Copy the branch up to this message into a new chat, and open it."""
    chat, message = await requested_message(request)
    copy = await fork(chat_state(request), owner_of(request), chat, message)
    if is_scripted(request):
        return Response(None, status_code=200, headers={"HX-Redirect": f"/c/{copy.id}"})
    return Redirect(f"/c/{copy.id}", status_code=303)


@post(f"{ONE}/delete", guards=[same_origin], status_code=200)
async def delete_message(request: Request[Any, Any, Any]) -> Response[Any]:
    """Delete a message and all that follow it."""
    state = chat_state(request)
    chat, message = await requested_message(request)
    with state.replies.lock(chat.id):
        deletion = await state.store.call(Chats.delete_message, chat.id, message.id)
    state.replies.purge_later()
    undo = Undo("The message and what followed it are deleted.", f"/chats/undo/{deletion}")
    return await _updated_page(request, chat, "Message deleted", f"?deleted={deletion}", undo)


async def _answered(request: Request[Any, Any, Any], ask: Ask) -> Response[Any]:
    chat, message = await requested_message(request)
    form = await fields_of(request)
    try:
        turn = await ask(chat_state(request), owner_of(request), chat, message, form)
    except ChatFull as full:
        field_id = f"edit-{message.id}" if request.url.path.endswith("/edit") else "composer-message"
        refusal = composer_presenters.refusal(full, request.url.path, chat, field_id=field_id)
        if is_scripted(request):
            return html(refusal, full.status)
        return html(await page_with_error(request, {"conversation": chat.id, **form}, full, (), refusal), full.status)
    except RequestError as error:
        if not is_scripted(request):
            raise
        return await refused_in_place(request, form, error)
    if not is_scripted(request):
        for writing in chat_state(request).replies.unfinished(chat.id):
            await until_written(request, writing)
    return await _updated_page(request, chat, "Generating", f"#m-{turn.writing.message.id}")


async def _updated_page(
    request: Request[Any, Any, Any], chat: Chat, announcement: str, where: str, undo: Undo | None = None,
    *, is_redrawn: bool = False,
) -> Response[Any]:  # fmt: skip
    if not is_scripted(request):
        return Redirect(f"/c/{chat.id}{where}", status_code=303)
    chat = await chat_state(request).store.call(Chats.get, owner_of(request), chat.id)
    return html(replace(await presenters.update(request, chat, announcement, undo), is_redrawn=is_redrawn))


HANDLERS = (
    show_message,
    raw_message,
    edit_form,
    edit_message,
    regenerate,
    continue_reply,
    send_results,
    other_models,
    answer_with_other,
    select_version,
    fork_chat,
    delete_message,
)
