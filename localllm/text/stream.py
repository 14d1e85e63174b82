"""Incremental UTF-8 detokenisation: one token id in, the text completed by it out.

A stream is primed with the end of the prompt, so that a character or a word's leading space at the border comes out
right. Text is never released while a character's bytes are incomplete (see `open`).
Does not know: stop strings, requests.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from typing import Protocol

from localllm.text.pieces import PieceTable

PRIME_TOKENS = 8
"""Prompt tokens that a stream is primed with. With more, broken text could repeat the prompt in the output."""


class TextStream(Protocol):
    @property
    def open(self) -> bool:
        """True while the last token's text is incomplete."""

    def feed(self, token_id: int) -> str:
        """Return the text that this token completes."""

    def flush(self) -> str:
        """Return incomplete text as U+FFFD. Ends the stream."""


class ByteStream:
    """A stream for vocabularies whose tokens are independent bytes: one lookup and one decode per token.

    `first_piece(id)` is the bytes of a token at the start of a text; None for a token without text.
    """

    __slots__ = ("_at_start", "_bytes", "_first_piece", "_pieces", "_prompt_tail", "_settled")

    def __init__(
        self, prompt_token_ids: Sequence[int], pieces: PieceTable, first_piece: Callable[[int], bytes | None]
    ) -> None:
        self._pieces = pieces
        self._first_piece = first_piece
        prime = prompt_token_ids[-PRIME_TOKENS:]
        data = b"".join([pieces[token_id] for token_id in prime])
        self._prompt_tail = data[utf_8_decode(data, "replace", False)[1] :]
        self._at_start = all(first_piece(token_id) is None for token_id in prime)
        self._settled = not (self._at_start or self._prompt_tail)
        self._bytes = b""

    @property
    def open(self) -> bool:
        return bool(self._bytes)

    def feed(self, token_id: int) -> str:
        piece = self._pieces[token_id] if self._settled else self._settle(token_id)
        data = self._bytes + piece if self._bytes else piece
        text, used = utf_8_decode(data, "replace", False)
        self._bytes = data[used:]
        return text

    def flush(self) -> str:
        data, self._bytes = self._bytes, b""
        return data.decode("utf-8", "replace")

    def _settle(self, token_id: int) -> bytes:
        """Return the bytes of the first tokens:
        no leading space at the start of a text, and the prompt's incomplete character is continued.

        The prompt's incomplete bytes are dropped if the output does not continue them, since they belong to the prompt.
        """
        first = self._first_piece(token_id)
        if first is None:
            return b""
        piece = first if self._at_start else self._pieces[token_id]
        self._at_start = False
        if not piece:
            return b""
        self._settled = True
        if self._prompt_tail and not utf_8_decode(self._prompt_tail + piece[:1], "replace", False)[0].startswith("�"):
            self._bytes = self._prompt_tail
        return piece


class WindowStream:
    """A stream for any other decoder: decodes a window of a few tokens with and without the new ones, and compares.

    The window advances whenever text is released, so its length does not depend on the length of the output.
    """

    MAX_OPEN = 8  # no character has more bytes; beyond this the text is broken

    __slots__ = ("_decode", "_ids", "_read", "_read_text")

    def __init__(self, prompt_token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids = list(prompt_token_ids[-PRIME_TOKENS:])
        self._read = len(self._ids)  # ids before this index are released
        self._read_text = decode(self._ids)

    @property
    def open(self) -> bool:
        return self._read < len(self._ids)

    def feed(self, token_id: int) -> str:
        was_open = self.open
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text == self._read_text and not was_open:
            self._ids.pop()  # a token without text must not displace the context
            return ""
        if text.endswith("�") and len(self._ids) - self._read < self.MAX_OPEN:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        return self._advance(self._decode(self._ids)) if self.open else ""

    def _advance(self, text: str) -> str:
        new = text[len(self._read_text) :]
        self._ids = self._ids[self._read :]
        self._read, self._read_text = len(self._ids), self._decode(self._ids)
        return new
