"""A growing text: finished blocks as safe HTML, and the open rest as plain text.

A follower gets its updates as `News`. Beyond `MAX_DRAWN_CHARS` a text continues as plain text, which can be read and
copied: rendering it as Markdown would take seconds and megabytes.
Does not know: the source of the text, HTTP, templates.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

from localllm.web.pages.chat.markdown.render import (
    MAX_PENDING_CHARS,
    BlockSplitter,
    LastHeading,
    fenced_code,
    render_markdown,
)

MAX_DRAWN_CHARS = 200_000

MAX_KEPT_CHARS = 8_000_000
"""Characters of rendered texts and their HTML in the cache: some thousand replies."""

OpenKind = Literal["text", "code", "note"]
"""Kind of the open block. A note says why there is no text yet."""


@dataclass(frozen=True, slots=True)
class TextUpdate:
    """The part of a text that a follower has not seen yet. `restarts`: discard everything before."""

    html: str
    restarts: bool
    open_kind: OpenKind | None = None  # set if the open block must be drawn again
    open_text: str = ""  # the whole open block; if open_kind is None, only its new end
    open_language: str = ""  # of an open block of code


@dataclass(slots=True)
class ReadPosition:
    """The part of a text that one follower has seen."""

    blocks: int = 0
    kind: tuple[str, str] = ("", "")  # and language
    chars: int = 0
    first: bool = True


class MarkdownStream:
    """One growing text."""

    def __init__(self) -> None:
        self.text = ""
        self.blocks: list[str] = []  # safe HTML of the finished blocks
        # Closed blocks, and the open one as followers see it: its kind, text and language.
        self.settled: tuple[int, OpenKind, str, str] = (0, "text", "", "")
        self._splitter = BlockSplitter()
        self._drawn_chars = 0
        self._last_heading = LastHeading()

    @property
    def html(self) -> str:
        return "".join(self.blocks)

    async def add(self, text: str, *, ends: bool = False) -> None:
        """Append text. A long block is rendered in a thread, which takes tens of milliseconds, so other streams are not
        delayed.
        """
        self.text += text
        if len(self._splitter.pending) > MAX_PENDING_CHARS:
            closed = await asyncio.to_thread(self._splitter.push, text)
        else:
            closed = self._splitter.push(text)
        if ends:
            closed += self._splitter.finish()
        if closed.strip():
            self.blocks.append(await asyncio.to_thread(self._render, closed))

    def settle(self, instead: tuple[OpenKind, str, str] | None = None) -> None:
        """Publish the current state to followers, with `instead` in place of the open block if given."""
        self.settled = (len(self.blocks), *(instead or self._splitter.open_block()))

    def update_for(self, seen: ReadPosition) -> TextUpdate | None:
        """Return what this follower has not seen, and mark it as seen; None if there is nothing new."""
        num_blocks, kind, text, language = self.settled
        html, chars = "".join(self.blocks[seen.blocks : num_blocks]), seen.chars
        redraws = seen.first or bool(html) or (kind, language) != seen.kind or len(text) < chars
        first, seen.blocks, seen.chars, seen.first = seen.first, num_blocks, len(text), False
        seen.kind = kind, language
        if redraws:
            return TextUpdate(html, first, kind, text, language)
        return TextUpdate("", False, None, text[chars:]) if len(text) > chars else None

    def _render(self, closed: str) -> str:
        self._drawn_chars += len(closed)
        return render_markdown(closed, self._last_heading) if self._drawn_chars <= MAX_DRAWN_CHARS else plain(closed)


def text_html(text: str) -> str:
    """Return the safe HTML of a whole text; beyond the limit it is plain text."""
    if len(text) <= MAX_DRAWN_CHARS:
        return render_markdown(text)
    splitter = BlockSplitter()
    head = splitter.push(text[:MAX_DRAWN_CHARS])
    return render_markdown(head) + plain(text[len(head) :])


class HTMLCache:
    """A cache of the HTML of texts that no longer change. Thread-safe."""

    def __init__(self, most_chars: int, draw: Callable[[str], str] = text_html) -> None:
        self._most_chars, self._chars, self._draw = most_chars, 0, draw
        self._html: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, text: str) -> str:
        with self._lock:
            if (html := self._html.get(text)) is not None:
                self._html.move_to_end(text)
                return html
        html = self._draw(text)
        with self._lock:
            if text not in self._html:
                self._html[text] = html
                self._chars += len(text) + len(html)
            while self._chars > self._most_chars:
                old_text, old_html = self._html.popitem(last=False)
                self._chars -= len(old_text) + len(old_html)
        return html

    def clear(self) -> None:
        """Clear the cache when chats are deleted, so that nothing of them remains."""
        with self._lock:
            self._html.clear()
            self._chars = 0


cached_html = HTMLCache(MAX_KEPT_CHARS)


def plain(text: str) -> str:
    return f'<p class="plain">{escape(text)}</p>\n'


MAX_TYPED_CHARS = 2_000_000
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})([^`\n]*)\n?")
_RUN = re.compile("`+")


def user_html(text: str) -> str:
    """Return the safe HTML of a message. Line breaks of its text stay line breaks; the style sheet shows them."""
    env: dict[str, Any] = {}
    parts = (
        fenced_code(body, language, env).rstrip("\n")
        if is_code
        else "".join(_line(line) for line in body.splitlines(keepends=True))
        for is_code, language, body in _parts(text)
    )
    return "".join(parts)


def _parts(text: str) -> Iterator[tuple[bool, str, str]]:
    """Yield the parts of a text: whether it is code, its language, and its lines. A fence that is not closed goes on to
    the end.
    """
    lines, plain, at = text.splitlines(keepends=True), list[str](), 0
    while at < len(lines):
        fence = _FENCE.fullmatch(lines[at])
        if fence is None:
            plain.append(lines[at])
            at += 1
            continue
        end = next((n for n in range(at + 1, len(lines)) if _closes(lines[n], fence[1])), len(lines))
        if plain:
            yield False, "", "".join(plain)
        yield True, fence[2].strip().split(" ")[0], "".join(lines[at + 1 : end])
        plain, at = [], end + 1
    if plain:
        yield False, "", "".join(plain)


def _closes(line: str, opener: str) -> bool:
    mark = line.strip()
    return mark.startswith(opener) and not mark.strip(opener[0]) and len(line) - len(line.lstrip(" ")) < 4


def _line(line: str) -> str:
    """Return a line of text; what stands between two equal runs of backticks is code."""
    runs, closing, after = [run.span() for run in _RUN.finditer(line)], dict[int, int](), dict[int, int]()
    for number in reversed(range(len(runs))):
        length = runs[number][1] - runs[number][0]
        if length in after:
            closing[number] = after[length]
        after[length] = number
    found, at, number = list[str](), 0, 0
    while number < len(runs):
        if number in closing:
            start, end = runs[number], runs[closing[number]]
            found += [escape(line[at : start[0]]), f"<code>{escape(line[start[1] : end[0]])}</code>"]
            at, number = end[1], closing[number]
        number += 1
    return "".join([*found, escape(line[at:])])


cached_user_html = HTMLCache(MAX_TYPED_CHARS, user_html)
