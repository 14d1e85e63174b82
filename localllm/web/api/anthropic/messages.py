"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import post
from litestar.response.base import ASGIResponse

from localllm.engine.params import SamplingParams
from localllm.errors import ContextTooLong
from localllm.serving.answers.conversation import ChatRequest
from localllm.serving.answers.pictures import PromptIds
from localllm.serving.served import ServedModel
from localllm.text.messages import text_of
from localllm.web.api.answer import streamed, whole
from localllm.web.api.anthropic import shapes
from localllm.web.api.anthropic.answer import FRAMING, AnthropicHead, MessageEvents, message_object
from localllm.web.api.anthropic.conversation import chat_request, messages_of, params_of, tools_of
from localllm.web.api.anthropic.documents import read_documents
from localllm.web.api.anthropic.schema import (
    CHOICE_RULES,
    OUTPUT_RULES,
    RULES,
    THINKING_RULES,
    TOOL_RULES,
    AnthropicThinking,
    CountBody,
    MessagesBody,
    OutputConfig,
    Tool,
    ToolChoice,
)
from localllm.web.api.exchange import (
    TAKES_PICTURES,
    ApiRequest,
    json_body,
    json_response,
    served_model,
    warning_headers,
)
from localllm.web.api.openapi import OF_MODELS, Operation, RequestBody
from localllm.web.api.reading import read, read_object
from localllm.web.api.remote import RemoteGeneration, openai_messages, openai_tools, remote_model

INSIDE = {
    "output_config": RequestBody(OutputConfig, OUTPUT_RULES),
    "thinking": RequestBody(AnthropicThinking, THINKING_RULES),
    "tools": RequestBody(Tool, TOOL_RULES),
    "tool_choice": RequestBody(ToolChoice, CHOICE_RULES),
}
CHARS_PER_TOKEN = 4
EXAMPLE = {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}


@post(
    "/v1/messages",
    status_code=200,
    opt=TAKES_PICTURES,
    operation=Operation(
        shapes.AnthropicMessage,
        RequestBody(MessagesBody, RULES, INSIDE, EXAMPLE | {"max_tokens": 64}),
        shapes.Event,
        also=OF_MODELS,
    ),
)
async def messages(request: ApiRequest) -> ASGIResponse:
    """Answer a conversation.

    With `stream: true` the answer is sent as events.
    """
    body, warnings = await read(await json_body(request), MessagesBody, RULES)
    if (answer := await _answer_remotely(request, body, warnings)) is not None:
        return answer
    model = await served_model(request, body.model)
    asked, more = await chat_request(body, params_of(body, model), model)
    token_ids = await _token_ids(asked, model)
    if len(token_ids) >= model.plan.max_model_len:
        raise _too_long(str(len(token_ids)), model)
    generation = asked.within_context(len(token_ids), model).generation(model, token_ids)
    warnings = [*warnings, *token_ids.warnings]
    head = AnthropicHead.new(model.shown_name, len(token_ids), body.max_tokens)
    if body.stream:
        events = MessageEvents(head, request.scope)
        return await streamed(request, generation, events, [*warnings, *more], FRAMING)
    return await whole(
        request,
        generation,
        lambda choices: message_object(head, choices, generation.progress),
        [*warnings, *more],
    )


async def _answer_remotely(request: ApiRequest, body: MessagesBody, warnings: list[str]) -> ASGIResponse | None:
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


async def _token_ids(asked: ChatRequest, model: ServedModel) -> PromptIds:
    """Return the prompt. A text that is too long even to count has an estimated number of tokens."""
    try:
        return await asked.token_ids(model)
    except ContextTooLong as error:
        num_chars = sum(len(text_of(message)) for message in asked.conversation.messages)
        num_tokens = max(num_chars // CHARS_PER_TOKEN, model.plan.max_model_len)
        raise _too_long(f"about {num_tokens}", model) from error


def _too_long(num_tokens: str, model: ServedModel) -> ContextTooLong:
    """Return the error in the words by which Anthropic's clients recognise a full context and shorten it."""
    most = model.plan.max_model_len - 1
    return ContextTooLong(
        f"prompt is too long: {num_tokens} tokens > {most} maximum",
        f"({model.shown_name} has a context of {model.plan.max_model_len} tokens here, of which the answer needs one).",
        "Shorten the prompt, or start the server with a larger --max-model-len.",
        param="messages",
    )


@post(
    "/v1/messages/count_tokens",
    status_code=200,
    opt=TAKES_PICTURES,
    operation=Operation(shapes.TokenCount, RequestBody(CountBody, RULES, INSIDE, EXAMPLE), also=OF_MODELS),
)
async def count_tokens(request: ApiRequest) -> ASGIResponse:
    """Count the prompt tokens of a request without running it."""
    body, warnings = await read(await json_body(request), CountBody, RULES)
    model = await served_model(request, body.model)
    asked, more = await chat_request(body, SamplingParams(max_tokens=None), model)
    token_ids = await _token_ids(asked, model)
    return json_response(shapes.TokenCount(len(token_ids)), warning_headers([*warnings, *more, *token_ids.warnings]))
