"""Llama 4 and 3.2, LFM2 and others: a list of Python calls, as the whole answer or between markers.

    [f(a=1, b="x"), g()]
    <|tool_call_start|>[f(a=1)]<|tool_call_end|>

The markers are special tokens. A value is passed on when it is complete.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from localllm.text.answers.formats.base import ToolFormat
from localllm.text.answers.grammar import (
    CannotForce,
    GrammarBuilder,
    Schema,
    checked_name,
    plain_properties,
    with_definitions,
)
from localllm.text.answers.output import PartCollector
from localllm.text.answers.scanner import NotACall, Read, Scanner
from localllm.text.answers.values import dump_string, parse_json, python_to_json
from localllm.text.structured import StructuredOutputsParams

_VALUE_STEP = re.compile(r"""["'()\[\]{},]""")
_IN_QUOTES = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}


class Pythonic(ToolFormat):
    name = "pythonic"
    openers = ("<|python_start|>", "<|tool_call_start|>")
    closers = ("<|python_end|>", "<|tool_call_end|>")
    bare = True

    def read_calls(self, scan: Scanner, output: PartCollector) -> Read[None]:
        yield from scan.skip_space()
        yield from scan.accept(*self.openers)
        yield from scan.skip_space()
        yield from scan.expect("[")
        num_before = output.num_calls
        while (char := (yield from scan.skip_space())) not in ("", "]"):
            if char == "," and output.num_calls > num_before:
                scan.at += 1
                continue
            if not (yield from _read_call(scan, output)):
                return
        if output.num_calls == num_before:
            raise NotACall("the list of calls is empty")
        scan.at += len(char)
        yield from scan.accept_behind_space(*self.closers)

    def write_calls(self, grammar: GrammarBuilder, tools: Mapping[str, Schema], *, parallel: bool) -> str:
        call = grammar.one_of(
            [
                f'{grammar.text(f"{checked_name(name)}(")} {_keywords(grammar, schema)} ")"'
                for name, schema in tools.items()
            ]
        )
        calls = f'"[" {call} (", " {call})* "]"' if parallel else f'"[" {call} "]"'
        for begin, end in zip(self.openers, self.closers, strict=True):
            if grammar.has_token(begin):
                return f"{grammar.marker(begin)} {calls} {grammar.marker(end)}"
        return calls

    def begins_apart(self, grammar: GrammarBuilder, answer: StructuredOutputsParams) -> bool:
        return any(map(grammar.has_token, self.openers))


def _keywords(grammar: GrammarBuilder, schema: Schema) -> str:
    """Return `a=1, b="x"` in the schema's order; arguments that are not required may be missing."""
    pairs = []
    for name, value, required in plain_properties(schema):
        if not isinstance(value, Mapping) or not name.isidentifier():
            raise CannotForce
        pairs.append((f"{grammar.text(f'{name}=')} {grammar.json(with_definitions(value, schema))}", required))
    return grammar.list_of(pairs, '", "')


def _read_call(scan: Scanner, output: PartCollector) -> Read[bool]:
    """Read `f(a=1, b="x")`. Return False if it is cut off, or if its rest is not valid;
    the rest is then passed on as arguments."""
    name = yield from scan.name()
    yield from scan.expect("(")
    separator = "{"
    while (yield from scan.skip_space()) != ")":
        key = yield from scan.name()
        yield from scan.skip_space()
        if not key or not (yield from scan.accept("=")):
            return (yield from _give_rest(scan, output, begun=separator != "{"))
        if separator == "{":
            output.start_call(name)
        output.arguments(f"{separator}{dump_string(key)}: ")
        scan.commit()
        yield from scan.skip_space()
        value, end = yield from _read_value(scan)
        output.arguments(_value_to_json(value) if end else value)
        scan.commit()
        if not end:
            return False
        separator = ", "
        if end == ",":
            scan.at += 1
    if separator == "{":
        output.start_call(name)
        output.arguments("{")
    output.arguments("}")
    scan.at += 1
    scan.commit()
    return True


def _give_rest(scan: Scanner, output: PartCollector, *, begun: bool) -> Read[bool]:
    if not begun:
        raise NotACall("its arguments have no names")
    scan.rewind()
    rest, _ = yield from scan.until()
    output.arguments(rest)
    scan.commit()
    return False


def _read_value(scan: Scanner) -> Read[tuple[str, str]]:
    """Return a value's text and the "," or ")" after it, which stays unread; "" if the text ends first."""
    taken: list[str] = []
    depth, quote = 0, ""
    while True:
        found = (_IN_QUOTES[quote] if quote else _VALUE_STEP).search(scan.text, scan.at)
        taken.append(scan.take((found.start() if found else len(scan.text)) - scan.at))
        scan.commit()
        if not found:
            if not (yield from scan.more()):
                return "".join(taken), ""
            continue
        char = found.group()
        if not quote and depth == 0 and char in ",)":
            return "".join(taken).rstrip(), char
        if char == "\\" and len(scan.text) < scan.at + 2 and (yield from scan.more()):
            continue
        taken.append(scan.take(2 if char == "\\" else 1))
        if char in "\"'":
            quote = "" if quote else char
        elif not quote and char in "([{":
            depth += 1
        elif not quote and char in ")]}":
            depth -= 1


def _value_to_json(text: str) -> str:
    value = python_to_json(text)
    try:
        parse_json(value)
    except (ValueError, RecursionError):
        return dump_string(text)
    return value
