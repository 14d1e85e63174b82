"""Turn an action in a chat into a request to the engine, in the same way as the API does.

A new message, an edited message, a regenerated reply and a continued reply: each starts a reply.
Does not know: HTTP, templates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.errors import InvalidParameter
from localllm.web.pages.chat.active_replies import ActiveReply
from localllm.web.pages.chat.attachments import Attachment
from localllm.web.pages.chat.claims import Claim, claimed, reply_of, start
from localllm.web.pages.chat.history import history, too_long
from localllm.web.pages.chat.long_files import keep_long_files, with_passages, with_sources
from localllm.web.pages.chat.settings import MAX_MESSAGE_CHARS, typed
from localllm.web.pages.chat.state import ChatState
from localllm.web.pages.chat.store import Chat, Chats, StoredMessage
from localllm.web.pages.chat.template_messages import num_chars, reply_message
from localllm.web.pages.chat.tools import results_of

TITLE_CHARS = 60
Said = tuple[str, Mapping[str, Any]]
"""A message's text, and the details stored with it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The result of an action."""

    chat: Chat
    user: StoredMessage | None  # the new message that is answered; None: the message existed before
    writing: ActiveReply


async def ask(state: ChatState, owner: str, form: Mapping[str, str], files: Sequence[Attachment] = ()) -> Turn:
    """Add a message to a chat, or to a new one. Raises `RequestError`, `ChatsUnavailable`."""
    text = checked_message(form, or_nothing=bool(files))
    details = {"files": [file.details() for file in files]} if files else {}
    if not form.get("conversation"):
        settings = typed(form, {})
        async with claimed(state, owner, settings) as claim:
            title = title_of(text or files[0].name)
            chat = await state.store.call(Chats.create, owner, title, settings)
            return await _answer(state, owner, chat, None, (text, details), settings, claim)
    chat = await state.store.call(Chats.get, owner, form["conversation"])
    return await _send(state, owner, chat, chat.leaf, (text, details), form)


async def edit(state: ChatState, owner: str, chat: Chat, message: StoredMessage, form: Mapping[str, str]) -> Turn:
    """Answer an edited message, as a branch beside the original."""
    if message.role != "user" or "results" in message.details:
        raise InvalidParameter("Only your own messages can be edited.", hint="A reply can be regenerated instead.")
    text = checked_message(form, or_nothing="files" in message.details)
    return await _send(state, owner, chat, message.parent_id, (text, message.details), form)


async def send_results(
    state: ChatState, owner: str, chat: Chat, message: StoredMessage, form: Mapping[str, str]
) -> Turn:
    """Answer the results of a reply's tool calls: the model continues with them."""
    results = results_of(state.replies.current(message), form)
    text = "\n\n".join(f"{each['name']}: {each['text']}" for each in results)
    return await _send(state, owner, chat, message.id, (text, {"results": results}), form)


async def regenerate(state: ChatState, owner: str, chat: Chat, message: StoredMessage, form: Mapping[str, str]) -> Turn:
    """Write another reply beside this one, or a first reply to a message without one."""
    settings = typed(form, chat.settings)
    parent = message.id if message.role == "user" else message.parent_id
    with state.replies.lock(chat.id):
        async with claimed(state, owner, settings) as claim:
            await _configure(state, owner, chat, settings)
            return await _begin(state, owner, chat, parent, None, settings, claim)


async def continue_reply(
    state: ChatState, owner: str, chat: Chat, message: StoredMessage, form: Mapping[str, str]
) -> Turn:
    """Continue a reply that was cut off."""
    message = state.replies.current(message)
    if message.role != "assistant" or chat.leaf != message.id or not message.text or "calls" in message.details:
        raise InvalidParameter("Only the last reply of a branch can be continued.", hint="Write a message instead.")
    settings = typed(form, chat.settings)
    with state.replies.lock(chat.id):
        async with claimed(state, owner, settings) as claim:
            said = message.details
            read = await history(state, chat, message.parent_id, settings)
            read = with_sources(read, said.get("sources"))
            reply = reply_of(claim, message.id)
            sources = {"sources": said["sources"]} if "sources" in said else {}
            writing = ActiveReply(owner, chat.id, message, reply, _figures_only(said), sources)
            thought = (said.get("reasoning", ""), said.get("reasoning_s", 0.0), said.get("reasoning_tokens", 0))
            await reply.continue_from(message.text, *thought)
            state.replies.add(writing)
            start(writing, claim, [*read, reply_message(message)], settings, goes_on=True)
            return Turn(chat, None, writing)


async def _send(
    state: ChatState, owner: str, chat: Chat, parent: str | None, said: Said, form: Mapping[str, str]
) -> Turn:
    settings = typed(form, chat.settings)
    with state.replies.lock(chat.id):
        async with claimed(state, owner, settings) as claim:
            await _configure(state, owner, chat, settings)
            return await _answer(state, owner, chat, parent, said, settings, claim)


async def _answer(
    state: ChatState, owner: str, chat: Chat, parent: str | None, said: Said, settings: Mapping[str, str], claim: Claim
) -> Turn:
    text, details = said
    new = num_chars(StoredMessage("", parent, "user", text, details))
    await history(state, chat, parent, settings, new)  # refuses a chat that is too long before saving
    details = await keep_long_files(state, chat.id, details)
    user = await state.store.call(Chats.add, chat.id, parent, "user", text, details)
    return await _begin(state, owner, chat, user.id, user, settings, claim)


async def _begin(
    state: ChatState, owner: str, chat: Chat, parent: str | None, user: StoredMessage | None,
    settings: Mapping[str, str], claim: Claim,
) -> Turn:  # fmt: skip
    read = await history(state, chat, parent, settings)
    read, sources = await with_passages(state, owner, chat, parent, read, claim)
    details = {"model": claim.name, "finish_reason": "", **sources}
    message = await state.store.call(Chats.add, chat.id, parent, "assistant", "", details)
    message = await state.store.call(Chats.message, chat.id, message.id)
    chat = await state.store.call(Chats.get, owner, chat.id)
    writing = ActiveReply(owner, chat.id, message, reply_of(claim, message.id), sources=sources)
    state.replies.add(writing)
    start(writing, claim, read, settings)  # from here on the reply owns the lease, so nothing may fail
    return Turn(chat, user, writing)


async def _configure(state: ChatState, owner: str, chat: Chat, settings: Mapping[str, str]) -> None:
    if settings != chat.settings:
        await state.store.call(Chats.configure, owner, chat.id, settings)


# Texts -------------------------------------------------------------------------------------------------------------


def checked_message(form: Mapping[str, str], *, or_nothing: bool = False) -> str:
    """Return the typed message, or the example that was clicked."""
    text = (form.get("message", "").strip() or form.get("example", "").strip()).replace("\r\n", "\n")
    if not text and not or_nothing:
        raise InvalidParameter("The message is empty.", hint="Type something first.", param="message")
    if len(text) > MAX_MESSAGE_CHARS:
        raise too_long("The message", len(text))
    return text


def title_of(text: str) -> str:
    """Return a first title: the beginning of the first message."""
    first = " ".join(text.split())
    return first if len(first) <= TITLE_CHARS else first[: TITLE_CHARS - 1].rstrip() + "…"


def _figures_only(details: Mapping[str, Any]) -> dict[str, Any]:
    return {name: details[name] for name in ("prompt_tokens", "completion_tokens", "ttft_s") if name in details}
