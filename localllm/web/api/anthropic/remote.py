"""Messages that another server answers: the body in OpenAI's dialect, and the answer as Anthropic's events.

Does not know: which server answers.
"""

from __future__ import annotations

from typing import Any

import msgspec
from litestar.response.base import ASGIResponse

from localllm.web.api.answer import streamed, whole
from localllm.web.api.anthropic.answer import FRAMING, AnthropicHead, MessageEvents, message_object
from localllm.web.api.anthropic.conversation import messages_of, tools_of
from localllm.web.api.anthropic.documents import read_documents
from localllm.web.api.anthropic.schema import OUTPUT_RULES, MessagesBody, OutputConfig
from localllm.web.api.exchange import ApiRequest
from localllm.web.api.reading import read_object
from localllm.web.api.remote import RemoteGeneration, openai_messages, openai_tools, remote_model


async def remote_messages(request: ApiRequest, body: MessagesBody, warnings: list[str]) -> ASGIResponse | None:
    """Answer a body by another server; None: this process should."""
    parts = [body.system, *(msgspec.to_builtins(message) for message in body.messages)]
    remote = await remote_model(request, body.model, parts)
    if remote is None:
        return None
    asked, more = await _openai_body(body)
    generation = RemoteGeneration(remote, "/chat/completions", asked)
    head = AnthropicHead.new(remote.name, 0, body.max_tokens)  # the prompt is counted by the server that reads it
    warnings = [*warnings, *more]
    if body.stream:
        return await streamed(request, generation, MessageEvents(head, request.scope), warnings, FRAMING)
    return await whole(
        request, generation, lambda choices: message_object(head, choices, generation.progress), warnings
    )


async def _openai_body(body: MessagesBody) -> tuple[dict[str, Any], list[str]]:
    """Return the same request in OpenAI's dialect, and warnings."""
    await read_documents(body)
    output, warnings = read_object(body.output_config or {}, OutputConfig, OUTPUT_RULES, "output_config.")
    tools, more = tools_of(body, None)
    asked: dict[str, Any] = {"messages": openai_messages(messages_of(body)), "max_tokens": body.max_tokens}
    asked |= openai_tools(tools)
    named = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k, "stop": body.stop_sequences}
    asked |= {name: value for name, value in named.items() if value is not None}
    if output.format is not None:
        schema = {"name": "answer", "schema": output.format.schema}
        asked["response_format"] = {"type": "json_schema", "json_schema": schema}
    if output.effort is not None:
        asked["reasoning_effort"] = output.effort
    thinking = (body.thinking or {}).get("type")
    if thinking in ("enabled", "disabled"):
        asked["chat_template_kwargs"] = {"enable_thinking": thinking == "enabled"}
    return asked, [*warnings, *more]
