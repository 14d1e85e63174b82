"""Translate the body's fields beside the messages: sampling, tools, the format of the answer.

Does not know: items, HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localllm.engine.params import SamplingParams, given_params
from localllm.errors import InvalidParameter
from localllm.serving.chat import TOOL_CHOICE, Tools
from localllm.serving.served import ServedModel
from localllm.text.structured import StructuredOutputsParams
from localllm.web.api.conversation import sampling_params
from localllm.web.api.hints import effort_switch, thinking_budget
from localllm.web.api.reading import read_object
from localllm.web.api.responses.client_tools import ClientTools, plain_choice
from localllm.web.api.responses.fields import REASONING_RULES, TEXT_RULES
from localllm.web.api.responses.mcp_tools import McpOffer
from localllm.web.api.responses.schema import ResponseReasoning, ResponsesBody, TextConfig
from localllm.web.api.tools import chosen
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
    text, warnings = read_object(body.text or {}, TextConfig, TEXT_RULES, "text.")
    budget = {"thinking_token_budget": body.thinking_token_budget}
    asked["thinking_token_budget"], more = thinking_budget(budget, model)
    if (structured := _structured({"type": "text"} if text.format is None else text.format)) is not None:
        asked["structured_outputs"] = structured
    return sampling_params(model, asked), [*warnings, *more]


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
    switches, more = effort_switch(model, asked.effort, "reasoning.effort")
    return switches, [*warnings, *more]


def tools_of(body: ResponsesBody, model: ServedModel, own: ClientTools, offer: McpOffer) -> Tools:
    """Return the tools: those of the client, and those of MCP servers. Raises `RequestError` if a tool or the
    choice is invalid.
    """
    choice = _choice(plain_choice(body.tool_choice, own), offer)
    return chosen([*own.functions, *offer.functions()], choice, body.parallel_tool_calls, model)


def _choice(choice: Any, offer: McpOffer) -> Any:
    """Return the choice with the names that the model uses in place of those of servers and their tools."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "mcp":
        return {"type": "allowed_tools", "mode": "required", "tools": _named(choice, offer)}
    tools = choice.get("tools")
    if choice.get("type") == "allowed_tools" and isinstance(tools, list):
        is_mcp = [isinstance(tool, dict) and tool.get("type") == "mcp" for tool in tools]
        return choice | {
            "tools": [
                n for tool, mcp in zip(tools, is_mcp, strict=True) for n in (_named(tool, offer) if mcp else [tool])
            ]
        }
    return choice


def _named(choice: dict[str, Any], offer: McpOffer) -> list[dict[str, str]]:
    names = offer.names_of(choice.get("server_label"), choice.get("name"))
    if not names:
        what = "tool_choice names a tool that is not offered."
        why = f"Offered: {', '.join(offer.by_name) or 'none'}."
        raise InvalidParameter(what, why, param=TOOL_CHOICE)
    return [{"type": "function", "name": name} for name in names]
