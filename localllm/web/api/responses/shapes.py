"""Items, answers and events of OpenAI's responses API, as they are sent.

Does not know: where the values come from.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any, Literal, cast

import msgspec
from msgspec import UNSET, UnsetType

from localllm.web.api.timings import ApiTimings
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


class InputImage(Shape, tag="input_image"):
    image_url: str
    detail: str | None


class InputAudio(Shape, tag="input_audio"):
    input_audio: dict[str, Any]


class MessageItem(Shape, tag="message"):
    id: str
    status: Status
    role: Literal["user", "assistant", "system", "developer"]
    content: list[InputText | OutputText | InputImage | InputAudio]


class ReasoningItem(Shape, tag="reasoning"):
    id: str
    status: Status
    summary: list[Any]
    content: list[ReasoningText]


class CallItem(Shape, tag="function_call", kw_only=True):
    id: str
    status: Status
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str


class CallOutputItem(Shape, tag="function_call_output"):
    id: str
    status: Status
    call_id: str
    output: str | list[InputText | InputImage]


class CustomCallItem(Shape, tag="custom_tool_call"):
    id: str
    status: Status
    call_id: str
    name: str
    input: str


class CustomOutputItem(Shape, tag="custom_tool_call_output"):
    id: str
    status: Status
    call_id: str
    output: str | list[InputText | InputImage]


class ShellCallItem(Shape, tag="local_shell_call"):
    id: str
    status: Status
    call_id: str
    action: dict[str, Any]


class ShellOutputItem(Shape, tag="local_shell_call_output"):
    id: str
    status: Status
    call_id: str
    output: str | list[InputText | InputImage]


class WebSearchItem(Shape, tag="web_search_call"):
    id: str


class CompactionItem(Shape, tag="compaction"):
    id: str


class McpTool(Shape):
    name: str
    description: str | None
    input_schema: dict[str, Any]
    annotations: None


class McpListItem(Shape, tag="mcp_list_tools"):
    id: str
    server_label: str
    tools: list[McpTool]
    error: str | None


class McpProtocolError(Shape, tag="mcp_protocol_error"):
    code: int
    message: str


class McpToolError(Shape, tag="mcp_tool_execution_error"):
    content: list[Any]


class McpCallItem(Shape, tag="mcp_call"):
    id: str
    status: Literal["in_progress", "completed", "incomplete", "calling", "failed"]
    server_label: str
    name: str
    arguments: str
    approval_request_id: str | None
    output: str | None
    error: McpProtocolError | McpToolError | None


class McpRequestItem(Shape, tag="mcp_approval_request"):
    id: str
    server_label: str
    name: str
    arguments: str


class McpAnswerItem(Shape, tag="mcp_approval_response"):
    id: str
    approval_request_id: str
    approve: bool
    reason: str | None


Item = (
    MessageItem | ReasoningItem | CallItem | CallOutputItem | CustomCallItem | CustomOutputItem | ShellCallItem
    | ShellOutputItem | WebSearchItem | CompactionItem
    | McpListItem | McpCallItem | McpRequestItem | McpAnswerItem
)  # fmt: skip


class InputDetails(Shape):
    cached_tokens: int
    cache_write_tokens: int
    image_tokens: int | UnsetType = UNSET  # if the prompt has pictures
    audio_tokens: int | UnsetType = UNSET  # if the prompt has sound


class OutputDetails(Shape):
    reasoning_tokens: int


class ResponseUsage(Shape):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseProblem(Shape):
    code: str
    message: str


class Cut(Shape):
    reason: Literal["max_output_tokens"]


ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class Response(Shape, kw_only=True):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: ResponseStatus
    background: bool
    error: ResponseProblem | None
    incomplete_details: Cut | None
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    reasoning: dict[str, Any]  # this field and `text` to `metadata` repeat the request, and so do those after `usage`
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    truncated_items: int | UnsetType = UNSET  # with truncation auto: oldest items that are not in the prompt
    metadata: dict[str, str]
    usage: ResponseUsage | None
    timings: ApiTimings | UnsetType = UNSET  # of a response that has ended
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    previous_response_id: str | None
    prompt_cache_key: str | None
    safety_identifier: str | None
    user: str | None


class ResponseEvent(Shape):
    response: Response
    sequence_number: int


class ItemEvent(Shape):
    output_index: int
    item: Item
    sequence_number: int


class ItemPlace(Shape):
    item_id: str
    output_index: int


class PartPlace(ItemPlace):
    content_index: int


TextPart = OutputText | ReasoningText


class PartEvent(PartPlace):
    part: TextPart
    sequence_number: int


class ResponseTextDelta(PartPlace, tag="response.output_text.delta"):
    logprobs: list[Any]
    delta: str
    sequence_number: int


class TextDone(PartPlace, tag="response.output_text.done"):
    text: str
    logprobs: list[Any]
    sequence_number: int


class ReasoningDelta(PartPlace, tag="response.reasoning_text.delta"):
    delta: str
    sequence_number: int


class ReasoningDone(PartPlace, tag="response.reasoning_text.done"):
    text: str
    sequence_number: int


class ItemDelta(ItemPlace):
    delta: str
    sequence_number: int


class ArgumentsEvent(ItemPlace):
    arguments: str
    sequence_number: int


class CustomInputDone(ItemPlace, tag="response.custom_tool_call_input.done"):
    input: str
    sequence_number: int


class McpEvent(ItemPlace):
    sequence_number: int


def _event(name: str, base: type[Shape], kind: str) -> type[Shape]:
    """Return the class of an event that differs from its base by its type alone."""
    made = msgspec.defstruct(name, [], bases=(base,), tag=f"response.{kind}", module=__name__)
    return cast("type[Shape]", made)


Created = _event("Created", ResponseEvent, "created")
InProgress = _event("InProgress", ResponseEvent, "in_progress")
Completed = _event("Completed", ResponseEvent, "completed")
Incomplete = _event("Incomplete", ResponseEvent, "incomplete")
Failed = _event("Failed", ResponseEvent, "failed")
ItemAdded = _event("ItemAdded", ItemEvent, "output_item.added")
ItemDone = _event("ItemDone", ItemEvent, "output_item.done")
PartAdded = _event("PartAdded", PartEvent, "content_part.added")
PartDone = _event("PartDone", PartEvent, "content_part.done")
ArgumentsDelta = _event("ArgumentsDelta", ItemDelta, "function_call_arguments.delta")
ArgumentsDone = _event("ArgumentsDone", ArgumentsEvent, "function_call_arguments.done")
CustomInputDelta = _event("CustomInputDelta", ItemDelta, "custom_tool_call_input.delta")
McpArgumentsDelta = _event("McpArgumentsDelta", ItemDelta, "mcp_call_arguments.delta")
McpArgumentsDone = _event("McpArgumentsDone", ArgumentsEvent, "mcp_call_arguments.done")
McpCallInProgress = _event("McpCallInProgress", McpEvent, "mcp_call.in_progress")
McpCallCompleted = _event("McpCallCompleted", McpEvent, "mcp_call.completed")
McpCallFailed = _event("McpCallFailed", McpEvent, "mcp_call.failed")
McpListInProgress = _event("McpListInProgress", McpEvent, "mcp_list_tools.in_progress")
McpListCompleted = _event("McpListCompleted", McpEvent, "mcp_list_tools.completed")
EVENTS = (
    Created, InProgress, Completed, Incomplete, Failed, ItemAdded, ItemDone, PartAdded, PartDone,
    ResponseTextDelta, TextDone, ReasoningDelta, ReasoningDone, ArgumentsDelta, ArgumentsDone,
    CustomInputDelta, CustomInputDone, McpArgumentsDelta, McpArgumentsDone,
    McpCallInProgress, McpCallCompleted, McpCallFailed, McpListInProgress, McpListCompleted,
)  # fmt: skip
AnyEvent: Any = reduce(or_, EVENTS)


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
