"""Changes that need no model: a reply's text edited by the user, and a chat copied up to one message.

Does not know: HTTP, templates, the engine.
"""

from __future__ import annotations

from collections.abc import Mapping

from localllm.web.pages.chat.readable import SUMMARY_OF
from localllm.web.pages.chat.state import ChatState
from localllm.web.pages.chat.store import Chat, Chats, StoredMessage
from localllm.web.pages.chat.turns import checked_message
from localllm.web.pages.frame.errors import StillWriting

KEPT = ("model", "calls", SUMMARY_OF)
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
