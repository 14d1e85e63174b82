"""DeepSeek V3 to V3.1, Kimi K2, Solar Open and Functionary: a name and a JSON object between markers.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>      V3.1
    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f                                        V3, R1
    ```json
    {"a": 1}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}
        <|tool_call_end|><|tool_calls_section_end|>                                                      Kimi K2
    <|tool_calls|><|tool_call:begin|>a1b2c3<|tool_call:name|>f<|tool_call:args|>{"a": 1}
        <|tool_call:end|><|calls|>                                                                       Solar Open
    <function=f>{"a": 1}</function>                                                                      Functionary 3.1

The markers are tokens of their own, special ones in some vocabularies; Functionary's are text.
"""

from __future__ import annotations

from collections.abc import Mapping

from localllm.text.answers.formats.base import ToolFormat
from localllm.text.answers.grammar import GrammarBuilder, Schema, checked_name, one_or_more
from localllm.text.answers.json_text import pass_arguments
from localllm.text.answers.output import PartCollector
from localllm.text.answers.reasoning import ReasoningPair
from localllm.text.answers.scanner import NotACall, Read, Scanner

FENCE, FENCE_END = "\n```json\n", "\n```"


class Marked(ToolFormat):
    """Format with a name and a JSON object between markers. `openers`: before all calls (optional), before one call.

    `closers`: before the arguments, after them, after all calls (optional).
    """

    between = ""  # between calls

    def read_calls(self, scan: Scanner, output: PartCollector) -> Read[None]:
        *before, begin = self.openers
        if (yield from scan.accept(*before)):
            yield from scan.skip_space()
        yield from scan.expect(begin)
        yield from self._read_call(scan, output)
        while (yield from scan.accept_behind_space(begin, *self.closers[2:3])) == begin:
            yield from self._read_call(scan, output)

    def read_head(self, scan: Scanner) -> Read[tuple[str, str]]:
        """Read the name, and the call's id if it has one; the arguments come next."""
        name = yield from scan.name()
        yield from scan.expect(self.closers[0])
        return name, ""

    def write_head(self, grammar: GrammarBuilder, name: str) -> str:
        return f"{grammar.text(name)} {grammar.marker(self.closers[0])}"

    def write_calls(self, grammar: GrammarBuilder, tools: Mapping[str, Schema], *, parallel: bool) -> str:
        *before, begin = map(grammar.marker, self.openers)
        end, *behind = map(grammar.marker, self.closers[1:3])
        call = grammar.one_of(
            [
                f"{begin} {self.write_head(grammar, checked_name(name))} {self.write_arguments(grammar, schema)} {end}"
                for name, schema in tools.items()
            ]
        )
        return " ".join([*before, one_or_more(call, parallel=parallel, between=self.between), *behind])

    def write_arguments(self, grammar: GrammarBuilder, schema: Schema) -> str:
        return grammar.arguments(schema)

    def _read_call(self, scan: Scanner, output: PartCollector) -> Read[None]:
        name, call_id = yield from self.read_head(scan)
        output.schema(name)
        if (yield from scan.skip_space()) != "{":
            raise NotACall("its arguments are not an object")
        output.start_call(name, call_id)
        yield from pass_arguments(scan, output, self.closers[1:2])
        yield from scan.accept_behind_space("```")
        yield from scan.accept_behind_space(self.closers[1])


class DeepSeek31(Marked):
    name = "deepseek-v3.1"
    openers = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    closers = ("<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")


class DeepSeek(DeepSeek31):
    """DeepSeek V3: the format of V3.1 is accepted too."""

    name = "deepseek-v3"
    between = "\n"

    def read_head(self, scan: Scanner) -> Read[tuple[str, str]]:
        name, _ = yield from super().read_head(scan)  # or the type, "function"
        if (yield from scan.skip_space()) != "{":
            name = yield from scan.name()
            yield from scan.skip_space()
            yield from scan.expect("```json")
        return name, ""

    def write_head(self, grammar: GrammarBuilder, name: str) -> str:
        return f"{super().write_head(grammar, 'function')} {grammar.text(f'{name}{FENCE}')}"

    def write_arguments(self, grammar: GrammarBuilder, schema: Schema) -> str:
        return f"{grammar.arguments(schema)} {grammar.text(FENCE_END)}"


class KimiK2(Marked):
    """Kimi K2's format. Its ids contain the function's name and a count, and its templates expect them back."""

    name = "kimi-k2"
    openers = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
    closers = ("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>")

    def read_head(self, scan: Scanner) -> Read[tuple[str, str]]:
        call_id, _ = yield from super().read_head(scan)
        name, _, number = call_id.rpartition(":")
        return (name if number.isdigit() else call_id).removeprefix("functions."), call_id

    def write_head(self, grammar: GrammarBuilder, name: str) -> str:
        return f"{grammar.text(f'functions.{name}:')} /[0-9]{{1,3}}/ {grammar.marker(self.closers[0])}"


class Solar(Marked):
    name = "solar"
    reasoning = ReasoningPair("<|think|>", "<|end|>")
    openers = ("<|tool_calls|>", "<|tool_call:begin|>")
    closers = ("<|tool_call:args|>", "<|tool_call:end|>", "<|calls|>", "<|tool_call:name|>")

    def read_head(self, scan: Scanner) -> Read[tuple[str, str]]:
        call_id = yield from scan.name()
        yield from scan.expect(self.closers[3])
        name, _ = yield from super().read_head(scan)
        return name, call_id

    def write_head(self, grammar: GrammarBuilder, name: str) -> str:
        return f"/[a-z0-9]{{10}}/ {grammar.marker(self.closers[3])} {super().write_head(grammar, name)}"


class Functionary(Marked):
    name = "functionary"
    openers = ("<function=",)
    closers = (">", "</function>")
