"""Items, answers and events of OpenAI's responses API, as they are sent.

Does not know: where the values come from.
"""

from __future__ import annotations

from typing import Any, Literal

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


class MessageItem(Shape, tag="message"):
    id: str
    status: Status
    role: Literal["user", "assistant", "system", "developer"]
    content: list[InputText | OutputText | InputImage]


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


class Created(ResponseEvent, tag="response.created"):
    pass


class InProgress(ResponseEvent, tag="response.in_progress"):
    pass


class Completed(ResponseEvent, tag="response.completed"):
    pass


class Incomplete(ResponseEvent, tag="response.incomplete"):
    pass


class Failed(ResponseEvent, tag="response.failed"):
    pass


class ItemEvent(Shape):
    output_index: int
    item: Item
    sequence_number: int


class ItemAdded(ItemEvent, tag="response.output_item.added"):
    pass


class ItemDone(ItemEvent, tag="response.output_item.done"):
    pass


class ItemPlace(Shape):
    item_id: str
    output_index: int


class PartPlace(ItemPlace):
    content_index: int


TextPart = OutputText | ReasoningText


class PartEvent(PartPlace):
    part: TextPart
    sequence_number: int


class PartAdded(PartEvent, tag="response.content_part.added"):
    pass


class PartDone(PartEvent, tag="response.content_part.done"):
    pass


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


class ArgumentsDelta(ItemPlace, tag="response.function_call_arguments.delta"):
    delta: str
    sequence_number: int


class ArgumentsDone(ItemPlace, tag="response.function_call_arguments.done"):
    arguments: str
    sequence_number: int


class CustomInputDelta(ItemPlace, tag="response.custom_tool_call_input.delta"):
    delta: str
    sequence_number: int


class CustomInputDone(ItemPlace, tag="response.custom_tool_call_input.done"):
    input: str
    sequence_number: int


class McpArgumentsDelta(ItemPlace, tag="response.mcp_call_arguments.delta"):
    delta: str
    sequence_number: int


class McpArgumentsDone(ItemPlace, tag="response.mcp_call_arguments.done"):
    arguments: str
    sequence_number: int


class McpEvent(ItemPlace):
    sequence_number: int


class McpCallInProgress(McpEvent, tag="response.mcp_call.in_progress"):
    pass


class McpCallCompleted(McpEvent, tag="response.mcp_call.completed"):
    pass


class McpCallFailed(McpEvent, tag="response.mcp_call.failed"):
    pass


class McpListInProgress(McpEvent, tag="response.mcp_list_tools.in_progress"):
    pass


class McpListCompleted(McpEvent, tag="response.mcp_list_tools.completed"):
    pass


TextEvent = (
    ResponseTextDelta | TextDone | ReasoningDelta | ReasoningDone | ArgumentsDelta | ArgumentsDone
    | CustomInputDelta | CustomInputDone | McpArgumentsDelta | McpArgumentsDone
)  # fmt: skip
AnyEvent = (
    Created | InProgress | Completed | Incomplete | Failed | ItemAdded | ItemDone | PartAdded | PartDone
    | TextEvent | McpCallInProgress | McpCallCompleted | McpCallFailed | McpListInProgress | McpListCompleted
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
