"""Hermes and Qwen 2.5, Qwen 3, Granite 4 and many others: one JSON object between tags for each call.

    <tool_call>
    {"name": "f", "arguments": {"a": 1}}
    </tool_call>

The tags are plain text in most vocabularies.
"""

from __future__ import annotations

from collections.abc import Mapping

from localllm.text.answers.formats.base import ToolFormat
from localllm.text.answers.grammar import Grammar, Schema, one_or_more
from localllm.text.answers.json_text import json_call_rule, read_json_call
from localllm.text.answers.output import Output
from localllm.text.answers.scanner import Read, Scanner


class Hermes(ToolFormat):
    name = "hermes"
    openers = ("<tool_call>",)
    closers = ("</tool_call>",)

    def read_calls(self, scan: Scanner, output: Output) -> Read[None]:
        yield from scan.expect(*self.openers)
        yield from scan.skip_space()
        yield from read_json_call(scan, output, self.closers)
        yield from scan.accept_behind_space(*self.closers)

    def write_calls(self, grammar: Grammar, tools: Mapping[str, Schema], *, parallel: bool) -> str:
        begin, end = grammar.marker(self.openers[0]), grammar.marker(self.closers[0])
        one = json_call_rule(grammar, tools)
        call = grammar.rule(begin, grammar.text("\n"), one, grammar.text("\n"), end)
        return one_or_more(call, parallel=parallel)
