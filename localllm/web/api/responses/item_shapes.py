"""Items of OpenAI's responses API, as they are sent.

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
