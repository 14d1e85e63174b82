"""Hermes and Qwen 2.5, Qwen 3, Granite 4 and many others, MiniMax M1, GigaChat, Llama 3: a JSON object for each call.

    <tool_call>
    {"name": "f", "arguments": {"a": 1}}
    </tool_call>                                                    Hermes, Qwen

    <tool_calls>
    {"name": "f", "arguments": {"a": 1}}
    </tool_calls>                                                   MiniMax M1; around all calls

    <|function_call|>{"name": "f", "arguments": {"a": 1}}           GigaChat 3.1; in 3 a message of its own

    {"name": "f", "parameters": {"a": 1}}                           Llama 3.x: the whole answer
    <|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}

Tags are plain text in most vocabularies, markers with bars are special tokens. Of Llama's answers without the marker
only one that begins with such an object is a call; an object with other keys is content.
"""

from __future__ import annotations

from collections.abc import Mapping

from localllm.text.answers.formats.base import ToolFormat
from localllm.text.answers.grammar import GrammarBuilder, Schema, dumps, one_or_more
from localllm.text.answers.json_text import json_call_rule, read_json_call
from localllm.text.answers.output import PartCollector
from localllm.text.answers.scanner import Read, Scanner
from localllm.text.structured import StructuredOutputsParams

_LLAMA_KEYS = frozenset({"type", "name", "parameters", "arguments"})


class Hermes(ToolFormat):
    name = "hermes"
    openers: tuple[str, ...] = ("<tool_call>",)
    closers = ("</tool_call>",)

    def read_calls(self, scan: Scanner, output: PartCollector) -> Read[None]:
        yield from scan.expect(*self.openers)
        yield from scan.skip_space()
        yield from read_json_call(scan, output, self.closers)
        while (yield from scan.accept_behind_space("{", *self.closers)) == "{":
            scan.at -= 1
            yield from read_json_call(scan, output, self.closers)

    def write_calls(self, grammar: GrammarBuilder, tools: Mapping[str, Schema], *, parallel: bool) -> str:
        begin, end = grammar.marker(self.openers[0]), grammar.marker(self.closers[0])
        one = json_call_rule(grammar, tools)
        call = grammar.rule(begin, grammar.text("\n"), one, grammar.text("\n"), end)
        return one_or_more(call, parallel=parallel)


class MiniMaxM1(Hermes):
    name = "minimax-m1"
    openers = ("<tool_calls>",)
    closers = ("</tool_calls>",)

    def write_calls(self, grammar: GrammarBuilder, tools: Mapping[str, Schema], *, parallel: bool) -> str:
        calls = one_or_more(json_call_rule(grammar, tools), parallel=parallel)
        line = grammar.text("\n")
        return " ".join([grammar.marker(self.openers[0]), line, calls, line, grammar.marker(self.closers[0])])


class GigaChat(Hermes):
    """GigaChat's format: one call at a time."""

    name = "gigachat"
    openers = ("<|function_call|>", "function call<|role_sep|>\n")
    closers = ("<|message_sep|>",)

    def write_calls(self, grammar: GrammarBuilder, tools: Mapping[str, Schema], *, parallel: bool) -> str:
        new, old = self.openers
        begin = new if grammar.has_token(new) else f"{self.closers[0]}\n\n{old}"
        return f"{grammar.marker(begin)} {json_call_rule(grammar, tools)}"


class Llama3Json(ToolFormat):
    name = "llama3-json"
    openers = ("<|python_tag|>",)
    bare = True

    def read_calls(self, scan: Scanner, output: PartCollector) -> Read[None]:
        if (yield from scan.skip_space()) != "{":
            yield from scan.expect(*self.openers)
            yield from scan.skip_space()
        yield from read_json_call(scan, output, keys=_LLAMA_KEYS)
        scan.commit()
        while (char := (yield from scan.skip_space())) in ("{", ";"):
            if char == ";":
                scan.at += 1
                continue
            yield from read_json_call(scan, output, keys=_LLAMA_KEYS)
            scan.commit()
        scan.rewind()

    def write_calls(self, grammar: GrammarBuilder, tools: Mapping[str, Schema], *, parallel: bool) -> str:
        return json_call_rule(grammar, tools, _llama_head)  # trained to make one call at a time

    def begins_apart(self, grammar: GrammarBuilder, answer: StructuredOutputsParams) -> bool:
        return False  # a call begins like any JSON object


def _llama_head(grammar: GrammarBuilder, name: str) -> str:
    return grammar.text(f'{{"name": {dumps(name)}, "parameters": ')
