"""Mistral: `[TOOL_CALLS]`, then a JSON list of calls or, in the models since mid 2025, a name and its arguments.

    [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "a1B2c3D4e"}, ...]
    [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]a1B2c3D4e[ARGS]{}

Some leave `[ARGS]` out. The markers are special tokens. The templates want ids of nine letters and digits back.
"""

from __future__ import annotations

from collections.abc import Mapping

from localllm.text.answers.formats.base import ToolFormat
from localllm.text.answers.grammar import GrammarBuilder, Schema, checked_name
from localllm.text.answers.json_text import json_calls_rule, pass_arguments, read_json_calls
from localllm.text.answers.output import PartCollector, short_call_id
from localllm.text.answers.scanner import NotACall, Read, Scanner


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
