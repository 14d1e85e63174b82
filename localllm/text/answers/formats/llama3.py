"""Llama 3.x: a JSON object that is the whole answer, with or without a marker before it.

    {"name": "f", "parameters": {"a": 1}}
    <|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}

Without the marker only an answer that begins with such an object is a call; an object with other keys is content.
The marker is a special token.
"""

from __future__ import annotations

from collections.abc import Mapping

from localllm.text.answers.formats.base import ToolFormat
from localllm.text.answers.grammar import GrammarBuilder, Schema, dumps
from localllm.text.answers.json_text import json_call_rule, read_json_call
from localllm.text.answers.output import PartCollector
from localllm.text.answers.scanner import Read, Scanner
from localllm.text.structured import StructuredOutputsParams

_KEYS = frozenset({"type", "name", "parameters", "arguments"})


class Llama3Json(ToolFormat):
    name = "llama3-json"
    openers = ("<|python_tag|>",)
    bare = True

    def read_calls(self, scan: Scanner, output: PartCollector) -> Read[None]:
        if (yield from scan.skip_space()) != "{":
            yield from scan.expect(*self.openers)
            yield from scan.skip_space()
        yield from read_json_call(scan, output, keys=_KEYS)
        scan.commit()
        while (char := (yield from scan.skip_space())) in ("{", ";"):
            if char == ";":
                scan.at += 1
                continue
            yield from read_json_call(scan, output, keys=_KEYS)
            scan.commit()
        scan.rewind()

    def write_calls(self, grammar: GrammarBuilder, tools: Mapping[str, Schema], *, parallel: bool) -> str:
        return json_call_rule(grammar, tools, _head)  # trained to make one call at a time

    def begins_apart(self, grammar: GrammarBuilder, answer: StructuredOutputsParams) -> bool:
        return False  # a call begins like any JSON object


def _head(grammar: GrammarBuilder, name: str) -> str:
    return grammar.text(f'{{"name": {dumps(name)}, "parameters": ')
