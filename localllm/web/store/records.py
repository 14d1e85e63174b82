"""What the store hands out, plain and frozen, and what it raises.

Does not know: SQL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from localllm.errors import LocalLLMError, RequestError

Role = Literal["user", "assistant"]


class ChatsUnavailable(LocalLLMError):
    """The file with the chats cannot be read or written now; what is on the page and in memory stays."""

    status, code, type = 503, "chats_unavailable", "unavailable_error"


class ChatNotFound(RequestError):
    """A chat or message that never was here, or was deleted."""

    status, code = 404, "chat_not_found"


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation without its messages."""

    id: str
    title: str
    pinned: bool
    leaf: str | None  # the last message of the branch that is shown; None: no message yet
    settings: Mapping[str, str]  # system prompt, sampling and model, as they were typed
    updated_s: float  # Unix time


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the tree."""

    id: str
    parent_id: str | None
    role: Role
    text: str
    details: Mapping[str, Any] = field(default_factory=dict)  # what there is beside the text: model, figures, error
    created_s: float = 0.0  # Unix time
    versions: tuple[str, ...] = ()  # ids of those with the same parent, itself included, oldest first


@dataclass(frozen=True, slots=True)
class Branch:
    """A stretch of the messages that lead to a leaf, first to last."""

    messages: tuple[Message, ...]
    num_earlier: int = 0  # of the same branch, before these
    num_later: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """A chat that a search found; `snippet` is cut in three around the first word that was found."""

    chat: Chat
    snippet: tuple[str, str, str] = ("", "", "")
