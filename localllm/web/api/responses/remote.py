"""Responses of models of other servers: the items as messages of a chat completion, its answer as items and events.

The conversation is stored here, as for a model of this server.
Does not know: which server answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from litestar.response.base import ASGIResponse

from localllm.engine.params import SamplingParams, given_params
from localllm.errors import UnsupportedOption
from localllm.serving.answers.generation import Choice
from localllm.web.access.caller import is_background, owner_of
from localllm.web.api.answer import streamed, whole
from localllm.web.api.exchange import ApiRequest, upstreams_of
from localllm.web.api.reading import read, read_object
from localllm.web.api.remote import RemoteGeneration, openai_messages, openai_tools, remote_model
from localllm.web.api.responses import shapes
from localllm.web.api.responses.answer import ResponseEvents, ResponseHead, whole_response
from localllm.web.api.responses.asked import conversation_of
from localllm.web.api.responses.client_tools import client_tools, plain_choice
from localllm.web.api.responses.items import messages_of
from localllm.web.api.responses.schema import (
    REASONING_RULES,
    RULES,
    TEXT_RULES,
    ResponseReasoning,
    ResponsesBody,
    TextConfig,
)
from localllm.web.api.responses.stored import decoded, store_of
from localllm.web.api.tools import chosen


async def remote_response(request: ApiRequest, raw: bytes) -> ASGIResponse | None:
    """Answer a body by another server; None: this process should."""
    if not upstreams_of(request):
        return None
    body, warnings = await read(raw, ResponsesBody, RULES)
    before, items = conversation_of(request, body)
    messages = list(messages_of([*decoded(before), *items]))
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    remote = await remote_model(request, body.model, messages) if messages else None
    if remote is None:
        return None
    own = client_tools(body.tools or [])
    _refuse_servers(body, remote.name)
    given = {name: value for name, value in given_params(body, "responses").items() if name != "structured_outputs"}
    asked: dict[str, Any] = {"messages": openai_messages(messages), **given}
    asked |= openai_tools(chosen(own.functions, plain_choice(body.tool_choice, own), body.parallel_tool_calls))
    more = _add_options(asked, body)
    generation = RemoteGeneration(remote, "/chat/completions", asked)
    head = ResponseHead.new(remote.name, body, SamplingParams(**given), calls=own.calls)

    def keep(response: shapes.Response) -> None:
        if body.store is not False and not is_background(request):
            store_of(request).put(owner_of(request), response, before, items)

    warnings = [*warnings, *own.warnings, *more]
    if body.stream:
        return await streamed(request, generation, ResponseEvents(head, keep), warnings)

    def respond(choices: Sequence[Choice]) -> shapes.Response:
        response = whole_response(head, choices, generation.progress)
        keep(response)
        return response

    return await whole(request, generation, respond, warnings)


def _refuse_servers(body: ResponsesBody, model: str) -> None:
    """Raise `UnsupportedOption` for tools of MCP servers: what they return is cut to a context that is not known."""
    if any(tool.get("type") == "mcp" for tool in body.tools or ()):
        what = "Tools of MCP servers run beside models of this server only."
        hint = "Leave the tools of type mcp out, or name a model of this server."
        raise UnsupportedOption(what, f"{model} is a model of another server.", hint, param="tools")


def _add_options(asked: dict[str, Any], body: ResponsesBody) -> list[str]:
    """Add the format of the text and the effort of reasoning to a chat completion. Return warnings."""
    text, warnings = read_object(body.text or {}, TextConfig, TEXT_RULES, "text.")
    reasoning, more = read_object(body.reasoning or {}, ResponseReasoning, REASONING_RULES, "reasoning.")
    form = dict(text.format or {})
    if (kind := form.pop("type", "text")) == "json_schema":
        asked["response_format"] = {"type": kind, "json_schema": {"name": "answer", **form}}
    elif kind != "text":
        asked["response_format"] = {"type": kind}
    if reasoning.effort is not None:
        asked["reasoning_effort"] = reasoning.effort
    if body.truncation == "auto":
        more = [*more, "field 'truncation' has no effect on models of other servers: their context is not known"]
    return [*warnings, *more]
