"""Which tokens may come next, so that a text follows a grammar: llguidance over this model's vocabulary.

    Grammars        compiles what is asked, keeps the last ones compiled
    GrammarState    one text on its way: a mask of tokens for the next place, a token taken
    AfterReasoning  the same, from the end of the reasoning on

llguidance (github.com/guidance-ai/llguidance) reads JSON schemas, regular expressions and context-free grammars with an
Earley parser over a lexer of derivatives, and walks the vocabulary as a trie: tens of microseconds a mask. Its own
limits bound what a hostile schema or expression can cost. It lets go of the interpreter while it works. It recurses
over schemas and rules: a large grammar is tried in a child process (grammar_trial.py) and then compiled here, on a
thread with a large stack. Masks, copies and destructors of such a grammar do not recurse.
Does not know: logits, requests.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from localllm.errors import InvalidParameter, RequestError, StepFailed
from localllm.text.grammar_trial import STACK_BYTES, TrialFailed, Trials, TrialUnavailable
from localllm.text.structured import StructuredOutputsParams
from localllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")
_MARK = "\x02"
KEPT = 64  # compiled grammars; a matcher is copied in microseconds
LEXER_FUEL, STEP_FUEL = 200_000, 50_000
"""Expressions that llguidance may build for a grammar, and for a mask. They take 150 bytes each, for as long as the
grammar is kept. Its own limits are five and four times that; a choice of 1,500 texts passes, or a string of 100,000
characters at most, and nothing was seen that needs more and does not need too much."""
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": LEXER_FUEL,
    "step_lexer_fuel": STEP_FUEL,
    "verbose_errors": False,  # an error holds no part of anybody's text
}
LARGE_CHARACTERS, LARGE_LEVELS = 16_384, 200
"""From here on a grammar is tried in a child process first. 200 levels take less than 3 MiB of a thread's 8."""
_starts_a_thread = threading.Lock()  # the size of stacks is a setting of the process


class GrammarStuck(RequestError):
    """An answer cannot go on under its grammar: that has become too complex. Trying again would change nothing."""

    code = "grammar_stuck"


class GrammarState:
    """What one choice has said so far, as its grammar sees it. Not thread-safe."""

    __slots__ = ("_matcher", "_on_stuck")

    def __init__(self, matcher: LLMatcher, on_stuck: Callable[[], None]) -> None:
        self._matcher, self._on_stuck = matcher, on_stuck

    def fill(self, bits: npt.NDArray[np.int32]) -> None:
        """bits [ceil(V / 32)]: bit id % 32 of word id // 32 becomes 1 where the token may come.

        Raises `GrammarStuck` where the grammar has become too complex.
        """
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._check()

    def may_forbid(self, num_unseen: int) -> bool:
        return True

    def accept(self, token_id: int) -> None:
        """Raises `GrammarStuck`, too, and `StepFailed` where the token may not come here: somebody left a mask out."""
        self._matcher.consume_token(token_id)
        self._check()

    @property
    def is_over(self) -> bool:
        """Whether nothing but the end can follow."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error()
            kind = StepFailed if "doesn't satisfy the grammar" in reason else GrammarStuck
            if kind is GrammarStuck:
                self._on_stuck()
            raise kind(
                "The output cannot go on under its grammar.",
                _reason(reason),
                "Ask for a simpler schema, expression or grammar.",
            )


class AfterReasoning:
    """A grammar that holds from the end of the reasoning on, where the model reasons first.

    Until then everything may come but the end. Without reasoning it holds from the first token; where reasoning may
    begin, so may its marker, if that is a token of its own. A line end or two may stand between both.
    """

    def __init__(
        self, state: GrammarState, asked: StructuredOutputsParams, tokenizer: Tokenizer, eos_token_ids: Sequence[int]
    ) -> None:
        assert asked.after is not None
        opener, self._closer = asked.after[0], asked.after[1].encode()
        self._state, self._tokenizer, self._eos_token_ids = state, tokenizer, eos_token_ids
        self._bypass = _single_token(tokenizer, opener)  # what may come now beside what the grammar lets come
        self._opener = self._bypass
        self._is_inside, self._tail = asked.is_inside, b""

    def fill(self, bits: npt.NDArray[np.int32]) -> None:
        if self._is_inside:
            bits[:] = -1
            for token_id in self._eos_token_ids:
                clear(bits, token_id)
            return
        self._state.fill(bits)
        if self._bypass is not None:
            bits.view(np.uint32)[self._bypass // 32] |= np.uint32(1 << self._bypass % 32)

    def may_forbid(self, num_unseen: int) -> bool:
        return True

    def accept(self, token_id: int) -> None:
        if self._is_inside:
            self._tail = (self._tail + self._tokenizer.token_bytes(token_id))[-2 * len(self._closer) - 64 :]
            if self._closer in self._tail:
                self._is_inside, self._bypass = False, _single_token(self._tokenizer, "\n\n")
            return
        bypassed, self._bypass = token_id == self._bypass, None
        if not bypassed:
            self._state.accept(token_id)
        elif token_id == self._opener:
            self._is_inside = True

    @property
    def is_over(self) -> bool:
        return not self._is_inside and self._state.is_over


def _single_token(tokenizer: Tokenizer, text: str) -> int | None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids[0] if len(ids) == 1 else None


def clear(bits: npt.NDArray[np.int32], token_id: int) -> None:
    """The token may not come."""
    bits.view(np.uint32)[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)


class Grammars:
    """Any thread may call any method. The vocabulary is read when the first grammar is asked for: half a second."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """vocab_size: of the model's logits; tokens beyond the tokenizer's never come."""
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, tuple(eos_token_ids)
        self._words: _Words | None = None
        self._vocabulary: LLTokenizer | None = None
        self._trials = Trials(self._words_of_vocabulary, _LIMITS)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # the one used last comes last
        self._lock = threading.Lock()

    def start(self, asked: StructuredOutputsParams) -> GrammarState | AfterReasoning:
        """A text that has not begun. Raises `InvalidParameter` where the grammar cannot be honoured, with the reason.

        Compiles it where it is not kept: milliseconds, rarely more than a second, so elsewhere than where others wait.
        """
        grammar = asked.to_grammar()
        ready = asked.compiled
        matcher = ready.matcher if isinstance(ready, _Compiled) and ready.by is self else self._kept(grammar)
        if matcher is None:
            matcher = self._compile(grammar, asked)
            with self._lock:
                self._compiled[grammar] = matcher
                while len(self._compiled) > KEPT:
                    self._compiled.popitem(last=False)
        object.__setattr__(asked, "compiled", _Compiled(self, matcher))  # for its choices, even if others push it out
        # One that gets stuck has built all that it may, and copies share it: it is the costliest to keep.
        state = GrammarState(matcher.deep_copy(), lambda: self._forget(grammar))
        return state if asked.after is None else AfterReasoning(state, asked, self._tokenizer, self._eos_token_ids)

    def is_large(self, asked: StructuredOutputsParams) -> bool:
        """Whether `start` would try it in a child process, which takes longer. Raises `InvalidParameter`."""
        return self._kept(asked.to_grammar()) is None and _is_large(asked)

    def close(self) -> None:
        """Ends the child process, if there is one; a large grammar that comes later starts another."""
        self._trials.close()

    def _kept(self, grammar: str) -> LLMatcher | None:
        with self._lock:
            matcher = self._compiled.pop(grammar, None)
            if matcher is not None:
                self._compiled[grammar] = matcher
        return matcher

    def _forget(self, grammar: str) -> None:
        with self._lock:
            self._compiled.pop(grammar, None)

    def _compile(self, grammar: str, asked: StructuredOutputsParams) -> LLMatcher:
        vocabulary = self._llguidance_vocabulary()
        if _is_large(asked):
            self._try(grammar, asked)
            return _on_large_stack(lambda: _compiled(vocabulary, grammar, asked))
        return _compiled(vocabulary, grammar, asked)

    def _try(self, grammar: str, asked: StructuredOutputsParams) -> None:
        try:
            reason = self._trials.run(grammar)
        except TrialUnavailable:
            return  # its levels are bounded, and the stack is large enough for them
        except TrialFailed as failed:
            raise asked.refusal(
                "This output format is too complex.", str(failed), "Ask for a simpler schema, expression or grammar."
            ) from failed
        if reason is not None:
            raise _cannot_be_honoured(reason, asked)

    def _words_of_vocabulary(self) -> _Words:
        with self._lock:
            if self._words is None:
                self._words = _Words(self._tokenizer, self._vocab_size, self._eos_token_ids)
            return self._words

    def _llguidance_vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        words = self._words_of_vocabulary()
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = LLTokenizer(words, n_vocab=self._vocab_size, eos_token=list(words.eos_token_ids))  # type: ignore[arg-type]
            return self._vocabulary


class _Compiled:
    """Stays beside what was asked, and is left out of its copies and pickles."""

    __slots__ = ("by", "matcher")

    def __init__(self, by: Grammars, matcher: LLMatcher) -> None:
        self.by, self.matcher = by, matcher

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _is_large(asked: StructuredOutputsParams) -> bool:
    return len(asked.to_grammar()) > LARGE_CHARACTERS or asked.levels() > LARGE_LEVELS


def _compiled(vocabulary: LLTokenizer, grammar: str, asked: StructuredOutputsParams) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=LLParserLimits(**_LIMITS))
    begun = matcher.deep_copy()
    if not matcher.is_error():
        begun.compute_bitmask()  # one that no text can follow, or none of this length, shows here and not in a step
    if begun.is_error():
        raise _cannot_be_honoured(begun.get_error(), asked)
    return matcher


def _cannot_be_honoured(reason: str, asked: StructuredOutputsParams) -> InvalidParameter:
    return asked.refusal(
        "This output format cannot be honoured.",
        _reason(reason),
        "See docs/concepts/structured-output.md for what can.",
    )


def _on_large_stack(work: Callable[[], T]) -> T:
    """What `work` gives or raises, on a thread of its own."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name="localllm-large-grammar", daemon=True)
    with _starts_a_thread:
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    return future.result()


class _Words:
    """A vocabulary as llguidance asks for it."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        known = eos_token_ids or tuple(i for i in [tokenizer.eos_token_id] if i is not None)
        if not known:
            raise InvalidParameter(
                "This model has no token that ends a text.", "A grammar could not say when it is complete."
            )
        self.eos_token_ids, self.eos_token_id = known, known[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = sorted({i for i in tokenizer.special_ids if i < vocab_size} | set(known))
        self._tokenizer = tokenizer

    def __call__(self, text: Any) -> list[int]:
        return ids_inside_text(self._tokenizer, text.decode("utf-8", "replace") if isinstance(text, bytes) else text)


def ids_inside_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """As the tokens stand inside a text: some tokenizers put a blank before what they are given."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    if b"".join(map(tokenizer.token_bytes, ids)) == text.encode("utf-8", "replace"):
        return ids
    before = tokenizer.encode(_MARK, add_special_tokens=False)
    return tokenizer.encode(_MARK + text, add_special_tokens=False)[len(before) :]


def _reason(message: str) -> str:
    if message.startswith("NoExtensionBias"):
        return "No text follows it."
    line = " ".join(message.replace("<non-verbose/>", "").split())[:300] or "llguidance gives no reason"
    return line if line.endswith(".") else f"{line}."
