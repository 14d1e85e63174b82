"""Reads text that arrives in pieces as if it were complete.

A format's parser is a generator that reads from a `Scanner` and yields whenever the next character has not arrived. Its
decisions depend on the characters alone: it waits until they decide, or until the text has ended. The result is
therefore the same however the text is split.
Does not know: formats, parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

from localllm.text.stop_strings import START, stop_strings

T = TypeVar("T")
Read: TypeAlias = Generator[None, None, T]
"""A parser in progress: yields while it waits for text, returns what it read."""

_NAME = re.compile(r"[\w.:/-]*")


class NotACall(Exception):
    """The text is not a call: the parser returns to where the call seemed to begin."""


class Scanner:
    """The text of one answer; `text[at:]` is unread. `rewind` returns to the last `commit`; earlier text is discarded.

    Positions in `text` other than `at` are therefore valid only until the next wait.
    """

    __slots__ = ("_mark", "at", "ended", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._mark = 0

    def feed(self, text: str) -> None:
        self.text = self.text[self._mark :] + text
        self.at -= self._mark
        self._mark = 0

    def commit(self) -> None:
        self._mark = self.at

    def rewind(self) -> None:
        self.at = self._mark

    def more(self) -> Read[bool]:
        """Wait for text. Return False if the text has ended."""
        if self.ended:
            return False
        yield
        return True

    def take(self, length: int) -> str:
        """Read the next `length` characters, which must have arrived."""
        begin, self.at = self.at, self.at + length
        return self.text[begin : self.at]

    def peek(self) -> Read[str]:
        """Return the next character without reading it; "" at the end."""
        while self.at == len(self.text):
            if not (yield from self.more()):
                return ""
        return self.text[self.at]

    def skip_space(self) -> Read[str]:
        """Skip whitespace, and return the next character without reading it; "" at the end."""
        while (char := (yield from self.peek())).isspace():
            self.at += 1
        return char

    def next_of(self, *markers: str) -> Read[str]:
        """Return the marker that comes next without reading it; "" if none. No marker may begin with another."""
        longest = max(map(len, markers), default=0)
        while True:
            rest = self.text[self.at : self.at + longest]
            for marker in markers:
                if rest.startswith(marker):
                    return marker
            if not any(marker.startswith(rest) for marker in markers) or not (yield from self.more()):
                return ""

    def accept(self, *markers: str) -> Read[str]:
        """Read the marker that comes next; "" if none does."""
        marker = yield from self.next_of(*markers)
        self.at += len(marker)
        return marker

    def accept_behind_space(self, *markers: str) -> Read[str]:
        """Read whitespace and a marker, or neither if no marker follows. Commits what was read before."""
        self.commit()
        yield from self.skip_space()
        marker = yield from self.accept(*markers)
        if not marker:
            self.rewind()
        return marker

    def expect(self, *markers: str) -> Read[str]:
        marker = yield from self.accept(*markers)
        if not marker:
            raise NotACall(f"expected {' or '.join(markers)}")
        return marker

    def name(self, pattern: re.Pattern[str] = _NAME, may_go_on: Callable[[str], bool] | None = None) -> Read[str]:
        """Read a function's or an argument's name: the next letters, digits and `_-.:/`. may_go_on: takes what has
        arrived of it, and says whether to wait for more; None: always."""
        while True:
            match = pattern.match(self.text, self.at)
            assert match is not None, "it matches nothing at least"
            is_whole = match.end() < len(self.text) or not (may_go_on is None or may_go_on(match.group()))
            if is_whole or not (yield from self.more()):
                return self.take(len(match.group()))

    def until(self, *markers: str) -> Read[tuple[str, str]]:
        """Read up to the first marker. Return the text before it and the marker; the rest and "" if none comes."""
        taken: list[str] = []
        marker = yield from self.give_until(markers, taken.append)
        self.at += len(marker)
        return "".join(taken), marker

    def give_until(
        self, markers: tuple[str, ...], give: Callable[[str], None], *, hold_space: bool = False
    ) -> Read[str]:
        """Pass on text as it arrives, up to the first marker, which stays unread. Return the marker; "" at the end.

        Text that may become a marker is held back. With `hold_space`, whitespace before a marker is dropped.
        """
        automaton = stop_strings(markers)
        while True:
            rest = self.text[self.at :]
            state, match = automaton.read(START, rest)
            safe = len(rest) if self.ended else len(rest) - automaton.num_held(state)
            if match:
                safe = match.begin
            shown = rest[:safe]
            if hold_space and (match or not self.ended):
                shown = shown.rstrip()
            self.at += match.begin if match else len(shown)
            if shown:
                give(shown)
            if match:
                return match.string
            if not (yield from self.more()):
                return ""
