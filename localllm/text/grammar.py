"""Grammar-constrained decoding: which tokens may come next, computed by llguidance over this model's vocabulary.

    OutputGrammar   what the engine needs of a constraint on one output
    Grammars        compiles grammars, keeps the last ones
    GrammarState    the state of one output: computes token masks, accepts tokens
    AfterReasoning  a GrammarState that starts when the reasoning ends
    opened_grammar.py has one that starts at each of some markers
    fill_along      the masks of an output's next tokens where some of them were guessed

llguidance (github.com/guidance-ai/llguidance) handles JSON schemas, regular expressions and context-free grammars with
an Earley parser over a lexer of derivatives, and walks the vocabulary as a trie: tens of microseconds a mask. Its own
limits bound the cost of a hostile schema or expression. It releases the GIL while it works. It recurses over schemas
and rules, so a large grammar is first tried in a child process (grammar_trial.py) and then compiled here, on a thread
with a large stack. Masks, copies and destructors of such a grammar do not recurse.
Does not know: logits, requests.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from copy import copy
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from localllm.errors import InvalidParameter, RequestError, StepFailed
from localllm.text.grammar_trial import STACK_BYTES, GrammarTrials, TrialFailed, TrialUnavailable
from localllm.text.opened_grammar import opened_grammar
from localllm.text.structured import StructuredOutputsParams
from localllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")
_MARK = "\x02"
KEPT = 16  # compiled grammars that are kept: each takes about 1 MiB once used; copying one takes microseconds
LEXER_FUEL, STEP_FUEL = 200_000, 50_000
"""Most expressions that llguidance may build for a grammar, and for a mask. Each takes 150 bytes for as long as the
grammar is kept. llguidance's defaults are five and four times higher. A choice of 1,500 texts fits, or a string of at
most 100,000 characters; no useful grammar was seen to need more."""
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": LEXER_FUEL,
    "step_lexer_fuel": STEP_FUEL,
    "verbose_errors": False,  # errors do not contain any user's text
}
LARGE_CHARACTERS, LARGE_LEVELS = 16_384, 200
"""Size from which a grammar is tried in a child process first. 200 levels take less than 3 MiB of a thread's 8."""
_starts_a_thread = threading.Lock()  # the stack size is a process-wide setting


class GrammarStuck(RequestError):
    """The grammar has become too complex for the output to continue. A retry would fail the same way."""

    code = "grammar_stuck"


class OutputGrammar(Protocol):
    """Constraint on one output, which follows the output so far."""

    def fill(self, bits: npt.NDArray[np.int32]) -> None:
        """Set the bits of the tokens that may come next. bits [ceil(V / 32)].
        Raises `LocalLLMError` if that cannot be computed."""

    def may_forbid(self, num_unseen: int) -> bool:
        """Return whether a token may be forbidden after `num_unseen` tokens that were not passed to `accept` yet."""

    def accept(self, token_id: int) -> None:
        """Advance by one output token. Raises `LocalLLMError` if the grammar forbids it."""

    def refuses(self, token_id: int) -> bool:
        """Return whether the token, which was drawn without a mask because `may_forbid` was False, must be drawn
        again; `may_forbid` is then True."""

    def fork(self) -> Self:
        """Return a copy that goes its own way."""

    @property
    def is_over(self) -> bool:
        """True when only an end token may follow."""


def fill_along(grammar: OutputGrammar, drafts: Sequence[int], bits: npt.NDArray[np.int32]) -> int:
    """Set the allowed tokens of a row that draws the next token, and one behind each of its drafts while these are
    right. bits [1 + len(drafts), ceil(V / 32)]. Return for how many of them; the grammar itself does not change.

    The row's result ends where the grammar forbids a draft, or where the output is over. If a later mask cannot be
    computed, it allows nothing, which ends the result before it; the next step's first mask raises the error.
    """
    grammar.fill(bits[0])
    walk, place = grammar.fork() if drafts else grammar, 0
    for place, token_id in enumerate(drafts, start=1):
        word = bits[place - 1].view(np.uint32)[token_id // 32]
        if not word >> np.uint32(token_id % 32) & np.uint32(1):
            return place
        try:
            walk.accept(token_id)
            if walk.is_over:
                return place
            walk.fill(bits[place])
        except Exception:
            bits[place] = 0
            return place + 1
    return place + 1


class GrammarState:
    """The grammar state of one output. Not thread-safe."""

    __slots__ = ("_matcher", "_on_stuck")

    def __init__(self, matcher: LLMatcher, on_stuck: Callable[[], None]) -> None:
        self._matcher, self._on_stuck = matcher, on_stuck

    def fill(self, bits: npt.NDArray[np.int32]) -> None:
        """Set the allowed tokens. bits [ceil(V / 32)]: bit id % 32 of word id // 32 becomes 1 if the token is allowed.

        Raises `GrammarStuck` if the grammar has become too complex.
        """
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._check()

    def may_forbid(self, num_unseen: int) -> bool:
        return True

    def accept(self, token_id: int) -> None:
        """Advance by a token. Raises `GrammarStuck`, or `StepFailed` if the token is forbidden,
        which means that a mask was not applied."""
        self._matcher.consume_token(token_id)
        self._check()

    def refuses(self, token_id: int) -> bool:
        return False

    def takes(self, token_ids: Sequence[int]) -> bool:
        """Return whether these tokens may come next."""
        return int(self._matcher.validate_tokens(list(token_ids))) == len(token_ids)

    @property
    def may_end(self) -> bool:
        """True if the text so far is complete."""
        return bool(self._matcher.is_accepting())

    def fork(self) -> GrammarState:
        return GrammarState(self._matcher.deep_copy(), self._on_stuck)

    @property
    def is_over(self) -> bool:
        """True when only an end token may follow."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error()
            kind = StepFailed if "doesn't satisfy the grammar" in reason else GrammarStuck
            if kind is GrammarStuck:
                self._on_stuck()
            raise kind(
                "The output cannot continue under its grammar.",
                _reason(reason),
                "Ask for a simpler schema, expression or grammar.",
            )


class AfterReasoning:
    """A grammar that applies after the reasoning, for models that reason first.

    Inside the reasoning every token is allowed except end tokens. Without reasoning the grammar applies from the first
    token. Where reasoning may begin, its marker is allowed too if it is a single token. One or two line ends may
    separate reasoning and answer.
    """

    def __init__(
        self, state: GrammarState, asked: StructuredOutputsParams, tokenizer: Tokenizer, eos_token_ids: Sequence[int]
    ) -> None:
        assert asked.after is not None
        opener, self._closer = asked.after[0], asked.after[1].encode()
        self._state, self._tokenizer, self._eos_token_ids = state, tokenizer, eos_token_ids
        self._bypass = _single_token(tokenizer, opener)  # token allowed now besides those of the grammar
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

    def refuses(self, token_id: int) -> bool:
        return False

    def fork(self) -> AfterReasoning:
        other = copy(self)
        other._state = self._state.fork()
        return other

    @property
    def is_over(self) -> bool:
        return not self._is_inside and self._state.is_over


def _single_token(tokenizer: Tokenizer, text: str) -> int | None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids[0] if len(ids) == 1 else None


def clear(bits: npt.NDArray[np.int32], token_id: int) -> None:
    """Forbid a token."""
    bits.view(np.uint32)[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)


class Grammars:
    """Compiles and keeps grammars. Thread-safe.
    The vocabulary is read at the first grammar, which takes half a second."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """vocab_size: of the model's logits; ids beyond the tokenizer's vocabulary are never allowed."""
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, tuple(eos_token_ids)
        self._words: _TokenizerVocabulary | None = None
        self._vocabulary: LLTokenizer | None = None
        self._trials = GrammarTrials(self._words_of_vocabulary, _LIMITS)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # the most recently used last
        self._lock = threading.Lock()

    def start(self, asked: StructuredOutputsParams) -> OutputGrammar | None:
        """Return the state of a new output; None if its grammar is optional and no marker of it can begin it.
        Raises `InvalidParameter` with the reason if the grammar is invalid or unsupported.

        Compiles the grammar unless it is kept. That takes milliseconds, rarely more than a second, so call it on a
        worker thread.
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
        object.__setattr__(asked, "compiled", _Compiled(self, matcher))  # for its choices, even after eviction
        # A grammar that gets stuck has built all expressions it may, and its copies share them: it is the costliest to
        # keep.
        state = GrammarState(matcher.deep_copy(), lambda: self._forget(grammar))
        if asked.opened_by:
            words, tokenizer = self._words_of_vocabulary().tokens, self._tokenizer
            return opened_grammar(
                state, asked, words, tokenizer.token_bytes, lambda text: ids_inside_text(tokenizer, text)
            )
        return state if asked.after is None else AfterReasoning(state, asked, self._tokenizer, self._eos_token_ids)

    def is_large(self, asked: StructuredOutputsParams) -> bool:
        """Return whether `start` would first try the grammar in a child process, which takes longer.
        Raises `InvalidParameter`."""
        return self._kept(asked.to_grammar()) is None and _is_large(asked)

    def close(self) -> None:
        """End the child process, if any; a later large grammar starts another."""
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
            return  # safe: its levels are bounded, and the stack is large enough for them
        except TrialFailed as failed:
            raise asked.refusal(
                "This output format is too complex.", str(failed), "Ask for a simpler schema, expression or grammar."
            ) from failed
        if reason is not None:
            raise _cannot_be_honoured(reason, asked)

    def _words_of_vocabulary(self) -> _TokenizerVocabulary:
        with self._lock:
            if self._words is None:
                self._words = _TokenizerVocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
            return self._words

    def _llguidance_vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        words = self._words_of_vocabulary()
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = LLTokenizer(words, n_vocab=self._vocab_size, eos_token=list(words.eos_token_ids))  # type: ignore[arg-type]
            return self._vocabulary


class _Compiled:
    """A compiled grammar stored with the request; copies and pickles of the request omit it."""

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
        begun.compute_bitmask()  # shows now, and not in a step, that no text can follow the grammar
    if begun.is_error():
        raise _cannot_be_honoured(begun.get_error(), asked)
    return matcher


def _cannot_be_honoured(reason: str, asked: StructuredOutputsParams) -> InvalidParameter:
    return asked.refusal(
        "This output format is not supported.",
        _reason(reason),
        "docs/concepts/structured-output.md lists what is supported.",
    )


def _on_large_stack(work: Callable[[], T]) -> T:
    """Run `work` on a thread with a large stack. Return its result, or raise its exception."""
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


class _TokenizerVocabulary:
    """A vocabulary in the form that llguidance expects."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        known = eos_token_ids or tuple(i for i in [tokenizer.eos_token_id] if i is not None and i < vocab_size)
        if not known:
            raise InvalidParameter(
                "This model has no token that ends a text.", "A grammar needs such a token to end its output."
            )
        self.eos_token_ids, self.eos_token_id = known, known[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = sorted({i for i in tokenizer.special_ids if i < vocab_size} | set(known))
        self._tokenizer = tokenizer

    def __call__(self, text: Any) -> list[int]:
        return ids_inside_text(self._tokenizer, text.decode("utf-8", "replace") if isinstance(text, bytes) else text)


def ids_inside_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text inside a longer text: some tokenizers add a leading space otherwise."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    if b"".join(map(tokenizer.token_bytes, ids)) == text.encode("utf-8", "replace"):
        return ids
    before = tokenizer.encode(_MARK, add_special_tokens=False)
    return tokenizer.encode(_MARK + text, add_special_tokens=False)[len(before) :]


def _reason(message: str) -> str:
    if message.startswith("NoExtensionBias"):
        return "No text matches it."
    line = " ".join(message.replace("<non-verbose/>", "").split())[:300] or "llguidance gives no reason"
    return line if line.endswith(".") else f"{line}."
