"""A message, whole or as events: content blocks, stop reason and usage.

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
from localllm.text.answers.parts import Content, Part, Reasoning, ToolArguments, ToolCallStart
from localllm.web.api.disconnect import Framing
from localllm.web.api.generation import Choice, Progress, parts_of
from localllm.web.errors import anthropic_error

to_json = msgspec.json.encode


def event_bytes(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + to_json({"type": kind, **fields}) + b"\n\n"


PING = event_bytes("ping")
FRAMING = Framing("text/event-stream", PING)


@dataclass(frozen=True, slots=True)
class Head:
    """The fields of a message that are known before its first token."""

    id: str
    model: str
    num_prompt_tokens: int
    max_tokens: int  # as requested

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

    def end(
        self, finish_reason: str | None, stop_reason: int | str | None, progress: Progress, *, calls: bool
    ) -> dict[str, Any]:
        """Return the stop reason in Anthropic's terms. `length` before max_tokens means that the context was full."""
        if finish_reason == "stop" and isinstance(stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
        if finish_reason == "stop":
            return {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}
        full = finish_reason == "length" and progress.completion_tokens < self.max_tokens
        return {"stop_reason": "model_context_window_exceeded" if full else "max_tokens", "stop_sequence": None}


NOT_ENDED = {"stop_reason": None, "stop_sequence": None}


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return the usage; `input_tokens` are those that were computed and not cached."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def message_object(head: Head, choices: Sequence[Choice], progress: Progress) -> dict[str, Any]:
    [choice] = choices
    end = head.end(choice.finish_reason, choice.stop_reason, progress, calls=bool(choice.calls))
    return head.message(_blocks(choice), end, progress.usage())


def _blocks(choice: Choice) -> list[dict[str, Any]]:
    """Return the content blocks in the order of generation. A call with incomplete arguments is left out, because
    `input` must be an object.
    """
    blocks: list[dict[str, Any]] = []
    for part in choice.parts:
        match part:
            case Content(text):
                blocks.append({**TEXT.block, "text": text})
            case Reasoning(text):
                blocks.append({**THINKING.block, "thinking": text})
            case ToolCallStart(index, id, name):
                input = choice.calls[index].arguments_object()
                blocks.append({**TOOL_USE.block, "id": id, "name": name, "input": input or {}})
    return blocks


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of content block: its start object, and the start of its deltas."""

    block: dict[str, Any]
    delta: bytes


TEXT = Kind({"type": "text", "text": ""}, b'{"type":"text_delta","text":')
# A signature lets a server recognise its own reasoning; this one accepts any.
THINKING = Kind({"type": "thinking", "thinking": "", "signature": ""}, b'{"type":"thinking_delta","thinking":')
TOOL_USE = Kind({"type": "tool_use", "id": "", "name": "", "input": {}}, b'{"type":"input_json_delta","partial_json":')


class MessageEvents:
    """The events of one message: its start, its blocks in order, its end."""

    def __init__(self, head: Head, scope: Scope) -> None:
        self.head, self.scope = head, scope
        self._started = self._called = False
        self._index = -1  # of the open block, or of the last one
        self._open: Kind | None = None
        self._end: dict[str, Any] = NOT_ENDED
        self._delta = b""

    def event(self, event: GenerationEvent, progress: Progress) -> bytes:
        written = [b"" if self._started else self._start(), *map(self._part, parts_of(event))]
        if event.finish_reason is not None:
            self._end = self.head.end(event.finish_reason, event.stop_reason, progress, calls=self._called)
        return b"".join(written)

    def end(self, progress: Progress) -> bytes:
        usage = usage_object(progress.usage())
        return self._close_block() + event_bytes("message_delta", delta=self._end, usage=usage) + STOP

    def error(self, error: LocalLLMError) -> bytes:
        return b"event: error\ndata: " + to_json(anthropic_error(error, self.scope)) + b"\n\n"

    def _start(self) -> bytes:
        """Return the start event. The number of cached prompt tokens is reported at the end."""
        self._started = True
        usage = Usage(self.head.num_prompt_tokens, 0, 0)
        return event_bytes("message_start", message=self.head.message([], NOT_ENDED, usage))

    def _part(self, part: Part) -> bytes:
        match part:
            case Content(text):
                return self._piece(TEXT, text)
            case Reasoning(text):
                return self._piece(THINKING, text)
            case ToolCallStart(_, id, name):
                self._called = True
                return self._open_block(TOOL_USE, id=id, name=name)
            case ToolArguments(_, text):
                return self._piece(TOOL_USE, text)
        return b""

    def _piece(self, kind: Kind, text: str) -> bytes:
        opened = b"" if self._open is kind else self._open_block(kind)
        return opened + self._delta + to_json(text) + b"}}\n\n"

    def _open_block(self, kind: Kind, **named: str) -> bytes:
        closed = self._close_block()
        self._index, self._open = self._index + 1, kind
        self._delta = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":' % self._index
            + kind.delta
        )
        start = event_bytes("content_block_start", index=self._index, content_block=kind.block | named)
        return closed + start + (PING if self._index == 0 else b"")

    def _close_block(self) -> bytes:
        was_open, self._open = self._open, None
        return event_bytes("content_block_stop", index=self._index) if was_open else b""


STOP = event_bytes("message_stop")
