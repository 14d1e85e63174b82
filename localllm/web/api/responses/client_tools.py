"""The client's own tools beside plain functions: namespaces of functions, tools whose input is a text, and tools that a
hosted service would run.

The model knows only functions. A function of a namespace gets a name that begins with the namespace; a `custom` tool
becomes a function with one text; hosted tools are left out with a warning while the request does not name them. Calls
are translated back, and so are the items of earlier calls.
Does not know: tools of MCP servers (mcp_tools.py), HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.errors import InvalidParameter, UnsupportedParameter
from localllm.serving.answers.conversation import TOOL_CHOICE
from localllm.web.api.reading import text_field, wrong_type
from localllm.web.api.tools import function_tool

Item = dict[str, Any]

HOSTED = (
    "web_search", "web_search_preview", "image_generation", "local_shell", "file_search", "code_interpreter",
    "computer", "computer_use_preview", "shell", "apply_patch", "tool_search",
)  # fmt: skip
"""Types of tools that OpenAI runs, or that need no description for its models; a date may follow."""
LEFT_OUT = (
    "web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call", "tool_search_call",
    "tool_search_output", "compaction", "compaction_summary",
)  # fmt: skip
"""Types of items without a text for the model: another server ran the call, or encrypted the summary."""
PREFIXES = {"custom_tool_call": "ctc", "custom_tool_call_output": "ctco", "local_shell_call": "lsh",
            "local_shell_call_output": "lsho"}  # fmt: skip
"""Type of an item of this file -> prefix of its ids."""
OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
CALLS = ("function_call", "custom_tool_call", "local_shell_call")
TEXT_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"],
              "additionalProperties": False}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ClientTools:
    functions: Sequence[Mapping[str, Any]]  # as the model reads them
    calls: Mapping[str, Item]  # the model's name of a tool -> the fields of a call's item
    hosted: Sequence[str]  # types of the tools that were left out
    warnings: Sequence[str]


def client_tools(tools: Sequence[Mapping[str, Any]]) -> ClientTools:
    """Return the tools of a request that its client runs. Raises `RequestError` that names the invalid tool."""
    functions, calls, hosted, warnings = list[Item](), dict[str, Item](), list[str](), list[str]()
    for i, tool in enumerate(tools):
        where, kind = f"tools[{i}]", tool.get("type")
        if kind == "function":
            functions.append(_function(tool, where))
        elif kind == "custom":
            functions.append(_custom(tool, where))
            calls[str(tool["name"])] = {"type": "custom_tool_call", "name": tool["name"]}
            if (tool.get("format") or {}).get("type") == "grammar":
                warnings.append(f"field '{where}.format' is only described to the model: its grammar is not enforced")
        elif kind == "namespace":
            space = text_field(tool, "name", where)
            for name, member in _members(tool, space, where):
                functions.append(member)
                calls[member["function"]["name"]] = {"type": "function_call", "name": name, "namespace": space}
        elif is_hosted(kind):
            hosted.append(str(kind))
        elif kind != "mcp":
            raise UnsupportedParameter(
                f"{where} is of type {kind!r}.", "Supported: function, namespace, custom and mcp.",
                param=f"{where}.type",
            )  # fmt: skip
    if hosted:
        warnings.append(f"tools that this server does not run are left out: {', '.join(hosted)}")
    return ClientTools(functions, calls, hosted, warnings)


def is_hosted(kind: object) -> bool:
    """Return whether a tool's type is one that a hosted service runs, such as `web_search_preview_2025_03_11`."""
    return isinstance(kind, str) and kind.rstrip("_0123456789") in HOSTED


def qualified(namespace: object, name: str) -> str:
    """Return the model's name of a function in a namespace."""
    if not namespace:
        return name
    return f"{namespace}{'' if str(namespace).endswith('__') else '__'}{name}"


def _function(tool: Mapping[str, Any], where: str) -> Item:
    return function_tool(tool.get("name"), tool.get("description"), tool.get("parameters"), where)


def _custom(tool: Mapping[str, Any], where: str) -> Item:
    """Return the function in place of a tool whose input is a text, perhaps with a grammar."""
    form = tool.get("format") or {}
    if not isinstance(form, dict) or form.get("type", "text") not in ("text", "grammar"):
        raise wrong_type(f"{where}.format", "an object of type text or grammar", form)
    described = tool.get("description")
    if form.get("type") == "grammar":
        grammar = f"The input follows this {form.get('syntax', '')} grammar:\n{form.get('definition', '')}"
        described = f"{described}\n\n{grammar}" if described else grammar
    return function_tool(tool.get("name"), described, TEXT_INPUT, where)


def _members(tool: Mapping[str, Any], space: str, where: str) -> Iterator[tuple[str, Item]]:
    members = tool.get("tools")
    if not isinstance(members, list):
        raise wrong_type(f"{where}.tools", "a list of functions", members)
    for j, member in enumerate(members):
        here = f"{where}.tools[{j}]"
        if not isinstance(member, dict) or member.get("type", "function") != "function":
            raise UnsupportedParameter(f"{here} is not a function.", "Supported: functions.", param=here)
        name = text_field(member, "name", here)
        yield name, _function({**member, "name": qualified(space, name)}, here)


# The choice among them ----------------------------------------------------------------------------------------------


def plain_choice(choice: Any, offered: ClientTools) -> Any:
    """Return a tool choice with the names that the model uses. Raises if it names a tool that was left out."""
    if not isinstance(choice, dict):
        return choice
    tools = choice.get("tools")
    if choice.get("type") == "allowed_tools" and isinstance(tools, list):
        return choice | {"tools": [each for tool in tools for each in _chosen(tool, offered)]}
    chosen = _chosen(choice, offered)
    return chosen[0] if len(chosen) == 1 else {"type": "allowed_tools", "mode": "required", "tools": chosen}


def _chosen(choice: Any, offered: ClientTools) -> list[Any]:
    kind, name = (choice.get("type"), choice.get("name")) if isinstance(choice, dict) else (None, None)
    if is_hosted(kind):
        raise UnsupportedParameter(
            f"tool_choice names {kind}, which this server does not run.",
            "Tools of a hosted service are left out of the prompt.",
            "Use tool_choice auto, or a function.",
            param=TOOL_CHOICE,
        )
    if kind not in ("namespace", "custom", "function") or (kind == "function" and "namespace" not in choice):
        return [choice]
    space = name if kind == "namespace" else choice.get("namespace")
    found = [
        {"type": "function", "name": used}
        for used, call in offered.calls.items()
        if call.get("namespace") == space and (kind == "namespace" or call["name"] == name)
    ]
    if not found:
        raise InvalidParameter(f"tool_choice names {name!r}, which is not offered.", param=TOOL_CHOICE)
    return found


# Items --------------------------------------------------------------------------------------------------------------


def read_client_item(item: Mapping[str, Any], where: str, new_id: str, output: Any) -> Item:
    """Return an item that a client sent. `new_id`: its id if it has none; `output`: the parsed output of a call."""
    kind, given = item["type"], item.get("id")
    found = {"id": given if isinstance(given, str) and given else new_id, "type": kind, "status": "completed"}
    match kind:
        case "custom_tool_call":
            fields = {name: text_field(item, name, where) for name in ("call_id", "name", "input")}
            return found | fields
        case "local_shell_call":
            if not isinstance(action := item.get("action"), dict):
                raise wrong_type(f"{where}.action", "an object", action)
            return found | {"call_id": item.get("call_id") or found["id"], "action": action}
        case "custom_tool_call_output" | "local_shell_call_output":
            if not isinstance(call_id := item.get("call_id", given), str):
                raise wrong_type(f"{where}.call_id", "text", call_id)
            return found | {"call_id": call_id, "output": output}
    return {**item, "id": found["id"]}


def as_functions(items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items with each call of a tool of this file as a function call, and without what has no text."""
    for item in items:
        match item["type"]:
            case "function_call" if item.get("namespace"):
                yield item | {"name": qualified(item["namespace"], item["name"])}
            case "custom_tool_call":
                yield item | {"type": "function_call", "arguments": json.dumps({"input": item["input"]})}
            case "local_shell_call":
                action = {name: value for name, value in item["action"].items() if value is not None}
                yield item | {"type": "function_call", "name": "local_shell", "arguments": json.dumps(action)}
            case kind if kind in OUTPUTS:
                yield item | {"type": "function_call_output"}
            case kind if kind not in LEFT_OUT:
                yield item


def input_of(arguments: str) -> str:
    """Return the text that a call of a custom tool has, which is all of it if the model wrote no object around it."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = found.get("input") if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments
