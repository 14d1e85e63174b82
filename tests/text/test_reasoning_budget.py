"""The bound of reasoning on the level of tokens: whatever is drawn from the masks reasons no longer than it may."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.errors import InvalidParameter
from localllm.text.answers.formats import FORMATS
from localllm.text.answers.parts import Content, Reasoning
from localllm.text.answers.reader import AnswerFormat, AnswerReader
from localllm.text.answers.reasoning import PAIRS, PromptEnd, ReasoningPair
from localllm.text.grammar import Grammars, fill_along
from localllm.text.reasoning_budget import ReasoningBudgets
from localllm.text.structured import StructuredOutputsParams
from localllm.text.tokenizer import Tokenizer
from tests.draws import draws
from tests.text.vocabularies import raw_tokenizer, tokenizer

THINK = AnswerFormat(None, PAIRS[0])
HARMONY = AnswerFormat(FORMATS["harmony"], ReasoningPair("<|channel|>analysis<|message|>", "<|end|>"))
HARMONY_TOKENS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]
KINDS = ("byte_level", "sentencepiece")


def harmony_tokenizer() -> Tokenizer:
    raw = raw_tokenizer("byte_level").from_str(raw_tokenizer("byte_level").to_str())
    raw.add_special_tokens(HARMONY_TOKENS)
    raw.add_tokens(["analysis", "assistant", "final"])
    return Tokenizer(raw)


def draw(made: Tokenizer, state, rng: random.Random, wanted: list[int], longest: int) -> list[int]:
    """Tokens from the masks: those wanted first, as far as they may come, then any."""
    bits = np.zeros(-(-made.vocab_size // 32), np.int32)
    drawn: list[int] = []
    wanted = list(wanted)
    while len(drawn) < longest and not state.is_over:
        told = state.may_forbid(0)
        state.fill(bits)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[: made.vocab_size])
        assert len(allowed), "nothing may come"
        assert told or len(allowed) == made.vocab_size, "a mask that was not announced"
        if wanted and wanted[0] in allowed:
            drawn.append(wanted.pop(0))
        else:
            wanted = wanted if len(allowed) == 1 else []
            drawn.append(int(rng.choice(allowed)))
        state.accept(drawn[-1])
    return drawn


@draws(40)
@given(budget=st.integers(0, 9), seed=st.integers(0, 9999), opened=st.booleans(), start=st.integers(0, 12))
def test_masks_along_drafts_are_those_of_one_token_after_the_other(
    budget: int, seed: int, opened: bool, start: int
) -> None:
    """S8: drafts may begin before the reasoning, cross its forced end, and go on behind it."""
    made, words = tokenizer("byte_level"), -(-tokenizer("byte_level").vocab_size // 32)
    budgets = ReasoningBudgets(made, THINK)
    prompt = made.encode("Hi <think>\n" if opened else "Hi")
    wanted = [] if opened else made.encode("<think>", add_special_tokens=False)
    tokens = draw(made, budgets.start(budget, prompt, None), random.Random(seed), wanted, len(wanted) + budget + 16)
    plain, expected = budgets.start(budget, prompt, None), []
    for token_id in tokens:
        expected.append(np.zeros(words, np.int32))
        plain.fill(expected[-1])
        plain.accept(token_id)
    state, start = budgets.start(budget, prompt, None), min(start, len(tokens) - 1)
    for token_id in tokens[:start]:
        state.accept(token_id)
    bits = np.zeros((len(tokens) - start, words), np.int32)
    assert fill_along(state, tokens[start:-1], bits) == len(bits)
    assert [row.tolist() for row in bits] == [row.tolist() for row in expected[start:]]
    state.fill(bits[0])
    assert bits[0].tolist() == expected[start].tolist()


def said(made: Tokenizer, format: AnswerFormat, prompt: str, drawn: list[int]) -> tuple[str, str]:
    reader = AnswerReader(format, tools=[], prompt=PromptEnd(prompt))
    parts = [*reader.feed(made.decode(drawn, skip_special_tokens=False)), *reader.end()]
    return tuple("".join(p.text for p in parts if isinstance(p, kind)) for kind in (Reasoning, Content))  # type: ignore[return-value]


@draws(40)
@given(kind=st.sampled_from(KINDS), budget=st.integers(0, 12), seed=st.integers(0, 9999), opened=st.booleans())
def test_reasoning_ends_at_its_budget_and_the_answer_goes_on(kind: str, budget: int, seed: int, opened: bool) -> None:
    """Neither marker is a token here: the closer is several that come one after the other."""
    made, rng = tokenizer(kind), random.Random(seed)
    prompt = "Hi <think>\n" if opened else "Hi"
    state = ReasoningBudgets(made, THINK).start(budget, made.encode(prompt), None)
    inner = made.encode(" the quick brown fox jumps over the lazy dog", add_special_tokens=False) * 4
    opener = [] if opened else made.encode("<think>", add_special_tokens=False)
    closer = ReasoningBudgets(made, THINK)._marks.end_ids
    drawn = draw(made, state, rng, [*opener, *inner], len(opener) + budget + len(closer) + 10)
    start = len(opener)
    assert drawn[:start] == opener
    assert drawn[start : start + budget] == inner[:budget]
    assert tuple(drawn[start + budget : start + budget + len(closer)]) == closer
    assert b"</think>" in b"".join(map(made.token_bytes, closer))
    assert not state.may_forbid(99)
    reasoning, content = said(made, THINK, prompt, drawn)
    assert reasoning.split() == made.decode(inner[:budget]).split()
    assert "</think>" not in content


@pytest.mark.parametrize("text", ["Hello there", "\n\n Hello <think>"])
def test_an_answer_that_does_not_reason_is_left_alone(text: str) -> None:
    made = tokenizer("byte_level")
    state = ReasoningBudgets(made, THINK).start(0, made.encode("Hi"), None)
    ids = made.encode(text, add_special_tokens=False)
    assert draw(made, state, random.Random(0), ids, len(ids)) == ids
    assert not state.may_forbid(99)


def test_reasoning_that_ends_before_its_budget_is_left_alone() -> None:
    made = tokenizer("byte_level")
    state = ReasoningBudgets(made, THINK).start(30, made.encode("Hi"), None)
    ids = made.encode("<think>short</think> and a very long answer that goes on and on and on and on", False)
    assert draw(made, state, random.Random(0), ids, len(ids)) == ids
    assert not state.may_forbid(99)


@pytest.mark.parametrize("budget", [0, 3])
def test_harmony_goes_on_in_another_channel(budget: int) -> None:
    made = harmony_tokenizer()
    state = ReasoningBudgets(made, HARMONY).start(budget, made.encode("<|start|>assistant"), None)
    thoughts = made.encode("the quick brown fox", add_special_tokens=False)
    opener = [made.token_id(text) for text in ("<|channel|>", "analysis", "<|message|>")]
    forced = [made.token_id(text) for text in ("<|end|>", "<|start|>", "assistant", "<|channel|>")]
    drawn = draw(made, state, random.Random(1), [*opener, *thoughts], 3 + budget + 4)
    assert drawn == [*opener, *thoughts[:budget], *forced]
    bits = np.zeros(-(-made.vocab_size // 32), np.int32)
    state.fill(bits)
    barred = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[: made.vocab_size] == 0).tolist()
    assert made.token_id("analysis") in barred
    assert {made.token_text(token_id).lstrip() for token_id in barred} <= {"analysis"[:n] for n in range(9)}
    commentary = [made.token_id("final"), made.token_id("<|message|>"), *thoughts[:2], *forced[:3], *opener]
    again = draw(made, state, random.Random(1), [*commentary, *thoughts], len(commentary) + 4)
    assert again == [*commentary, *forced]  # nothing is left for a second time


@pytest.mark.parametrize("budget", [0, 3])
def test_muse_goes_on_with_another_recipient(budget: int) -> None:
    raw = raw_tokenizer("byte_level").from_str(raw_tokenizer("byte_level").to_str())
    raw.add_special_tokens(["<|start|>", "<|message|>", "<|eom|>", "<|eot|>"])
    raw.add_tokens(["assistant", " to=", "self", "user"])
    made = Tokenizer(raw)
    state = ReasoningBudgets(made, AnswerFormat(FORMATS["muse"], FORMATS["muse"].reasoning)).start(
        budget, made.encode("<|start|>assistant"), None
    )
    thoughts = made.encode("the quick brown fox", add_special_tokens=False)
    opener = [made.token_id(text) for text in (" to=", "self", "<|message|>")]
    forced = [made.token_id(text) for text in ("<|eom|>", "<|start|>", "assistant", " to=")]
    drawn = draw(made, state, random.Random(1), [*opener, *thoughts], 3 + budget + 4)
    assert drawn == [*opener, *thoughts[:budget], *forced]
    bits = np.zeros(-(-made.vocab_size // 32), np.int32)
    state.fill(bits)
    assert not bits.view(np.uint32)[made.token_id("self") // 32] >> np.uint32(made.token_id("self") % 32) & np.uint32(1)


def test_a_grammar_comes_behind_the_forced_end() -> None:
    raw = raw_tokenizer("byte_level").from_str(raw_tokenizer("byte_level").to_str())
    raw.add_tokens(["<think>"])
    made = Tokenizer(raw)
    asked = StructuredOutputsParams(choice=["yes", "no"], after=("<think>", "</think>"))
    grammar = Grammars(made, made.vocab_size, [0]).start(asked)
    state = ReasoningBudgets(made, THINK).start(4, made.encode("Hi"), grammar)
    thoughts = made.encode(" the quick brown fox jumps", False)
    drawn = draw(made, state, random.Random(3), [made.token_id("<think>"), *thoughts, *thoughts], 60)
    reasoning, content = said(made, THINK, "", drawn)
    assert reasoning == made.decode(thoughts[:4]).strip()
    assert content in ("yes", "no")


def test_a_grammar_that_spells_reasoning_out_decides() -> None:
    made = tokenizer("byte_level")
    grammar = Grammars(made, made.vocab_size, [0]).start(
        StructuredOutputsParams(choice=["<think>hello there</think>Hi"])
    )
    state = ReasoningBudgets(made, THINK).start(1, made.encode("Hi"), grammar)
    assert made.decode(draw(made, state, random.Random(0), [], 60)) == "<think>hello there</think>Hi"


def test_a_model_that_does_not_reason_is_told() -> None:
    for budgets in (ReasoningBudgets(tokenizer("byte_level"), None), ReasoningBudgets(tokenizer("words"), THINK)):
        check_refusal(budgets)


def check_refusal(budgets: ReasoningBudgets) -> None:
    with pytest.raises(InvalidParameter, match="100 tokens") as refusal:
        budgets.start(100, [1], None)
    assert refusal.value.param == "thinking_token_budget"
    assert budgets.start(0, [1], None) is None
