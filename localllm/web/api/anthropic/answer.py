"""A message, whole or as events: content blocks, stop reason and usage.

Does not know: sockets, the engine.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from litestar.types import Scope

from localllm.engine.outputs import GenerationEvent, Usage
from localllm.errors import LocalLLMError
from localllm.serving.answers.generation import Choice, Progress, parts_of
from localllm.text.answers.parts import Content, Part, Reasoning, ToolArguments, ToolCallStart
from localllm.web.api.anthropic import shapes
from localllm.web.api.disconnect import Framing
from localllm.web.errors import anthropic_error
from localllm.web.shape import event_bytes

to_json = msgspec.json.encode
PING = event_bytes(shapes.Ping())
FRAMING = Framing("text/event-stream", PING)


@dataclass(frozen=True, slots=True)
class AnthropicHead:
    """The fields of a message that are known before its first token."""

    id: str
    model: str
    num_prompt_tokens: int
    max_tokens: int  # as requested

    @staticmethod
    def new(model: str, num_prompt_tokens: int, max_tokens: int) -> AnthropicHead:
        return AnthropicHead(f"msg_{uuid.uuid4().hex}", model, num_prompt_tokens, max_tokens)

    def started(self) -> shapes.Started:
        """Return the message before its first token. The number of cached prompt tokens is reported at the end."""
        usage = usage_object(Usage(self.num_prompt_tokens, 0, 0))
        return shapes.Started(self.id, "message", "assistant", self.model, [], None, None, usage)

    def end(
        self, finish_reason: str | None, stop_reason: int | str | None, progress: Progress, *, calls: bool
    ) -> shapes.End:
        """Return the stop reason in Anthropic's terms. `length` before max_tokens means that the context was full."""
        if finish_reason == "stop" and isinstance(stop_reason, str):
            return shapes.End("stop_sequence", stop_reason)
        if finish_reason == "stop":
            return shapes.End("tool_use" if calls else "end_turn", None)
        full = finish_reason == "length" and progress.completion_tokens < self.max_tokens
        return shapes.End("model_context_window_exceeded" if full else "max_tokens", None)


def usage_object(usage: Usage) -> shapes.AnthropicUsage:
    """Return the usage; `input_tokens` are those that were computed and not cached."""
    return shapes.AnthropicUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
    )


def message_object(head: AnthropicHead, choices: Sequence[Choice], progress: Progress) -> shapes.AnthropicMessage:
    [choice] = choices
    end = head.end(choice.finish_reason, choice.stop_reason, progress, calls=bool(choice.calls))
    return shapes.AnthropicMessage(
        id=head.id,
        type="message",
        role="assistant",
        model=head.model,
        content=_blocks(choice),
        stop_reason=end.stop_reason,
        stop_sequence=end.stop_sequence,
        usage=usage_object(progress.usage()),
    )


def _blocks(choice: Choice) -> list[shapes.Block]:
    """Return the content blocks in the order of generation. A call with incomplete arguments is left out, because
    `input` must be an object.
    """
    blocks: list[shapes.Block] = []
    for part in choice.parts:
        match part:
            case Content(text):
                blocks.append(shapes.TextBlock(text))
            case Reasoning(text):
                blocks.append(shapes.AnthropicThinkingBlock(text, NO_SIGNATURE))
            case ToolCallStart(index, id, name):
                input = choice.calls[index].arguments_object()
                blocks.append(shapes.ToolUseBlock(id, name, input or {}))
    return blocks


NO_SIGNATURE = ""
"""A signature lets a server recognise its own reasoning; this one accepts any."""
TEXT, THINKING = shapes.TextBlock(""), shapes.AnthropicThinkingBlock("", NO_SIGNATURE)
TOOL_USE = shapes.ToolUseBlock("", "", {})
EMPTY_DELTAS: Mapping[type[shapes.Block], shapes.Delta] = {
    shapes.TextBlock: shapes.AnthropicTextDelta(""),
    shapes.AnthropicThinkingBlock: shapes.ThinkingDelta(""),
    shapes.ToolUseBlock: shapes.InputDelta(""),
}


class MessageEvents:
    """The events of one message: its start, its blocks in order, its end."""

    def __init__(self, head: AnthropicHead, scope: Scope) -> None:
        self.head, self.scope = head, scope
        self._started = self._called = False
        self._index = -1  # of the open block, or of the last one
        self._open: type[shapes.Block] | None = None
        self._end: shapes.End | None = None
        self._delta = b""

    def event(self, event: GenerationEvent, progress: Progress) -> bytes:
        written = [b"" if self._started else self._start(), *map(self._part, parts_of(event))]
        if event.finish_reason is not None:
            self._end = self.head.end(event.finish_reason, event.stop_reason, progress, calls=self._called)
        return b"".join(written)

    def end(self, progress: Progress) -> bytes:
        assert self._end is not None, "the answer has ended"
        return self._close_block() + event_bytes(shapes.MessageDelta(self._end, usage_object(progress.usage()))) + STOP

    def error(self, error: LocalLLMError) -> bytes:
        return b"event: error\ndata: " + to_json(anthropic_error(error, self.scope)) + b"\n\n"

    def _start(self) -> bytes:
        self._started = True
        return event_bytes(shapes.MessageStart(self.head.started()))

    def _part(self, part: Part) -> bytes:
        match part:
            case Content(text):
                return self._piece(TEXT, text)
            case Reasoning(text):
                return self._piece(THINKING, text)
            case ToolCallStart(_, id, name):
                self._called = True
                return self._open_block(shapes.ToolUseBlock(id, name, {}))
            case ToolArguments(_, text):
                return self._piece(TOOL_USE, text)
        return b""

    def _piece(self, block: shapes.Block, text: str) -> bytes:
        """Return a piece of text. `block`: the start of its block, which is opened unless one of its type is open."""
        opened = b"" if self._open is type(block) else self._open_block(block)
        return opened + self._delta + to_json(text) + b"}}\n\n"

    def _open_block(self, block: shapes.Block) -> bytes:
        closed = self._close_block()
        self._index, self._open = self._index + 1, type(block)
        # A delta event up to the text, which is an empty string in the event that is encoded here.
        self._delta = event_bytes(shapes.BlockDelta(self._index, EMPTY_DELTAS[type(block)])).removesuffix(b'""}}\n\n')
        start = event_bytes(shapes.BlockStart(self._index, block))
        return closed + start + (PING if self._index == 0 else b"")

    def _close_block(self) -> bytes:
        was_open, self._open = self._open, None
        return event_bytes(shapes.BlockStop(self._index)) if was_open else b""


STOP = event_bytes(shapes.MessageStop())
