"""Qwen3-Coder, Seed-OSS, MiniMax, MiniCPM and DeepSeek since V3.2: arguments between tags that name them.

<tool_call>
<function=f>
<parameter=a>
1
</parameter>
</function>
</tool_call>                      Qwen3-Coder, Qwen3.5; <seed:tool_call> in Seed-OSS. Some leave <tool_call> out. In
                                  MiMo V2 without line breaks; a value keeps its own

<minimax:tool_call>
<invoke name="f">
<parameter name="a">1</parameter>
</invoke>
</minimax:tool_call>              MiniMax M2; around all calls. DeepSeek: <｜DSML｜invoke name="f">, and the tags of
                                  its parameters say string="true" or string="false"

<function name="f"><param name="a">1</param></function>             MiniCPM 5; text may stand in <![CDATA[...]]>
"""

from __future__ import annotations

from collections.abc import Mapping

from localllm.text.answers.formats.arguments import LINE, TaggedArguments, pairs_rule
from localllm.text.answers.formats.base import ToolFormat
from localllm.text.answers.grammar import GrammarBuilder, Schema, checked_name, one_or_more
from localllm.text.answers.output import PartCollector
from localllm.text.answers.scanner import Read, Scanner

CDATA, CDATA_END = "<![CDATA[", "]]>"
TEXT, NO_TEXT = ' string="true"', ' string="false"'


class Tagged(ToolFormat):
    """Format with tags that name the arguments. `openers`: before all calls (optional), before a call's name.

    `closers`: after a value, after a call, after all calls.
    """

    argument: str  # before an argument's name
    quote = '"'  # after a name
    wraps_each = False  # the outer tags wrap one call, not all of them
    line = LINE  # between tags
    value_space = ""  # around a value
    typed = False  # tags state which values are text
    verbatim = False  # line breaks around a value belong to it
    cdata = False

    def read_calls(self, scan: Scanner, output: PartCollector) -> Read[None]:
        """Read one call; a further one in the same tags begins with an opener too."""
        value_end, call_end, *end = self.closers
        if (yield from scan.accept(*self.openers[:-1])):
            yield from scan.skip_space()
        yield from scan.expect(self.openers[-1])
        name = yield from scan.name()
        yield from scan.expect(f"{self.quote}>")
        arguments = TaggedArguments(scan, output, name)
        yield from scan.skip_space()
        while (yield from scan.accept(self.argument)):
            key, found = yield from scan.until(self.quote or ">")
            said, found = (yield from scan.until(">")) if self.quote else ("", found)
            if not found:
                break
            types = {TEXT: frozenset({"string"}), NO_TEXT: frozenset[str]()}.get(said) if self.typed else None
            in_cdata = self.cdata and (yield from scan.accept(CDATA))
            if not in_cdata and not self.verbatim and (yield from scan.peek()) == LINE:
                scan.at += 1
            ends = (value_end,) if self.verbatim else (LINE + value_end, value_end)
            ends = (CDATA_END + value_end,) if in_cdata else ends
            if not (yield from arguments.read(key, *ends, types=types)):
                return
            yield from scan.skip_space()
        if (yield from scan.accept(call_end)):
            arguments.end()
            yield from scan.accept_behind_space(*end)
        else:
            yield from arguments.end_without_marker(*end)

    def write_calls(self, grammar: GrammarBuilder, tools: Mapping[str, Schema], *, parallel: bool) -> str:
        value_end, call_end, *ends = self.closers
        line, argument = grammar.text(self.line), grammar.marker(self.argument)

        def pair(key: str, value: str, is_text: bool) -> str:
            said = (TEXT if is_text else NO_TEXT) if self.typed else ""
            return f"{argument} {grammar.text(f'{key}{self.quote}{said}>{self.value_space}')} {value} {line}"

        calls = []
        for name, schema in tools.items():
            head = f"{grammar.marker(self.openers[-1])} {grammar.text(f'{checked_name(name)}{self.quote}>{self.line}')}"
            pairs = pairs_rule(grammar, schema, value_end, pair, space=self.value_space, typed=self.typed)
            calls.append(f"{head} {pairs} {grammar.marker(call_end)}")
        call = grammar.one_of(calls)
        if not ends:
            return one_or_more(call, parallel=parallel)
        begin, end = grammar.marker(self.openers[0]), grammar.marker(ends[0])
        if self.wraps_each:
            return one_or_more(f"{begin} {line} {call} {line} {end}", parallel=parallel)
        return f"{begin} {line} {one_or_more(call, parallel=parallel)} {line} {end}"


class Qwen3Coder(Tagged):
    name = "qwen3-coder"
    openers = ("<tool_call>", "<function=")
    closers = ("</parameter>", "</function>", "</tool_call>")
    argument = "<parameter="
    quote = ""
    wraps_each = True
    value_space = LINE


class MiMo(Qwen3Coder):
    name = "mimo"
    line = ""
    value_space = ""
    verbatim = True


class SeedOss(Qwen3Coder):
    name = "seed-oss"
    openers = ("<seed:tool_call>", "<function=")
    closers = ("</parameter>", "</function>", "</seed:tool_call>")
    value_space = ""


class MiniMaxM2(Tagged):
    name = "minimax-m2"
    openers = ("<minimax:tool_call>", '<invoke name="')
    closers = ("</parameter>", "</invoke>", "</minimax:tool_call>")
    argument = '<parameter name="'


class MiniCpm(Tagged):
    name = "minicpm"
    openers = ('<function name="',)
    closers = ("</param>", "</function>")
    argument = '<param name="'
    line = ""
    cdata = True


class DeepSeek32(Tagged):
    name = "deepseek-v3.2"
    openers = ("<｜DSML｜function_calls>", '<｜DSML｜invoke name="')
    closers = ("</｜DSML｜parameter>", "</｜DSML｜invoke>", "</｜DSML｜function_calls>")
    tokens = ("｜DSML｜",)
    argument = '<｜DSML｜parameter name="'
    typed = True


class DeepSeek4(DeepSeek32):
    name = "deepseek-v4"
    openers = ("<｜DSML｜tool_calls>", '<｜DSML｜invoke name="')
    closers = ("</｜DSML｜parameter>", "</｜DSML｜invoke>", "</｜DSML｜tool_calls>")
