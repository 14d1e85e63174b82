"""Actions on one message: edit, regenerate, compare, continue, switch between versions, delete, show the raw text.

With scripts each is answered with the updated messages; without scripts, after a redirect, with the page. Two models
that are loaded answer a comparison at the same time. A model that has to be loaded is requested once the other reply
has ended: memory may hold only one of them, and a load would then end the reply that is being written. A model that
does not fit says so, with numbers, in its own reply.
Does not know: how the actions work (replies/turns.py, store/).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, get_args

from litestar import Request, get, post
from litestar.response import Redirect, Response

from localllm.errors import ContextTooLong, InvalidParameter, RequestError
from localllm.web.access.caller import owner_of
from localllm.web.pages.chat.composer import views as w
from localllm.web.pages.chat.composer.settings import typed
from localllm.web.pages.chat.files.long_files import with_passages
from localllm.web.pages.chat.replies import turns
from localllm.web.pages.chat.replies.active import ActiveReply
from localllm.web.pages.chat.replies.claims import claim_later, claimed, reply_of, start
from localllm.web.pages.chat.replies.messages import messages_of
from localllm.web.pages.chat.replies.prompt import ChatFull, prompt_of
from localllm.web.pages.chat.replies.reply import Reply
from localllm.web.pages.chat.replies.turns import Turn, edit_reply, fork, history, regenerate
from localllm.web.pages.chat.sidebar.views import Undo
from localllm.web.pages.chat.state import ChatState, chat_state
from localllm.web.pages.chat.store import Chat, Chats, StoredMessage
from localllm.web.pages.chat.thread import messages as m
from localllm.web.pages.chat.thread import views as v
from localllm.web.pages.chat.thread.handlers import (
    MAX_BODY_BYTES,
    page_with_error,
    refused_in_place,
    requested_message,
    until_written,
)
from localllm.web.pages.chat.thread.messages import ChatMessage, OtherModel
from localllm.web.pages.frame.errors import StillWriting
from localllm.web.pages.frame.forms import fields_of, is_scripted
from localllm.web.pages.frame.state import html

STOP_S = 5.0
"""How long a reply that was not chosen may take to stop."""


async def answer_with(
    state: ChatState, owner: str, chat: Chat, message: StoredMessage, form: Mapping[str, str]
) -> Turn:
    """Answer a message with the form's `model`, and beside it with its `beside` if that is set. The chat keeps its own
    model. Raises `RequestError`, `ChatsUnavailable`.
    """
    try:
        return await _answer_with(state, owner, chat, message, form)
    except ChatFull as full:  # its ways on would answer with the chat's own model
        raise ContextTooLong(full.what, full.why, full.hint) from full


async def _answer_with(
    state: ChatState, owner: str, chat: Chat, message: StoredMessage, form: Mapping[str, str]
) -> Turn:
    names = [name for name in (form.get("model", "").strip(), form.get("beside", "").strip()) if name]
    pages = state.pages
    entries = [pages.elsewhere(name) or await pages.manager.register.look_up(name) for name in names]
    if len(names) < 2:
        if not names:
            raise InvalidParameter("No model is chosen.", hint="Choose one from the list.", param="model")
        return await regenerate(state, owner, chat, message, form, once=True)
    if entries[0] == entries[1]:
        raise InvalidParameter("Choose two different models.", f"Both are {names[0]}.", param="beside")
    parent_id = message.id if message.role == "user" else message.parent_id
    if parent_id is None:
        raise InvalidParameter("This reply answers no message.", hint="Compare the models on one of your messages.")
    with state.replies.lock(chat.id):
        return await _compare(state, owner, chat, parent_id, names, form)


async def _compare(
    state: ChatState, owner: str, chat: Chat, parent_id: str, names: list[str], form: Mapping[str, str]
) -> Turn:
    settings = {name: typed({**form, "model": name}, chat.settings) for name in names}
    in_turn = sorted(names, key=lambda name: not state.picker.is_ready(name))  # one that is loaded answers first
    at_once = in_turn if state.picker.is_ready(in_turn[1]) else in_turn[:1]
    async with AsyncExitStack() as stack:
        claims = {name: await stack.enter_async_context(claimed(state, owner, settings[name])) for name in at_once}
        read = messages_of(settings[names[0]].get("system", ""), await history(state, chat, parent_id))
        for name, claim in claims.items():
            if claim.served is not None:  # refuses a chat that is too long before anything is stored
                claim.prompt = await prompt_of(claim.served, read, settings[name])
        found = {
            name: await with_passages(state, chat, parent_id, read, settings[name], claims[name]) for name in claims
        }
        found = {name: found.get(name, found[in_turn[0]]) for name in names}
        details = [
            {"model": claims[name].name if name in claims else name, "finish_reason": "", **found[name][1]}
            for name in names
        ]
        stored = await state.store.call(Chats.compare, chat.id, parent_id, details)
        messages = dict(zip(names, stored, strict=True))
        chat = await state.store.call(Chats.get, owner, chat.id)
        writings = {}
        for name, claim in claims.items():  # from here on the replies own the leases, so nothing may fail
            reply, (read, sources) = reply_of(claim, messages[name].id), found[name]
            writing = writings[name] = ActiveReply(owner, chat.id, messages[name], reply, kept=sources)
            state.replies.add(writing)
            start(writing, claim, read, settings[name])
        for name in in_turn[len(claims) :]:
            first, reply = writings[in_turn[0]].reply, Reply(f"chat-{messages[name].id}", name, 0)
            read, sources = found[name]
            writings[name] = ActiveReply(owner, chat.id, messages[name], reply, kept=sources)
            state.replies.add(writings[name])
            start(writings[name], claim_later(state, owner, name, first.ended, reply.announce), read, settings[name])
            reply.announce(f"{name} has to be loaded: it answers after {first.model}.")
        return Turn(chat, None, writings[names[0]])


async def stop_others(state: ChatState, chat: Chat, message: StoredMessage) -> bool:
    """Stop the replies that are compared with the chosen one; return whether it is compared. Raises `StillWriting` if
    one does not stop.
    """
    parent = await state.store.call(Chats.message, chat.id, message.parent_id) if message.parent_id else None
    if parent is None or message.id not in parent.details.get("compared", []):
        return False
    others = [each for each in state.replies.unfinished(chat.id) if each.message.id != message.id]
    for each in others:
        each.reply.cancel()
    try:
        async with asyncio.timeout(STOP_S):
            for each in others:
                await each.reply.ended.wait()
    except TimeoutError:
        raise StillWriting("The other reply has not stopped yet.", hint="Try again in a moment.") from None
    return True


ONE = "/c/{conversation_id:str}/m/{message_id:str}"
Ask = Callable[[ChatState, str, Chat, StoredMessage, Mapping[str, str]], Awaitable[Turn]]


@get(ONE)
async def show_message(request: Request[Any, Any, Any]) -> Response[Any]:
    """Show one message, to replace a cancelled edit form."""
    chat, message = await requested_message(request)
    if not is_scripted(request):
        return Redirect(f"/c/{chat.id}#m-{message.id}", status_code=303)
    replies = chat_state(request).replies
    return html(m.one_message(chat.id, replies.current(message), replies.get(message.id)))


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
    return html(ChatMessage(message.id, message.role, model=model, edit=m.edit_form(chat.id, message)))


@post(f"{ONE}/edit", status_code=200, request_max_body_size=MAX_BODY_BYTES)
async def edit_message(request: Request[Any, Any, Any]) -> Response[Any]:
    """Send an edited message as a branch beside the original; save an edited reply as a version of it."""
    chat, message = await requested_message(request)
    if message.role == "user":
        return await _answered(request, turns.edit)
    edited = await edit_reply(chat_state(request), chat, message, await fields_of(request))
    return await _updated_page(request, chat, "Version saved", f"#m-{edited.id}")


@post(f"{ONE}/regenerate", status_code=200, request_max_body_size=MAX_BODY_BYTES)
async def regenerate_message(request: Request[Any, Any, Any]) -> Response[Any]:
    """Write another reply beside this one."""
    return await _answered(request, turns.regenerate)


@post(f"{ONE}/continue", status_code=200, request_max_body_size=MAX_BODY_BYTES)
async def continue_message(request: Request[Any, Any, Any]) -> Response[Any]:
    """Continue a reply that was cut off."""
    return await _answered(request, turns.continue_reply)


@post(f"{ONE}/results", status_code=200, request_max_body_size=MAX_BODY_BYTES)
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
    compares, only = "compare" in request.query_params, other if len(names) == 2 else ""
    form = OtherModel(url, names, own, only, compares=True) if compares else OtherModel(url, names, other)
    return html(form if is_scripted(request) else await v.panel_page(request, chat.title, form))


@post(f"{ONE}/answer", status_code=200, request_max_body_size=MAX_BODY_BYTES)
async def answer_with_other(request: Request[Any, Any, Any]) -> Response[Any]:
    """Have the message answered by another model, or by two whose replies are shown beside each other."""
    return await _answered(request, answer_with)


@get(f"{ONE}/rating")
async def rating_form(request: Request[Any, Any, Any]) -> Response[Any]:
    """Show the form that rates a reply."""
    chat, message = await requested_message(request)
    kept = message.details.get("rating", {})
    form = m.RatingForm(f"/c/{chat.id}/m/{message.id}", kept.get("rating", "good"), kept.get("note", ""))
    return html(form if is_scripted(request) else await v.panel_page(request, chat.title, form))


@post(f"{ONE}/rating", status_code=200)
async def rate_message(request: Request[Any, Any, Any]) -> Response[Any]:
    """Keep what a person thinks of a reply, or take it back."""
    chat, message = await requested_message(request)
    form = await fields_of(request)
    rating, note = form.get("rating", ""), form.get("note", "").strip()
    if message.role != "assistant" or not chat_state(request).replies.current(message).details.get("finish_reason"):
        raise InvalidParameter("Only answers that are complete can be rated.", param="rating")
    if rating not in get_args(m.Rating):
        raise InvalidParameter(f"An answer is not rated {rating[:20]!r}.", hint="Choose good or bad.", param="rating")
    if len(note) > m.MAX_NOTE_CHARS:
        why = f"It has {len(note):,} characters; a note has at most {m.MAX_NOTE_CHARS:,}."
        raise InvalidParameter("The note is too long.", why, "Shorten it.", param="note")
    await chat_state(request).store.call(Chats.rate, message.id, rating, note)
    return await _updated_page(request, chat, f"Rated {rating}" if rating else "Rating removed", f"#m-{message.id}")


@post(f"{ONE}/select", status_code=200)
async def select_version(request: Request[Any, Any, Any]) -> Response[Any]:
    """Show the branch with this message. Of replies that are compared, it is the one that is kept."""
    state = chat_state(request)
    chat, message = await requested_message(request)
    compared = await stop_others(state, chat, message)
    with state.replies.lock(chat.id, beside=message.id if compared else ""):
        await state.store.call(Chats.select, chat.id, message.id)
    at, count = message.versions.index(message.id) + 1, len(message.versions)
    return await _updated_page(request, chat, f"Version {at} of {count}", f"#m-{message.id}", is_redrawn=compared)


@post(f"{ONE}/fork", status_code=200)
async def fork_chat(request: Request[Any, Any, Any]) -> Response[Any]:
    """Copy the branch up to this message into a new chat, and open it."""
    chat, message = await requested_message(request)
    copy = await fork(chat_state(request), owner_of(request), chat, message)
    if is_scripted(request):
        return Response(None, status_code=200, headers={"HX-Redirect": f"/c/{copy.id}"})
    return Redirect(f"/c/{copy.id}", status_code=303)


@post(f"{ONE}/delete", status_code=200)
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
        refusal = w.refusal(full, request.url.path, chat, field_id=field_id)
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
    return html(replace(await v.update(request, chat, announcement, undo), is_redrawn=is_redrawn))


HANDLERS = (
    show_message,
    raw_message,
    edit_form,
    edit_message,
    regenerate_message,
    continue_message,
    send_results,
    other_models,
    answer_with_other,
    rating_form,
    rate_message,
    select_version,
    fork_chat,
    delete_message,
)
