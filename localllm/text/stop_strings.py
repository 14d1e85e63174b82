"""Finds stop strings in a growing text, and how much of the text's end might become one.

The strings of a request form one automaton (Aho & Corasick 1975), shared by all its choices. A reader keeps only its
state, a number, and each new character costs the same for any number and length of strings.
Does not know: tokens.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

START = 0
"""Initial state of a reader."""


class StopMatch(NamedTuple):
    begin: int
    end: int
    string: str


class StopStrings:
    """An automaton whose states are trie nodes:
    the longest suffix of the text read so far that begins a stop string."""

    __slots__ = ("_children", "_completed", "_fallback", "_first_chars", "_held")

    def __init__(self, strings: tuple[str, ...]) -> None:
        assert all(strings), "an empty stop string matches everywhere"
        self._children: list[dict[str, int]] = [{}]
        self._completed: list[str | None] = [None]  # longest string that ends at the node
        for string in strings:
            node = START
            for char in string:
                node = self._children[node].setdefault(char, len(self._children))
                if node == len(self._children):
                    self._children.append({})
                    self._completed.append(None)
            self._completed[node] = string
        self._fallback = [START] * len(self._children)  # node of the next shorter suffix
        self._held = [0] * len(self._children)  # length of the suffix that a longer string begins with
        self._link()
        firsts = "".join(map(re.escape, self._children[START]))
        self._first_chars = re.compile(f"[{firsts}]" if firsts else "(?!)")

    def _link(self) -> None:
        """Compute fallbacks, completed strings and held lengths, level by level."""
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
        """Return True if no stop string can begin in `text`: true of most texts, decided by one scan."""
        return self._first_chars.search(text) is None

    def read(self, state: int, text: str) -> tuple[int, StopMatch | None]:
        """Read `text` up to the match that completes first; of two that end together, the longer one.

        Returns the new state and the match. Match positions count from the start of `text`; the start is negative if it
        is in text read before.
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
        """Read all of `text`, ignoring matches."""
        while text:
            state, match = self.read(state, text)
            text = text[match.end :] if match else ""
        return state

    def num_held(self, state: int) -> int:
        """Return the number of characters at the end of the text that begin a stop string without completing it."""
        return self._held[state]


@lru_cache(maxsize=32)
def stop_strings(strings: tuple[str, ...]) -> StopStrings:
    """Return the automaton of these strings, built once for all choices of a request."""
    return StopStrings(strings)
