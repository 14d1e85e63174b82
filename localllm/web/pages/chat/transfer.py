"""Chats as files: Markdown to read, JSON to keep and to import again.

    {"format": "localllm-chat", "version": 1, "title", "settings", "messages": [what OpenAI's API takes], "tree": [...]}

An import also accepts OpenAI's `messages` alone, in an object or as a list. Every field is checked.
Does not know: HTTP, where chats are stored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from localllm.errors import RequestError
from localllm.web.pages.chat.settings import NAMES, typed
from localllm.web.pages.chat.store import Chat, StoredMessage
from localllm.web.pages.chat.store.records import Role
from localllm.web.pages.chat.template_messages import files_of, with_files
from localllm.web.pages.chat.turns import title_of

LISTS = {"calls": ("id", "name", "arguments"), "results": ("id", "name", "text"), "files": ("name", "text")}
"""Details that are lists of rows -> the text fields of a row."""

FORMAT, VERSION = "localllm-chat", 1
MAX_MESSAGES = 20_000


class NotAChat(RequestError):
    """The file cannot be imported."""

    code = "not_a_chat"


@dataclass(frozen=True, slots=True)
class Imported:
    """A chat from a file; parents precede their children."""

    title: str
    settings: dict[str, str]
    messages: tuple[StoredMessage, ...]
    leaf: str  # last message of the branch to show


class _Part(msgspec.Struct):
    type: str
    text: str = ""


class _Plain(msgspec.Struct):
    """A message in the format of OpenAI's API."""

    role: str
    content: str | list[_Part] | None = None


class _Node(msgspec.Struct):
    """A message of the tree."""

    id: str
    role: Role
    content: str
    parent: str | None = None
    details: dict[str, Any] = {}
    created_s: float = 0.0


class _File(msgspec.Struct):
    messages: list[_Plain] = []
    tree: list[_Node] = []
    leaf: str | None = None
    title: str = ""
    settings: dict[str, str] = {}
    format: str = FORMAT
    version: int = VERSION


def as_markdown(chat: Chat, messages: Sequence[StoredMessage]) -> bytes:
    """Return the shown branch, with the author of each message."""
    parts = [f"# {chat.title}"]
    if chat.settings.get("system"):
        parts.append(f"## System\n\n{chat.settings['system']}")
    for message in messages:
        author = "You" if message.role == "user" else str(message.details.get("model") or "Assistant")
        parts.append(f"## {author}\n\n{_whole(message)}")
    return ("\n\n".join(parts) + "\n").encode()


def as_json(chat: Chat, messages: Sequence[StoredMessage], everything: Sequence[StoredMessage]) -> bytes:
    """Return the shown branch as OpenAI's messages, and the tree with every branch."""
    system = [{"role": "system", "content": chat.settings["system"]}] if chat.settings.get("system") else []
    body = {
        "format": FORMAT,
        "version": VERSION,
        "title": chat.title,
        "settings": dict(chat.settings),
        "messages": system + [{"role": message.role, "content": _whole(message)} for message in messages],
        "leaf": chat.leaf,
        "tree": [
            {
                "id": message.id,
                "parent": message.parent_id,
                "role": message.role,
                "content": message.text,
                "created_s": message.created_s,
                "details": dict(message.details),
            }
            for message in everything
        ],
    }
    return msgspec.json.format(msgspec.json.encode(body), indent=1)


def _whole(message: StoredMessage) -> str:
    """Return the text with the attached files."""
    return with_files(message.text, files_of(message.details))


def file_name(chat: Chat) -> str:
    """Return the title, reduced to characters that every system allows."""
    return re.sub(r"[^A-Za-z0-9]+", "-", chat.title).strip("-")[:60].lower() or "chat"


def read(body: bytes) -> Imported:
    """Parse a file. Raises `NotAChat`, and the errors of settings."""
    try:
        if body.lstrip()[:1] == b"[":
            file = _File(messages=msgspec.json.decode(body, type=list[_Plain]))
        else:
            file = msgspec.json.decode(body, type=_File)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _refusal(f"{error}.") from error
    if file.format != FORMAT or file.version != VERSION:
        raise _refusal(f"Its format is {file.format[:40]} {file.version}; supported: {FORMAT} {VERSION}.")
    if not file.messages and not file.tree:
        raise _refusal("It contains no messages.")
    if len(file.messages) + len(file.tree) > MAX_MESSAGES:
        raise _refusal(f"It contains more than {MAX_MESSAGES} messages.")
    system, plain = _linear(file.messages)
    messages = _tree(file.tree) if file.tree else plain
    if not messages:
        raise _refusal("It contains no message of a user or an assistant.")
    settings = typed({name: text for name, text in file.settings.items() if name in NAMES} or {"system": system}, {})
    first = next((message.text for message in messages if message.role == "user"), "Imported chat")
    known = {message.id for message in messages}
    leaf = file.leaf if file.leaf in known and file.leaf is not None else messages[-1].id
    return Imported(title_of(file.title or first), settings, messages, leaf)


def _linear(plain: Sequence[_Plain]) -> tuple[str, tuple[StoredMessage, ...]]:
    """Return the system prompt, and the messages in order."""
    system, messages = [], list[StoredMessage]()
    for number, message in enumerate(plain):
        text = _text(message, number)
        if message.role in ("system", "developer"):
            system.append(text)
        elif message.role in ("user", "assistant"):
            parent = messages[-1].id if messages else None
            role: Role = "user" if message.role == "user" else "assistant"
            messages.append(StoredMessage(str(number), parent, role, text))
        else:
            why = f"messages[{number}] has the role {message.role[:40]!r}"
            raise _refusal(f"{why}; supported: user, assistant and system.")
    return "\n\n".join(system), tuple(messages)


def _text(message: _Plain, number: int) -> str:
    if isinstance(message.content, str):
        return message.content
    parts = message.content or []
    odd = next((part.type for part in parts if part.type not in ("text", "input_text", "output_text")), None)
    if odd is not None:
        raise _refusal(f"messages[{number}] has a part of type {odd[:40]!r}; supported: text.")
    return "\n".join(part.text for part in parts)


def _tree(nodes: Sequence[_Node]) -> tuple[StoredMessage, ...]:
    seen: set[str | None] = {None}
    for node in nodes:
        if node.id in seen:
            raise _refusal(f"Two messages of its tree have the id {node.id[:40]!r}.")
        if node.parent not in seen:
            raise _refusal(
                f"The message {node.id[:40]!r} of its tree comes before its parent, or its parent is missing."
            )
        seen.add(node.id)
    return tuple(StoredMessage(n.id, n.parent, n.role, n.content, _details(n), n.created_s) for n in nodes)


def _details(node: _Node) -> dict[str, Any]:
    """Return the details that the pages show, with the types that they expect."""
    kinds: dict[str, type | tuple[type, ...]] = {
        "model": str, "finish_reason": str, "prompt_tokens": int, "cached_tokens": int, "completion_tokens": int,
        "context_tokens": int, "reasoning": str, "reasoning_tokens": int, "reasoning_s": (int, float),
        "ttft_s": (int, float), "tokens_per_s": (int, float),
    }  # fmt: skip
    found = {
        name: value
        for name, value in node.details.items()
        if name in kinds and isinstance(value, kinds[name]) and not isinstance(value, bool)
    }
    found |= {"edited": True} if node.details.get("edited") is True else {}
    return found | {name: rows for name, keys in LISTS.items() if (rows := _rows(node.details.get(name), keys))}


def _rows(value: object, keys: Sequence[str]) -> list[dict[str, str]]:
    rows = [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
    return [{key: each[key] for key in keys} for each in rows if all(isinstance(each.get(key), str) for key in keys)]


def _refusal(why: str) -> NotAChat:
    return NotAChat(
        "This file is not a chat export.", why, "Choose a JSON file that was exported here, or OpenAI's messages."
    )
