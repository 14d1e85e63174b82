"""Calls in `auto` always parse: whatever a random model writes, from the marker of a call on its grammar applies."""

import random
from functools import cache

import jsonschema
import numpy as np
import pytest

from localllm.errors import StepFailed
from localllm.text.answers.formats import FORMATS
from localllm.text.answers.reader import AnswerFormat
from localllm.text.answers.reasoning import NO_PROMPT, ReasoningPair
from localllm.text.grammar import Grammars, OutputGrammar
from tests.text.answers.harness import CLOSERS, SCHEMAS, tool, vocabulary
from tests.text.answers.reading import MESSAGES, broken_in, calls_in, read

TOOLS = [tool("scalars", SCHEMAS["scalars"]), tool("strings", SCHEMAS["strings"])]
THINK = ReasoningPair("<think>", "</think>")
UNMARKED = {*MESSAGES, "llama3-json"}  # with tokens of their own; without them also pythonic and gigachat
MARKED = [name for name in FORMATS if name not in UNMARKED]
MOST = 30_000  # tokens of an answer


@cache
def grammars(with_markers: bool) -> Grammars:
    tokenizer, words = vocabulary(with_markers)
    return Grammars(tokenizer, words.vocab_size, (words.eos_token,))


def started(name: str, with_markers: bool, *, reasons: bool = False) -> OutputGrammar | None:
    format = AnswerFormat(FORMATS[name], THINK if reasons else None)
    tokenizer, _ = vocabulary(with_markers)
    asked = format.enforced_calls(TOOLS, NO_PROMPT, tokenizer, parallel=True)
    return None if asked is None else grammars(with_markers).start(asked)


class RandomModel:
    """Writes one answer as the engine draws it: without a mask until the grammar may forbid a token."""

    def __init__(self, name: str, with_markers: bool, seed: int) -> None:
        self.tokenizer, words = vocabulary(with_markers)
        self.size, self.end = words.vocab_size, words.eos_token
        grammar = started(name, with_markers)
        assert grammar is not None
        self.grammar, self.rng, self.opener = grammar, random.Random(seed), FORMATS[name].openers[0]
        self.bits = np.zeros(-(-self.size // 32), np.int32)
        self.wanted: list[int] = []  # tokens that it writes next where it may

    def write(self) -> str:
        ids: list[int] = []
        while len(ids) < MOST:
            token_id = self._masked() if self.grammar.may_forbid(0) else self._free()
            if self.grammar.refuses(token_id):
                token_id = self._masked()
            if token_id == self.end:
                return self.tokenizer.decode(ids, skip_special_tokens=False)
            assert not self.grammar.refuses(token_id)
            self.grammar.accept(token_id)
            ids.append(token_id)
        raise AssertionError("the answer does not end")

    def _free(self) -> int:
        """Return the next token of a text of markers and what begins like one, and of what may not follow them."""
        if not self.wanted:
            if self.rng.random() < 0.2:
                return self.end
            text = self.rng.choice([self.opener, self.opener[:-1], "<", "a {", "\n", "é"])
            self.wanted = self.tokenizer.encode(text, add_special_tokens=False)
        return self.wanted.pop(0)

    def _masked(self) -> int:
        self.grammar.fill(self.bits)
        octets = np.unpackbits(self.bits.view(np.uint8), bitorder="little")[: self.size]
        allowed = np.flatnonzero(octets).tolist()
        assert allowed
        if self.wanted and octets[self.wanted[0]]:
            return self.wanted.pop(0)
        self.wanted = []
        if len(allowed) > 100 and self.rng.random() < 0.3:
            self.wanted = self.tokenizer.encode(self.rng.choice(CLOSERS), add_special_tokens=False)
        ending = [i for i in allowed if self.tokenizer.token_bytes(i) in (b'"', b"<", b"]", b"}", b",", b"\n")]
        return self.rng.choice(ending if ending and self.rng.random() < 0.3 else allowed)


def check(name: str, with_markers: bool, seed: int) -> int:
    """Return the number of calls in a random answer, after checking that each is parsed and fits its schema."""
    model = RandomModel(name, with_markers, seed)
    text = model.write()
    parts = read(name, [text], tools=TOOLS)
    assert broken_in(parts) == [], text
    calls = calls_in(parts)
    for called, arguments in calls:
        jsonschema.validate(arguments, SCHEMAS[called])
    return len(calls)


@pytest.mark.parametrize("name", MARKED)
def test_calls_of_a_random_model_parse(name: str) -> None:
    assert sum(check(name, True, seed) for seed in range(6)) > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_calls_of_a_random_model_parse() -> None:
    done, seed = 0, 100
    while done < 10_000:
        name = MARKED[seed % len(MARKED)]
        done += check(name, seed % 3 > 0 or name in ("pythonic", "gigachat"), seed)
        seed += 1


def test_formats_without_a_marker_stay_free() -> None:
    assert started("harmony", True) is None
    assert started("llama3-json", True) is None
    assert started("pythonic", False) is None


def test_text_without_a_call_makes_no_mask() -> None:
    tokenizer, _ = vocabulary(False)
    grammar = started("hermes", False)
    assert grammar is not None
    for token_id in tokenizer.encode(
        'A <tool of <tool_cal, {"name": 1} and <think> tool_call>', add_special_tokens=False
    ):
        assert not grammar.may_forbid(0)
        assert not grammar.may_forbid(2)
        assert not grammar.refuses(token_id)
        grammar.accept(token_id)


def test_a_marker_inside_reasoning_is_free() -> None:
    tokenizer, _ = vocabulary(True)
    grammar = started("hermes", True, reasons=True)
    assert grammar is not None
    for token_id in tokenizer.encode("\n<think>a <tool_call> b</think>c", add_special_tokens=False):
        grammar.accept(token_id)
        assert not grammar.may_forbid(0)
    grammar.accept(tokenizer.encode("<tool_call>", add_special_tokens=False)[0])
    assert grammar.may_forbid(0)


def test_text_behind_a_call_is_free_again() -> None:
    tokenizer, words = vocabulary(True)
    grammar = started("hermes", True)
    assert grammar is not None
    text = '<tool_call>\n{"name": "strings", "arguments": {"a": "x"}}\n</tool_call>'
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        assert not grammar.refuses(token_id)
        grammar.accept(token_id)
    assert not grammar.may_forbid(0)
    assert not grammar.refuses(words.eos_token)


def test_an_end_token_inside_a_call_is_drawn_again() -> None:
    tokenizer, words = vocabulary(True)
    grammar = started("hermes", True)
    assert grammar is not None
    grammar.accept(tokenizer.encode("<tool_call>", add_special_tokens=False)[0])
    assert grammar.refuses(words.eos_token)
    assert grammar.may_forbid(0)


def test_a_mask_that_does_not_hold_is_an_error() -> None:
    """Instead of a token that is drawn again for ever."""
    tokenizer, words = vocabulary(True)
    grammar = started("hermes", True)
    assert grammar is not None
    grammar.accept(tokenizer.encode("<tool_call>", add_special_tokens=False)[0])
    assert grammar.refuses(words.eos_token)
    assert not grammar.refuses(words.eos_token)
    with pytest.raises(StepFailed):
        grammar.accept(words.eos_token)
