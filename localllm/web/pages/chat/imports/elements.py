"""The elements of a JSON array, one by one, so that a file of hundreds of chats takes the memory of one.

Does not know: what the elements mean.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import IO

from localllm.web.pages.chat.imports.records import no_messages, not_a_chat

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
