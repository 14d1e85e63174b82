"""Chats as files: Markdown to read, JSON to keep and to import again, one HTML file to share, a zip of all chats.

The format of the JSON is described in imports/own.py. The HTML file shows the branch on the page: no scripts, and
nothing loaded from elsewhere.
Does not know: HTTP, where chats are stored.
"""

from __future__ import annotations

import base64
import io
import re
import time
import zipfile
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, Literal, cast

import msgspec

from localllm.web.pages.chat.composer.views import AttachmentChip
from localllm.web.pages.chat.files.pictures import TYPES
from localllm.web.pages.chat.imports.own import FORMAT, VERSION
from localllm.web.pages.chat.markdown.maths import with_mathml
from localllm.web.pages.chat.markdown.stream import cached_html, user_html
from localllm.web.pages.chat.replies.messages import calls_of, files_of, with_files
from localllm.web.pages.chat.store import Chat, StoredMessage
from localllm.web.pages.chat.thread.messages import Sources, file_chips, sources
from localllm.web.pages.chat.tools.views import ToolResult, results
from localllm.web.pages.frame.render import render
from localllm.web.pages.frame.views import View, view

if TYPE_CHECKING:
    from typing_extensions import Buffer


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
    body = {
        "format": FORMAT,
        "version": VERSION,
        "title": chat.title,
        "settings": dict(chat.settings),
        "messages": _openai_messages(chat, messages),
        "leaf": chat.leaf,
        "tree": [
            {
                "id": message.id,
                "parent": message.parent_id,
                "role": message.role,
                "content": message.text,
                "created_s": message.created_s,
                "details": _details(message.details),
            }
            for message in everything
        ],
    }
    return msgspec.json.format(msgspec.json.encode(body), indent=1)


def _openai_messages(chat: Chat, messages: Sequence[StoredMessage]) -> list[dict[str, str]]:
    system = [{"role": "system", "content": chat.settings["system"]}] if chat.settings.get("system") else []
    return system + [{"role": message.role, "content": _whole(message)} for message in messages]


def _details(details: Mapping[str, Any]) -> dict[str, Any]:
    """Return the details with the bytes of pictures as data URLs."""
    pictures = [
        {**each, "data": f"data:{TYPES[each['kind']]};base64,{base64.b64encode(each.get('data', b'')).decode()}"}
        for each in details.get("pictures", [])
    ]
    return {**details, "pictures": pictures} if pictures else dict(details)


def _whole(message: StoredMessage) -> str:
    """Return the text with the attached files, and the names of pictures."""
    names = "".join(
        f"[{'Sound' if 'seconds' in each else 'Picture'}: {each['name']}]\n\n"
        for each in message.details.get("pictures", [])
    )
    return names + with_files(message.text, files_of(message.details))


def as_rating(chat: Chat, messages: Sequence[StoredMessage]) -> bytes:
    """Return the line of a rated reply: the rating, and the branch up to the reply as OpenAI's messages."""
    *read, reply = messages
    line = {
        **reply.details["rating"],
        "model": reply.details.get("model"),
        "chat": chat.title,
        "messages": _openai_messages(chat, read),
        "answer": reply.text,
    }
    return msgspec.json.encode(line) + b"\n"


def file_name(chat: Chat) -> str:
    """Return the title, reduced to characters that every system allows."""
    return re.sub(r"[^A-Za-z0-9]+", "-", chat.title).strip("-")[:60].lower() or "chat"


class Archive:
    """A zip of chats that is written piece by piece: `add` returns the bytes that are ready to be sent."""

    def __init__(self) -> None:
        self._sink = _Sink()
        self._zip = zipfile.ZipFile(cast("IO[bytes]", self._sink), "w", zipfile.ZIP_DEFLATED)
        self._count = 0

    def add(self, chat: Chat, messages: Sequence[StoredMessage], everything: Sequence[StoredMessage]) -> bytes:
        """Add a chat as JSON. The name begins with a number, because titles repeat."""
        self._count += 1
        self._zip.writestr(f"{self._count:05}-{file_name(chat)}.json", as_json(chat, messages, everything))
        return self._sink.taken()

    def close(self) -> bytes:
        """Return the end of the file."""
        self._zip.close()
        return self._sink.taken()


class _Sink(io.RawIOBase):
    """A file that a zip is written to; it cannot go back, so the zip holds sizes behind each file."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer) -> int:
        self._parts.append(bytes(data))
        return len(self._parts[-1])

    def taken(self) -> bytes:
        taken, self._parts = b"".join(self._parts), []
        return taken


@view("chat/_shared_message.html")
class SharedMessage(View):
    """A message without its actions. `html` and `thinking_html` are safe markup."""

    role: Literal["user", "assistant"]
    author: str
    html: str
    thinking_html: str = ""
    calls: tuple[ToolResult, ...] = ()  # name and arguments of each tool call
    results: tuple[ToolResult, ...] = ()
    files: tuple[AttachmentChip, ...] = ()
    sources: Sources | None = None
    error: str = ""


@view("chat/shared.html")
class SharedChat(View):
    """The whole document."""

    title: str
    day: str  # of the export
    messages: tuple[SharedMessage, ...]
    system: str = ""
    is_file: bool = True  # else it is read at a link


_BUTTON = re.compile(r"<button\b.*?</button>", re.DOTALL)
"""The buttons of a code block, which do nothing without scripts. Text of a model cannot match: its brackets are
escaped.
"""


def as_html(chat: Chat, messages: Sequence[StoredMessage]) -> bytes:
    """Return the file. Slow for a long chat: each message is drawn."""
    drawn = tuple(_message(message) for message in messages)
    return render(SharedChat(chat.title, time.strftime("%Y-%m-%d"), drawn, chat.settings.get("system", ""))).encode()


def as_page(title: str, messages: Sequence[StoredMessage]) -> bytes:
    """Return the page behind a link. Slow for a long chat, as the file is."""
    return render(SharedChat(title, time.strftime("%Y-%m-%d"), tuple(map(_message, messages)), is_file=False)).encode()


def _without_scripts(html: str) -> str:
    """Return the HTML of a message with its formulas drawn, and without the buttons of its code."""
    return with_mathml(_BUTTON.sub("", html))


def _message(message: StoredMessage) -> SharedMessage:
    details, is_user = message.details, message.role == "user"
    html = user_html(message.text) if is_user else cached_html(message.text)
    error = details.get("error") or ("",)
    return SharedMessage(
        role=message.role,
        author="You" if is_user else str(details.get("model") or "Assistant"),
        html="" if details.get("results") else _without_scripts(html),
        thinking_html=_without_scripts(cached_html(details["reasoning"])) if details.get("reasoning") else "",
        calls=tuple(ToolResult(call.name, call.arguments) for call in calls_of(details)),
        results=results(details),
        files=file_chips(details),
        sources=sources(details),
        error=str(error[0]),
    )
