"""Granite 3, Phi-4-mini, Nemotron Nano and Apriel: a JSON list of calls behind a marker.

    <|tool_call|>[{"name": "f", "arguments": {"a": 1}}, ...]                    Granite; also <tool_call>
    <|tool_call|>[{"name": "f", "arguments": {"a": 1}}, ...]<|/tool_call|>      Phi-4-mini; also functools[...]
    <TOOLCALL>[{"name": "f", "arguments": {"a": 1}}, ...]</TOOLCALL>            Nemotron Nano v2
    <tool_calls>[{"name": "f", "arguments": {"a": 1}}, ...]</tool_calls>        Apriel

Markers with bars are special tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

from localllm.text.answers.formats.base import ToolFormat
from localllm.text.answers.grammar import Grammar, Schema
from localllm.text.answers.json_text import json_calls_rule, read_json_calls
from localllm.text.answers.output import Output
from localllm.text.answers.scanner import Read, Scanner


class JsonList(ToolFormat):
    def read_calls(self, scan: Scanner, output: Output) -> Read[None]:
        yield from scan.expect(*self.openers)
        yield from scan.skip_space()
        yield from read_json_calls(scan, output, self.closers)
        yield from scan.accept_behind_space(*self.closers)

    def write_calls(self, grammar: Grammar, tools: Mapping[str, Schema], *, parallel: bool) -> str:
        calls = json_calls_rule(grammar, tools, parallel=parallel)
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
