"""Translate the body's fields beside the messages: sampling, tools, the format of the answer.

Does not know: items, HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localllm.engine.params import SamplingParams, given_params
from localllm.errors import InvalidParameter, UnsupportedParameter
from localllm.serving.chat import Tools
from localllm.serving.served import ServedModel
from localllm.text.structured import StructuredOutputsParams
from localllm.web.api.budget import thinking_budget
from localllm.web.api.conversation import sampling_params, thinking_switch
from localllm.web.api.reading import read_object
from localllm.web.api.responses.fields import REASONING_RULES, TEXT_RULES
from localllm.web.api.responses.schema import ResponseReasoning, ResponsesBody, TextConfig
from localllm.web.api.tools import chosen, function_tool
from localllm.web.errors import InvalidType

FORMAT = "text.format"


def params_of(body: ResponsesBody, model: ServedModel) -> tuple[SamplingParams, list[str]]:
    """Return the parameters, and warnings. Without a limit the answer may fill the rest of the context. Raises the
    error that names the wrong field.
    """
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        why = f"Got {body.max_output_tokens}."
        raise InvalidParameter("max_output_tokens must be at least 1.", why, param="max_output_tokens")
    asked = {"max_tokens": model.sampling_defaults.get("max_tokens"), **given_params(body, "responses")}
    budget = {"thinking_token_budget": body.thinking_token_budget}
    asked["thinking_token_budget"] = thinking_budget(budget, model)
    text, warnings = read_object(body.text or {}, TextConfig, TEXT_RULES, "text.")
    if (structured := _structured({"type": "text"} if text.format is None else text.format)) is not None:
        asked["structured_outputs"] = structured
    return sampling_params(model, asked), warnings


def _structured(format: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """Return the structured output. `strict` changes nothing: a schema is either enforced completely or refused."""
    match format.get("type"):
        case "text":
            return None
        case "json_object":
            return StructuredOutputsParams(json_object=True, param=FORMAT)
        case "json_schema":
            if not isinstance(schema := format.get("schema"), dict):
                raise InvalidType(
                    f"Invalid type for '{FORMAT}.schema'.", "Expected an object.", param=f"{FORMAT}.schema"
                )
            return StructuredOutputsParams(json=schema, param=FORMAT)
        case kind:
            known = "Known: text, json_object, json_schema."
            raise InvalidParameter(f"Unknown {FORMAT}.type {kind!r}.", known, param=f"{FORMAT}.type")


def template_of(body: ResponsesBody, model: ServedModel) -> tuple[dict[str, Any], list[str]]:
    """Return the chat template's arguments, and warnings."""
    asked, warnings = read_object(body.reasoning or {}, ResponseReasoning, REASONING_RULES, "reasoning.")
    if asked.effort is None:
        return {}, warnings
    if model.chat_template.reads("reasoning_effort"):
        return {"reasoning_effort": asked.effort}, warnings
    if asked.effort == "none":
        switches, more = thinking_switch(model, on=False, param="reasoning.effort")
        return switches, [*warnings, *more]
    raise UnsupportedParameter(
        "'reasoning.effort' is not supported by this model.",
        "Its chat template has no such switch.",
        param="reasoning.effort",
    )


def tools_of(body: ResponsesBody, model: ServedModel) -> Tools:
    """Return the tools. Raises `RequestError` if a tool or the choice is invalid."""
    offered = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())]
    return chosen(offered, body.tool_choice, body.parallel_tool_calls, model)


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") == "mcp":
        what, hint = f"{where} is of type 'mcp'.", "Send the server's tools as functions and run the calls yourself."
        raise UnsupportedParameter(what, "MCP servers are used in the chat only.", hint, param=f"{where}.type")
    if tool.get("type") != "function":
        raise UnsupportedParameter(
            f"{where} is of type {tool.get('type')!r}.", "Supported: functions.", param=f"{where}.type"
        )
    return function_tool(tool.get("name"), tool.get("description"), tool.get("parameters"), where)
