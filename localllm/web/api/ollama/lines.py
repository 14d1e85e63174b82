"""Answers as lines of JSON: pieces of text, and a last line with why it ended and how long everything took.

Does not know: sockets, the engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from localllm.engine.outputs import GenerationEvent
from localllm.errors import LocalLLMError
from localllm.web.api.disconnect import Framing
from localllm.web.api.generation import Choice, Progress
from localllm.web.errors import ollama_error

LINES = Framing("application/x-ndjson", b"")  # every line is read as news: there is none that says nothing


def line(content: dict[str, Any]) -> bytes:
    return msgspec.json.encode(content) + b"\n"


def timestamp(seconds: float) -> str:
    """Of seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


@dataclass(slots=True)
class Clock:
    """How long a request has taken, from when it came."""

    started_ns: int = field(default_factory=time.perf_counter_ns)
    load_ns: int = 0  # until its model was there

    def has_model(self) -> None:
        self.load_ns = self.total_ns()

    def total_ns(self) -> int:
        return time.perf_counter_ns() - self.started_ns


@dataclass(frozen=True, slots=True)
class Head:
    """What every line of one answer repeats."""

    model: str
    kind: Literal["chat", "generate"]
    clock: Clock

    def line(self, text: str, **rest: Any) -> dict[str, Any]:
        said = {"message": {"role": "assistant", "content": text}} if self.kind == "chat" else {"response": text}
        return {"model": self.model, "created_at": timestamp(time.time()), **said, **(rest or {"done": False})}

    def last(self, text: str, reason: str | None, progress: Progress) -> dict[str, Any]:
        usage, timings = progress.usage(), progress.timings
        return self.line(
            text,
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
        return self.last(choice.text, choice.finish_reason, progress)


class Lines:
    """The lines of one answer."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self._reason: str | None = None

    def event(self, event: GenerationEvent, progress: Progress) -> bytes:
        self._reason = event.finish_reason
        return line(self.head.line(event.text)) if event.text else b""

    def end(self, progress: Progress) -> bytes:
        return line(self.head.last("", self._reason, progress))

    def error(self, error: LocalLLMError) -> bytes:
        return line(ollama_error(error))
