"""Messages that the model reads of a chat: the shown branch from the first message that is not left out.

Does not know: HTTP, templates, which model reads it.
"""

from __future__ import annotations

from localllm.units import format_count
from localllm.web.pages.chat.readable import first_read
from localllm.web.pages.chat.settings import MAX_MESSAGE_CHARS
from localllm.web.pages.chat.state import ChatState
from localllm.web.pages.chat.store import Chat, Chats, StoredMessage
from localllm.web.pages.frame.errors import MessageTooLong


async def history(state: ChatState, chat: Chat, leaf: str | None) -> list[StoredMessage]:
    """Return the messages that lead to a leaf, in their current state, without those that were left out."""
    branch = await state.store.call(Chats.branch, chat.id, leaf)
    messages = [state.replies.current(message) for message in branch.messages]
    return messages[first_read(messages, branch.num_left_out) :]


def too_long(
    what: str, length: int, limit: int = MAX_MESSAGE_CHARS, hint: str = "Send a part of it, or use the API."
) -> MessageTooLong:
    why = f"It has {format_count(length)} characters; at most {format_count(limit)} are allowed here."
    return MessageTooLong(f"{what} is too long.", why, hint)
