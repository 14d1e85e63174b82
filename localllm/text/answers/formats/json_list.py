"""Granite 3, Phi-4-mini, Nemotron Nano, Apriel, Command, Apertus and Mistral: a JSON list of calls behind a marker.

    <|tool_call|>[{"name": "f", "arguments": {"a": 1}}, ...]                    Granite; also <tool_call>
    <|tool_call|>[{"name": "f", "arguments": {"a": 1}}, ...]<|/tool_call|>      Phi-4-mini; also functools[...]
    <TOOLCALL>[{"name": "f", "arguments": {"a": 1}}, ...]</TOOLCALL>            Nemotron Nano v2
    <tool_calls>[{"name": "f", "arguments": {"a": 1}}, ...]</tool_calls>        Apriel, Hunyuan A13B
    <|START_ACTION|>[
        {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}
    ]<|END_ACTION|>                                                             Command R7B and A
    <|tools_prefix|>[{"f": {"a": 1}}, ...]<|tools_suffix|>                      Apertus
    [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "a1B2c3D4e"}, ...]  Mistral; since mid 2025:
    [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]a1B2c3D4e[ARGS]{}          some leave [ARGS] out

Markers with bars, and Mistral's, are special tokens. Mistral's templates want ids of nine letters and digits back.
"""

from __future__ import annotations

from collections.abc import Mapping

from localllm.text.answers.formats.base import ToolFormat
from localllm.text.answers.grammar import GrammarBuilder, Schema, checked_name, dumps
from localllm.text.answers.json_text import (
    ReadCall,
    json_calls_rule,
    named_head,
    pass_arguments,
    read_json_call,
    read_json_calls,
    read_keyed_call,
)
from localllm.text.answers.output import PartCollector, short_call_id
from localllm.text.answers.scanner import NotACall, Read, Scanner


class JsonList(ToolFormat):
    read_call: ReadCall = staticmethod(read_json_call)

    def read_calls(self, scan: Scanner, output: PartCollector) -> Read[None]:
        yield from scan.expect(*self.openers)
        yield from scan.skip_space()
        yield from read_json_calls(scan, output, self.closers, self.read_call)
        yield from scan.accept_behind_space(*self.closers)

    def write_head(self, grammar: GrammarBuilder, name: str) -> str:
        return named_head(grammar, name)

    def write_calls(self, grammar: GrammarBuilder, tools: Mapping[str, Schema], *, parallel: bool) -> str:
        calls = json_calls_rule(grammar, tools, self.write_head, parallel=parallel)
        return " ".join([grammar.marker(self.openers[0]), calls, *map(grammar.marker, self.closers)])


class Granite(JsonList):
    name = "granite"
    openers = ("<|tool_call|>", "<tool_call>")


class Phi4(JsonList):
    name = "phi4"
    openers = ("<|tool_call|>", "functools")
    closers = ("<|/tool_call|>",)


class Nemotron(JsonList):
    name = "nemotron"
    openers = ("<TOOLCALL>",)
    closers = ("</TOOLCALL>",)


class Apriel(JsonList):
    name = "apriel"
    openers = ("<tool_calls>",)
    closers = ("</tool_calls>",)


class Command(JsonList):
    name = "command"
    openers = ("<|START_ACTION|>",)
    closers = ("<|END_ACTION|>",)

    def write_head(self, grammar: GrammarBuilder, name: str) -> str:
        begin, behind = '{"tool_call_id": "', f'", "tool_name": {dumps(name)}, "parameters": '
        return f"{grammar.text(begin)} /[0-9]{{1,2}}/ {grammar.text(behind)}"


class Apertus(JsonList):
    name = "apertus"
    openers = ("<|tools_prefix|>",)
    closers = ("<|tools_suffix|>",)
    read_call = staticmethod(read_keyed_call)

    def write_head(self, grammar: GrammarBuilder, name: str) -> str:
        return grammar.text(f"{{{dumps(name)}: ")


class Mistral(ToolFormat):
    name = "mistral"
    openers = ("[TOOL_CALLS]",)
    closers = ("[ARGS]", "[CALL_ID]")
    new_id = staticmethod(short_call_id)

    def read_calls(self, scan: Scanner, output: PartCollector) -> Read[None]:
        yield from scan.expect(*self.openers)
        if (yield from scan.skip_space()) == "[":
            yield from read_json_calls(scan, output)
            return
        name = yield from scan.name()
        output.schema(name)
        call_id = ""
        if (yield from scan.accept("[CALL_ID]")):
            call_id = yield from scan.name()
        yield from scan.accept("[ARGS]")
        if (yield from scan.skip_space()) != "{":
            raise NotACall("its arguments are not an object")
        output.start_call(name, call_id)
        yield from pass_arguments(scan, output)

    def write_calls(self, grammar: GrammarBuilder, tools: Mapping[str, Schema], *, parallel: bool) -> str:
        """Return the format of the vocabulary: newer models have a token `[ARGS]`."""
        begin = grammar.marker(self.openers[0])
        if not grammar.has_token("[ARGS]"):
            return f"{begin} {json_calls_rule(grammar, tools, parallel=parallel)}"
        separator = grammar.marker("[ARGS]")
        call = grammar.one_of(
            [
                f"{begin} {grammar.text(checked_name(name))} {separator} {grammar.arguments(schema)}"
                for name, schema in tools.items()
            ]
        )
        return f"{call}+" if parallel else call
