"""Parses an answer's text, as it arrives, into content, reasoning and tool calls.

Does not know: tokens, requests, HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from localllm.text.answers.formats.base import ContentReader, ToolFormat
from localllm.text.answers.formats.messages import MessageFormat
from localllm.text.answers.output import Enough, PartCollector, call_id
from localllm.text.answers.parts import Part
from localllm.text.answers.reasoning import NO_PROMPT, PromptEnd, ReasoningPair, read_reasoning
from localllm.text.answers.scanner import Read, Scanner
from localllm.text.structured import StructuredOutputsParams
from localllm.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """One model's format of tool calls and of reasoning; None for those it does not write."""

    tools: ToolFormat | None = None
    reasoning: ReasoningPair | None = None
    frame: tuple[str, ...] = ()  # markers around content

    def as_asked(self, *, calls: bool, inline_reasoning: bool = False) -> AnswerFormat | None:
        """Return the format with only the parts that a request wants separated. None: the whole answer is content."""
        reasoning = None if inline_reasoning else self.reasoning
        tools = self.tools if calls or (self.tools is not None and self.tools.reads_reasoning) else None
        found = AnswerFormat(tools, reasoning, self.frame)
        return None if found == AnswerFormat() else found

    def behind_reasoning(self, asked: StructuredOutputsParams, prompt: PromptEnd) -> StructuredOutputsParams:
        """Return the parameters with the format applying only after the reasoning. prompt:
        whether it opens the reasoning."""
        if self.reasoning is None:
            return asked
        if isinstance(self.tools, MessageFormat):
            return replace(asked, after=("", self.tools.final), is_inside=True)
        pair = self.reasoning
        return replace(asked, after=(pair.opener, pair.closer), is_inside=prompt.opens(pair))

    def enforced_calls(
        self, tools: Sequence[Mapping[str, Any]], prompt: PromptEnd, tokenizer: Tokenizer, *, parallel: bool
    ) -> StructuredOutputsParams | None:
        """Return a grammar that applies from the marker of a call on, so that each call is parsed; None if this format
        has no marker that only calls have, or cannot force these tools' arguments."""
        if self.tools is None or self.tools.reads_reasoning:
            return None
        grammar = self.tools.call_grammar(tools, "required", parallel=parallel, tokenizer=tokenizer)
        if grammar is None:
            return None
        pair = self.reasoning
        return StructuredOutputsParams(
            grammar=grammar, param="tools", opened_by=self.tools.openers, after=pair,
            is_inside=pair is not None and prompt.opens(pair),
        )  # fmt: skip

    def needs_special_tokens(self, tokenizer: Tokenizer) -> bool:
        """Return True if a marker is a special token of this vocabulary: decode answers with
        `skip_special_tokens=False`."""
        tools = (*self.tools.openers, *self.tools.closers, *self.tools.tokens) if self.tools else ()
        markers = (*tools, *(self.reasoning or ()), *self.frame)
        return any(tokenizer.token_id(marker) in tokenizer.special_ids for marker in markers)


class AnswerReader:
    """Parses one answer: call `feed` with pieces of text of any size, then `end`.
    The result does not depend on the pieces.

    `tools`: the request's tools in OpenAI's form. A call of any other name is content, so with an empty list everything
    is. None allows any name.
    `any_name`: a call of another name is parsed too, if the format marks its calls; schemas apply to `tools` alone.
    `prompt`: shows whether the model's text begins inside reasoning.
    `parallel`: whether several calls are allowed. If not, the first complete call ends the answer (`is_over`), and the
    rest is dropped.
    `new_id`: generates the ids of calls.
    """

    def __init__(
        self,
        format: AnswerFormat,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        any_name: bool = False,
        prompt: PromptEnd = NO_PROMPT,
        parallel: bool = True,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        self._scan = Scanner()
        any_name = any_name and format.tools is not None and not format.tools.bare
        new_id = new_id or (format.tools.new_id if format.tools else call_id)
        self._output = PartCollector(tools, new_id, parallel=parallel, any_name=any_name)
        self.is_over = False
        self._reading = self._read(format, prompt, calls=tools is None or any_name or len(tools) > 0)
        self._resume()

    def feed(self, text: str) -> list[Part]:
        """Add text, and return the parts that are now certain."""
        if not self.is_over:
            self._scan.feed(text)
            self._resume()
        return self._output.take()

    def end(self) -> list[Part]:
        """Return everything held back, then a `BrokenCall` for each incomplete call."""
        self._scan.ended = True
        self._resume()
        return self._output.end()

    def _resume(self) -> None:
        try:
            next(self._reading, None)
        except Enough:
            self.is_over = True

    def _read(self, format: AnswerFormat, prompt: PromptEnd, *, calls: bool) -> Read[None]:
        tools, pair, orphan = format.tools, format.reasoning, ""
        own = tools is not None and tools.reads_reasoning
        if pair and not own:
            was_read = yield from read_reasoning(self._scan, self._output, pair, inside=prompt.opens(pair))
            orphan = "" if was_read else pair.closer
        content = ContentReader(self._scan, self._output, format.frame, orphan)
        if tools and (calls or own):
            yield from tools.read(self._scan, self._output, content)
        else:
            yield from content.until()
