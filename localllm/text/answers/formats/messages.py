"""gpt-oss, Muse Glimmer and Inkling: the answer is a chain of messages with headers; reasoning and calls are messages
too.

    <|channel|>analysis<|message|>...<|end|>                                                        reasoning
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>      a call
    <|start|>assistant to=functions.f<|channel|>commentary json<|message|>{...}<|call|>              the same
    <|start|>assistant<|channel|>final<|message|>...<|return|>                                      content

In gpt-oss (Harmony) the header names a channel. A commentary without a recipient is content, since it is meant for the
user.

     to=self<|message|>...<|eom|>                                                                    reasoning
    <|start|>assistant to=f<|message|><atem:function_calls>
    <atem:invoke name="f">
    <atem:parameter name="a">1</atem:parameter>
    </atem:invoke>
    </atem:function_calls><|eot|>                                                                    a call
    <|start|>assistant to=user<|message|>...<|eot|>                                                  content

In Muse Glimmer it names a recipient. The prompt of both ends with `<|start|>assistant`.

    <|content_thinking|>...<|end_message|>                                                          reasoning
    <|message_model|>f<|content_invoke_tool_json|>{"name": "f", "args": {...}}<|end_message|>            a call
    <|message_model|><|content_text|>...<|end_message|><|content_model_end_sampling|>               content

In Inkling a marker says what kind of text follows, and the header is the name of a tool or empty. Its prompt ends with
`<|message_model|>`. The markers in bars are special tokens.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

from localllm.text.answers.formats.base import ContentReader, ToolFormat
from localllm.text.answers.formats.tagged import Tagged
from localllm.text.answers.grammar import CannotForce, GrammarBuilder, Schema, checked_name, dumps
from localllm.text.answers.json_text import read_json_call
from localllm.text.answers.output import PartCollector
from localllm.text.answers.reasoning import ReasoningPair
from localllm.text.answers.scanner import NotACall, Read, Scanner

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN = "<|constrain|>"


class MessageFormat(ToolFormat):
    """Format of answers that are chains of messages."""

    reads_reasoning = True
    reasoning: ReasoningPair
    final: str  # start of the answer itself
    ends: tuple[str, ...]  # of a message
    begins: tuple[str, ...]  # markers that end a message too, since they begin the next one
    bodies: tuple[str, ...] = (MESSAGE,)  # between a header and its text
    next_message: str  # from the end of a message to the next header
    to_next: str  # from the end of a message to the part of the next header that names its kind
    thought: str  # kind of a message of reasoning

    def read(self, scan: Scanner, output: PartCollector, content: ContentReader) -> Read[None]:
        while (yield from scan.peek()):
            scan.commit()
            try:
                yield from self.read_calls(scan, output)
            except NotACall as why:
                output.no_call(why)
                scan.rewind()
                header, end = yield from scan.until(*self.bodies, *self.ends)
                output.content(header + end)
                if end in self.bodies:
                    yield from self.pass_body(scan, output.content)
            scan.commit()

    @abstractmethod
    def write_call(self, grammar: GrammarBuilder, name: str, schema: Schema) -> str:
        """Return the expression of a call from its header on. Raises `CannotForce`."""

    def write_calls(self, grammar: GrammarBuilder, tools: Mapping[str, Schema], *, parallel: bool) -> str:
        """Return optional reasoning, then one call: the models are trained to wait for the result of each."""
        calls = [self.write_call(grammar, checked_name(name), schema) for name, schema in tools.items()]
        return f"{self._thought(grammar)} {grammar.one_of(calls)}"

    def write_answer(self, grammar: GrammarBuilder, answer: str, frame: Sequence[str]) -> str:
        return f"{self._thought(grammar)} {grammar.marker(self.final)} {answer}"

    def _thought(self, grammar: GrammarBuilder) -> str:
        """Return optional reasoning followed by the start of the next message."""
        if not grammar.has_token(self.openers[0]):
            raise CannotForce
        opener, closer = self.reasoning
        thought = grammar.rule(grammar.marker(opener), grammar.text_until(closer))
        return f"({thought} {grammar.marker(self.next_message)})?"

    def pass_body(self, scan: Scanner, give: Callable[[str], None]) -> Read[None]:
        """Pass on a message's text and read its end marker; the next message's start stays unread."""

        def give_and_commit(text: str) -> None:
            give(text)
            scan.commit()

        scan.commit()
        yield from scan.give_until((*self.ends, *self.begins), give_and_commit)
        yield from scan.accept(*self.ends)


class HeaderFormat(MessageFormat):
    """Format of messages whose header says what their text is."""

    def read_calls(self, scan: Scanner, output: PartCollector) -> Read[None]:
        """Read one message of any kind."""
        if not (yield from scan.next_of(*self.openers)):
            yield from self.pass_body(scan, output.content)
            return
        header, end = yield from scan.until(MESSAGE, *self.ends)
        if end != MESSAGE:
            raise NotACall("a message ends before its text")
        yield from self.read_body(header, scan, output)

    @abstractmethod
    def read_body(self, header: str, scan: Scanner, output: PartCollector) -> Read[None]:
        """Read a message's text and its end."""


class Harmony(HeaderFormat):
    name = "harmony"
    begins = (START, CHANNEL)
    openers = (*begins, " to=")
    ends = ("<|end|>", "<|return|>", "<|call|>")
    closers = (MESSAGE, CONSTRAIN, *ends)
    thought = "analysis"
    next_message = f"{START}assistant"
    to_next = f"{next_message}{CHANNEL}"
    reasoning = ReasoningPair(f"{CHANNEL}{thought}{MESSAGE}", ends[0])
    final = f"{CHANNEL}final{MESSAGE}"

    def read_body(self, header: str, scan: Scanner, output: PartCollector) -> Read[None]:
        if recipient := re.search(r"\bto=functions\.([\w.-]+)", header):
            name = recipient.group(1)
            output.schema(name)
            if not (yield from scan.skip_space()):
                raise NotACall("it ends before its arguments")
            output.start_call(name)
            if (yield from scan.next_of(*self.ends)):
                output.arguments("{}")
            yield from self.pass_body(scan, output.arguments)
        elif re.search(rf"<\|channel\|>\s*{self.thought}\b", header):
            yield from self.pass_body(scan, output.reasoning)
        else:
            yield from self.pass_body(scan, output.content)

    def write_call(self, grammar: GrammarBuilder, name: str, schema: Schema) -> str:
        head = f"{grammar.marker(CHANNEL)} {grammar.text(f'commentary to=functions.{name} ')}"
        return f'{head} {grammar.marker(CONSTRAIN)} "json" {grammar.marker(MESSAGE)} {grammar.arguments(schema)}'


class _Atem(Tagged):
    """The calls within a message of Muse Glimmer."""

    openers = ("<atem:function_calls>", '<atem:invoke name="')
    closers = ("</atem:parameter>", "</atem:invoke>", "</atem:function_calls>")
    argument = '<atem:parameter name="'


class Muse(HeaderFormat):
    name = "muse"
    calls = _Atem()
    begins = (START,)
    openers = (START, " to=")
    ends = ("<|eom|>", "<|eot|>")
    closers = (MESSAGE, *ends, *calls.closers)
    thought = "self"
    next_message = f"{START}assistant"
    to_next = f"{next_message} to="
    reasoning = ReasoningPair(f" to={thought}{MESSAGE}", ends[0])
    final = f" to=user{MESSAGE}"

    def read_body(self, header: str, scan: Scanner, output: PartCollector) -> Read[None]:
        recipient = re.search(r"\bto=([\w.:/-]+)", header)
        if recipient is None or recipient.group(1) in ("user", self.thought):
            is_thought = recipient is not None and recipient.group(1) == self.thought
            yield from self.pass_body(scan, output.reasoning if is_thought else output.content)
            return
        yield from scan.skip_space()
        yield from self.calls.read_calls(scan, output)
        scan.commit()
        yield from scan.skip_space()
        while (yield from scan.next_of(*self.calls.openers)):
            yield from self.calls.read_calls(scan, output)
            scan.commit()
            yield from scan.skip_space()
        yield from self.pass_body(scan, output.content)

    def write_call(self, grammar: GrammarBuilder, name: str, schema: Schema) -> str:
        calls = self.calls.write_calls(grammar, {name: schema}, parallel=False)
        return f"{grammar.text(f' to={name}')} {grammar.marker(MESSAGE)} {calls}"


class Inkling(MessageFormat):
    name = "inkling"
    bodies = ("<|content_thinking|>", "<|content_text|>", "<|content_invoke_tool_json|>")
    begins = ("<|message_model|>", *bodies)
    openers = begins
    ends = ("<|end_message|>", "<|content_model_end_sampling|>")
    closers = ends
    thought = bodies[0]
    next_message = begins[0]
    to_next = next_message
    reasoning = ReasoningPair(thought, ends[0])
    final = bodies[1]

    def read_calls(self, scan: Scanner, output: PartCollector) -> Read[None]:
        """Read one message of any kind. The first one has no marker before its header: the prompt ends with it."""
        thought, _, call = self.bodies
        begun = yield from scan.accept(self.next_message)
        name = yield from scan.name(may_go_on=None if begun else output.begins_name)
        is_header = begun or not name or output.begins_name(name)
        kind = (yield from scan.accept(*self.bodies)) if is_header else None
        if not kind:
            scan.rewind()
            if begun:
                raise NotACall("a message begins without its kind")
        if kind != call:
            yield from self.pass_body(scan, output.reasoning if kind == thought else output.content)
            return
        if name:
            output.schema(name)
        yield from scan.skip_space()
        yield from read_json_call(scan, output, self.ends, name=name or None)
        scan.commit()
        yield from scan.skip_space()
        yield from self.pass_body(scan, output.content)

    def write_call(self, grammar: GrammarBuilder, name: str, schema: Schema) -> str:
        begin, end = f'{{"name": {dumps(name)}, "args": ', grammar.marker(self.ends[0])
        head = f"{grammar.text(name)} {grammar.marker(self.bodies[2])} {grammar.text(begin)}"
        return f"{head} {grammar.arguments(schema)} {grammar.text('}')} {end}"
