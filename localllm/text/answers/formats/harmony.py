"""gpt-oss: the answer is a chain of messages, each in a channel; reasoning and calls are messages too.

    <|channel|>analysis<|message|>...<|end|>                                                        reasoning
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>      a call
    <|start|>assistant to=functions.f<|channel|>commentary json<|message|>{...}<|call|>              the same
    <|start|>assistant<|channel|>final<|message|>...<|return|>                                      content

A commentary without a recipient is content, since it is meant for the user. The prompt ends with `<|start|>assistant`.
All markers are special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from localllm.text.answers.formats.base import ContentReader, ToolFormat
from localllm.text.answers.grammar import CannotForce, GrammarBuilder, Schema, checked_name
from localllm.text.answers.output import PartCollector
from localllm.text.answers.reasoning import ReasoningPair
from localllm.text.answers.scanner import NotACall, Read, Scanner

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ANALYSIS = "analysis"  # the channel of reasoning
CONSTRAIN = "<|constrain|>"
FINAL = f"{CHANNEL}final{MESSAGE}"  # start of the answer itself
ENDS = ("<|end|>", "<|return|>", "<|call|>")
_RECIPIENT = re.compile(r"\bto=functions\.([\w.-]+)")
_ANALYSIS = re.compile(rf"<\|channel\|>\s*{ANALYSIS}\b")
_BODY_END = (*ENDS, START, CHANNEL)


class Harmony(ToolFormat):
    name = "harmony"
    openers = (START, CHANNEL, " to=")
    closers = (MESSAGE, CONSTRAIN, *ENDS)
    reasoning = ReasoningPair(f"{CHANNEL}{ANALYSIS}{MESSAGE}", ENDS[0])
    reads_reasoning = True

    def read(self, scan: Scanner, output: PartCollector, content: ContentReader) -> Read[None]:
        while (yield from scan.peek()):
            scan.commit()
            try:
                yield from self.read_calls(scan, output)
            except NotACall as why:
                output.no_call(why)
                scan.rewind()
                header, end = yield from scan.until(MESSAGE, *ENDS)
                output.content(header + end)
                if end == MESSAGE:
                    yield from _pass_body(scan, output.content)
            scan.commit()

    def read_calls(self, scan: Scanner, output: PartCollector) -> Read[None]:
        """Read one message of any kind."""
        if not (yield from scan.next_of(*self.openers)):
            yield from _pass_body(scan, output.content)
            return
        header, end = yield from scan.until(MESSAGE, *ENDS)
        if end != MESSAGE:
            raise NotACall("a message ends before its text")
        if recipient := _RECIPIENT.search(header):
            name = recipient.group(1)
            output.schema(name)
            if not (yield from scan.skip_space()):
                raise NotACall("it ends before its arguments")
            output.start_call(name)
            if (yield from scan.next_of(*ENDS)):
                output.arguments("{}")
            yield from _pass_body(scan, output.arguments)
        elif _ANALYSIS.search(header):
            yield from _pass_body(scan, output.reasoning)
        else:
            yield from _pass_body(scan, output.content)

    def write_calls(self, grammar: GrammarBuilder, tools: Mapping[str, Schema], *, parallel: bool) -> str:
        """Return optional reasoning, then one call: the model is trained to wait for the result of each."""
        channel, message = grammar.marker(CHANNEL), grammar.marker(MESSAGE)
        call = grammar.one_of(
            [
                f"{grammar.text(f'commentary to=functions.{checked_name(name)} ')} {grammar.marker(CONSTRAIN)} "
                f'"json" {message} {grammar.arguments(schema)}'
                for name, schema in tools.items()
            ]
        )
        return f"{_thought(grammar)} {channel} {call}"

    def write_answer(self, grammar: GrammarBuilder, answer: str, frame: Sequence[str]) -> str:
        return f"{_thought(grammar)} {grammar.marker(FINAL)} {answer}"


def _thought(grammar: GrammarBuilder) -> str:
    """Return optional reasoning followed by the start of the next message."""
    if not grammar.has_token(START):
        raise CannotForce
    channel, message = grammar.marker(CHANNEL), grammar.marker(MESSAGE)
    thought = grammar.rule(channel, grammar.text(ANALYSIS), message, grammar.text_until(ENDS[0]))
    return f'({thought} {grammar.marker(START)} "assistant")?'


def _pass_body(scan: Scanner, give: Callable[[str], None]) -> Read[None]:
    """Pass on a message's text and read its end marker; the next message's start stays unread."""

    def give_and_commit(text: str) -> None:
        give(text)
        scan.commit()

    scan.commit()
    yield from scan.give_until(_BODY_END, give_and_commit)
    yield from scan.accept(*ENDS)
