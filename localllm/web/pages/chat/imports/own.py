"""Our own export, and OpenAI's messages.

    {"format": "localllm-chat", "version": 1, "title", "settings", "messages": [what OpenAI's API takes], "tree": [...]}

OpenAI's `messages` may also come alone, in an object or as a list. Every field is checked.
Does not know: other formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from localllm.config.settings import MAX_UPLOAD_BYTES
from localllm.errors import RequestError
from localllm.media.source import of_data_url
from localllm.web.api.documents import plain_name
from localllm.web.pages.chat.composer.settings import NAMES, typed
from localllm.web.pages.chat.files.pictures import DETAILS, is_picture, picture_of, sound_of
from localllm.web.pages.chat.imports.records import (
    MAX_MESSAGES,
    Imported,
    MessageTree,
    no_messages,
    not_a_chat,
    rows,
    titled,
)
from localllm.web.pages.chat.store import StoredMessage
from localllm.web.pages.chat.store.records import Role

FORMAT, VERSION = "localllm-chat", 1

LISTS = {"calls": ("id", "name", "arguments"), "results": ("id", "name", "text")}
"""Details that are lists of rows -> the text fields of a row."""


class _Part(msgspec.Struct):
    type: str
    text: str = ""


class _Plain(msgspec.Struct):
    """A message in the format of OpenAI's API."""

    role: str
    content: str | list[_Part] | None = None
    reasoning_content: str | None = None


class _TreeNode(msgspec.Struct):
    """A message of the tree."""

    id: str
    role: Role
    content: str
    parent: str | None = None
    details: dict[str, Any] = {}
    created_s: float = 0.0


class _ChatFile(msgspec.Struct):
    messages: list[_Plain] = []
    tree: list[_TreeNode] = []
    leaf: str | None = None
    title: str = ""
    settings: dict[str, str] = {}
    format: str = FORMAT
    version: int = VERSION


def read(raw: bytes) -> Imported:
    """Parse one chat: an object, or a list of messages. Raises `NotAChat`, and the errors of settings."""
    try:
        if raw[:1] == b"[":
            file = _ChatFile(messages=msgspec.json.decode(raw, type=list[_Plain]))
        else:
            file = msgspec.json.decode(raw, type=_ChatFile)
    except (msgspec.DecodeError, RecursionError) as error:
        raise not_a_chat(f"{error}.") from error
    if file.format != FORMAT or file.version != VERSION:
        raise not_a_chat(f"Its format is {file.format[:40]} {file.version}; supported: {FORMAT} {VERSION}.")
    if len(file.messages) + len(file.tree) > MAX_MESSAGES:
        raise not_a_chat(f"It contains more than {MAX_MESSAGES:,} messages.")
    system, plain = _linear(file.messages)
    messages = _tree(file.tree) if file.tree else plain
    if not messages:
        raise no_messages("It contains no message of a user or an assistant." if file.messages else "")
    settings = typed({name: text for name, text in file.settings.items() if name in NAMES} or {"system": system}, {})
    known = {message.id for message in messages}
    leaf = file.leaf if file.leaf in known and file.leaf is not None else messages[-1].id
    return Imported(titled(file.title, messages), settings, messages, leaf)


def _linear(plain: Sequence[_Plain]) -> tuple[str, tuple[StoredMessage, ...]]:
    """Return the system prompt, and the messages in order."""
    system, tree, parent = [], MessageTree(), None
    for number, message in enumerate(plain):
        text = _text(message, number)
        if message.role in ("system", "developer"):
            system.append(text)
        elif message.role in ("user", "assistant"):
            role: Role = "user" if message.role == "user" else "assistant"
            reasoning = (message.reasoning_content or "") if role == "assistant" else ""
            parent = tree.add(role, text, parent, reasoning=reasoning)
        else:
            why = f"messages[{number}] has the role {message.role[:40]!r}"
            raise not_a_chat(f"{why}; supported: user, assistant and system.")
    return "\n\n".join(system), tuple(tree.messages.values())


def _text(message: _Plain, number: int) -> str:
    if isinstance(message.content, str):
        return message.content
    parts = message.content or []
    odd = next((part.type for part in parts if part.type not in ("text", "input_text", "output_text")), None)
    if odd is not None:
        raise not_a_chat(f"messages[{number}] has a part of type {odd[:40]!r}; supported: text.")
    return "\n".join(part.text for part in parts)


def _tree(nodes: Sequence[_TreeNode]) -> tuple[StoredMessage, ...]:
    seen: set[str | None] = {None}
    for node in nodes:
        if node.id in seen:
            raise not_a_chat(f"Two messages of its tree have the id {node.id[:40]!r}.")
        if node.parent not in seen:
            raise not_a_chat(
                f"The message {node.id[:40]!r} of its tree comes before its parent, or its parent is missing."
            )
        seen.add(node.id)
    return tuple(StoredMessage(n.id, n.parent, n.role, n.content, _details(n), n.created_s) for n in nodes)


def _details(node: _TreeNode) -> dict[str, Any]:
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
    found |= {name: kept for name, keys in LISTS.items() if (kept := _rows(node.details.get(name), keys))}
    if files := _rows(node.details.get("files"), ("name", "text")) + _searched(node.details.get("files")):
        found["files"] = files
    if pictures := _pictures(node.details.get("pictures")):
        found["pictures"] = pictures
    return found | _sources(node.details.get("sources"))


def _rows(value: object, keys: Sequence[str]) -> list[dict[str, Any]]:
    return [{key: each[key] for key in keys} for each in rows(value) if all(isinstance(each.get(k), str) for k in keys)]


def _pictures(value: object) -> list[dict[str, Any]]:
    """Return the pictures and sounds, read anew from their bytes; one that cannot be read is left out."""
    found = []
    for each in rows(value):
        name, data, detail = (each.get(key) for key in ("name", "data", "detail"))
        if isinstance(name, str) and isinstance(data, str):
            with suppress(RequestError):
                body = of_data_url(data, name, MAX_UPLOAD_BYTES)
                read = picture_of(plain_name(name), body) if is_picture(body) else sound_of(plain_name(name), body)
                found.append({**read, "detail": detail} if detail in DETAILS else read)
    return found


def _searched(value: object) -> list[dict[str, Any]]:
    """Return the files that were searched, without the id of their text, which an export does not contain."""
    return [
        {"name": each["name"], "num_bytes": each["num_bytes"], "searched": True}
        for each in rows(value)
        if "text" not in each and isinstance(each.get("name"), str) and type(each.get("num_bytes")) is int
    ]


def _sources(value: object) -> dict[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("note"), str):
        return {}
    return {"sources": {"note": value["note"], "passages": _rows(value.get("passages"), ("name", "where", "text"))}}
