"""Qwen3-Coder, Seed-OSS and GLM-4.5: arguments between tags, a string as plain text and any other value as JSON.

    <tool_call>
    <function=f>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call>                      Qwen3-Coder, Qwen3.5; <seed:tool_call> in Seed-OSS. Some leave <tool_call> out

    <tool_call>f
    <arg_key>a</arg_key>
    <arg_value>1</arg_value>
    </tool_call>                      GLM-4.5 and later

What a value means is read from the tool's schema, else from its look. Where the schema says that it is a string, and
nothing else, it is passed on as it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from localllm.text.answers.formats.base import ToolFormat
from localllm.text.answers.grammar import Grammar, Schema, checked_name, one_or_more, plain_properties
from localllm.text.answers.output import Output
from localllm.text.answers.scanner import NotACall, Read, Scanner
from localllm.text.answers.values import dump_string, types_of, value_to_json
from localllm.text.stop_strings import StopStrings

LINE = "\n"


class Qwen3Coder(ToolFormat):
    name = "qwen3-coder"
    openers = ("<tool_call>", "<function=")
    closers = ("</tool_call>", "</function>", "</parameter>")
    value_space = LINE  # before a value and behind it

    def read_calls(self, scan: Scanner, output: Output) -> Read[None]:
        if (yield from scan.accept(self.openers[0])):
            yield from scan.skip_space()
        yield from scan.expect("<function=")
        name = yield from scan.name()
        yield from scan.expect(">")
        arguments = _Arguments(scan, output, name)
        yield from scan.skip_space()
        while (yield from scan.accept("<parameter=")):
            key, end = yield from scan.until(">")
            if not end:
                break
            if (yield from scan.peek()) == "\n":
                scan.at += 1
            if not (yield from arguments.read(key, "\n</parameter>", "</parameter>")):
                return
            yield from scan.skip_space()
        if (yield from scan.accept("</function>")):
            arguments.end()
            yield from scan.accept_behind_space(self.closers[0])
        else:
            yield from arguments.end_without_marker(self.closers[0])

    def write_calls(self, grammar: Grammar, tools: Mapping[str, Schema], *, parallel: bool) -> str:
        begin, end = grammar.marker(self.openers[0]), grammar.marker(self.closers[0])

        def pair(key: str, value: str) -> str:
            return f"{grammar.text(f'<parameter={key}>{self.value_space}')} {value} {grammar.text(LINE)}"

        calls = []
        for name, schema in tools.items():
            head = grammar.text(f"\n<function={checked_name(name)}>\n")
            pairs = _pairs_rule(grammar, schema, "</parameter>", pair, space=self.value_space)
            calls.append(f"{begin} {head} {pairs} {grammar.marker('</function>')} {grammar.text(LINE)} {end}")
        return one_or_more(grammar.one_of(calls), parallel=parallel)


class SeedOss(Qwen3Coder):
    name = "seed-oss"
    openers = ("<seed:tool_call>", "<function=")
    closers = ("</seed:tool_call>", "</function>", "</parameter>")
    value_space = ""


class Glm4(ToolFormat):
    name = "glm4"
    openers = ("<tool_call>",)
    closers = ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def read_calls(self, scan: Scanner, output: Output) -> Read[None]:
        yield from scan.expect(*self.openers)
        yield from scan.skip_space()
        name = yield from scan.name()
        arguments = _Arguments(scan, output, name)
        yield from scan.skip_space()
        while (yield from scan.accept("<arg_key>")):
            key, end = yield from scan.until("</arg_key>")
            yield from scan.skip_space()
            if not end or not (yield from scan.accept("<arg_value>")):
                break
            if not (yield from arguments.read(key.strip(), "</arg_value>")):
                return
            yield from scan.skip_space()
        yield from arguments.end_without_marker(self.closers[0])

    def write_calls(self, grammar: Grammar, tools: Mapping[str, Schema], *, parallel: bool) -> str:
        begin, end = grammar.marker(self.openers[0]), grammar.marker(self.closers[0])
        key_begin, key_end, value_begin, _ = map(grammar.marker, self.closers[1:])
        line = grammar.text(LINE)

        def pair(key: str, value: str) -> str:
            return f"{key_begin} {grammar.text(key)} {key_end} {line} {value_begin} {value} {line}"

        calls = []
        for name, schema in tools.items():
            pairs = _pairs_rule(grammar, schema, "</arg_value>", pair)
            calls.append(f"{begin} {grammar.text(checked_name(name))} {line} {pairs} {end}")
        return one_or_more(grammar.one_of(calls), parallel=parallel)


def _pairs_rule(grammar: Grammar, schema: Schema, end: str, pair: Callable[[str, str], str], space: str = "") -> str:
    """The arguments in the schema's order, without any of those that it does not require."""
    pairs = []
    for key, value, required in plain_properties(schema):
        one = grammar.rule(pair(checked_name(key), grammar.value_until(end, value, schema, space)))
        pairs.append(one if required else f"{one}?")
    return " ".join(pairs)


class _Arguments:
    """The arguments of one call, from tagged text to JSON. The call begins with the first, or where there is none."""

    def __init__(self, scan: Scanner, output: Output, name: str) -> None:
        self._scan, self._output, self._name = scan, output, name
        self._schema = output.schema(name)
        self._begun = False

    def read(self, key: str, *ends: str) -> Read[bool]:
        """One value, up to the marker that ends it; False if none comes."""
        self._begin()
        self._give(f"{dump_string(key)}: ")
        types = self._types(key)
        if types == {"string"}:
            self._give('"')
            end = yield from self._scan.give_until(StopStrings(ends), lambda text: self._give(dump_string(text)[1:-1]))
            self._scan.at += len(end)
            self._give('"' if end else "")
        else:
            taken: list[str] = []

            def hold(text: str) -> None:
                taken.append(text)
                self._scan.commit()

            end = yield from self._scan.give_until(StopStrings(ends), hold)
            self._scan.at += len(end)
            self._give(value_to_json("".join(taken), types) if end else "".join(taken))
        return bool(end)

    def end(self) -> None:
        if not self._begun:
            self._output.start_call(self._name)
            self._output.arguments("{")
        self._give("}")

    def end_without_marker(self, closer: str) -> Read[None]:
        """Where no further argument comes: `closer`, or text that is no part of the call, or the end of the text."""
        if (yield from self._scan.accept(closer)):
            self.end()
        elif not self._begun:
            raise NotACall("it ends before its arguments")
        elif (yield from self._scan.peek()):
            self._scan.rewind()
            self.end()

    def _begin(self) -> None:
        if self._begun:
            self._output.arguments(", ")
        else:
            self._output.start_call(self._name)
            self._output.arguments("{")
        self._begun = True

    def _types(self, key: str) -> frozenset[str]:
        properties = self._schema.get("properties")
        schema: Any = properties.get(key) if isinstance(properties, Mapping) else None
        return types_of(schema, self._schema)

    def _give(self, text: str) -> None:
        if text:
            self._output.arguments(text)
        self._scan.commit()
