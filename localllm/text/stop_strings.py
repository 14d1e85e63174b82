"""Where a stop string completes in a growing text, and how much of the text's end might become one.

The strings of a request are one automaton (Aho & Corasick 1975) that all of its choices share. A reader keeps one
number, its state, and each new character costs the same however many strings there are and however long they are.
Does not know: tokens.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

START = 0
"""The state of a reader that has read nothing."""


class StopMatch(NamedTuple):
    begin: int
    end: int
    string: str


class StopStrings:
    """A state is a node of the trie of all strings: the longest end of what was read that begins one of them."""

    __slots__ = ("_children", "_completed", "_fallback", "_first_chars", "_held")

    def __init__(self, strings: tuple[str, ...]) -> None:
        assert all(strings), "an empty stop string matches everywhere"
        self._children: list[dict[str, int]] = [{}]
        self._completed: list[str | None] = [None]  # the longest string that ends at the node
        for string in strings:
            node = START
            for char in string:
                node = self._children[node].setdefault(char, len(self._children))
                if node == len(self._children):
                    self._children.append({})
                    self._completed.append(None)
            self._completed[node] = string
        self._fallback = [START] * len(self._children)  # the node of the next shorter end
        self._held = [0] * len(self._children)  # characters that a longer string begins with
        self._link()
        firsts = "".join(map(re.escape, self._children[START]))
        self._first_chars = re.compile(f"[{firsts}]" if firsts else "(?!)")

    def _link(self) -> None:
        """Fill in what follows from shorter ends, level by level."""
        level, depth = [START], 0
        while level:
            below = []
            for node in level:
                back = self._fallback[node]
                self._held[node] = depth if self._children[node] else self._held[back]
                if self._completed[node] is None:
                    self._completed[node] = self._completed[back]
                for char, child in self._children[node].items():
                    if node != START:
                        self._fallback[child] = self._step(back, char)
                    below.append(child)
            level, depth = below, depth + 1

    def _step(self, node: int, char: str) -> int:
        while node != START and char not in self._children[node]:
            node = self._fallback[node]
        return self._children[node].get(char, START)

    def absent(self, text: str) -> bool:
        """True if no stop string begins anywhere in `text`: most texts, decided by one scan."""
        return self._first_chars.search(text) is None

    def read(self, state: int, text: str) -> tuple[int, StopMatch | None]:
        """Read `text` up to the match that completes first in it, of two that end together the longer.

        Returns the state after what was read. The match counts from the start of `text`: its begin is negative where
        it began in text that was read before.
        """
        at, end = 0, len(text)
        while at < end:
            if state == START:
                first = self._first_chars.search(text, at)
                if first is None:
                    break
                at = first.start()
            state = self._step(state, text[at])
            at += 1
            if (string := self._completed[state]) is not None:
                return state, StopMatch(at - len(string), at, string)
        return state, None

    def skip(self, state: int, text: str) -> int:
        """Read all of `text`, where no match counts."""
        while text:
            state, match = self.read(state, text)
            text = text[match.end :] if match else ""
        return state

    def num_held(self, state: int) -> int:
        """Characters at the end of what was read that are the beginning of a stop string, and not yet all of it."""
        return self._held[state]


@lru_cache(maxsize=32)
def stop_strings(strings: tuple[str, ...]) -> StopStrings:
    """The automaton of these strings, made once for the choices of a request."""
    return StopStrings(strings)
