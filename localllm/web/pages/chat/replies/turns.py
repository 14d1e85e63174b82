"""Turn an action in a chat into a request to the engine, in the same way as the API does.

A new message, an edited message, a regenerated reply and a continued reply: each starts a reply. A reply edited by the
user and a chat copied up to one message need no model. The model reads the shown branch from the first message that is
not left out.
Does not know: HTTP, templates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from localllm.errors import InvalidParameter
from localllm.units import format_count
from localllm.web.pages.chat.composer.settings import MAX_MESSAGE_CHARS, results_of, typed
from localllm.web.pages.chat.files.attachments import Attachment
from localllm.web.pages.chat.files.long_files import keep_long_files, resumed, sources_of, with_passages
from localllm.web.pages.chat.files.pictures import with_pictures
from localllm.web.pages.chat.replies.active import ActiveReply
from localllm.web.pages.chat.replies.claims import Claim, claimed, reply_of, served_for, start
from localllm.web.pages.chat.replies.messages import (
    SUMMARY_OF,
    first_read,
    is_summary,
    is_typed,
    messages_of,
    with_files,
)
from localllm.web.pages.chat.replies.prompt import ChatFull, beginning_that_fits, can_leave_out, prompt_of
from localllm.web.pages.chat.replies.summaries import rewrite_summary
from localllm.web.pages.chat.state import ChatState
from localllm.web.pages.chat.store import Chat, Chats, Project, StoredMessage
from localllm.web.pages.chat.store.records import ChatNotFound
from localllm.web.pages.chat.store.tables import new_id
from localllm.web.pages.frame.errors import MessageTooLong, StillWriting


async def history(state: ChatState, chat: Chat, leaf: str | None) -> list[StoredMessage]:
    """Return the messages that lead to a leaf, in their current state, without those that were left out."""
    branch = await state.store.call(Chats.branch, chat.id, leaf)
    messages = [state.replies.current(message) for message in branch.messages]
    return await with_pictures(state.store, chat, messages[first_read(messages, branch.num_left_out) :])


def too_long(
    what: str, length: int, limit: int = MAX_MESSAGE_CHARS, hint: str = "Send a part of it, or use the API."
) -> MessageTooLong:
    why = f"It has {format_count(length)} characters; at most {format_count(limit)} are allowed here."
    return MessageTooLong(f"{what} is too long.", why, hint)


TITLE_CHARS = 60
_PAGE_ID = re.compile(r"[\w-]{16}")
FULL, LEAVE_OUT = "full", "leave-out"
"""The form's field that says what to do if the chat is full, and its only value."""

Read = list[dict[str, Any]]
"""The messages that a chat template reads."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The result of an action."""

    chat: Chat
    user: StoredMessage | None  # the new message that is answered; None: the message existed before
    writing: ActiveReply


async def ask(state: ChatState, owner: str, form: Mapping[str, str], files: Sequence[Attachment] = ()) -> Turn:
    """Add a message to a chat, or to a new one. Raises `ChatFull`, `RequestError`, `ChatsUnavailable`."""
    text = checked_message(form, or_nothing=bool(files))
    new = typed_message(text, files)
    if form.get("conversation"):
        chat = await state.store.call(Chats.get, owner, form["conversation"])
        return await _send(state, owner, chat, chat.leaf, new, form)
    chat_id = form.get("begins", "")
    if not _PAGE_ID.fullmatch(chat_id):
        chat_id = new_id()
    begun = None
    with suppress(ChatNotFound):
        begun = await state.store.call(Chats.get, owner, chat_id)
    if begun is not None:  # by a message that left the page just before this one
        return await _send(state, owner, begun, begun.leaf, new, form)
    settings = typed(form, {})
    with state.replies.lock(chat_id):
        async with claimed(state, owner, settings) as claim:
            read = await _fit(state, owner, None, [], new, settings, claim, form)
            title = title_of(text or files[0].name)
            chat = await state.store.call(Chats.create, owner, title, settings, form.get("project", ""), chat_id)
            turn = await _answer(state, owner, chat, None, new, read, settings, claim)
            state.titles.write_after(owner, chat, text, turn.writing.reply)
            return turn


async def edit(state: ChatState, owner: str, chat: Chat, message: StoredMessage, form: Mapping[str, str]) -> Turn:
    """Answer an edited message, as a branch beside the original."""
    if not is_typed(message):
        raise InvalidParameter("Only your own messages can be edited.", hint="A reply can be regenerated instead.")
    text = checked_message(form, or_nothing=bool({"files", "pictures"} & message.details.keys()))
    [message] = await with_pictures(state.store, chat, [message])
    new = StoredMessage("", None, "user", text, message.details)
    return await _send(state, owner, chat, message.parent_id, new, form)


async def send_results(
    state: ChatState, owner: str, chat: Chat, message: StoredMessage, form: Mapping[str, str]
) -> Turn:
    """Answer the results of a reply's tool calls, typed or from a server: the model continues with them."""
    results = results_of(state.replies.current(message), form)
    text = "\n\n".join(f"{each['name']}: {each['text']}" for each in results)
    new = StoredMessage("", None, "user", text, {"results": results})
    return await _send(state, owner, chat, message.id, new, form)


async def regenerate(
    state: ChatState, owner: str, chat: Chat, message: StoredMessage, form: Mapping[str, str], *, once: bool = False
) -> Turn:
    """Write another reply beside this one, or a first reply to a message without one. `once`: the form's settings are
    for this reply, and the chat keeps its own.
    """
    settings = typed(form, chat.settings)
    parent = message.id if message.role == "user" else message.parent_id
    with state.replies.lock(chat.id):
        async with claimed(state, owner, settings) as claim:
            if is_summary(message):
                return Turn(chat, None, await rewrite_summary(state, owner, chat, message, claim))
            messages = await history(state, chat, parent)
            read = await _fit(state, owner, chat, messages, None, settings, claim, form)
            if not once:
                await configure(state, owner, chat, settings)
            return await _begin(state, owner, chat, parent, None, read, settings, claim)


async def continue_reply(
    state: ChatState, owner: str, chat: Chat, message: StoredMessage, form: Mapping[str, str]
) -> Turn:
    """Continue a reply that was cut off."""
    message = state.replies.current(message)
    is_last = message.role == "assistant" and chat.leaf == message.id
    if not is_last or not message.text or "calls" in message.details or is_summary(message):
        raise InvalidParameter("Only the last reply of a branch can be continued.", hint="Write a message instead.")
    settings = typed(form, chat.settings)
    with state.replies.lock(chat.id):
        async with claimed(state, owner, settings) as claim:
            messages = [*await history(state, chat, message.parent_id), message]
            read = await _fit(state, owner, chat, messages, None, settings, claim, form, goes_on=True)
            read = await resumed(read, message.details, settings, claim)
            reply = reply_of(claim, message.id)
            figures = {name: message.details[name] for name in FIGURES if name in message.details}
            writing = ActiveReply(owner, chat.id, message, reply, figures)
            writing.kept = sources_of(message.details)
            said = message.details
            thought = (said.get("reasoning", ""), said.get("reasoning_s", 0.0), said.get("reasoning_tokens", 0))
            await reply.continue_from(message.text, *thought)
            state.replies.add(writing)
            start(writing, claim, read, settings, goes_on=True)
            return Turn(chat, None, writing)


async def _send(
    state: ChatState, owner: str, chat: Chat, parent: str | None, new: StoredMessage, form: Mapping[str, str]
) -> Turn:
    settings = typed(form, chat.settings)
    with state.replies.lock(chat.id):
        async with claimed(state, owner, settings) as claim:
            messages = await history(state, chat, parent)
            read = await _fit(state, owner, chat, messages, new, settings, claim, form)
            await configure(state, owner, chat, settings)
            return await _answer(state, owner, chat, parent, new, read, settings, claim)


async def _answer(
    state: ChatState, owner: str, chat: Chat, parent: str | None, new: StoredMessage, read: Read,
    settings: Mapping[str, str], claim: Claim,
) -> Turn:  # fmt: skip
    details = await keep_long_files(state, chat.id, new.details)
    user = await state.store.call(Chats.add, chat.id, parent, "user", new.text, details)
    return await _begin(state, owner, chat, user.id, user, read, settings, claim)


async def _begin(
    state: ChatState, owner: str, chat: Chat, parent: str | None, user: StoredMessage | None, read: Read,
    settings: Mapping[str, str], claim: Claim,
) -> Turn:  # fmt: skip
    read, sources = await with_passages(state, chat, parent, read, settings, claim)
    details = {"model": claim.name, "finish_reason": "", **sources}
    message = await state.store.call(Chats.add, chat.id, parent, "assistant", "", details)
    message = await state.store.call(Chats.message, chat.id, message.id)
    chat = await state.store.call(Chats.get, owner, chat.id)
    writing = ActiveReply(owner, chat.id, message, reply_of(claim, message.id), kept=sources)
    state.replies.add(writing)
    start(writing, claim, read, settings)  # from here on the reply owns the lease, so nothing may fail
    return Turn(chat, user, writing)


async def configure(state: ChatState, owner: str, chat: Chat, settings: Mapping[str, str]) -> None:
    """Store the settings of a chat if they changed."""
    if settings != chat.settings:
        await state.store.call(Chats.configure, owner, chat.id, settings)


# What the model reads -----------------------------------------------------------------------------------------------


async def _fit(
    state: ChatState, owner: str, chat: Chat | None, messages: Sequence[StoredMessage], new: StoredMessage | None,
    settings: Mapping[str, str], claim: Claim, form: Mapping[str, str], *, goes_on: bool = False,
) -> Read:  # fmt: skip
    """Return what the model will read of these messages and the new one, before anything is stored.

    If that does not fit into the context, the oldest messages are left out of the chat where the form asks for it;
    otherwise `ChatFull` is raised. A model that is still loading cannot count: then the reply checks the same.
    """
    settings = await with_common_parts(state, owner, chat, form, settings)
    last, system = [new] if new is not None else [], settings.get("system", "")
    read = messages_of(system, [*messages, *last])
    served = claim.served
    if served is None or claim.waits_for_tools:
        return read
    settings = (await claim.tools_for(served, settings)).in_settings(settings)
    try:
        claim.prompt = await prompt_of(served, read, settings, goes_on=goes_on)
        return read
    except ChatFull as full:
        full.can_leave_out = await can_leave_out(served, settings, messages, new, goes_on=goes_on)
        if chat is None or not full.can_leave_out or form.get(FULL) != LEAVE_OUT:
            raise
        start = await beginning_that_fits(served, settings, messages, new, goes_on=goes_on)
        await state.store.call(Chats.leave_out, owner, chat.id, messages[start - 1].id)
        read = messages_of(system, [*messages[start:], *last])
        claim.prompt = await prompt_of(served, read, settings, goes_on=goes_on)
        return read


async def require_fit(state: ChatState, owner: str, form: Mapping[str, str], files: Sequence[Attachment]) -> None:
    """Raise `ChatFull` if the composer's message would not fit. Nothing is loaded, stored or sent."""
    chat = await state.store.call(Chats.get, owner, form["conversation"]) if form.get("conversation") else None
    settings: Mapping[str, str] = typed(form, chat.settings if chat is not None else {})
    served = served_for(state, settings)
    if served is None:
        return
    settings = await with_common_parts(state, owner, chat, form, settings)
    messages = await history(state, chat, chat.leaf) if chat is not None else []
    new = typed_message(form.get("message", "").strip().replace("\r\n", "\n"), files)
    try:
        await prompt_of(served, messages_of(settings.get("system", ""), [*messages, new]), settings)
    except ChatFull as full:
        full.can_leave_out = await can_leave_out(served, settings, messages, new)
        raise


def typed_message(text: str, files: Sequence[Attachment]) -> StoredMessage:
    """Return a message of the composer as it will be stored, without its id and place."""
    texts = [file.details() for file in files if not file.pictures]
    pictures = [picture for file in files for picture in file.pictures]
    details = {"files": texts} if texts else {}
    details |= {"pictures": pictures} if pictures else {}
    return StoredMessage("", None, "user", text, details)


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


FIGURES = ("prompt_tokens", "completion_tokens", "ttft_s", "edited")
"""Details that a continued reply begins with."""
KEPT = ("model", "server", "calls", SUMMARY_OF)
"""Details that an edited version has, too. Figures and reasoning belong to the model's own text."""


async def edit_reply(state: ChatState, chat: Chat, message: StoredMessage, form: Mapping[str, str]) -> StoredMessage:
    """Add the user's text as another version of a reply. Raises `RequestError`, `ChatsUnavailable`."""
    text = checked_message(form, or_nothing="calls" in message.details)
    details = {name: message.details[name] for name in KEPT if name in message.details}
    details |= {"edited": True, "finish_reason": "stop"}
    with state.replies.lock(chat.id):
        return await state.store.call(Chats.add, chat.id, message.parent_id, "assistant", text, details)


async def fork(state: ChatState, owner: str, chat: Chat, message: StoredMessage) -> Chat:
    """Copy the messages up to one into a new chat. Raises `StillWriting` if one of them is still being written."""
    branch = await state.store.call(Chats.branch, chat.id, message.id)
    if any(state.replies.get(each.id) for each in branch.messages):
        raise StillWriting("A reply is still being written.", hint="Stop it, or wait until it ends.")
    return await state.store.call(Chats.fork, owner, chat.id, message.id)


async def named_project(state: ChatState, owner: str, form: Mapping[str, str]) -> Project | None:
    """Return the project that a form or a query names; None if it names none. Raises `ProjectNotFound`."""
    project_id = form.get("project", "")
    return await state.store.call(Chats.project, owner, project_id) if project_id else None


async def with_common_parts(
    state: ChatState, owner: str, chat: Chat | None, form: Mapping[str, str], settings: Mapping[str, str]
) -> dict[str, str]:
    """Return the settings as the model reads them: the memory and the files of the chat's project follow the system
    prompt. `chat` None: a new chat, whose form names the project. Raises `ProjectNotFound`.
    """
    project_id, files = chat.project_id if chat is not None else form.get("project"), list[tuple[str, str]]()
    if project_id:
        project = await state.store.call(Chats.project, owner, project_id)
        files = [(file.name, file.text) for file in await state.store.call(Chats.project_files, project.id)]
    memory = (await state.store.call(Chats.memory, owner)).as_read
    parts = [settings.get("system", ""), memory, with_files("", files)]
    return {**settings, "system": "\n\n".join(filter(None, parts))} if memory or files else dict(settings)
