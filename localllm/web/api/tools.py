"""What a request lets the model call, and how its answer is read: content, reasoning and calls told apart.

Tools are kept in OpenAI's shape, which is the one that chat templates print.
Does not know: any dialect's words but that shape, HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from localllm.errors import InvalidParameter
from localllm.served import ServedModel
from localllm.text.answers.reader import AnswerFormat, AnswerReader
from localllm.web.errors import InvalidType, UnsupportedParameter

MAX_TOOLS = 512
PROMPT_TAIL = 16
"""Tokens: enough to see whether the prompt ends inside reasoning."""


@dataclass(frozen=True, slots=True)
class Tools:
    """`offered` is empty where nothing may be called."""

    offered: Sequence[Mapping[str, Any]] = ()  # {"type": "function", "function": {"name", "description", "parameters"}}
    must: bool = False  # one has to be called
    parallel: bool = True  # several may be


NO_TOOLS = Tools()


def function_tool(name: object, description: object, parameters: object, where: str) -> dict[str, Any]:
    """A tool in the shape that templates print. Raises what names the field that is wrong."""
    if not isinstance(name, str) or not name:
        raise InvalidType(f"Invalid type for '{where}.name'.", "Expected a name.", param=f"{where}.name")
    if not isinstance(description, str | None):
        raise InvalidType(f"Invalid type for '{where}.description'.", "Expected text.", param=f"{where}.description")
    if not isinstance(parameters, dict | None):
        raise InvalidType(f"Invalid type for '{where}.parameters'.", "Expected a JSON schema.", param=where)
    described = {} if description is None else {"description": description}
    schema = {"type": "object", "properties": {}} if parameters is None else parameters
    return {"type": "function", "function": {"name": name, **described, "parameters": schema}}


def only(offered: Sequence[Mapping[str, Any]], names: Sequence[str], param: str) -> list[Mapping[str, Any]]:
    """Those of these names. Raises where one is not offered."""
    by_name = {tool["function"]["name"]: tool for tool in offered}
    for name in names:
        if name not in by_name:
            raise InvalidParameter(
                f"There is no tool {name!r} in this request.", f"It has {', '.join(by_name) or 'none'}.", param=param
            )
    return [by_name[name] for name in names]


def checked(offered: Sequence[Mapping[str, Any]], param: str) -> Sequence[Mapping[str, Any]]:
    """Raises where a name comes twice, or there are too many."""
    names = [tool["function"]["name"] for tool in offered]
    if len(names) > MAX_TOOLS:
        raise InvalidParameter(f"{len(names)} tools are too many.", f"At most {MAX_TOOLS}.", param=param)
    if twice := {name for name in names if names.count(name) > 1}:
        raise InvalidParameter(f"Two tools have the name {min(twice)!r}.", param=param)
    return offered


def require_known_format(model: ServedModel, param: str) -> None:
    """Raises where the template takes tools, but nobody knows how the model writes a call."""
    if (model.answers is None or model.answers.tools is None) and model.chat_template.reads("tools"):
        raise UnsupportedParameter(
            f"How {model.shown_name} writes tool calls is not known.",
            "Its chat template takes tools and prints calls in none of the formats that are read here.",
            "Leave the tools out, or serve a model of another family; docs/concepts/tool-calls.md lists them.",
            param=param,
        )


def format_of(model: ServedModel, tools: Tools) -> AnswerFormat | None:
    """How the answer is to be read. None: all of it is content."""
    found = model.answers
    if found is None:
        return None
    if found.tools is not None and not tools.offered and not found.tools.reads_reasoning:
        found = replace(found, tools=None)
    return None if found.tools is None and found.reasoning is None else found


def reader_of(
    model: ServedModel, found: AnswerFormat | None, tools: Tools, prompt: Sequence[int]
) -> Callable[[], AnswerReader] | None:
    """Makes a reader for each choice."""
    if found is None:
        return None
    tail = model.tokenizer.decode(prompt[-PROMPT_TAIL:], skip_special_tokens=False)
    return lambda: AnswerReader(found, tools=tools.offered, prompt=tail)
