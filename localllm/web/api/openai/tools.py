"""`tools` and `tool_choice` as the `Tools` of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from localllm.errors import InvalidParameter
from localllm.served import ServedModel
from localllm.web.api.openai.schema import ChatBody
from localllm.web.api.tools import NO_TOOLS, Tools, checked, only, read_tool, require_known_format
from localllm.web.errors import InvalidType

PARAM = "tool_choice"
CHOICES = ("auto", "none", "required")


def tools_of(body: ChatBody, model: ServedModel) -> Tools:
    """Raises `RequestError` where a tool or the choice cannot be read."""
    offered = checked([read_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())], "tools")
    tools = _chosen(offered, body.tool_choice, parallel=body.parallel_tool_calls is not False)
    if tools.offered:
        require_known_format(model, "tools")
    return tools


def _chosen(offered: Sequence[Any], choice: str | dict[str, Any] | None, *, parallel: bool) -> Tools:
    """`none` leaves the tools out of the prompt as well."""
    if isinstance(choice, dict):
        return _named(offered, choice, parallel=parallel)
    if choice is not None and choice not in CHOICES:
        raise InvalidParameter(f"Unknown tool_choice {choice!r}.", f"Known: {', '.join(CHOICES)}.", param=PARAM)
    if choice == "required" and not offered:
        raise InvalidParameter("tool_choice is 'required', and there are no tools.", param=PARAM)
    return NO_TOOLS if choice == "none" else Tools(offered, offered, must=choice == "required", parallel=parallel)


def _named(offered: Sequence[Any], choice: dict[str, Any], *, parallel: bool) -> Tools:
    """{"type": "function", "function": {"name"}}, or allowed_tools with a list of them."""
    if choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list):
            raise _unreadable()
        names = [_name(tool) for tool in allowed["tools"]]
        return Tools(offered, only(offered, names, PARAM), must=allowed.get("mode") == "required", parallel=parallel)
    return Tools(offered, only(offered, [_name(choice)], PARAM), must=True, parallel=False)


def _name(choice: Any) -> str:
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise _unreadable()
    return name


def _unreadable() -> InvalidType:
    return InvalidType(
        f"Invalid type for {PARAM!r}.", 'Expected {"type": "function", "function": {"name": ...}}.', param=PARAM
    )
