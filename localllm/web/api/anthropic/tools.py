"""Translate `tools` and `tool_choice` into the `Tools` of a request."""

from __future__ import annotations

from typing import Any

from localllm.errors import InvalidParameter
from localllm.serving.chat import NO_TOOLS, Tools
from localllm.serving.served import ServedModel
from localllm.web.api.anthropic.fields import CHOICE_RULES, TOOL_RULES
from localllm.web.api.anthropic.schema import CountBody, Tool, ToolChoice
from localllm.web.api.reading import read_object
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
            read, more = _tool(tool, f"tools[{i}]")
            offered.append(read)
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


def _tool(given: dict[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    tool, warnings = read_object(given, Tool, TOOL_RULES, f"{where}.")
    return function_tool(tool.name, tool.description, tool.input_schema, where), warnings
