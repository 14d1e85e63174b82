"""Structured output on the level of tokens: whatever is drawn from the masks is what was asked for."""

import dataclasses
import json
import random
import re
import time
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.errors import InvalidParameter, StepFailed
from localllm.text.grammar import KEPT, Grammars, GrammarStuck, fill_along
from localllm.text.structured import StructuredOutputsParams
from tests.draws import draws
from tests.text.harness import GRAMMARS, HOSTILE, KINDS, draw, grammars
from tests.text.schemas import SCHEMAS
from tests.text.vocabularies import tokenizer


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_drawn_fits_the_schema(name: str) -> None:
    state = GRAMMARS["byte_level"].start(StructuredOutputsParams(json=SCHEMAS[name]))
    written = json.loads(draw("byte_level", state, random.Random(name)))
    jsonschema.validate(written, SCHEMAS[name], format_checker=jsonschema.FormatChecker())


def test_there_are_a_hundred_schemas() -> None:
    assert len(SCHEMAS) >= 100


OTHERS: dict[str, tuple[dict[str, Any], Callable[[str], object]]] = {
    "object": ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    "schema as text": ({"json": '{"type": "integer"}'}, lambda text: isinstance(json.loads(text), int)),
    "any json": ({"json": True}, lambda text: json.loads(text) is not ...),
    "no blanks": ({"json": SCHEMAS["person"], "disable_any_whitespace": True}, lambda t: not re.search(r'[,:{] ', t)),
    "regex": ({"regex": r"^[a-c]{2,4}(-\d+)?$"}, lambda text: re.fullmatch(r"[a-c]{2,4}(-\d+)?", text)),
    "regex that ends in a dollar": ({"regex": r"[ab]\$"}, lambda text: text in ("a$", "b$")),
    "choice": ({"choice": ["yes", 'per"haps\\', "grüße\n"]}, lambda text: text in ("yes", 'per"haps\\', "grüße\n")),
    "gbnf": ({"grammar": 'root ::= ("ab" | "cd")+ "."'}, lambda text: re.fullmatch(r"(ab|cd)+\.", text)),
    "lark": ({"grammar": 'start: "x" NUMBER\nNUMBER: /[0-9]{2}/'}, lambda text: re.fullmatch(r"x\d\d", text)),
    "tags": (
        {"structural_tag": {"triggers": ["<f="], "structures": [
            {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}]}},
        lambda text: all(re.match(r"<f=a>-?\d+</f>", text[found.start() :]) for found in re.finditer("<f=", text)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OTHERS)
def test_what_is_drawn_is_what_was_asked(name: str, kind: str) -> None:
    asked, holds = OTHERS[name]
    state = GRAMMARS[kind].start(StructuredOutputsParams(**asked))
    text = draw(kind, state, random.Random(1))
    assert holds(text.lstrip(" ") if kind == "sentencepiece" else text), text


@draws(30)
@given(name=st.sampled_from(sorted(SCHEMAS)), seed=st.integers(0, 10_000))
def test_any_draw_of_any_schema(name: str, seed: int) -> None:
    state = GRAMMARS["byte_level"].start(StructuredOutputsParams(json=SCHEMAS[name]))
    jsonschema.validate(json.loads(draw("byte_level", state, random.Random(seed))), SCHEMAS[name])


def test_choices_of_a_request_go_their_own_ways() -> None:
    asked = StructuredOutputsParams(choice=["aa", "bb"])
    states = [GRAMMARS["byte_level"].start(asked) for _ in range(2)]
    made = tokenizer("byte_level")
    for state, letter in zip(states, "ab", strict=True):
        for token_id in made.encode(letter * 2, add_special_tokens=False):
            state.accept(token_id)
        assert state.is_over


def masks_one_by_one(state: Any, tokens: list[int], words: int) -> list[Any]:
    """Return the mask before each token, and the one behind the last unless the output is over."""
    masks = []
    for token_id in tokens:
        bits = np.zeros(words, np.int32)
        state.fill(bits)
        masks.append(bits)
        state.accept(token_id)
    if not state.is_over:
        masks.append(np.zeros(words, np.int32))
        state.fill(masks[-1])
    return masks


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("after", [None, ("<think>", "</think>")])
def test_masks_along_drafts_are_those_of_one_token_after_the_other(after: Any, start: int) -> None:
    """S8: a copy follows the drafts, and the grammar stays where it is."""
    made, kind = tokenizer("byte_level"), GRAMMARS["byte_level"]
    text = '<think>{"no</think>{"a": 12}' if after else '{"a": 12}'
    tokens = made.encode(text, add_special_tokens=False)
    asked = StructuredOutputsParams(
        json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        after=after, is_inside=False,
    )  # fmt: skip
    words = -(-(made.vocab_size + 7) // 32)
    if after:
        asked = dataclasses.replace(asked, is_inside=True)
        tokens = made.encode(text.removeprefix("<think>"), add_special_tokens=False)
    expected = masks_one_by_one(kind.start(asked), tokens, words)
    state = kind.start(asked)
    for token_id in tokens[:start]:
        state.accept(token_id)
    bits = np.zeros((1 + len(tokens) - start, words), np.int32)
    filled = fill_along(state, tokens[start:], bits)
    assert [row.tolist() for row in bits[:filled]] == [row.tolist() for row in expected[start:][:filled]]
    assert filled >= len(expected) - start
    again = np.zeros(words, np.int32)
    state.fill(again)
    assert again.tolist() == expected[start].tolist(), "the grammar has moved"


def test_a_draft_that_may_not_come_ends_the_masks() -> None:
    made = tokenizer("byte_level")
    state = GRAMMARS["byte_level"].start(StructuredOutputsParams(choice=["abc"]))
    a, b, x = (made.encode(letter, add_special_tokens=False)[0] for letter in "abx")
    bits = np.zeros((4, -(-(made.vocab_size + 7) // 32)), np.int32)
    assert fill_along(state, [a, x, b], bits) == 2
    assert not bits[2].any()
    assert fill_along(state, [], bits) == 1


def test_a_token_that_may_not_come_is_told() -> None:
    state = GRAMMARS["byte_level"].start(StructuredOutputsParams(choice=["yes"]))
    with pytest.raises(StepFailed):
        state.accept(tokenizer("byte_level").encode("n", add_special_tokens=False)[0])


def test_the_last_grammars_are_kept() -> None:
    kept = grammars("byte_level")
    for number in range(KEPT + 5):
        kept.start(StructuredOutputsParams(choice=[f"x{number}"]))
    assert len(kept._compiled) == KEPT
    assert "x0" not in " ".join(kept._compiled)
    kept.start(StructuredOutputsParams(choice=["x5"]))
    kept.start(StructuredOutputsParams(choice=["new"]))
    assert any('"x5"' in grammar for grammar in kept._compiled)


DEEP: dict[str, Any] = {"type": "object"}
for _ in range(2000):
    DEEP = {"type": "object", "properties": {"a": DEEP}}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a keyword that is not kept": ({"json": {"type": "object", "not": {}}}, "not"),
    "unique items": ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    "if": ({"json": {"if": {}, "then": {}}}, "then"),
    "no such type": ({"json": {"type": "nope"}}, "nope"),
    "no such format": ({"json": {"type": "string", "format": "weird"}}, "weird"),
    "a pointer to nowhere": ({"json": {"$ref": "#/x"}}, "/x"),
    "look-ahead": ({"regex": "(?=a)b"}, "look-around"),
    "no expression": ({"regex": "(a"}, "unclosed group"),
    "no grammar": ({"grammar": "root ::= ("}, "cannot be"),
    "half a grammar": ({"grammar": 'start: ("a" |'}, "Expected token"),
    "a rule that is missing": ({"grammar": "start: other"}, "other"),
    "no JSON": ({"json": '{"type":'}, "not JSON"),
    "a list": ({"json": "[1]"}, "Got list"),
    "never": ({"json": False}, "nothing"),
    "too deep": ({"json": DEEP}, "deep"),
    "too long": ({"regex": "a" * (1 << 20) + "b"}, "1,048,577"),
    "an odd tag": ({"structural_tag": {"structures": []}}, "triggers"),
    "a tag without a trigger": (
        {"structural_tag": {"triggers": ["x"], "structures": [{"begin": "y", "schema": {}, "end": ""}]}}, "trigger"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_with_the_reason(name: str) -> None:
    asked, reason = REFUSED[name]
    with pytest.raises(InvalidParameter, match=re.escape(reason)) as refusal:
        GRAMMARS["byte_level"].start(StructuredOutputsParams(**asked, param="response_format"))
    assert refusal.value.param == "response_format"


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"json_object": False},
        {"json": {}, "regex": "a"},
        {"choice": []},
        {"choice": "yes"},
        {"choice": [""]},
        {"choice": [1]},
        {"regex": 1},
        {"grammar": ["x"]},
    ],
)
def test_what_makes_no_sense_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter):
        StructuredOutputsParams(**asked)


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}])
def test_a_grammar_that_no_text_follows_is_refused_before_it_is_begun(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter, match="is not supported"):
        GRAMMARS["byte_level"].start(StructuredOutputsParams(json=schema))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_cost_little_or_are_refused(name: str) -> None:
    began = time.process_time()
    bits = np.zeros(-(-(tokenizer("byte_level").vocab_size + 7) // 32), np.int32)
    try:
        state = GRAMMARS["byte_level"].start(StructuredOutputsParams(**HOSTILE[name]))
        for token_id in tokenizer("byte_level").encode("aaaaaaaa", add_special_tokens=False):
            state.fill(bits)
            state.accept(token_id)
    except (InvalidParameter, GrammarStuck, StepFailed):
        pass
    assert time.process_time() - began < 5


def test_grammars_that_get_stuck_are_not_kept() -> None:
    """Each of these holds all that it was allowed to build, which is most of what a grammar can hold."""
    made = tokenizer("byte_level")
    grammars, bits = Grammars(made, made.vocab_size, [0]), np.zeros(-(-made.vocab_size // 32), np.int32)
    before_bytes = psutil.Process().memory_info().rss
    for number in range(6):
        with pytest.raises((GrammarStuck, InvalidParameter)):
            grammars.start(StructuredOutputsParams(regex=f"(((x{{{99 - number}}}){{99}}){{99}}){{99}}")).fill(bits)
    assert not grammars._compiled
    assert psutil.Process().memory_info().rss - before_bytes < 100 * 2**20  # 900 MiB when all of it was kept
