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

from localllm.engine.outputs import GenerationEvent
from localllm.errors import LocalLLMError
from localllm.text.answers.parts import Content, Part, Reasoning, ToolArguments, ToolCallStart
from localllm.text.answers.whole import ToolCall
from localllm.web.api.disconnect import Framing
from localllm.web.api.generation import Choice, Progress, parts_of
from localllm.web.errors import ollama_error
from localllm.web.shape import Shape

Piece = dict[str, Any]
"""Part of a message: content, thinking or tool_calls."""
LINES = Framing("application/x-ndjson", b"")  # no ping: clients treat every line as content


def line(content: Shape | dict[str, Any]) -> bytes:
    return msgspec.json.encode(content) + b"\n"


def timestamp(seconds: float) -> str:
    """Format a time, given in seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


@dataclass(slots=True)
class Clock:
    """Durations of a request, measured from its arrival."""

    started_ns: int = field(default_factory=time.perf_counter_ns)
    load_ns: int = 0  # from arrival until its model was loaded

    def has_model(self) -> None:
        self.load_ns = self.total_ns()

    def total_ns(self) -> int:
        return time.perf_counter_ns() - self.started_ns


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that every line of an answer repeats."""

    model: str
    kind: Literal["chat", "generate"]
    clock: Clock

    def line(self, piece: Piece, **rest: Any) -> dict[str, Any]:
        said = {"content": "", **piece}
        if self.kind == "chat":
            said = {"message": {"role": "assistant", **said}}
        else:
            said["response"] = said.pop("content")
        return {"model": self.model, "created_at": timestamp(time.time()), **said, **(rest or {"done": False})}

    def last(self, piece: Piece, reason: str | None, progress: Progress) -> dict[str, Any]:
        usage, timings = progress.usage(), progress.timings
        return self.line(
            piece,
            done=True,
            done_reason=reason,
            total_duration=self.clock.total_ns(),
            load_duration=self.clock.load_ns,
            prompt_eval_count=usage.prompt_tokens,
            prompt_eval_duration=int(timings.prefill_s * 1e9),
            eval_count=usage.completion_tokens,
            eval_duration=int(timings.decode_s * 1e9),
        )

    def whole(self, choices: Sequence[Choice], progress: Progress) -> dict[str, Any]:
        [choice] = choices
        said: Piece = {}
        for piece in Pieces().read(choice.parts, ended=True):
            for name, value in piece.items():
                said[name] = said[name] + value if name in said else value
        return self.last(said, choice.finish_reason, progress)


class Pieces:
    """The pieces of one answer. A tool call is returned once it is complete, which the next part or the end shows."""

    def __init__(self) -> None:
        self._call: ToolCall | None = None

    def read(self, parts: Sequence[Part], *, ended: bool) -> Iterator[Piece]:
        for part in parts:
            if isinstance(part, ToolArguments):
                assert self._call is not None, "a call has begun"
                self._call.arguments += part.text
                continue
            yield from self._whole_call()
            match part:
                case Content(text):
                    yield {"content": text}
                case Reasoning(text):
                    yield {"thinking": text}
                case ToolCallStart(_, id, name):
                    self._call = ToolCall(id, name)
        if ended:
            yield from self._whole_call()

    def _whole_call(self) -> Iterator[Piece]:
        """Yield the finished call. An incomplete or invalid call becomes content, because clients execute a call at
        once.
        """
        call, self._call = self._call, None
        if call is None:
            return
        arguments = call.arguments_object()
        if arguments is None:
            yield {"content": f"{call.name} {call.arguments}"}
        else:
            yield {"tool_calls": [{"function": {"name": call.name, "arguments": arguments}}]}


class Lines:
    """The lines of one answer."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self._pieces = Pieces()
        self._reason: str | None = None

    def event(self, event: GenerationEvent, progress: Progress) -> bytes:
        self._reason = event.finish_reason
        pieces = self._pieces.read(parts_of(event), ended=event.finish_reason is not None)
        return b"".join([line(self.head.line(piece)) for piece in pieces])

    def end(self, progress: Progress) -> bytes:
        return line(self.head.last({}, self._reason, progress))

    def error(self, error: LocalLLMError) -> bytes:
        return line(ollama_error(error))
