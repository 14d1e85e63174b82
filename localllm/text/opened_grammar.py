"""A grammar that applies from a marker on: free text, and calls that always parse.

Until a marker is complete no token is forbidden, so the engine makes no mask and does not wait for tokens. Two tokens
may therefore be drawn without a mask although they had to follow the grammar: one that contains the end of a marker
and more, and one that was in flight when the marker was seen. If the grammar does not allow such a token, it is
refused, and drawn again with a mask. When the grammar's text is complete, the text is free again.
Does not know: what the markers mean, logits, requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Literal, Protocol, Self

import numpy as np
import numpy.typing as npt

from localllm.errors import StepFailed
from localllm.text.structured import StructuredOutputsParams

Bits = npt.NDArray[np.int32]


class Constraint(Protocol):
    """The grammar that begins at a marker."""

    def fill(self, bits: Bits) -> None: ...
    def accept(self, token_id: int) -> None: ...
    def fork(self) -> Self: ...

    def takes(self, token_ids: Sequence[int]) -> bool:
        """Return whether these tokens may come next."""

    @property
    def may_end(self) -> bool:
        """True if the text so far is complete."""


@dataclass(slots=True)
class _Markers:
    """The markers that may begin the grammar, and the vocabulary in which they are written."""

    state: Constraint  # before its first token
    openers: tuple[bytes, ...]
    reasoning: tuple[bytes, bytes] | None  # markers between which the text stays free
    words: Sequence[bytes]  # of every token
    token_bytes: Callable[[int], bytes]
    encode: Callable[[str], list[int]]
    found: dict[tuple[bytes, bool], list[int]] = field(default_factory=dict)

    @property
    def most(self) -> int:
        return max(map(len, self.openers)) - 1

    def first_opener(self, text: bytes) -> int:
        """Return where the first marker begins, or -1."""
        return min((at for at in (text.find(opener) for opener in self.openers) if at >= 0), default=-1)

    def begun(self, text: bytes) -> Constraint | None:
        """Return the grammar after a text that begins with a marker; None if it does not allow the text."""
        try:
            token_ids = self.encode(text.decode())
        except UnicodeDecodeError:  # the beginning of a character right behind the marker
            return None
        if not self.state.takes(token_ids):
            return None
        state = self.state.fork()
        for token_id in token_ids:
            state.accept(token_id)
        return state

    def completing(self, tail: bytes) -> list[int]:
        """Return the tokens that would complete a marker behind this text."""
        wanted = {
            (opener[size:], size > 0)
            for opener in self.openers
            for size in range(len(opener))
            if tail.endswith(opener[:size])
        }
        return sorted({token_id for rest, is_begun in wanted for token_id in self._tokens_with(rest, is_begun)})

    def _tokens_with(self, rest: bytes, is_begun: bool) -> list[int]:
        known = self.found.get((rest, is_begun))
        if known is None:
            known = [i for i, word in enumerate(self.words) if (word.startswith(rest) if is_begun else rest in word)]
            self.found[rest, is_begun] = known
        return known


class OpenedGrammar:
    """The state of one output. Not thread-safe."""

    __slots__ = ("_inner", "_is_armed", "_markers", "_place", "_tail")

    def __init__(self, markers: _Markers, *, is_inside: bool) -> None:
        self._markers, self._is_armed, self._tail = markers, False, b""
        self._place: Literal["before", "inside", "free"] = "free"
        self._inner: Constraint | None = None  # of a text that has begun
        if markers.reasoning is not None:
            self._place = "inside" if is_inside else "before"

    def may_forbid(self, num_unseen: int) -> bool:
        return self._inner is not None or self._is_armed

    def fill(self, bits: Bits) -> None:
        if self._inner is not None:
            self._inner.fill(bits)
            return
        bits[:] = -1
        if self._is_armed:
            for token_id in self._markers.completing(self._tail):
                if self._after(token_id) is None:
                    bits.view(np.uint32)[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)

    def refuses(self, token_id: int) -> bool:
        was_armed, self._is_armed = self._is_armed, self._after(token_id) is None
        return self._is_armed and not was_armed  # a mask that did not hold is an error, and not a reason to draw again

    def accept(self, token_id: int) -> None:
        after = self._after(token_id)
        if after is None:
            raise StepFailed("A token was drawn that the grammar of the calls forbids.")
        self._place, self._tail, self._inner = after
        self._is_armed = False

    def fork(self) -> OpenedGrammar:
        other = copy(self)
        other._inner = None if self._inner is None else self._inner.fork()
        return other

    @property
    def is_over(self) -> bool:
        return False

    def _after(self, token_id: int) -> tuple[Literal["before", "inside", "free"], bytes, Constraint | None] | None:
        """Return the place, the tail and the grammar after one more token; None if the grammar does not allow it."""
        if self._inner is not None:
            if not self._inner.takes([token_id]):
                return None
            inner = self._inner.fork()
            inner.accept(token_id)
            return ("free", b"", None) if inner.may_end else ("free", b"", inner)
        place, text = self._place, self._tail + self._markers.token_bytes(token_id)
        reasoning = self._markers.reasoning
        if place == "before" and reasoning is not None:
            text = text.lstrip()
            if text.startswith(reasoning[0]):
                place, text = "inside", text[len(reasoning[0]) :]
            elif reasoning[0].startswith(text):
                return place, text, None
            else:
                place = "free"
        if place == "inside" and reasoning is not None:
            _, closer, behind = text.partition(reasoning[1])
            if not closer:
                return place, text[-len(reasoning[1]) :], None
            place, text = "free", behind
        at = self._markers.first_opener(text)
        if at < 0:
            return place, text[-self._markers.most :] if self._markers.most else b"", None
        begun = self._markers.begun(text[at:])
        return None if begun is None else (place, b"", begun)


def opened_grammar(
    state: Constraint,
    asked: StructuredOutputsParams,
    words: Sequence[bytes],
    token_bytes: Callable[[int], bytes],
    encode: Callable[[str], list[int]],
) -> OpenedGrammar | None:
    """Return the state of a new output; None if the grammar can begin with none of the markers.

    words: the bytes of every token. encode: returns the tokens of a text inside a longer one.
    """
    openers = tuple(opener.encode() for opener in asked.opened_by if state.takes(encode(opener)))
    if not openers:
        return None
    reasoning = None if asked.after is None else (asked.after[0].encode(), asked.after[1].encode())
    markers = _Markers(state, openers, reasoning, words, token_bytes, encode)
    return OpenedGrammar(markers, is_inside=asked.is_inside)
