"""Sequence breakers of the sampler DRY as token ids: every way in which tokens can spell a string.

A breaker may begin inside a token and end inside another. Each token that contains the string is a breaker by itself;
each token that ends in the string's beginning is one together with the tokens of the rest, as in llama.cpp.
Does not know: where repetitions are searched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

MOST_TAIL = 20  # tokens of a tail, as in llama.cpp

Breakers = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""By tails: (tokens after the first one, token ids that may be the first one)."""


class Vocabulary(Protocol):
    """The part of a tokenizer that knows how tokens are spelled."""

    vocab_size: int

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def token_bytes(self, token_id: int) -> bytes: ...


class DryBreakers:
    """Finds breakers in the texts of all tokens, which are joined once: a search is then one pass over them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        words = [vocabulary.token_bytes(token_id).replace(b"\0", b" ") for token_id in range(vocabulary.vocab_size)]
        self._joined = b"\0" + b"\0".join(words) + b"\0"
        lengths = np.array([len(word) + 1 for word in words], np.int64)
        self._ends = np.cumsum(lengths)  # of each token in the joined text, with the zero behind it

    def of(self, strings: Sequence[str]) -> Breakers:
        """Return the breakers of these strings."""
        by_tail: dict[tuple[int, ...], set[int]] = {}
        for string in strings:
            spelled = string.encode(errors="replace").replace(b"\0", b" ")
            whole = self._tokens_with(spelled)
            by_tail.setdefault((), set()).update(whole)
            for split in range(1, len(spelled)):
                heads = self._tokens_with(spelled[:split] + b"\0") - whole
                rest = spelled[split:].decode(errors="replace")
                tail = tuple(self._vocabulary.encode(rest, add_special_tokens=False)[:MOST_TAIL])
                if heads and tail:
                    by_tail.setdefault(tail, set()).update(heads)
        return tuple((tail, tuple(sorted(heads))) for tail, heads in by_tail.items() if heads)

    def _tokens_with(self, part: bytes) -> set[int]:
        """Return the tokens in whose text, followed by a zero, `part` occurs."""
        places, at = [], self._joined.find(part, 1)
        while at >= 0:
            places.append(at)
            at = self._joined.find(part, at + 1)
        return set(np.searchsorted(self._ends, np.array(places, np.int64) - 1, side="right").tolist())
