"""Limits the length of reasoning: when the budget is used up, its end is forced and the answer continues.

    ReasoningBudgets   how one model begins and ends reasoning, in its own tokens
    ReasoningBudget    one answer's state: counts reasoning tokens, then allows only the end of reasoning

To the engine it is a grammar, wrapped around the answer's own one if there is one. If the inner grammar forbids the end
of reasoning, it is not forced: a grammar that describes the reasoning itself decides its length.
Does not know: logits, requests, how reasoning is separated from content (answers/).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from localllm.errors import InvalidParameter
from localllm.text.answers.formats.messages import MessageFormat
from localllm.text.answers.reader import AnswerFormat
from localllm.text.answers.reasoning import PromptEnd
from localllm.text.grammar import OutputGrammar, clear, ids_inside_text
from localllm.text.tokenizer import Tokenizer

PROMPT_TAIL = 16
"""Number of prompt tokens that show whether the prompt ends inside reasoning."""

Bits = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The markers of reasoning as bytes, and the tokens that end it."""

    opener: bytes
    closer: bytes
    end_ids: tuple[int, ...]  # forced tokens: the closer, and what must follow it
    token_bytes: Callable[[int], bytes]
    again: bool = False  # reasoning may begin anywhere and several times, not only at the start
    barred_ids: tuple[int, ...] = ()  # forbidden after the forced end, since they would begin reasoning again


class ReasoningBudget:
    """Grammar that ends the reasoning of one answer after a number of tokens. Not thread-safe."""

    __slots__ = ("_inner", "_left", "_marks", "_num_forced", "_place", "_tail")

    def __init__(
        self, marks: ReasoningMarks, tokens: int, *, is_inside: bool, inner: OutputGrammar | None = None
    ) -> None:
        """is_inside: whether the prompt has opened the reasoning."""
        self._marks, self._left, self._inner = marks, tokens, inner
        self._place: Literal["before", "inside", "barred", "over"] = "inside" if is_inside else "before"
        self._tail = b""  # the last bytes, which may contain the start of a marker
        self._num_forced = 0  # how many of end_ids the latest tokens were

    def may_forbid(self, num_unseen: int) -> bool:
        if self._inner is not None and self._inner.may_forbid(num_unseen):
            return True
        match self._place:
            case "before":
                return self._left < num_unseen  # one of the tokens is the opener
            case "inside":
                return self._left <= num_unseen
            case "barred":
                return True
        return False

    def fill(self, bits: Bits) -> None:
        if self._inner is None:
            bits[:] = -1
        else:
            self._inner.fill(bits)
        if self._place == "barred":
            for token_id in self._marks.barred_ids:
                clear(bits, token_id)
        elif self._place == "inside" and self._left <= 0:
            token_id = self._marks.end_ids[self._num_forced]
            word, bit = divmod(token_id, 32)
            if bits.view(np.uint32)[word] >> np.uint32(bit) & np.uint32(1):
                bits[:] = 0
                bits.view(np.uint32)[word] = np.uint32(1 << bit)

    def accept(self, token_id: int) -> None:
        if self._inner is not None:
            self._inner.accept(token_id)
        match self._place:
            case "before":
                self._look_for_opener(token_id)
            case "inside":
                self._reason(token_id)
            case "barred":
                self._place = "before"

    def refuses(self, token_id: int) -> bool:
        return self._inner is not None and self._inner.refuses(token_id)

    def fork(self) -> ReasoningBudget:
        other = copy(self)
        other._inner = None if self._inner is None else self._inner.fork()
        return other

    @property
    def is_over(self) -> bool:
        return self._inner is not None and self._inner.is_over

    def _look_for_opener(self, token_id: int) -> None:
        opener, text = self._marks.opener, self._tail + self._marks.token_bytes(token_id)
        if self._marks.again:
            found = opener in text
            self._tail = text[-2 * len(opener) :]
        else:
            self._tail = text = text.lstrip()
            found = text.startswith(opener)
            if not found and not opener.startswith(text):
                self._place = "over"
        if found:
            self._place, self._tail = "inside", b""

    def _reason(self, token_id: int) -> None:
        marks = self._marks
        self._tail = (self._tail + marks.token_bytes(token_id))[-2 * len(marks.closer) - 64 :]
        if self._left <= 0 and token_id == marks.end_ids[self._num_forced]:
            self._num_forced += 1
            if self._num_forced == len(marks.end_ids):
                self._end("barred" if marks.barred_ids else "over")
            return
        self._left, self._num_forced = self._left - 1, 0
        if marks.closer in self._tail:
            self._end("before" if marks.again else "over")

    def _end(self, place: Literal["before", "barred", "over"]) -> None:
        self._place, self._tail, self._num_forced = place, b"", 0


class ReasoningBudgets:
    """Makes the reasoning budgets of one model. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, format: AnswerFormat | None) -> None:
        self._tokenizer = tokenizer
        self._pair = format.reasoning if format is not None else None
        self._marks = None if format is None else _marks(tokenizer, format)

    def start(
        self, tokens: int, prompt: Sequence[int], inner: OutputGrammar | None
    ) -> ReasoningBudget | OutputGrammar | None:
        """Return the grammar of one answer.
        Raises `InvalidParameter` if the model does not reason, unless `tokens` is 0."""
        if self._marks is None or self._pair is None:
            if tokens == 0:
                return inner
            raise InvalidParameter(
                f"This model does not reason, so a budget of {tokens} tokens has no effect.",
                "Its chat template has none of the known reasoning markers.",
                "Leave the budget out.",
                param="thinking_token_budget",
            )
        end = self._tokenizer.decode(prompt[-PROMPT_TAIL:], skip_special_tokens=False)
        return ReasoningBudget(self._marks, tokens, is_inside=PromptEnd(end).opens(self._pair), inner=inner)


def _marks(tokenizer: Tokenizer, format: AnswerFormat) -> ReasoningMarks | None:
    """Return the model's markers; None if it does not reason, or if its vocabulary cannot write the end marker."""
    if format.reasoning is None:
        return None
    opener, closer = format.reasoning
    again = isinstance(format.tools, MessageFormat)
    forced, barred = closer, tuple[int, ...]()
    if isinstance(format.tools, MessageFormat):  # the next message must be of another kind
        forced, thought = f"{closer}{format.tools.to_next}", format.tools.thought
        barred = (*_beginnings(tokenizer, thought), *_beginnings(tokenizer, f" {thought}"))
    end_ids = tuple(ids_inside_text(tokenizer, forced))
    if closer.encode() not in b"".join(map(tokenizer.token_bytes, end_ids)):
        return None
    return ReasoningMarks(opener.encode(), closer.encode(), end_ids, tokenizer.token_bytes, again, barred)


def _beginnings(tokenizer: Tokenizer, word: str) -> tuple[int, ...]:
    """Return the tokens that a word may begin with."""
    encoded = [tokenizer.encode(word[:length], add_special_tokens=False) for length in range(1, len(word) + 1)]
    return tuple(dict.fromkeys(ids[0] for ids in encoded if len(ids) == 1))
