"""Answers as lines of JSON: pieces of text, and a last line with the finish reason and all durations.

Does not know: sockets, the engine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from localllm.engine.outputs import GenerationEvent
from localllm.engine.step import TokenLogprobs
from localllm.errors import LocalLLMError
from localllm.serving.answers.generation import Choice, Progress, parts_of
from localllm.text.answers.parts import Content, Part, Reasoning, ToolArguments, ToolCallStart
from localllm.text.answers.whole import ToolCall
from localllm.text.tokenizer import Tokenizer
from localllm.web.api.disconnect import Framing
from localllm.web.api.ollama.shapes import ChatLine, GenerateLine, OllamaCall, OllamaCalledFunction, OllamaMessage
from localllm.web.api.timings import scored
from localllm.web.errors import ollama_error
from localllm.web.shape import Shape

LINES = Framing("application/x-ndjson", b"")  # no ping: clients treat every line as content


def line(content: Shape) -> bytes:
    return msgspec.json.encode(content) + b"\n"


def timestamp(seconds: float) -> str:
    """Format a time, given in seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


@dataclass(slots=True)
class RequestClock:
    """Durations of a request, measured from its arrival."""

    started_ns: int = field(default_factory=time.perf_counter_ns)
    load_ns: int = 0  # from arrival until its model was loaded

    def has_model(self) -> None:
        self.load_ns = self.total_ns()

    def total_ns(self) -> int:
        return time.perf_counter_ns() - self.started_ns


@dataclass(frozen=True, slots=True)
class OllamaHead:
    """The fields that every line of an answer repeats."""

    model: str
    kind: Literal["chat", "generate"]
    clock: RequestClock
    tokenizer: Tokenizer | None = None  # set if logprobs are asked for

    def scored(self, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]] | UnsetType:
        """Return the logprobs of tokens, if they are asked for."""
        if self.tokenizer is None:
            return UNSET
        scores = [scored(entry, self.tokenizer) for entry in entries]
        return [{**first, "top_logprobs": top} for first, *top in scores]

    def line(self, said: OllamaMessage, done: bool = False, **rest: Any) -> ChatLine | GenerateLine:
        """Return a line. `said`: the piece of the message. `rest`: the further fields of the last line."""
        now = timestamp(time.time())
        if self.kind == "chat":
            return ChatLine(self.model, now, said, done=done, **rest)
        return GenerateLine(
            model=self.model, created_at=now, thinking=said.thinking, response=said.content, done=done, **rest
        )

    def last(self, said: OllamaMessage, reason: str | None, progress: Progress, **rest: Any) -> ChatLine | GenerateLine:
        """Return the last line. Clients divide eval_count by eval_duration to get the rate of generation."""
        usage, timings, rate = progress.usage(), progress.timings, progress.tokens_per_s
        return self.line(
            said,
            done=True,
            done_reason=reason,
            total_duration=self.clock.total_ns(),
            load_duration=self.clock.load_ns,
            prompt_eval_count=usage.prompt_tokens,
            prompt_eval_duration=int(timings.prefill_s * 1e9),
            eval_count=usage.completion_tokens,
            eval_duration=0 if rate is None else round(usage.completion_tokens / rate * 1e9),
            **rest,
        )

    def whole(self, choices: Sequence[Choice], progress: Progress) -> ChatLine | GenerateLine:
        [choice] = choices
        said = OllamaMessage("assistant", "")
        for piece in Pieces().read(choice.parts, ended=True):
            said.content += piece.content
            said.thinking = _added(said.thinking, piece.thinking)
            said.tool_calls = _added(said.tool_calls, piece.tool_calls)
        return self.last(said, choice.finish_reason, progress, logprobs=self.scored(choice.logprobs))


def _added(one: Any, other: Any) -> Any:
    return one if other is UNSET else other if one is UNSET else one + other


class Pieces:
    """The pieces of one answer. A tool call is returned once it is complete, which the next part or the end shows."""

    def __init__(self) -> None:
        self._call: ToolCall | None = None

    def read(self, parts: Sequence[Part], *, ended: bool) -> Iterator[OllamaMessage]:
        for part in parts:
            if isinstance(part, ToolArguments):
                assert self._call is not None, "a call has begun"
                self._call.arguments += part.text
                continue
            yield from self._whole_call()
            match part:
                case Content(text):
                    yield OllamaMessage("assistant", text)
                case Reasoning(text):
                    yield OllamaMessage("assistant", "", text)
                case ToolCallStart(_, id, name):
                    self._call = ToolCall(id, name)
        if ended:
            yield from self._whole_call()

    def _whole_call(self) -> Iterator[OllamaMessage]:
        """Yield the finished call. An incomplete or invalid call becomes content, because clients execute a call at
        once.
        """
        call, self._call = self._call, None
        if call is None:
            return
        arguments = call.arguments_object()
        if arguments is None:
            yield OllamaMessage("assistant", f"{call.name} {call.arguments}")
        else:
            yield OllamaMessage("assistant", "", tool_calls=[OllamaCall(OllamaCalledFunction(call.name, arguments))])


class OllamaLines:
    """The lines of one answer."""

    def __init__(self, head: OllamaHead) -> None:
        self.head = head
        self._pieces = Pieces()
        self._reason: str | None = None

    def event(self, event: GenerationEvent, progress: Progress) -> bytes:
        self._reason = event.finish_reason
        pieces = list(self._pieces.read(parts_of(event), ended=event.finish_reason is not None))
        if self.head.tokenizer is None:
            return b"".join([line(self.head.line(piece)) for piece in pieces])
        if event.logprobs and not pieces:
            pieces = [OllamaMessage("assistant", "")]
        # All logprobs of a step are in its first line.
        scores = [self.head.scored(event.logprobs), *[UNSET] * len(pieces)]
        return b"".join(
            [line(self.head.line(piece, logprobs=each)) for piece, each in zip(pieces, scores, strict=False)]
        )

    def end(self, progress: Progress) -> bytes:
        return line(self.head.last(OllamaMessage("assistant", ""), self._reason, progress))

    def error(self, error: LocalLLMError) -> bytes:
        return line(ollama_error(error))
