"""The tools that a request offers to the model, and how its answer is split into content, reasoning and calls.

Tools are kept in OpenAI's format, which chat templates expect; a tool choice is also in OpenAI's terms.
Does not know: any dialect's words but that format, HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from localllm.engine.params import SamplingParams
from localllm.errors import InvalidParameter
from localllm.serving.served import ServedModel
from localllm.text.answers.reader import AnswerFormat, AnswerReader
from localllm.text.answers.reasoning import PromptEnd
from localllm.text.structured import StructuredOutputsParams
from localllm.web.errors import InvalidType, UnsupportedParameter

MAX_TOOLS = 512
PROMPT_TAIL = 16  # tokens


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request. Each is {"type": "function", "function": {"name", "description", "parameters"}}."""

    offered: Sequence[Mapping[str, Any]] = ()  # the tools in the prompt
    allowed: Sequence[Mapping[str, Any]] = ()  # those of them that may be called
    must: bool = False  # at least one must be called
    parallel: bool = True  # several calls are allowed


NO_TOOLS = Tools()
CHOICES = ("auto", "none", "required")
PARAM = "tool_choice"


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
    offered: Sequence[Mapping[str, Any]], choice: str | dict[str, Any] | None, parallel: bool | None, model: ServedModel
) -> Tools:
    """Return the tools after applying OpenAI's `tool_choice` and `parallel_tool_calls`, for a model that can call
    tools.
    """
    tools = _choose(checked(offered, "tools"), choice, parallel=parallel is not False)
    if tools.offered:
        require_known_format(model, "tools")
    return tools


def _choose(offered: Sequence[Mapping[str, Any]], choice: str | dict[str, Any] | None, *, parallel: bool) -> Tools:
    """Apply a tool choice; `none` leaves the tools out of the prompt as well."""
    if isinstance(choice, dict):
        return _named(offered, choice, parallel=parallel)
    if choice is not None and choice not in CHOICES:
        raise InvalidParameter(f"Unknown tool_choice {choice!r}.", f"Known: {', '.join(CHOICES)}.", param=PARAM)
    if choice == "required" and not offered:
        raise InvalidParameter("tool_choice is 'required', but the request has no tools.", param=PARAM)
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
        f"Invalid type for {PARAM!r}.",
        'Expected {"type": "function", "function": {"name": ...}}.',
        param=PARAM,
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


def calls_tools(model: ServedModel) -> bool:
    """Return whether the model accepts tools and its calls can be parsed."""
    return model.answers is not None and model.answers.tools is not None and model.chat_template.reads("tools")


def reasons(model: ServedModel) -> bool:
    """Return whether the model may reason before it answers, in a way that can be separated from the answer."""
    return model.answers is not None and model.answers.reasoning is not None


def format_of(model: ServedModel, tools: Tools, *, inline_reasoning: bool = False) -> AnswerFormat | None:
    """Return how the answer is parsed. None: all of it is content."""
    if model.answers is None:
        return None
    return model.answers.as_asked(calls=bool(tools.allowed), inline_reasoning=inline_reasoning)


def constrained(
    params: SamplingParams, model: ServedModel, found: AnswerFormat | None, tools: Tools, prompt_end: PromptEnd
) -> SamplingParams:
    """Return the parameters with a grammar for required calls, or for optional calls beside structured output, and with
    the position from which the grammar applies.
    """
    asked = params.structured_outputs
    if tools.must:
        if asked is not None:
            raise InvalidParameter(
                f"A forced tool call and {asked.param} cannot be combined.",
                "The answer would have to be both.",
                "Leave out one of the two.",
                param=PARAM,
            )
        asked = StructuredOutputsParams(grammar=_grammar_of_calls(model, found, tools), param=PARAM)
    elif asked is not None and tools.allowed:
        asked = StructuredOutputsParams(grammar=_grammar_of_calls(model, found, tools, asked), param=asked.param)
    if asked is not None and found is not None:
        from_the_start = tools.allowed and found.tools is not None and found.tools.reads_reasoning
        asked = asked if from_the_start else found.behind_reasoning(asked, prompt_end)
    return params if asked is params.structured_outputs else replace(params, structured_outputs=asked)


def _grammar_of_calls(
    model: ServedModel, found: AnswerFormat | None, tools: Tools, answer: StructuredOutputsParams | None = None
) -> str:
    """Return the grammar of the calls. `answer`: the structure of a text that may come instead of calls."""
    grammar = None
    if found is not None and found.tools is not None:
        grammar = found.tools.call_grammar(
            tools.allowed, "required", parallel=tools.parallel, tokenizer=model.tokenizer, answer=answer,
            frame=found.frame,
        )  # fmt: skip
    if grammar is None and answer is not None:
        raise UnsupportedParameter(
            f"Tools and {answer.param} cannot be combined with this model.",
            "A grammar could not tell its calls from such text by their beginning, or could not enforce their schemas.",
            "Use tool_choice none or required, or a JSON schema; docs/concepts/tool-calls.md says which models can.",
            param=answer.param,
        )
    if grammar is None:
        raise UnsupportedParameter(
            "A call of these tools cannot be forced with this model.",
            "A grammar cannot enforce the schemas in the model's argument format.",
            "Use tool_choice auto, or simpler schemas; docs/concepts/tool-calls.md says which.",
            param=PARAM,
        )
    return grammar


def end_of(prompt: Sequence[int], model: ServedModel, continued: str = "") -> PromptEnd:
    """Return the end of the prompt as text, long enough to see whether it ends inside reasoning. `continued`: the text
    that the answer continues.
    """
    most = PROMPT_TAIL + len(continued.encode(errors="replace"))  # each token has at least one byte
    return PromptEnd(model.tokenizer.decode(prompt[-most:], skip_special_tokens=False), continued)


def reader_of(found: AnswerFormat | None, tools: Tools, prompt_end: PromptEnd) -> Callable[[], AnswerReader] | None:
    """Return a function that makes a reader for each choice. If a call is required, its grammar limits the number of
    calls.
    """
    parallel = tools.parallel or tools.must
    if found is None:
        return None
    return lambda: AnswerReader(found, tools=tools.allowed, prompt=prompt_end, parallel=parallel)
