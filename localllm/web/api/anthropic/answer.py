"""A message, whole or as events: blocks of content, why it ended, what it cost.

Does not know: sockets, the engine.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from litestar.types import Scope

from localllm.engine.outputs import GenerationEvent, Usage
from localllm.errors import LocalLLMError
from localllm.web.api.disconnect import Framing
from localllm.web.api.generation import Choice, Progress
from localllm.web.errors import anthropic_error

to_json = msgspec.json.encode


def event_bytes(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + to_json({"type": kind, **fields}) + b"\n\n"


PING = event_bytes("ping")
FRAMING = Framing("text/event-stream", PING)


@dataclass(frozen=True, slots=True)
class Head:
    """What is known of a message before its first token."""

    id: str
    model: str
    num_prompt_tokens: int
    max_tokens: int  # as asked

    @staticmethod
    def new(model: str, num_prompt_tokens: int, max_tokens: int) -> Head:
        return Head(f"msg_{uuid.uuid4().hex}", model, num_prompt_tokens, max_tokens)

    def message(self, content: list[Any], end: dict[str, Any], usage: Usage) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **end,
            "usage": usage_object(usage),
        }

    def end(self, finish_reason: str | None, stop_reason: int | str | None, progress: Progress) -> dict[str, Any]:
        """Why it ended, in Anthropic's words. `length` before max_tokens were there: the context was full."""
        if finish_reason == "stop":
            matched = isinstance(stop_reason, str)
            return {
                "stop_reason": "stop_sequence" if matched else "end_turn",
                "stop_sequence": stop_reason if matched else None,
            }
        full = finish_reason == "length" and progress.completion_tokens < self.max_tokens
        return {"stop_reason": "model_context_window_exceeded" if full else "max_tokens", "stop_sequence": None}


NOT_ENDED = {"stop_reason": None, "stop_sequence": None}


def usage_object(usage: Usage) -> dict[str, Any]:
    """`input_tokens` are those that had to be computed."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def message_object(head: Head, choices: Sequence[Choice], progress: Progress) -> dict[str, Any]:
    [choice] = choices
    content = [{"type": "text", "text": choice.text}] if choice.text else []
    return head.message(content, head.end(choice.finish_reason, choice.stop_reason, progress), progress.usage())


class MessageEvents:
    """The events of one message: its start, its blocks one after the other, its end."""

    def __init__(self, head: Head, scope: Scope) -> None:
        self.head, self.scope = head, scope
        self._started = False
        self._block = -1  # index of the block that is open or was open last
        self._open = False
        self._end: dict[str, Any] = NOT_ENDED
        self._delta = b""

    def event(self, event: GenerationEvent, progress: Progress) -> bytes:
        written = b"" if self._started else self._start()
        if event.text:
            written += self._text(event.text)
        if event.finish_reason is not None:
            self._end = self.head.end(event.finish_reason, event.stop_reason, progress)
        return written

    def end(self, progress: Progress) -> bytes:
        usage = usage_object(progress.usage())
        return self._close_block() + event_bytes("message_delta", delta=self._end, usage=usage) + STOP

    def error(self, error: LocalLLMError) -> bytes:
        return b"event: error\ndata: " + to_json(anthropic_error(error, self.scope)) + b"\n\n"

    def _start(self) -> bytes:
        """How much of the prompt was cached is told at the end."""
        self._started = True
        usage = Usage(self.head.num_prompt_tokens, 0, 0)
        return event_bytes("message_start", message=self.head.message([], NOT_ENDED, usage))

    def _text(self, text: str) -> bytes:
        opened = b"" if self._open else self._open_block({"type": "text", "text": ""})
        return opened + self._delta + to_json(text) + b"}}\n\n"

    def _open_block(self, block: dict[str, Any]) -> bytes:
        self._block, self._open = self._block + 1, True
        self._delta = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":"text_delta","text":' % self._block
        )
        ping = PING if self._block == 0 else b""
        return event_bytes("content_block_start", index=self._block, content_block=block) + ping

    def _close_block(self) -> bytes:
        was_open, self._open = self._open, False
        return event_bytes("content_block_stop", index=self._block) if was_open else b""


STOP = event_bytes("message_stop")
