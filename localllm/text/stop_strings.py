"""Where a stop string completes in a growing text, and how much of the text's end might become one.

Does not know: tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    begin: int
    end: int
    string: str


class StopStrings:
    __slots__ = ("_first_chars", "_strings")

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(dict.fromkeys(strings))
        assert all(self._strings), "an empty stop string matches everywhere"
        self._first_chars = re.compile("|".join(re.escape(string[0]) for string in self._strings))

    def __bool__(self) -> bool:
        return bool(self._strings)

    def absent(self, text: str) -> bool:
        """True if no stop string begins anywhere in `text`: most texts, decided by one scan."""
        return self._first_chars.search(text) is None

    def find(self, text: str, seen: int) -> StopMatch | None:
        """The match that completes first after the first `seen` characters; of two that end together the longer."""
        best: StopMatch | None = None
        for string in self._strings:
            begin = text.find(string, max(0, seen - len(string) + 1))
            if begin >= 0:
                match = StopMatch(begin, begin + len(string), string)
                if best is None or (match.end, match.begin) < (best.end, best.begin):
                    best = match
        return best

    def num_held(self, text: str) -> int:
        """Characters at the end of `text` that are the beginning of a stop string: at most max(len) - 1."""
        held = 0
        for string in self._strings:
            begin = text.find(string[0], max(0, len(text) - len(string) + 1))
            while begin >= 0 and len(text) - begin > held:
                if string.startswith(text[begin:]):
                    held = len(text) - begin
                    break
                begin = text.find(string[0], begin + 1)
        return held
