"""One message answered by another model, or by two models whose replies are shown beside each other.

Models that are loaded answer at the same time. A model that has to be loaded is requested once the other reply has
ended: memory may hold only one of them, and a load would then end the reply that is being written. A model that does
not fit at all says so, with numbers, in its own reply.
Does not know: HTTP, templates.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack

from localllm.errors import ContextTooLong, InvalidParameter
from localllm.web.pages.chat.active_replies import ActiveReply
from localllm.web.pages.chat.claims import claim_later, claimed, reply_of, start
from localllm.web.pages.chat.history import history
from localllm.web.pages.chat.live_reply import Reply
from localllm.web.pages.chat.long_files import with_passages
from localllm.web.pages.chat.prompts import ChatFull, prompt_of
from localllm.web.pages.chat.settings import typed
from localllm.web.pages.chat.state import ChatState
from localllm.web.pages.chat.store import Chat, Chats, StoredMessage
from localllm.web.pages.chat.template_messages import messages_of
from localllm.web.pages.chat.turns import Turn, regenerate
from localllm.web.pages.frame.errors import StillWriting

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
    entries = [await state.pages.manager.register.look_up(name) for name in names]
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
