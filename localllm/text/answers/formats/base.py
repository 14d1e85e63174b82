"""What every format of tool calls has in common: content passes, a marker begins an attempt to read calls.

Does not know: any one format.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from localllm.text.answers.grammar import CannotForce, Grammar, Schema
from localllm.text.answers.output import Output, call_id, tool_schemas
from localllm.text.answers.scanner import NotACall, Read, Scanner
from localllm.text.stop_strings import StopStrings
from localllm.text.tokenizer import Tokenizer

MOST_BROKEN = 64
"""Attempts that fail, each of which may have read to the end; what looks like a call after them is content."""


class ToolFormat(ABC):
    """How the models of one family write tool calls."""

    name: str
    openers: tuple[str, ...] = ()  # what calls begin with
    closers: tuple[str, ...] = ()  # what else their text holds, where it may be a special token
    bare = False  # calls may also begin the answer without a marker
    reads_reasoning = False  # reasoning is written as calls are, so this format reads it too
    new_id: Callable[[], str] = staticmethod(call_id)

    @abstractmethod
    def read_calls(self, scan: Scanner, output: Output) -> Read[None]:
        """Read calls, beginning with their opener. Raises `NotACall`; what was not committed becomes content."""

    @abstractmethod
    def write_calls(self, grammar: Grammar, tools: Mapping[str, Schema], *, parallel: bool) -> str:
        """The expression of one call or, if `parallel`, of several. Raises `CannotForce`."""

    def call_grammar(
        self, tools: Sequence[Mapping[str, Any]], choice: str, *, parallel: bool, tokenizer: Tokenizer | None = None
    ) -> str | None:
        """A grammar of answers that are calls: of any tool where `choice` is "required", else of the tool it names.

        None if this format cannot be forced to write these tools' arguments as their schemas want them.
        """
        schemas = tool_schemas(tools)
        chosen = schemas if choice == "required" else {choice: schemas[choice]}
        grammar = Grammar(tokenizer)
        try:
            return grammar.with_start(self.write_calls(grammar, chosen, parallel=parallel))
        except (CannotForce, RecursionError):
            return None

    def read(self, scan: Scanner, output: Output, orphan: str = "") -> Read[None]:
        """Read an answer. `orphan` ends reasoning that nothing began: once, it is dropped instead of shown."""
        opener, num_broken = "", 0
        if not self.bare:
            opener, orphan = yield from pass_content(scan, output, self.openers, orphan)
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
            opener, orphan = yield from pass_content(scan, output, openers, orphan)
            if not opener:
                return


def pass_content(scan: Scanner, output: Output, openers: tuple[str, ...], orphan: str) -> Read[tuple[str, str]]:
    """Content as it comes; the opener that ends it, unread, and the orphan that may still come."""

    def give(text: str) -> None:
        output.content(text)
        scan.commit()

    while True:
        markers = StopStrings((*openers, orphan) if orphan else openers)
        marker = yield from scan.give_until(markers, give)
        if not orphan or marker != orphan:
            return marker, orphan
        scan.at += len(orphan)
        if (yield from scan.peek()) in ("\n", ""):  # as a line's end it is what the model was trained to write
            yield from scan.skip_space()
            orphan = ""
        else:
            give(orphan)
        scan.commit()
