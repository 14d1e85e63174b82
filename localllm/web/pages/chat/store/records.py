"""The store's plain, frozen values, the errors it raises, and the tree of a chat's messages.

An edited message is a sibling of the original, and a second reply a sibling of the first.
Does not know: SQL.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from localllm.errors import LocalLLMError, RequestError

Role = Literal["user", "assistant"]
INTRODUCTION = "The user asked you to remember, in every chat:"


class ChatsUnavailable(LocalLLMError):
    """The file with the chats cannot be read or written at the moment; chats in memory and on the page remain."""

    status, code, type = 503, "chats_unavailable", "unavailable_error"


class ChatNotFound(RequestError):
    """The chat or message does not exist, or was deleted."""

    status, code = 404, "chat_not_found"


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation without its messages."""

    id: str
    title: str
    pinned: bool
    leaf: str | None  # last message of the shown branch; None: no message yet
    settings: Mapping[str, str]  # system prompt, sampling and model, as typed
    updated_s: float  # Unix time
    archived: bool = False
    project_id: str | None = None
    project_name: str = ""


@dataclass(frozen=True, slots=True)
class SavedPrompt:
    """A named prompt: text for the composer, settings for a chat, or both."""

    id: str
    name: str
    text: str
    settings: Mapping[str, str]  # as of a chat


@dataclass(frozen=True, slots=True)
class Project:
    """A group of chats with common settings and files."""

    id: str
    name: str
    settings: Mapping[str, str]  # those with which a new chat of the project starts
    num_chats: int = 0


@dataclass(frozen=True, slots=True)
class ProjectFile:
    """A file that the model reads in every chat of a project."""

    id: str
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class UserMemory:
    """Notes of a user that the model reads in every chat."""

    is_on: bool = False
    text: str = ""  # a note on each line

    @property
    def as_read(self) -> str:
        """The notes as the model reads them; empty if the memory is off or empty."""
        if not self.is_on or not self.text:
            return ""
        return "\n".join((INTRODUCTION, *(f"- {line}" for line in self.text.splitlines())))


@dataclass(frozen=True, slots=True)
class ChatLink:
    """A link with which anybody who has it may read a chat, up to one message."""

    chat_id: str
    title: str  # of the chat
    secret: str
    leaf: str  # the last message that it shows
    created_s: float  # Unix time


@dataclass(frozen=True, slots=True)
class ProjectFolder:
    """A folder of this machine that the chats of a project search."""

    project_id: str
    path: str
    chat_id: str  # of the chat to which its files belong; no list shows it


@dataclass(frozen=True, slots=True)
class ChatTotals:
    """The sums over every message of a chat, on all branches."""

    num_messages: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    duration_s: float  # until the first token and from there to the last, of every reply


@dataclass(frozen=True, slots=True)
class Restored:
    """A chat, project or prompt that undo has restored, by its `id`."""

    kind: Literal["chat", "message", "project", "prompt"]
    id: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """One message of the tree."""

    id: str
    parent_id: str | None
    role: Role
    text: str
    details: Mapping[str, Any] = field(default_factory=dict)  # further data beside the text: model, statistics, error
    created_s: float = 0.0  # Unix time
    versions: tuple[str, ...] = ()  # ids of the messages with the same parent, this one included, oldest first


@dataclass(frozen=True, slots=True)
class Branch:
    """A range of the messages that lead to a leaf, first to last."""

    messages: tuple[StoredMessage, ...]
    num_earlier: int = 0  # number of earlier messages of the same branch
    num_later: int = 0
    num_left_out: int = 0  # number of messages at the start of the whole branch that the model does not read any more
    beside: tuple[StoredMessage, ...] = ()  # other replies that are shown beside the last message


@dataclass(frozen=True, slots=True)
class Consent:
    """The decision of an owner about a tool of a server."""

    server: str
    tool: str
    digest: str  # of the tool, its description and its schema; another one asks again
    choice: Literal["always", "never"]
    at_s: float  # Unix time


@dataclass(frozen=True, slots=True)
class FoundChat:
    """A search result; `snippet` is split in three around the first match."""

    chat: Chat
    snippet: tuple[str, str, str] = ("", "", "")


@dataclass(frozen=True, slots=True)
class FilePassage:
    """A passage of a long file."""

    number: int  # ascending in the order of the file
    name: str  # of the file
    where: str  # such as "p. 3" or "lines 12–40"
    text: str


Siblings = dict[str | None, list[str]]


class Tree:
    """The parents and children of messages."""

    def __init__(self, rows: Iterable[tuple[str, str | None]]) -> None:
        self.parents: dict[str, str | None] = dict(rows)
        self.children: Siblings = {}
        for message_id, parent_id in self.parents.items():
            self.children.setdefault(parent_id, []).append(message_id)

    def path(self, leaf: str | None) -> list[str]:
        """Return the ids from the root to the leaf."""
        found = []
        while leaf is not None and leaf in self.parents:
            found.append(leaf)
            leaf = self.parents[leaf]
        return found[::-1]

    def versions(self, message_id: str) -> tuple[str, ...]:
        return tuple(self.children.get(self.parents[message_id], ()))

    def newest_leaf(self, message_id: str | None) -> str | None:
        """Return the leaf that is reached by following the newest child each time."""
        while message_id in self.children:
            message_id = self.children[message_id][-1]
        return message_id

    def below(self, message_id: str) -> list[str]:
        """Return the message and all that follow it, on every branch."""
        found = [message_id]
        for each in found:
            found += self.children.get(each, ())
        return found
