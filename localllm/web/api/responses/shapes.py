"""Answers of OpenAI's responses API, as they are sent.

Does not know: where the values come from.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from localllm.web.shape import Shape

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Shape, tag="input_text"):
    text: str


class OutputText(Shape, tag="output_text"):
    text: str
    annotations: list[Any]
    logprobs: list[Any] | UnsetType = UNSET  # logprobs of the output tokens


class ReasoningText(Shape, tag="reasoning_text"):
    text: str


class MessageItem(Shape, tag="message"):
    id: str
    status: Status
    role: Literal["user", "assistant", "system", "developer"]
    content: list[InputText | OutputText]


class ReasoningItem(Shape, tag="reasoning"):
    id: str
    status: Status
    summary: list[Any]
    content: list[ReasoningText]


class CallItem(Shape, tag="function_call"):
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


class CallOutputItem(Shape, tag="function_call_output"):
    id: str
    status: Status
    call_id: str
    output: str | list[InputText]


Item = MessageItem | ReasoningItem | CallItem | CallOutputItem


class InputDetails(Shape):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Shape):
    reasoning_tokens: int


class Usage(Shape):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Problem(Shape):
    code: str
    message: str


class Cut(Shape):
    reason: Literal["max_output_tokens"]


class Response(Shape):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: bool
    error: Problem | None
    incomplete_details: Cut | None
    model: str
    output: list[Item]
    usage: Usage | None
    temperature: float
    top_p: float
    top_logprobs: int
    service_tier: str
    truncation: Literal["auto", "disabled"]
    store: bool
    parallel_tool_calls: bool
    reasoning: dict[str, Any]  # this and the following fields repeat the request
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    metadata: dict[str, str]
    instructions: str | None
    max_output_tokens: int | None
    previous_response_id: str | None
    prompt_cache_key: str | None
    safety_identifier: str | None
    user: str | None
    truncated_items: int | UnsetType = UNSET  # with truncation auto: oldest items that are not in the prompt


class Event(Shape):
    sequence_number: int


class Created(Event, tag="response.created"):
    response: Response


class InProgress(Event, tag="response.in_progress"):
    response: Response


class Completed(Event, tag="response.completed"):
    response: Response


class Incomplete(Event, tag="response.incomplete"):
    response: Response


class Failed(Event, tag="response.failed"):
    response: Response


class ItemAdded(Event, tag="response.output_item.added"):
    output_index: int
    item: Item


class ItemDone(Event, tag="response.output_item.done"):
    output_index: int
    item: Item


class Place(Event):
    item_id: str
    output_index: int


class Part(Place):
    content_index: int


class PartAdded(Part, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class PartDone(Part, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class TextDelta(Part, tag="response.output_text.delta"):
    delta: str
    logprobs: list[Any]


class TextDone(Part, tag="response.output_text.done"):
    text: str
    logprobs: list[Any]


class ReasoningDelta(Part, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(Part, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(Place, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(Place, tag="response.function_call_arguments.done"):
    arguments: str


AnyEvent = (
    Created | InProgress | Completed | Incomplete | Failed | ItemAdded | ItemDone | PartAdded | PartDone
    | TextDelta | TextDone | ReasoningDelta | ReasoningDone | ArgumentsDelta | ArgumentsDone
)  # fmt: skip


class ResponseInputTokens(Shape):
    object: Literal["response.input_tokens"]
    input_tokens: int


class Deleted(Shape):
    id: str
    object: Literal["response"]
    deleted: bool


class Items(Shape):
    object: Literal["list"]
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool
