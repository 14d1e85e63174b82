"""A response, whole or as events: the request's fields, the output items, the status and the usage.

Does not know: sockets, the engine, where responses are stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import UNSET

from localllm.engine.outputs import GenerationEvent
from localllm.engine.params import SamplingParams
from localllm.errors import LocalLLMError
from localllm.serving.answers.generation import Choice, Progress
from localllm.text.answers.parts import Content
from localllm.web.api.responses import shapes
from localllm.web.api.responses.items import Item, new_id
from localllm.web.api.responses.output import NO_CALLS, OutputItems
from localllm.web.api.responses.schema import ResponsesBody
from localllm.web.api.timings import Timed, timings_object
from localllm.web.errors import openai_error

REPEATED = (
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "previous_response_id",
    "prompt_cache_key",
    "safety_identifier",
    "user",
)

NOT_ENDED = {"completed_at": None, "error": None, "incomplete_details": None, "usage": None}


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The fields of a response that are known before its first token."""

    id: str
    created_at: int
    model: str
    body: ResponsesBody
    params: SamplingParams
    num_truncated: int = 0  # number of the oldest items that are not in the prompt
    calls: Mapping[str, Item] = field(default_factory=dict)  # as for OutputItems

    @staticmethod
    def new(
        model: str,
        body: ResponsesBody,
        params: SamplingParams,
        num_truncated: int = 0,
        calls: Mapping[str, Item] = NO_CALLS,
    ) -> ResponseHead:
        return ResponseHead(new_id("resp"), int(time.time()), model, body, params, num_truncated, calls)

    def response(self, status: shapes.ResponseStatus, output: Any, **end: Any) -> shapes.Response:
        """Return the response. `end`: fields that differ from a response that has not ended."""
        body = self.body
        return shapes.Response(
            id=self.id,
            object="response",
            created_at=self.created_at,
            status=status,
            background=False,
            model=self.model,
            output=output,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning={"effort": None, "summary": None} | (body.reasoning or {}),
            service_tier="default",
            store=body.store is not False,
            temperature=self.params.temperature,
            text={"format": {"type": "text"}} | (body.text or {}),
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_logprobs=0,
            top_p=self.params.top_p,
            truncation=body.truncation or "disabled",
            truncated_items=self.num_truncated if body.truncation == "auto" else UNSET,
            metadata=body.metadata or {},
            **{name: getattr(body, name) for name in REPEATED},
            **(NOT_ENDED | end),
        )

    def ended(self, output: Sequence[Item], progress: Counted, *, cut: bool) -> shapes.Response:
        end: dict[str, Any] = {
            "completed_at": int(time.time()),
            "usage": usage_object(progress),
            "timings": timings_object(progress),
        }
        if cut:
            return self.response("incomplete", output, **end, incomplete_details=shapes.Cut("max_output_tokens"))
        return self.response("completed", output, **end)


class Counted(Timed, Protocol):
    """The tokens and the times of a response so far."""

    @property
    def reasoning_tokens(self) -> int: ...


def usage_object(progress: Counted) -> shapes.ResponseUsage:
    usage = progress.usage()
    return shapes.ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=shapes.InputDetails(
            cached_tokens=usage.cached_tokens,
            cache_write_tokens=0,
            image_tokens=usage.image_tokens or UNSET,
            audio_tokens=usage.audio_tokens or UNSET,
        ),
        output_tokens=usage.completion_tokens,
        output_tokens_details=shapes.OutputDetails(progress.reasoning_tokens),
        total_tokens=usage.total_tokens,
    )


def whole_response(head: ResponseHead, choices: Sequence[Choice], progress: Progress) -> shapes.Response:
    [choice] = choices
    output, cut = OutputItems(calls=head.calls), choice.finish_reason != "stop"
    for part in choice.parts:
        output.say(part)
    output.close(cut=cut)
    return head.ended(output.items, progress, cut=cut)


class ResponseEvents:
    """The events of one response: its start, its items in order, its end."""

    def __init__(
        self, head: ResponseHead, keep: Callable[[shapes.Response], None], output: OutputItems | None = None
    ) -> None:
        """`keep` is called with the response when it has ended."""
        self.head, self._keep, self._output = head, keep, output or OutputItems(calls=head.calls)
        self._started = False
        self.cut = False  # the response ends before the model has

    def event(self, event: GenerationEvent, progress: Progress) -> bytes:
        parts = (Content(event.text),) if event.parts is None else event.parts
        if event.finish_reason is not None:
            self.cut = event.finish_reason != "stop"
        return self.start() + b"".join([self._output.say(part) for part in parts])

    def end(self, progress: Counted) -> bytes:
        closed = self._output.close(cut=self.cut)
        response = self.head.ended(self._output.items, progress, cut=self.cut)
        self._keep(response)
        return closed + self._output.event(shapes.Incomplete if self.cut else shapes.Completed, response=response)

    def error(self, error: LocalLLMError) -> bytes:
        """Return the error event. Of the codes that clients know only one fits; the message has the details."""
        told = shapes.ResponseProblem("server_error", openai_error(error).error.message)
        written = self.start() + self._output.close(cut=True)
        response = self.head.response("failed", self._output.items, error=told)
        return written + self._output.event(shapes.Failed, response=response)

    def start(self) -> bytes:
        """Return the first events, once."""
        if self._started:
            return b""
        self._started = True
        told = [
            self._output.event(kind, response=self.head.response("in_progress", []))
            for kind in (shapes.Created, shapes.InProgress)
        ]
        return b"".join(told)
