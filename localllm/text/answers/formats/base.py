"""The common part of all formats: content passes through, and a marker starts an attempt to read calls.

Does not know: any specific format.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from localllm.text.answers.grammar import CannotForce, GrammarBuilder, Schema
from localllm.text.answers.output import PartCollector, call_id, tool_schemas
from localllm.text.answers.reasoning import ReasoningPair
from localllm.text.answers.scanner import NotACall, Read, Scanner
from localllm.text.structured import StructuredOutputsParams
from localllm.text.tokenizer import Tokenizer

MOST_BROKEN = 64
"""Most failed attempts, each of which may have read to the end; later markers are treated as content."""


class ToolFormat(ABC):
    """Format of tool calls of one family of models."""

    name: str
    openers: tuple[str, ...] = ()  # markers that begin calls
    closers: tuple[str, ...] = ()  # other markers of a call that may be special tokens
    tokens: tuple[str, ...] = ()  # tokens that the markers consist of, if they are not tokens themselves
    reasoning: ReasoningPair | None = None  # if the format implies the markers of reasoning
    bare = False  # calls may also begin the answer without a marker
    reads_reasoning = False  # reasoning is written like calls, so this format reads it too
    new_id: Callable[[], str] = staticmethod(call_id)

    @abstractmethod
    def read_calls(self, scan: Scanner, output: PartCollector) -> Read[None]:
        """Read calls, beginning with their opener. Raises `NotACall`; uncommitted text then becomes content."""

    @abstractmethod
    def write_calls(self, grammar: GrammarBuilder, tools: Mapping[str, Schema], *, parallel: bool) -> str:
        """Return the expression of one call or, if `parallel`, of several. Raises `CannotForce`."""

    def call_grammar(
        self,
        tools: Sequence[Mapping[str, Any]],
        choice: str,
        *,
        parallel: bool,
        tokenizer: Tokenizer | None = None,
        answer: StructuredOutputsParams | None = None,
        frame: Sequence[str] = (),
    ) -> str | None:
        """Return a grammar that forces calls: of any tool if `choice` is "required", else of the named tool.

        `answer`: a format that the text may have instead of a call, with or without markers of the `frame` around it.
        Returns None if this format cannot force these tools' arguments to fit their schemas, or if a call could not be
        distinguished from such a text by its beginning.
        """
        schemas = tool_schemas(tools)
        chosen = schemas if choice == "required" else {choice: schemas[choice]}
        grammar = GrammarBuilder(tokenizer)
        try:
            written = self.write_calls(grammar, chosen, parallel=parallel)
            if answer is not None:
                if not self.begins_apart(grammar, answer):
                    raise CannotForce
                written = f"{written} | {self.write_answer(grammar, grammar.rule(answer.to_expression()), frame)}"
            return grammar.with_start(written)
        except (CannotForce, RecursionError):
            return None

    def begins_apart(self, grammar: GrammarBuilder, answer: StructuredOutputsParams) -> bool:
        """Return whether no text of `answer` begins like a call: with its token, or its first character."""
        marker = self.openers[0]
        return grammar.has_token(marker) or (not self.bare and not answer.may_begin_with(marker[0]))

    def write_answer(self, grammar: GrammarBuilder, answer: str, frame: Sequence[str]) -> str:
        """Return the expression of a text that is not a call."""
        if not frame:
            return answer
        marker = grammar.one_of([grammar.marker(marker) for marker in frame])
        return f"{marker}? {marker}? {answer} {marker}?"

    def read(self, scan: Scanner, output: PartCollector, content: ContentReader) -> Read[None]:
        """Parse an answer."""
        opener, num_broken = "", 0
        if not self.bare:
            opener = yield from content.until(*self.openers)
        while opener or self.bare:
            scan.commit()
            num_before = output.num_calls
            try:
                yield from self.read_calls(scan, output)
                scan.commit()
            except NotACall as why:
                scan.rewind()
                num_broken += 1
                if opener or output.num_calls > num_before:
                    output.no_call(why)
                if output.num_calls == num_before:
                    output.content(scan.take(1 if opener else 0))  # so that the marker is not found again
            openers = self.openers if num_broken < MOST_BROKEN else ()
            opener = yield from content.until(*openers)
            if not opener:
                return


class ContentReader:
    """Passes content on as it arrives.

    `frame`: markers around content, which are dropped. `orphan`: a marker that ends reasoning without a start; the
    first one is dropped.
    """

    def __init__(self, scan: Scanner, output: PartCollector, frame: Sequence[str] = (), orphan: str = "") -> None:
        self._scan, self._output = scan, output
        self._frame, self._orphan = tuple(frame), orphan

    def until(self, *openers: str) -> Read[str]:
        """Pass content on up to an opener, which stays unread. Return the opener; "" at the end."""
        scan = self._scan
        while True:
            markers = tuple([marker for marker in (*openers, *self._frame, self._orphan) if marker])
            marker = yield from scan.give_until(markers, self._give)
            if not marker or marker in openers:
                return marker
            scan.at += len(marker)
            if marker == self._orphan:
                if (yield from scan.peek()) in (
                    "\n",
                    "",
                ):  # models are trained to write it at the end of a line
                    yield from scan.skip_space()
                    self._orphan = ""
                else:
                    self._give(marker)
            scan.commit()

    def _give(self, text: str) -> None:
        self._output.content(text)
        self._scan.commit()
