"""What the model reads of a chat: the messages of the shown branch, in the form of a chat template's input.

Does not know: HTTP, templates, which model reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localllm.units import format_count
from localllm.web.pages.chat.projects import files_of_chat, with_project_files
from localllm.web.pages.chat.settings import MAX_MESSAGE_CHARS
from localllm.web.pages.chat.state import ChatState
from localllm.web.pages.chat.store import Chat, Chats
from localllm.web.pages.chat.template_messages import messages_of, num_chars
from localllm.web.pages.frame.errors import MessageTooLong

MAX_CONVERSATION_CHARS = 2_000_000
"""A longer branch takes no further message, whatever the model's context is."""


async def history(
    state: ChatState, chat: Chat, leaf: str | None, settings: Mapping[str, str], new_chars: int = 0
) -> list[dict[str, Any]]:
    """Return the messages for the chat template; `new_chars` will be added."""
    branch = await state.store.call(Chats.branch, chat.id, leaf)
    messages = [state.replies.current(message) for message in branch.messages]
    files = await files_of_chat(state, chat)
    length = sum(num_chars(message) for message in messages) + sum(len(text) for _, text in files)
    if length + new_chars > MAX_CONVERSATION_CHARS:
        raise too_long("This chat", length + new_chars, MAX_CONVERSATION_CHARS, "Start a new chat.")
    return with_project_files(messages_of(settings.get("system", ""), messages), files)


def too_long(
    what: str, length: int, limit: int = MAX_MESSAGE_CHARS, hint: str = "Send a part of it, or use the API."
) -> MessageTooLong:
    why = f"It has {format_count(length)} characters; at most {format_count(limit)} are allowed here."
    return MessageTooLong(f"{what} is too long.", why, hint)
