"""Cut a long text into passages: whole paragraphs where they fit, else sentences, words, and at last characters.

Sizes are bytes of UTF-8, of which a token has about four in most languages. A passage begins with the end of the one
before it, so that a sentence at a border is whole in one of the two; a page begins with nothing of another. The own
parts, joined, are the text again.
Does not know: files, models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from localllm.web.api.documents import PAGE

OWN_BYTES = 1_000
"""Most bytes of a passage's own part: about 250 tokens."""

OVERLAP_BYTES = 150
"""Most bytes that a passage repeats of the one before it."""

BYTES_PER_TOKEN = 4

_PARAGRAPH = re.compile(r"\n[ \t]*\n\s*")
_SENTENCE = re.compile(r"(?<=[.!?…。！？])[\"'”’»)\]]*\s+|(?<=[。！？])|\n")
_WORD = re.compile(r"\s+")
_BORDERS = (_PARAGRAPH, _SENTENCE, _WORD)


@dataclass(frozen=True, slots=True)
class Passage:
    """A part of a text. `text[overlap:]` is its own part."""

    text: str
    overlap: int  # characters at its start that the passage before it has, too
    first: int  # page or line, from 1, where its own part begins
    last: int  # page or line where its own part ends


def estimated_tokens(text: str) -> int:
    """Return about how many tokens a text has, without a tokenizer."""
    return -(-len(text.encode(errors="replace")) // BYTES_PER_TOKEN)


def cut(text: str, *, paged: bool = False) -> list[Passage]:
    """Return the passages of a text, in order. `paged`: the text has pages, and no passage is of two; else the numbers
    are those of lines.
    """
    mark, number, found = PAGE if paged else "\n", 1, list[Passage]()
    for start, end in _parts(text, paged):
        own = text[start:end]
        page_start = text.rfind(PAGE, max(0, start - OVERLAP_BYTES - 1), start) + 1 if paged else 0
        overlap = _overlap(text, page_start, start)
        found.append(Passage(overlap + own, len(overlap), number, number + own.rstrip().count(mark)))
        number += own.count(mark)
    return found


def _parts(text: str, paged: bool) -> Iterator[tuple[int, int]]:
    """Yield the ranges of the own parts: neighbouring pieces together, as many as fit."""
    start = end = size = 0
    for piece_start, piece_end in _pages(text) if paged else ((0, len(text)),):
        for first, last in _pieces(text, piece_start, piece_end, 0):
            piece_bytes = _num_bytes(text, first, last)
            if start < end and (size + piece_bytes > OWN_BYTES or (paged and first == piece_start)):
                yield start, end
                start, size = end, 0
            end, size = last, size + piece_bytes
    if start < end:
        yield start, end


def _pages(text: str) -> Iterator[tuple[int, int]]:
    """Yield the ranges of the pages, each with the mark that ends it."""
    start = 0
    for page in text.split(PAGE):
        end = min(start + len(page) + 1, len(text))
        if start < end:
            yield start, end
        start = end


def _pieces(text: str, start: int, end: int, level: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most `OWN_BYTES`, divided at the widest borders that suffice."""
    if _num_bytes(text, start, end) <= OWN_BYTES:
        yield start, end
    elif level == len(_BORDERS):
        yield from _hard(text, start, end)
    else:
        at = start
        for border in _BORDERS[level].finditer(text, start, end):
            if border.end() > at:
                yield from _pieces(text, at, border.end(), level + 1)
                at = border.end()
        if at < end:
            yield from _pieces(text, at, end, level + 1)


def _hard(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of a text without any border."""
    while start < end:
        raw = text[start : min(end, start + OWN_BYTES)].encode(errors="replace")[:OWN_BYTES]
        length = max(1, len(raw.decode(errors="ignore")))
        yield start, start + length
        start += length


def _overlap(text: str, least: int, start: int) -> str:
    """Return the last whole words before a position, but after `least`; at most `OVERLAP_BYTES` of them."""
    raw = text[max(least, start - OVERLAP_BYTES) : start].encode(errors="replace")
    before = raw[-OVERLAP_BYTES:].decode(errors="ignore")
    if len(before) == start - least:
        return before
    word = _WORD.search(before)
    return before[word.end() :] if word else ""


def _num_bytes(text: str, start: int, end: int) -> int:
    return len(text[start:end].encode(errors="replace"))
