"""The chats of a file: JSON with one or many, or a zip of such files. One chat at a time is in memory.

Does not know: the formats (formats.py), HTTP.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from itertools import chain
from typing import IO

from localllm.errors import RequestError
from localllm.web.pages.chat.imports import formats, own
from localllm.web.pages.chat.imports.elements import MAX_ELEMENT_BYTES, elements
from localllm.web.pages.chat.imports.records import Imported, NotAChat, no_messages, not_a_chat

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
    if formats.is_message(first):
        yield own.read(_joined(chain([first], found)))
        return
    for number, raw in enumerate(chain([first], found), 1):
        try:
            chat = formats.read(raw)
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
