"""The chats of a file: JSON with one or many, or a zip of such files, and the format of each, told by its fields.

One chat at a time is in memory: the elements of an array are read one by one.
Does not know: the formats themselves (own.py, chatgpt.py, open_webui.py, lm_studio.py), HTTP.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import IO, Any

import msgspec

from localllm.errors import RequestError
from localllm.web.api.exchange import require_few_values
from localllm.web.pages.chat.imports import chatgpt, lm_studio, open_webui, own
from localllm.web.pages.chat.imports.records import Imported, NotAChat, no_messages, not_a_chat

MAX_ELEMENT_BYTES = 16 * 1024**2
"""Largest chat."""

CHUNK_BYTES = 2**20
BOM = b"\xef\xbb\xbf"
MAX_NESTING = 128
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{},]|"', re.DOTALL)
"""A whole string, a mark of the structure, or a quote whose string has not arrived yet."""


def elements(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the elements of an array. A value that is not an array is its own only element. Raises `NotAChat`."""
    head = b""
    while len(head) < len(BOM) + 1 and (chunk := stream.read(CHUNK_BYTES)):
        head = (head + chunk).removeprefix(BOM).lstrip()
    if not head:
        raise no_messages("It is empty.")
    if head[:1] != b"[":
        whole = head + stream.read(MAX_ELEMENT_BYTES)
        if len(whole) > MAX_ELEMENT_BYTES:
            raise _too_large()
        yield whole
        return
    yield from _of_array(head[1:], stream)


def _of_array(pending: bytes, stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the elements of an array whose opening bracket was read; `pending`: what was read after it."""
    depth, scanned = 1, 0
    while True:
        start = 0
        for token in _TOKEN.finditer(pending, scanned):
            mark = token[0]
            if mark == b'"':
                break
            scanned = token.end()
            depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(mark, 0)
            if depth == 0 or (depth == 1 and mark == b","):
                if element := pending[start : token.start()].strip():
                    yield element
                start = scanned
            if depth == 0:
                return
            if depth > MAX_NESTING:
                raise not_a_chat(f"It is nested more than {MAX_NESTING} levels deep.")
        pending, scanned = pending[start:], scanned - start
        if len(pending) > MAX_ELEMENT_BYTES:
            raise _too_large()
        if not (chunk := stream.read(CHUNK_BYTES)):
            raise not_a_chat("The file ends in the middle: it was not saved completely.")
        pending += chunk


def _too_large() -> Exception:
    return not_a_chat(f"One chat in it is larger than {MAX_ELEMENT_BYTES // 1024**2} MiB.")


class _ProbedMessage(msgspec.Struct):
    versions: msgspec.Raw = msgspec.Raw()
    role: msgspec.Raw = msgspec.Raw()


class _Probe(msgspec.Struct):
    """The fields that tell the formats apart; their values are not parsed."""

    mapping: msgspec.Raw = msgspec.Raw()
    chat: msgspec.Raw = msgspec.Raw()
    messages: list[_ProbedMessage] = []


def is_message(raw: bytes) -> bool:
    """Return whether an element is a message of OpenAI's API, and so a part of one chat."""
    try:
        return bool(bytes(msgspec.json.decode(raw, type=_ProbedMessage).role))
    except (msgspec.DecodeError, RecursionError):
        return False


def read_chat(raw: bytes) -> Imported | None:
    """Return a chat; None if it has no message. Raises `NotAChat`, and the errors of settings."""
    require_few_values(raw)
    try:
        other = _other_format(msgspec.json.decode(raw, type=_Probe))
        return other(msgspec.json.decode(raw)) if other is not None else own.read(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise not_a_chat(f"{error}.") from error


def _other_format(probe: _Probe) -> Callable[[Mapping[str, Any]], Imported | None] | None:
    if bytes(probe.mapping):
        return chatgpt.read
    if bytes(probe.chat):
        return open_webui.read
    return lm_studio.read if any(bytes(message.versions) for message in probe.messages) else None


MAX_CHATS = 20_000
"""Most chats of one file."""

MAX_UNZIPPED_BYTES = 1024**3
"""Most bytes of a zip's JSON files together."""


def chats_of(file: IO[bytes]) -> Iterator[Imported]:
    """Yield the chats of a file; those without a message are left out. Raises `NotAChat`, also after some chats."""
    start = file.read(4)
    file.seek(0)
    found, count = _of_zip(file) if start == b"PK\x03\x04" else _of_json(file), 0
    for chat in found:
        count += 1
        if count > MAX_CHATS:
            raise not_a_chat(f"It holds more than {MAX_CHATS:,} chats; the others are not imported.")
        yield chat
    if not count:
        raise no_messages()


def _of_json(file: IO[bytes]) -> Iterator[Imported]:
    found = elements(file)
    first = next(found, None)
    if first is None:
        return
    if is_message(first):
        yield own.read(_joined(chain([first], found)))
        return
    for number, raw in enumerate(chain([first], found), 1):
        try:
            chat = read_chat(raw)
        except RequestError as error:
            if number == 1:
                raise
            error.why = f"Chat {number:,} of it: {error.what} {error.why}"
            raise
        if chat is not None:
            yield chat


def _joined(messages: Iterator[bytes]) -> bytes:
    """Return a list of messages as one value."""
    parts, size = list[bytes](), 0
    for raw in messages:
        parts.append(raw)
        size += len(raw)
        if size > MAX_ELEMENT_BYTES:
            raise not_a_chat(f"It is larger than {MAX_ELEMENT_BYTES // 1024**2} MiB.")
    return b"[" + b",".join(parts) + b"]"


def _of_zip(file: IO[bytes]) -> Iterator[Imported]:
    """Yield the chats of a zip's JSON files; a JSON file without chats, such as one about the user, is left out."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = [each for each in archive.infolist() if each.filename.lower().endswith(".json")]
            if sum(each.file_size for each in names) > MAX_UNZIPPED_BYTES:
                raise not_a_chat(f"Its files have more than {MAX_UNZIPPED_BYTES // 1024**3} GiB together.")
            for each in names:
                with archive.open(each) as member:
                    yield from _of_member(member)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error, EOFError, OSError) as error:
        raise not_a_chat(f"The zip cannot be read: {error}.") from error


def _of_member(member: IO[bytes]) -> Iterator[Imported]:
    count = 0
    try:
        for chat in _of_json(member):
            count += 1
            yield chat
    except NotAChat:
        if count:
            raise
