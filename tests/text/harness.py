"""Grammars, hostile ones among them, and texts drawn from them."""

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from localllm.text.grammar import Grammars, GrammarState
from tests.text.vocabularies import tokenizer

KINDS = ("byte_level", "sentencepiece")
CLOSERS = (b'"', b"@", b"}", b"]", b",")


def grammars(kind: str) -> Grammars:
    made = tokenizer(kind)
    return Grammars(made, made.vocab_size + 7, (made.special_ids and [min(made.special_ids)]) or [0])


GRAMMARS = {kind: grammars(kind) for kind in KINDS}


def draw(kind: str, state: GrammarState, rng: random.Random, longest: int = 600) -> str:
    """A text of tokens drawn from the masks; the longer it is the more it hurries to close what is open."""
    vocabulary, text = tokenizer(kind), b""
    [eos] = GRAMMARS[kind]._eos_token_ids
    bits = np.zeros(-(-(vocabulary.vocab_size + 7) // 32), np.int32)
    for count in range(longest):
        if state.is_over:
            return text.decode()
        state.fill(bits)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
        assert allowed, "nothing may come"
        assert max(allowed) < vocabulary.vocab_size, "a token that stands for nothing"
        closing = [i for closer in CLOSERS for i in allowed if vocabulary.token_bytes(i) == closer]
        closing = [eos] if eos in allowed else closing
        chosen = closing[0] if closing and rng.random() < count / 100 else rng.choice(allowed)
        state.accept(chosen)
        if chosen == eos:
            assert state.is_over
            return text.decode()
        text += vocabulary.token_bytes(chosen)
    raise AssertionError(f"no end after {longest} tokens: {text!r}")


HOSTILE: dict[str, dict[str, Any]] = {
    "counted twice": {"regex": "(a?){5000}a{5000}"},
    "stars of stars": {"regex": "(((a*)*)*)*b"},
    "a billion laughs": {"regex": "((((x{99}){99}){99}){99}){99}"},
    "far away": {"regex": "(.*a){20}.{20}(x|y){1000,5000}"},
    "many choices": {"choice": [f"choice number {number}" for number in range(10_000)]},
    "itself": {"json": {"$ref": "#"}},
    "itself and more": {"json": {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 9}}, "$ref": "#/$defs/a"}},
    "left recursion": {"grammar": 'root ::= root root root | "a"'},
    "many properties": {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}}},
}


def chain(count: int, link: Callable[[dict[str, Any]], dict[str, Any]], last: Any = None) -> dict[str, Any]:
    """A schema of definitions of which each leads to the next."""
    steps = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return {"$defs": {**steps, f"d{count}": last or {"type": "string"}}, "$ref": "#/$defs/d0"}


def inside(link: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": link}, "required": ["a"]}


def deep_items(link: dict[str, Any]) -> dict[str, Any]:
    for _ in range(40):
        link = {"items": link}
    return link


def lark(count: int, before: str = "", after: str = "") -> str:
    rules = [f"r{i}: {before}r{i + 1}{after}" for i in range(count)]
    return "\n".join(["start: r0", *rules, f'r{count}: "c"']) + "\n"


# Each of these ends a process with SIGSEGV where llguidance compiles it on a thread with the usual 8 MiB of stack.
CHAINS: dict[str, dict[str, Any]] = {
    "properties": {"json": chain(2500, inside)},
    "references": {"json": chain(6000, lambda link: link)},
    "all of": {"json": chain(2500, lambda link: {"allOf": [link]})},
    "any of": {"json": chain(2500, lambda link: {"anyOf": [link, {"type": "integer"}]})},
    "items, nested": {"json": chain(100, deep_items)},
    "rules": {"grammar": lark(9000)},
    "rules, nested": {"grammar": lark(900, '("x" ' * 9, ' "y")*' * 9)},
    "too many rules": {"grammar": lark(60_000)},
    "gbnf": {"grammar": "\n".join(["root ::= r0", *(f'r{i} ::= "a" r{i + 1}' for i in range(2900)), 'r2900 ::= "c"'])},
    "in a circle": {"json": chain(2500, inside, {"$ref": "#/$defs/d0"})},
    "by another name": {"json": chain(2500, lambda link: {**inside({"$ref": "x" + link["$ref"]}), "$anchor": "a"})},
    "a schema in a grammar": {"grammar": f"start: %json {json.dumps(chain(2500, inside))}\n"},
}
