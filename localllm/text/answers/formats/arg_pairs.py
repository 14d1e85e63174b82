"""GLM-4.5 and later, Hunyuan 3: a name, then pairs of tags for an argument's name and its value.

    <tool_call>f
    <arg_key>a</arg_key>
    <arg_value>1</arg_value>
    </tool_call>                      GLM, Ling 3, Laguna

    <tool_calls:opensource>
    <tool_call:opensource>f<tool_sep:opensource>
    <arg_key:opensource>a</arg_key:opensource>
    <arg_value:opensource>1</arg_value:opensource>
    </tool_call:opensource>
    </tool_calls:opensource>          Hunyuan 3; its preview without :opensource

A string is written as plain text, any other value as JSON. In a call without arguments models may write the end of a
value for the end of the call.
"""

from __future__ import annotations

from collections.abc import Mapping

from localllm.text.answers.formats.arguments import LINE, TaggedArguments, pairs_rule
from localllm.text.answers.formats.base import ToolFormat
from localllm.text.answers.grammar import GrammarBuilder, Schema, checked_name, one_or_more
from localllm.text.answers.output import PartCollector
from localllm.text.answers.scanner import Read, Scanner


class Glm4(ToolFormat):
    """Format with tags around each argument's name and value. `openers`: before all calls (optional), before one call.
    `closers`: after a call, around a name, around a value, after a call's name (optional), after all calls
    (optional)."""

    name = "glm4"
    openers: tuple[str, ...] = ("<tool_call>",)
    closers: tuple[str, ...] = ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def read_calls(self, scan: Scanner, output: PartCollector) -> Read[None]:
        """Read one call; the next one begins with an opener too."""
        call_end, key_begin, key_end, value_begin, value_end, *others = self.closers
        if (yield from scan.accept(*self.openers[:-1])):
            yield from scan.skip_space()
        yield from scan.expect(self.openers[-1])
        yield from scan.skip_space()
        name = yield from scan.name()
        arguments = TaggedArguments(scan, output, name)
        yield from scan.skip_space()
        mark = yield from scan.accept(value_end, *others[:1])
        yield from scan.skip_space()
        if mark == value_end and not (yield from scan.next_of(key_begin)):
            arguments.end()
            yield from scan.accept(call_end)
            yield from scan.accept_behind_space(*others[1:])
            return
        while (yield from scan.accept(key_begin)):
            key, end = yield from scan.until(key_end)
            yield from scan.skip_space()
            if not end or not (yield from scan.accept(value_begin)):
                break
            if not (yield from arguments.read(key.strip(), value_end)):
                return
            yield from scan.skip_space()
        yield from arguments.end_without_marker(call_end)
        yield from scan.accept_behind_space(*others[1:])

    def write_calls(self, grammar: GrammarBuilder, tools: Mapping[str, Schema], *, parallel: bool) -> str:
        end, key_begin, key_end, value_begin, _, *others = map(grammar.marker, self.closers)
        *before, begin = map(grammar.marker, self.openers)
        line = grammar.text(LINE)

        def pair(key: str, value: str, is_text: bool) -> str:
            return f"{key_begin} {grammar.text(key)} {key_end} {line} {value_begin} {value} {line}"

        calls = []
        for name, schema in tools.items():
            head = " ".join([begin, grammar.text(checked_name(name)), *others[:1], line])
            calls.append(f"{head} {pairs_rule(grammar, schema, self.closers[4], pair)} {end}")
        written = one_or_more(grammar.one_of(calls), parallel=parallel)
        return " ".join([*before, line, written, line, *others[1:]]) if before else written


class Hunyuan3(Glm4):
    name = "hunyuan-v3"
    openers = ("<tool_calls:opensource>", "<tool_call:opensource>")
    closers: tuple[str, ...] = (
        "</tool_call:opensource>",
        "<arg_key:opensource>",
        "</arg_key:opensource>",
        "<arg_value:opensource>",
        "</arg_value:opensource>",
        "<tool_sep:opensource>",
        "</tool_calls:opensource>",
    )


class Hunyuan3Preview(Hunyuan3):
    name = "hunyuan-v3-preview"
    openers = ("<tool_calls>", "<tool_call>")
    closers = (*Glm4.closers, "<tool_sep>", "</tool_calls>")
