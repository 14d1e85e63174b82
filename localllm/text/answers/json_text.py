"""Parses JSON while it is being written: passes values on as they arrive, and reads calls that are JSON objects.

Only brackets and strings of a value are tracked, so that it can be passed on before it is complete. Whether it is valid
JSON is checked at the end by `PartCollector`.
Does not know: the markers around it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

from localllm.text.answers.grammar import GrammarBuilder, Schema, dumps
from localllm.text.answers.output import PartCollector
from localllm.text.answers.scanner import NotACall, Read, Scanner
from localllm.text.answers.values import parse_json

Head: TypeAlias = Callable[[GrammarBuilder, str], str]
ReadCall: TypeAlias = Callable[[Scanner, PartCollector, Sequence[str]], Read[None]]

_OUTSIDE = re.compile(r'["{}\[\]<]')
_INSIDE = re.compile(r'["\\\x00-\x1f]')
_SCALAR_END = re.compile(r"[\s,}\]<]")
_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters", "args")


def pass_value(scan: Scanner, give: Callable[[str], None], stops: Sequence[str] = ()) -> Read[bool]:
    """Pass on an object, a list or a string as it arrives.
    Return False if the text ends or a marker in `stops` comes first.

    Line breaks and tabs inside strings, which models write but JSON forbids, are escaped.
    """
    depth, in_string = 0, False
    while True:
        found = (_INSIDE if in_string else _OUTSIDE).search(scan.text, scan.at)
        if before := scan.take((found.start() if found else len(scan.text)) - scan.at):
            give(before)
        if not found:
            if not (yield from scan.more()):
                return False
            continue
        char = found.group()
        if char == "\\":
            if len(scan.text) > scan.at + 1 or not (yield from scan.more()):
                give(scan.take(2))
            continue
        if char == "<" and (yield from scan.next_of(*stops)):
            return False
        scan.at += 1
        give(char if char >= " " else json.dumps(char)[1:-1])
        if char == '"':
            in_string = not in_string
        elif char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
        if depth <= 0 and not in_string and char != "<":
            return True


def read_string(scan: Scanner) -> Read[str]:
    """Read a JSON string and decode it. Raises `NotACall`."""
    taken: list[str] = []
    if (yield from scan.peek()) != '"' or not (yield from pass_value(scan, taken.append)):
        raise NotACall("expected a string")
    try:
        return str(json.loads("".join(taken)))
    except ValueError as error:
        raise NotACall(f"a string is not JSON: {error}") from error


def pass_arguments(scan: Scanner, output: PartCollector, stops: Sequence[str] = ()) -> Read[bool]:
    """Pass on the open call's arguments as they arrive. Return False if they are cut off."""

    def give(text: str) -> None:
        output.arguments(text)
        scan.commit()

    return (yield from pass_value(scan, give, stops))


def read_json_call(
    scan: Scanner, output: PartCollector, stops: Sequence[str] = (), *, keys: Collection[str] | None = None,
    name: str | None = None,
) -> Read[None]:  # fmt: skip
    """Read `{"name": "f", "arguments": {...}}`, also with "parameters" or "args". The call starts with its arguments.

    `keys`: the only keys of a call; another key is refused at once. `name`: of the tool, if it was written before the
    object. Raises `NotACall` before the call starts.
    """
    yield from scan.expect("{")
    held: str | None = None  # arguments that came before the name
    started = False
    while (char := (yield from scan.skip_space())) not in ("", "}"):
        if char == ",":
            scan.at += 1
            continue
        if started and char != '"':
            return  # the arguments are complete; only the object around them is broken
        key = yield from read_string(scan)
        if keys is not None and key not in keys:
            raise NotACall(f"{key!r} is not part of a call")
        yield from scan.skip_space()
        yield from scan.expect(":")
        char = yield from scan.skip_space()
        if started or key not in (*_NAMES, *_ARGUMENTS):
            yield from _skip(scan, char, stops)
        elif key in _NAMES:
            name = yield from read_string(scan)
            output.schema(name)
        elif name is not None:
            started = True
            if not (yield from _start(scan, output, name, char, stops)):
                return
        else:
            held = yield from _hold(scan, char, stops)
        if started:
            scan.commit()
    if started:
        scan.at += len(char)
        return
    if name is None or not char or (held is None and keys is not None):
        raise NotACall("it ends before its arguments" if name else "it has no name")
    scan.at += 1
    output.start_call(name)
    output.arguments(held or "{}")


def read_keyed_call(scan: Scanner, output: PartCollector, stops: Sequence[str] = ()) -> Read[None]:
    """Read `{"f": {...}}`. The call starts with its arguments. Raises `NotACall` before that."""
    yield from scan.expect("{")
    yield from scan.skip_space()
    name = yield from read_string(scan)
    output.schema(name)
    yield from scan.skip_space()
    yield from scan.expect(":")
    if (yield from _start(scan, output, name, (yield from scan.skip_space()), stops)):
        scan.commit()
        if (yield from scan.skip_space()) == "}":
            scan.at += 1


def read_json_calls(
    scan: Scanner,
    output: PartCollector,
    stops: Sequence[str] = (),
    read_call: ReadCall = read_json_call,
) -> Read[None]:
    """Read `[{...}, {...}]`, each item by `read_call`."""
    yield from scan.expect("[")
    num_before = output.num_calls
    while (char := (yield from scan.skip_space())) not in ("", "]"):
        if char == ",":
            scan.at += 1
            continue
        yield from read_call(scan, output, stops)
        scan.commit()
    if output.num_calls == num_before:
        raise NotACall("the list of calls is empty" if char else "it ends before its arguments")
    scan.at += len(char)


def named_head(grammar: GrammarBuilder, name: str) -> str:
    return grammar.text(f'{{"name": {dumps(name)}, "arguments": ')


def json_call_rule(grammar: GrammarBuilder, tools: Mapping[str, Schema], head: Head = named_head) -> str:
    """Return a call of one of the tools as templates print it; `head` writes the part before the arguments."""
    return grammar.one_of(
        [f"{head(grammar, name)} {grammar.arguments(schema)} {grammar.text('}')}" for name, schema in tools.items()]
    )


def json_calls_rule(
    grammar: GrammarBuilder, tools: Mapping[str, Schema], head: Head = named_head, *, parallel: bool
) -> str:
    """Return the text that `read_json_calls` reads."""
    call = json_call_rule(grammar, tools, head)
    return grammar.rule(f'"[" {call} (", " {call})* "]"' if parallel else f'"[" {call} "]"')


def _start(scan: Scanner, output: PartCollector, name: str, char: str, stops: Sequence[str]) -> Read[bool]:
    """Start a call. Return False if its arguments are cut off."""
    if char == "{":
        output.start_call(name)
        return (yield from pass_arguments(scan, output, stops))
    held = yield from _hold(scan, char, stops)
    output.start_call(name)
    output.arguments(held)
    return True


def _hold(scan: Scanner, char: str, stops: Sequence[str]) -> Read[str]:
    """Read complete arguments: an object, an object inside a string, or null."""
    if char == '"':
        text = yield from read_string(scan)
        try:
            inside = parse_json(text or "{}")
        except (ValueError, RecursionError):
            inside = None
        if not isinstance(inside, dict):
            raise NotACall("its arguments are a string")
        return text or "{}"
    taken: list[str] = []
    if char == "{":
        if not (yield from pass_value(scan, taken.append, stops)):
            raise NotACall("it ends before its name")
        return "".join(taken)
    if (yield from _scalar(scan)) != "null":
        raise NotACall("its arguments are not an object")
    return "{}"


def _skip(scan: Scanner, char: str, stops: Sequence[str]) -> Read[None]:
    if char in ("{", "[", '"'):
        yield from pass_value(scan, lambda text: None, stops)
    else:
        yield from _scalar(scan)


def _scalar(scan: Scanner) -> Read[str]:
    """Read a number, true, false or null, up to the character that ends it."""
    taken = ""
    while True:
        found = _SCALAR_END.search(scan.text, scan.at)
        taken += scan.take((found.start() if found else len(scan.text)) - scan.at)
        if found or not (yield from scan.more()):
            return taken
