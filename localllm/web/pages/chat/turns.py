"""Turn an action in a chat into a request to the engine, in the same way as the API does.

A new message, an edited message, a regenerated reply and a continued reply: each starts a reply.
Does not know: HTTP, templates.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localllm.engine.client import GenerationRequest
from localllm.engine.request import RequestOptions
from localllm.errors import InvalidParameter, LocalLLMError, RequestError, UnsupportedOption
from localllm.serving.chat import CONTINUE, Conversation, Tools, calls_tools
from localllm.units import format_count
from localllm.web.pages.chat.active_replies import ActiveReply
from localllm.web.pages.chat.attachments import Attachment
from localllm.web.pages.chat.live_reply import Reply
from localllm.web.pages.chat.settings import MAX_MESSAGE_CHARS, sampling_params, typed
from localllm.web.pages.chat.state import ChatState
from localllm.web.pages.chat.store import Chat, Chats, StoredMessage
from localllm.web.pages.chat.template_messages import messages_of, num_chars, reply_message
from localllm.web.pages.chat.tools import read_tools, results_of
from localllm.web.pages.frame.errors import MessageTooLong

if TYPE_CHECKING:
    from localllm.serving.entry import Lease

MAX_CONVERSATION_CHARS = 2_000_000
"""A longer branch takes no further message, whatever the model's context is."""

MODEL_WAIT_S = 1.0
"""If the model takes longer to load, the reply waits for it and not the handler."""

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
    details = {"files": [{"name": file.name, "text": file.text} for file in files]} if files else {}
    if not form.get("conversation"):
        settings = typed(form, {})
        async with _claimed(state, owner, settings) as claim:
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
        async with _claimed(state, owner, settings) as claim:
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
        async with _claimed(state, owner, settings) as claim:
            history = await _history(state, chat, message.parent_id, settings)
            reply = _reply(claim, message.id)
            writing = ActiveReply(owner, chat.id, message, reply, _figures_only(message.details))
            said = message.details
            thought = (said.get("reasoning", ""), said.get("reasoning_s", 0.0), said.get("reasoning_tokens", 0))
            await reply.continue_from(message.text, *thought)
            state.replies.add(writing)
            _start(writing, claim, [*history, reply_message(message)], settings, goes_on=True)
            return Turn(chat, None, writing)


async def _send(
    state: ChatState, owner: str, chat: Chat, parent: str | None, said: Said, form: Mapping[str, str]
) -> Turn:
    settings = typed(form, chat.settings)
    with state.replies.lock(chat.id):
        async with _claimed(state, owner, settings) as claim:
            await _configure(state, owner, chat, settings)
            return await _answer(state, owner, chat, parent, said, settings, claim)


async def _answer(
    state: ChatState, owner: str, chat: Chat, parent: str | None, said: Said, settings: Mapping[str, str], claim: _Claim
) -> Turn:
    text, details = said
    new = num_chars(StoredMessage("", parent, "user", text, details))
    await _history(state, chat, parent, settings, new)  # refuses a chat that is too long before saving
    user = await state.store.call(Chats.add, chat.id, parent, "user", text, details)
    return await _begin(state, owner, chat, user.id, user, settings, claim)


async def _begin(
    state: ChatState, owner: str, chat: Chat, parent: str | None, user: StoredMessage | None,
    settings: Mapping[str, str], claim: _Claim,
) -> Turn:  # fmt: skip
    history = await _history(state, chat, parent, settings)
    details = {"model": claim.name, "finish_reason": ""}
    message = await state.store.call(Chats.add, chat.id, parent, "assistant", "", details)
    message = await state.store.call(Chats.message, chat.id, message.id)
    chat = await state.store.call(Chats.get, owner, chat.id)
    writing = ActiveReply(owner, chat.id, message, _reply(claim, message.id))
    state.replies.add(writing)
    _start(writing, claim, history, settings)  # from here on the reply owns the lease, so nothing may fail
    return Turn(chat, user, writing)


async def _configure(state: ChatState, owner: str, chat: Chat, settings: Mapping[str, str]) -> None:
    if settings != chat.settings:
        await state.store.call(Chats.configure, owner, chat.id, settings)


async def _history(
    state: ChatState, chat: Chat, leaf: str | None, settings: Mapping[str, str], new_chars: int = 0
) -> list[dict[str, Any]]:
    """Return the messages for the chat template; `new_chars` will be added."""
    branch = await state.store.call(Chats.branch, chat.id, leaf)
    messages = [state.replies.current(message) for message in branch.messages]
    length = sum(num_chars(message) for message in messages)
    if length + new_chars > MAX_CONVERSATION_CHARS:
        raise _too_long("This chat", length + new_chars, MAX_CONVERSATION_CHARS, "Start a new chat.")
    return messages_of(settings.get("system", ""), messages)


# The model --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Claim:
    """A requested model, which may still be loading."""

    name: str
    lease: asyncio.Task[Lease]
    cache_salt: str | None = None


async def _claim(state: ChatState, owner: str, settings: Mapping[str, str]) -> _Claim:
    """Request the model. Raises immediately if there is no such model, or if its load fails at once."""
    name = settings.get("model") or None
    lease = asyncio.create_task(state.pages.manager.acquire(name))
    try:
        await asyncio.wait({lease}, timeout=MODEL_WAIT_S)
    except asyncio.CancelledError:
        _release_claim(_Claim("", lease))
        raise
    if lease.done():
        found = lease.result()
        try:
            found.model.require("generate")
        except RequestError:
            found.release()
            raise
        return _Claim(found.model.name, lease, state.pages.cache_salt(owner))
    default = state.pages.manager.default
    return _Claim(name or (default.name if default else ""), lease, state.pages.cache_salt(owner))


@asynccontextmanager
async def _claimed(state: ChatState, owner: str, settings: Mapping[str, str]) -> AsyncIterator[_Claim]:
    """Request the model for the block, which passes the claim on or fails: then the claim is released."""
    claim = await _claim(state, owner, settings)
    try:
        yield claim
    except BaseException:
        _release_claim(claim)
        raise


def _release_claim(claim: _Claim) -> None:
    """Release the claim after a failure."""
    claim.lease.cancel()
    claim.lease.add_done_callback(_release)


def _release(lease: asyncio.Task[Lease]) -> None:
    if not lease.cancelled() and lease.exception() is None:
        lease.result().release()


def _reply(claim: _Claim, message_id: str) -> Reply:
    ready = claim.lease.result().model if claim.lease.done() else None
    return Reply(f"chat-{message_id}", claim.name, ready.plan.max_model_len if ready else 0)


def _start(
    writing: ActiveReply,
    claim: _Claim,
    messages: list[dict[str, Any]],
    settings: Mapping[str, str],
    *,
    goes_on: bool = False,
) -> None:
    """Start the reply in a task: the model may have to be loaded first, and the user sees the chat meanwhile."""
    reply = writing.reply
    if not claim.lease.done():
        reply.announce(f"Loading {claim.name} …")

    async def begin() -> None:
        try:
            lease = await claim.lease
        except asyncio.CancelledError:
            _release_claim(claim)
            raise
        except LocalLLMError as error:
            reply.fail(error)
            return
        try:
            served = lease.model
            served.require("generate")
            reply.model, reply.context_tokens = served.name, served.plan.max_model_len
            params, tools = sampling_params(served.sampling_defaults, settings), read_tools(settings.get("tools", ""))
            if tools and not calls_tools(served):
                raise _without_tools(served.name)
            template = CONTINUE if goes_on else {"add_generation_prompt": True}
            conversation = Conversation(messages, template, Tools(tools, tools))
            prompt_token_ids = await asyncio.to_thread(lambda: conversation.encode(conversation.prompt(served), served))
            params, new_reader = conversation.reading(served, params, prompt_token_ids)
            asked = GenerationRequest(
                reply.request_id, prompt_token_ids, params, options=RequestOptions(cache_salt=claim.cache_salt)
            )
            reply.start(served.generator, asked, new_reader and new_reader())
        except BaseException as error:
            lease.release()
            if not isinstance(error, LocalLLMError):
                raise
            reply.fail(error)
        else:
            reply.when_done(lease.release)

    reply.prepare(begin())


def _without_tools(name: str) -> UnsupportedOption:
    return UnsupportedOption(
        f"{name} cannot call tools.",
        "Its chat template does not support tools, or its tool call format is unknown.",
        "Empty the list of tools in the settings, or choose another model.",
    )


# Texts -------------------------------------------------------------------------------------------------------------


def checked_message(form: Mapping[str, str], *, or_nothing: bool = False) -> str:
    """Return the typed message, or the example that was clicked."""
    text = (form.get("message", "").strip() or form.get("example", "").strip()).replace("\r\n", "\n")
    if not text and not or_nothing:
        raise InvalidParameter("The message is empty.", hint="Type something first.", param="message")
    if len(text) > MAX_MESSAGE_CHARS:
        raise _too_long("The message", len(text))
    return text


def title_of(text: str) -> str:
    """Return a first title: the beginning of the first message."""
    first = " ".join(text.split())
    return first if len(first) <= TITLE_CHARS else first[: TITLE_CHARS - 1].rstrip() + "…"


def _too_long(
    what: str, length: int, limit: int = MAX_MESSAGE_CHARS, hint: str = "Send a part of it, or use the API."
) -> MessageTooLong:
    why = f"It has {format_count(length)} characters; at most {format_count(limit)} are allowed here."
    return MessageTooLong(f"{what} is too long.", why, hint)


def _figures_only(details: Mapping[str, Any]) -> dict[str, Any]:
    return {name: details[name] for name in ("prompt_tokens", "completion_tokens", "ttft_s") if name in details}
