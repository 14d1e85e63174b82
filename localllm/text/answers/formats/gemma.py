"""Gemma 4 and FunctionGemma: a call between markers; strings have their own markers.

    <|tool_call>call:f{a:1,b:<|"|>text<|"|>,c:[true,{d:null}]}<tool_call|>                        Gemma 4
    <start_function_call>call:f{a:1,b:<escape>text<escape>}<end_function_call>                    FunctionGemma

The templates print arguments in alphabetical order. The markers are single tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from localllm.text.answers.formats.base import ToolFormat
from localllm.text.answers.grammar import (
    CannotForce,
    GrammarBuilder,
    Schema,
    checked_name,
    dumps,
    length_bounds,
    plain_properties,
    require_only,
    with_definitions,
)
from localllm.text.answers.output import PartCollector
from localllm.text.answers.scanner import NotACall, Read, Scanner
from localllm.text.answers.values import dump_string, options_of, resolve, types_of, value_to_json, values_of

MAX_DEPTH = 64
_KEY = re.compile(r"[\w.-]*")
_SCALAR_END = re.compile(r"[,}\]<]")


class Gemma4(ToolFormat):
    """Gemma 4's format. The last of the closers is around each string."""

    name = "gemma4"
    openers = ("<|tool_call>",)
    closers = ("<tool_call|>", '<|"|>')

    def read_calls(self, scan: Scanner, output: PartCollector) -> Read[None]:
        yield from scan.expect(*self.openers)
        yield from scan.skip_space()
        yield from scan.expect("call:")
        name = yield from scan.name()
        if (yield from scan.skip_space()) != "{":
            raise NotACall("its arguments are not an object")
        output.start_call(name)

        def give(text: str) -> None:
            output.arguments(text)
            scan.commit()

        if (yield from self._pass_value(scan, give, 0)):
            yield from scan.accept_behind_space(self.closers[0])

    def write_calls(self, grammar: GrammarBuilder, tools: Mapping[str, Schema], *, parallel: bool) -> str:
        begin, end = grammar.marker(self.openers[0]), grammar.marker(self.closers[0])
        calls = []
        for name, schema in tools.items():
            arguments = self._object(grammar, schema, schema)
            calls.append(f"{begin} {grammar.text(f'call:{checked_name(name)}')} {arguments} {end}")
        call = grammar.one_of(calls)
        return f"{call}+" if parallel else call

    def _pass_value(self, scan: Scanner, give: Callable[[str], None], depth: int) -> Read[bool]:
        """Pass on a value as JSON as it arrives. Return False if the text or the call ends first."""
        char = yield from scan.skip_space()
        if depth > MAX_DEPTH or not char:
            return False
        if (yield from scan.accept(self.closers[1])):
            give('"')
            end = yield from scan.give_until(self.closers[1:], lambda text: give(dump_string(text)[1:-1]))
            scan.at += len(end)
            give('"' * bool(end))
            return bool(end)
        if char not in "{[":
            return (yield from _pass_scalar(scan, give))
        scan.at += 1
        give(char)
        separator = ""
        while (found := (yield from scan.skip_space())) not in ("", "}", "]"):
            if found == "," and separator:
                scan.at += 1
                continue
            if char == "{":
                key = yield from self._read_key(scan)
                if not key:
                    return False
                separator += f"{dump_string(key)}: "
            if separator:
                give(separator)
            if not (yield from self._pass_value(scan, give, depth + 1)):
                return False
            separator = ", "
        if found != {"{": "}", "[": "]"}[char]:
            return False
        scan.at += 1
        give(found)
        return True

    def _read_key(self, scan: Scanner) -> Read[str]:
        if (yield from scan.accept(self.closers[1])):
            key, _ = yield from scan.until(self.closers[1])
        else:
            key = yield from scan.name(_KEY)
        yield from scan.skip_space()
        if key and (yield from scan.accept(":")):
            return key
        scan.rewind()
        return ""

    def _object(self, grammar: GrammarBuilder, schema: Schema, root: Schema) -> str:
        pairs = []
        for key, value, required in sorted(plain_properties(schema), key=lambda one: one[0]):
            if not key.isidentifier():
                raise CannotForce
            pairs.append((f"{grammar.text(f'{key}:')} {self._value(grammar, value, root)}", required))
        return f'"{{" {grammar.list_of(pairs, dumps(","))} "}}"'

    def _value(self, grammar: GrammarBuilder, schema: object, root: Schema) -> str:
        schema = resolve(schema, root)
        if not isinstance(schema, Mapping):
            raise CannotForce
        if (values := values_of(schema)) is not None:
            return grammar.one_of([self._literal(grammar, value) for value in values])
        types = types_of(schema, root)
        if options := options_of(schema):
            require_only(schema, "anyOf", "oneOf")
            return grammar.one_of([self._value(grammar, option, root) for option in options])
        if len(types) != 1:
            return grammar.one_of([self._value(grammar, {**schema, "type": name}, root) for name in sorted(types)])
        if types == {"string"}:
            require_only(schema, "type")
            return f"{grammar.marker(self.closers[1])} {grammar.text_until(self.closers[1])}"
        if types == {"array"}:
            return self._array(grammar, schema, root)
        if types == {"object"}:
            if "properties" not in schema:
                raise CannotForce
            return self._object(grammar, schema, root)
        return grammar.json(with_definitions(schema, root))

    def _array(self, grammar: GrammarBuilder, schema: Schema, root: Schema) -> str:
        least, most = length_bounds(schema)
        item = grammar.rule(self._value(grammar, schema.get("items"), root))
        others = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}' if most != 1 else ""
        return f'"[" ({item} {others}){"" if least else "?"} "]"'

    def _literal(self, grammar: GrammarBuilder, value: object) -> str:
        if isinstance(value, list | dict):
            raise CannotForce
        if not isinstance(value, str):
            return grammar.text(dumps(value))
        quote = grammar.marker(self.closers[1])
        if self.closers[1] in value:
            raise CannotForce
        return f"{quote} {grammar.text(value)} {quote}"


class FunctionGemma(Gemma4):
    name = "function-gemma"
    openers = ("<start_function_call>",)
    closers = ("<end_function_call>", "<escape>")


def _pass_scalar(scan: Scanner, give: Callable[[str], None]) -> Read[bool]:
    taken: list[str] = []
    while True:
        found = _SCALAR_END.search(scan.text, scan.at)
        taken.append(scan.take((found.start() if found else len(scan.text)) - scan.at))
        scan.commit()
        if found or not (yield from scan.more()):
            break
    text = "".join(taken)
    give(value_to_json(text, frozenset()) if found else text)
    return found is not None
