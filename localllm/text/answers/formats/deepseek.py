"""DeepSeek V3, R1 and V3.1: markers around calls; the older two write a kind and a block of code.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>      V3.1
    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f                                        V3, R1
    ```json
    {"a": 1}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

The markers are tokens of their own, special ones in some vocabularies.
"""

from __future__ import annotations

from collections.abc import Mapping

from localllm.text.answers.formats.base import ToolFormat
from localllm.text.answers.grammar import Grammar, Schema, checked_name, one_or_more
from localllm.text.answers.json_text import pass_arguments
from localllm.text.answers.output import Output
from localllm.text.answers.scanner import NotACall, Read, Scanner

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE, FENCE_END = "\n```json\n", "\n```"


class DeepSeek(ToolFormat):
    name = "deepseek-v3"
    openers = (CALLS_BEGIN, BEGIN)
    closers = (SEP, END, CALLS_END)

    def read_calls(self, scan: Scanner, output: Output) -> Read[None]:
        yield from scan.accept(CALLS_BEGIN)
        yield from scan.skip_space()
        yield from scan.expect(BEGIN)
        yield from self._read_call(scan, output)
        while (yield from scan.accept_behind_space(BEGIN, CALLS_END)) == BEGIN:
            yield from self._read_call(scan, output)

    def _read_call(self, scan: Scanner, output: Output) -> Read[None]:
        name = yield from scan.name()  # or the kind, "function"
        yield from scan.expect(SEP)
        if (yield from scan.skip_space()) != "{":
            name = yield from scan.name()
            yield from scan.skip_space()
            yield from scan.expect("```json")
            if (yield from scan.skip_space()) != "{":
                raise NotACall("its arguments are not an object")
        output.start_call(name)
        yield from pass_arguments(scan, output, (END,))
        yield from scan.accept_behind_space("```")
        yield from scan.accept_behind_space(END)

    def write_calls(self, grammar: Grammar, tools: Mapping[str, Schema], *, parallel: bool) -> str:
        """As V3 and R1 write them."""
        begin, sep, end = (grammar.marker(marker) for marker in (BEGIN, SEP, END))
        call = grammar.one_of(
            [
                f"{begin} {grammar.text('function')} {sep} {grammar.text(f'{checked_name(name)}{FENCE}')} "
                f"{grammar.arguments(schema)} {grammar.text(FENCE_END)} {end}"
                for name, schema in tools.items()
            ]
        )
        calls = one_or_more(call, parallel=parallel)
        return f"{grammar.marker(CALLS_BEGIN)} {calls} {grammar.marker(CALLS_END)}"
