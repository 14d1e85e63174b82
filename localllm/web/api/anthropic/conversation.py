"""Translate Anthropic's messages and content blocks for the chat template, and its parameters for the sampler.

One message of theirs may become several of ours: a tool result is a message of its own.
Does not know: HTTP, how an answer is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from localllm.engine.params import SamplingParams, given_params
from localllm.errors import InvalidParameter, UnsupportedParameter
from localllm.serving.answers.conversation import CONTINUE, NO_TOOLS, ChatRequest, Conversation, Tools, sampling_params
from localllm.serving.served import ServedModel
from localllm.text.structured import StructuredOutputsParams
from localllm.web.api.anthropic.documents import read_documents
from localllm.web.api.anthropic.schema import (
    CHOICE_RULES,
    OUTPUT_RULES,
    THINKING_RULES,
    TOOL_RULES,
    AnthropicThinking,
    Content,
    CountBody,
    InputMessage,
    MessagesBody,
    OutputConfig,
    Tool,
    ToolChoice,
)
from localllm.web.api.hints import effort_switch, no_effect, thinking_budget, thinking_switch
from localllm.web.api.pictures import UNREAD, picture_part, readable
from localllm.web.api.reading import read_object, text_field, wrong_type
from localllm.web.api.tools import checked, function_tool, only, require_known_format
from localllm.web.errors import MissingParameter

HOSTED = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "advisor_", "mcp_toolset")
"""Beginnings of the types of tools that a hosted service runs; a date follows."""


def is_hosted(kind: object) -> bool:
    return isinstance(kind, str) and kind.startswith(HOSTED)


def tools_of(body: CountBody, model: ServedModel | None) -> tuple[Tools, list[str]]:
    """Return the tools of a body, and warnings. Raises `RequestError` if a tool or the choice is invalid.

    model: None for one of another server, which decides itself which tools it can call.
    """
    offered, warnings = [], list[str]()
    named = (body.tool_choice or {}).get("name")
    left_out = [tool for tool in body.tools or () if is_hosted(tool.get("type")) and tool.get("name") != named]
    if left_out:
        kinds = ", ".join(str(tool["type"]) for tool in left_out)
        warnings.append(f"tools that this server does not run are left out: {kinds}")
    for i, tool in enumerate(body.tools or ()):
        if tool not in left_out:
            where = f"tools[{i}]"
            read, more = read_object(tool, Tool, TOOL_RULES, f"{where}.")
            offered.append(function_tool(read.name, read.description, read.input_schema, where))
            warnings += more
    choice, more = read_object(body.tool_choice or {"type": "auto"}, ToolChoice, CHOICE_RULES, "tool_choice.")
    tools = _chosen(checked(offered, "tools"), choice, parallel=not choice.disable_parallel_tool_use)
    if tools.offered and model is not None:
        require_known_format(model, "tools")
    return tools, [*warnings, *more]


def _chosen(offered: Any, choice: ToolChoice, *, parallel: bool) -> Tools:
    """Apply the choice; `none` leaves the tools out of the prompt as well."""
    if choice.type == "none":
        return NO_TOOLS
    if choice.type == "tool":
        if choice.name is None:
            raise MissingParameter("Missing required parameter: 'tool_choice.name'.", param="tool_choice.name")
        return Tools(offered, only(offered, [choice.name], "tool_choice.name"), must=True, parallel=False)
    if choice.type == "any" and not offered:
        raise InvalidParameter("tool_choice is 'any', but the request has no tools.", param="tool_choice")
    return Tools(offered, offered, must=choice.type == "any", parallel=parallel)


Message = dict[str, Any]

SERVER_BLOCKS = (
    "server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result",
    "bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "tool_search_tool_result",
)  # fmt: skip
"""Blocks of tools that a hosted service ran, in earlier answers."""


def params_of(body: MessagesBody, model: ServedModel) -> SamplingParams:
    if body.temperature is not None and body.temperature > 1:
        raise InvalidParameter(
            "temperature must be between 0 and 1.", f"Got {body.temperature:g}.", param="temperature"
        )
    if "" in (body.stop_sequences or ()):
        raise InvalidParameter("stop_sequences must hold non-empty strings.", param="stop_sequences")
    return sampling_params(model, given_params(body, "anthropic"))


async def chat_request(body: CountBody, params: SamplingParams, model: ServedModel) -> tuple[ChatRequest, list[str]]:
    """Return the translated request, and its warnings."""
    await read_documents(body)
    output, warnings = read_object(body.output_config or {}, OutputConfig, OUTPUT_RULES, "output_config.")
    if output.format is not None:
        asked = StructuredOutputsParams(json=output.format.schema, param="output_config.format")
        params = replace(params, structured_outputs=asked)
    template, more = template_of(body, output.effort, model)
    if (asked_budget := (body.thinking or {}).get("budget_tokens")) is not None:
        tokens, beside = _budget(asked_budget, params, model)
        params = replace(params, thinking_token_budget=tokens)
        warnings += beside
    tools, even_more = tools_of(body, model)
    messages, unread = readable(messages_of(body), model)
    if any(_kinds(message.content) & set(SERVER_BLOCKS) for message in body.messages):
        unread = ["blocks of tools that another server ran are not in the prompt", *unread]
    return ChatRequest(Conversation(messages, template, tools), params), [*warnings, *more, *even_more, *unread]


def _budget(asked: int, params: SamplingParams, model: ServedModel) -> tuple[int | None, list[str]]:
    """Return the reasoning budget, and a warning if it has no effect. Clients send a budget with every request, so it
    is accepted anyway.
    """
    name = "thinking.budget_tokens"
    tokens, warnings = thinking_budget({name: asked}, model)
    if tokens is not None and params.max_tokens is not None and asked >= params.max_tokens:
        warnings = [no_effect(name, "max_tokens is reached first")]
    return tokens, warnings


def template_of(body: CountBody, effort: str | None, model: ServedModel) -> tuple[dict[str, Any], list[str]]:
    """Return the chat template's further arguments, and warnings."""
    template: dict[str, Any] = {}
    warnings: list[str] = []
    if body.thinking is not None:
        thinking, warnings = read_object(body.thinking, AnthropicThinking, THINKING_RULES, "thinking.")
        if thinking.type != "adaptive":
            template, more = thinking_switch(model, thinking.type == "enabled", "thinking")
            warnings += more
    if effort is not None:
        switch, more = effort_switch(model, effort, "output_config.effort")
        template |= switch
        warnings += more
    if _is_to_be_continued(body.messages):
        template |= CONTINUE
    return template, warnings


def messages_of(body: CountBody) -> list[Message]:
    """Return the messages. Raises the error that names the invalid message and block."""
    if not body.messages:
        raise InvalidParameter("messages is empty: there is nothing to answer.", param="messages")
    messages: list[Message] = []
    if system := without_billing(body.system):
        messages.append({"role": "system", "content": _texts(system, "system")})
    tool_names: dict[str, str] = {}
    for i, message in enumerate(body.messages):
        where = f"messages[{i}].content"
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_assistant(message.content, where, tool_names))
        else:
            messages += _turn(message.role, message.content, where, tool_names)
    return messages


BILLING = "x-anthropic-billing-header:"


def without_billing(system: Content | None) -> Content | None:
    """Return the system text without a first line that Claude Code writes for its provider's bills.

    The line holds a number that changes with each session, which would keep all that follows out of the prefix cache.
    """
    if isinstance(system, str) and system.startswith(BILLING):
        return system.partition("\n")[2]
    first = system[0].get("text") if isinstance(system, list) and system else None
    if isinstance(system, list) and isinstance(first, str) and first.startswith(BILLING):
        rest = first.partition("\n")[2]
        return [*([{**system[0], "text": rest}] if rest.strip() else []), *system[1:]]
    return system


def _is_to_be_continued(messages: Sequence[InputMessage]) -> bool:
    """Return whether the answer continues the last message: it is the assistant's and does not call a tool."""
    if not messages or messages[-1].role != "assistant":
        return False
    content = messages[-1].content
    return isinstance(content, str) or all(block.get("type") != "tool_use" for block in content)


def _kinds(content: Content) -> set[str]:
    return {str(block.get("type")) for block in content} if isinstance(content, list) else set()


def _assistant(blocks: Sequence[Mapping[str, Any]], where: str, tool_names: dict[str, str]) -> Message:
    message: Message = {"role": "assistant", "content": None}
    text, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        here = f"{where}[{i}]"
        match block.get("type"):
            case "text":
                text.append(text_field(block, "text", here))
            case "thinking":
                thoughts.append(text_field(block, "thinking", here))
            case "redacted_thinking":
                pass  # encrypted by the server that wrote it, so it cannot be read
            case "tool_use":
                calls.append(_tool_call(block, here, tool_names))
            case str(kind) if kind in SERVER_BLOCKS:
                pass  # of a tool that ran on the server that wrote it
            case _:
                raise _unreadable(block, here)
    if text or not (thoughts or calls):
        message["content"] = "".join(text)
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_call(block: Mapping[str, Any], where: str, tool_names: dict[str, str]) -> dict[str, Any]:
    name, id = text_field(block, "name", where), text_field(block, "id", where)
    arguments = block.get("input", {})
    if not isinstance(arguments, dict):
        raise wrong_type(f"{where}.input", "an object", arguments)
    tool_names[id] = name
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _turn(
    role: str, blocks: Sequence[Mapping[str, Any]], where: str, tool_names: Mapping[str, str]
) -> Iterator[Message]:
    """Yield the user's (or the system's) messages, with tool results in between."""
    parts: list[Message] = []
    for i, block in enumerate(blocks):
        here = f"{where}[{i}]"
        if block.get("type") != "tool_result":
            parts.append(_text_part(block, here))
            continue
        if parts:
            yield {"role": role, "content": parts}
            parts = []
        id = text_field(block, "tool_use_id", here)
        result: Message = {
            "role": "tool",
            "tool_call_id": id,
            "content": _texts(block.get("content"), f"{here}.content"),
        }
        if id in tool_names:
            result["name"] = tool_names[id]
        yield result
    if parts or not blocks:
        yield {"role": role, "content": parts or ""}


def _texts(content: Content | Any, where: str) -> str | list[Message]:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise wrong_type(where, "text or a list of blocks", content)
    return [_text_part(block, f"{where}[{i}]") for i, block in enumerate(content)]


def _text_part(block: Mapping[str, Any], where: str) -> Message:
    if block.get("type") == UNREAD:
        return dict(block)
    if block.get("type") == "image":
        return picture_part(_picture_url(block.get("source"), where), where)
    if block.get("type") != "text":
        raise _unreadable(block, where)
    return {"type": "text", "text": text_field(block, "text", where)}


def _picture_url(source: object, where: str) -> str:
    """Return the URL of a picture: the client's, or one that holds its data."""
    match source:
        case {"type": "url", "url": str(url)}:
            return url
        case {"type": "base64", "media_type": str(kind), "data": str(data)}:
            return f"data:{kind};base64,{data}"
        case {"type": "file", "file_id": str(id)}:
            return id
    raise wrong_type(f"{where}.source", "a URL or base64 data", source)


def _unreadable(block: Mapping[str, Any], where: str) -> UnsupportedParameter:
    kind = f"is of type {block['type']!r}" if "type" in block else "has no type"
    return UnsupportedParameter(f"{where} {kind}.", "Supported: text, thinking and tool blocks.", param=where)
