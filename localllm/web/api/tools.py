"""The tools that a request offers to the model, and its choice among them, in OpenAI's format and terms.

Does not know: how calls are parsed (serving/answers/conversation.py), any dialect's words but OpenAI's, HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from localllm.errors import InvalidParameter, UnsupportedParameter
from localllm.serving.answers.conversation import NO_TOOLS, TOOL_CHOICE, Tools
from localllm.serving.served import ServedModel
from localllm.web.errors import InvalidType

MAX_TOOLS = 512
CHOICES = ("auto", "none", "required")


def function_tool(name: object, description: object, parameters: object, where: str) -> dict[str, Any]:
    """Return a tool in the format that templates expect. Raises the error that names the wrong field."""
    if not isinstance(name, str) or not name:
        raise InvalidType(f"Invalid type for '{where}.name'.", "Expected a name.", param=f"{where}.name")
    if not isinstance(description, str | None):
        raise InvalidType(f"Invalid type for '{where}.description'.", "Expected text.", param=f"{where}.description")
    if not isinstance(parameters, dict | None):
        raise InvalidType(
            f"Invalid type for '{where}.parameters'.", "Expected a JSON schema.", param=f"{where}.parameters"
        )
    described = {} if description is None else {"description": description}
    schema = {"type": "object", "properties": {}} if parameters is None else parameters
    return {"type": "function", "function": {"name": name, **described, "parameters": schema}}


def read_tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a tool that a client sent in OpenAI's format. Raises the error that names the wrong field."""
    if tool.get("type") not in (None, "function"):
        raise UnsupportedParameter(
            f"{where} is of type {tool['type']!r}.", "Supported: functions.", param=f"{where}.type"
        )
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidType(f"Invalid type for '{where}.function'.", "Expected an object.", param=f"{where}.function")
    return function_tool(
        function.get("name"), function.get("description"), function.get("parameters"), f"{where}.function"
    )


def only(offered: Sequence[Mapping[str, Any]], names: Sequence[str], param: str) -> list[Mapping[str, Any]]:
    """Return the tools with these names. Raises if one is not offered."""
    by_name = {tool["function"]["name"]: tool for tool in offered}
    for name in names:
        if name not in by_name:
            raise InvalidParameter(
                f"There is no tool {name!r} in this request.",
                f"Its tools: {', '.join(by_name) or 'none'}.",
                param=param,
            )
    return [by_name[name] for name in names]


def checked(offered: Sequence[Mapping[str, Any]], param: str) -> Sequence[Mapping[str, Any]]:
    """Return the tools. Raises if a name occurs twice, or there are too many."""
    names = [tool["function"]["name"] for tool in offered]
    if len(names) > MAX_TOOLS:
        raise InvalidParameter(
            f"{len(names)} tools are too many.", f"A request may have at most {MAX_TOOLS}.", param=param
        )
    if twice := {name for name in names if names.count(name) > 1}:
        raise InvalidParameter(f"Two tools have the name {min(twice)!r}.", param=param)
    return offered


def chosen(
    offered: Sequence[Mapping[str, Any]],
    choice: str | dict[str, Any] | None,
    parallel: bool | None,
    model: ServedModel | None = None,
) -> Tools:
    """Return the tools after applying OpenAI's `tool_choice` and `parallel_tool_calls`, for a model that can call
    tools. model: None for one of another server, which decides itself which tools it can call.
    """
    tools = _choose(checked(offered, "tools"), choice, parallel=parallel is not False)
    if tools.offered and model is not None:
        require_known_format(model, "tools")
    return tools


def _choose(offered: Sequence[Mapping[str, Any]], choice: str | dict[str, Any] | None, *, parallel: bool) -> Tools:
    """Apply a tool choice; `none` leaves the tools out of the prompt as well."""
    if isinstance(choice, dict):
        return _named(offered, choice, parallel=parallel)
    if choice is not None and choice not in CHOICES:
        raise InvalidParameter(f"Unknown tool_choice {choice!r}.", f"Known: {', '.join(CHOICES)}.", param=TOOL_CHOICE)
    if choice == "required" and not offered:
        raise InvalidParameter("tool_choice is 'required', but the request has no tools.", param=TOOL_CHOICE)
    return NO_TOOLS if choice == "none" else Tools(offered, offered, must=choice == "required", parallel=parallel)


def _named(offered: Sequence[Mapping[str, Any]], choice: dict[str, Any], *, parallel: bool) -> Tools:
    """Apply a choice of the form {"type": "function", "function": {"name"}}, also without `function`, or allowed_tools
    with a list of them.
    """
    if choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list):
            raise _unreadable()
        names = [_name(tool) for tool in allowed["tools"]]
        return Tools(
            offered, only(offered, names, TOOL_CHOICE), must=allowed.get("mode") == "required", parallel=parallel
        )
    return Tools(offered, only(offered, [_name(choice)], TOOL_CHOICE), must=True, parallel=False)


def _name(choice: Any) -> str:
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise _unreadable()
    return name


def _unreadable() -> InvalidType:
    return InvalidType(
        f"Invalid type for {TOOL_CHOICE!r}.",
        'Expected {"type": "function", "function": {"name": ...}}.',
        param=TOOL_CHOICE,
    )


def require_known_format(model: ServedModel, param: str) -> None:
    """Raise if the template takes tools but the format of the model's calls is unknown."""
    if (model.answers is None or model.answers.tools is None) and model.chat_template.reads("tools"):
        raise UnsupportedParameter(
            f"The tool call format of {model.shown_name} is not supported.",
            "Its chat template supports tools, but writes calls in an unknown format.",
            "Leave out the tools, or serve a model of another family; docs/concepts/tool-calls.md lists them.",
            param=param,
        )
