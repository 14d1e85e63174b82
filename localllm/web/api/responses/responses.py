"""POST /v1/responses and /v1/responses/input_tokens."""

from __future__ import annotations

from collections.abc import Sequence

from litestar import post
from litestar.response.base import ASGIResponse

from localllm.serving.answers.generation import Choice
from localllm.web.access.caller import is_background, owner_of
from localllm.web.api.answer import streamed, whole
from localllm.web.api.disconnect import EVENTS, EventStream, unless_disconnected
from localllm.web.api.exchange import TAKES_PICTURES, ApiRequest, json_body, json_response, warning_headers
from localllm.web.api.openapi import OF_MODELS, Operation, RequestBody
from localllm.web.api.responses import shapes
from localllm.web.api.responses.answer import ResponseEvents, ResponseHead, whole_response
from localllm.web.api.responses.asked import Asked, read_asked
from localllm.web.api.responses.mcp_rounds import McpRounds, Totals
from localllm.web.api.responses.remote import remote_response
from localllm.web.api.responses.schema import (
    REASONING_RULES,
    RULES,
    TEXT_RULES,
    ResponseReasoning,
    ResponsesBody,
    TextConfig,
)
from localllm.web.api.responses.stored import store_of

BODY = RequestBody(
    ResponsesBody,
    RULES,
    {"text": RequestBody(TextConfig, TEXT_RULES), "reasoning": RequestBody(ResponseReasoning, REASONING_RULES)},
    {"input": "Why is the sky blue?", "max_output_tokens": 64},
)


@post(
    "/v1/responses",
    status_code=200,
    opt=TAKES_PICTURES,
    operation=Operation(shapes.Response, BODY, shapes.AnyEvent, also=OF_MODELS),
)
async def responses(request: ApiRequest) -> ASGIResponse:
    """Answer input items with output items.

    The answer is stored unless `store` is false. With `stream: true` it is sent as events. An empty `input` with
    `max_output_tokens` 1 only loads the model.
    """
    return await answer_response(request, await json_body(request))


async def answer_response(request: ApiRequest, raw: bytes) -> ASGIResponse:
    """Answer the body `raw`, from a client or from a line of a batch. Answers to lines are not stored: a large batch
    would evict every other response."""
    if (answer := await remote_response(request, raw)) is not None:
        return answer
    asked = await read_asked(request, raw)
    model, chat = asked.model, asked.chat.within_context(len(asked.token_ids), asked.model)
    head = ResponseHead.new(model.shown_name, asked.body, chat.params, asked.num_truncated, asked.own.calls)
    if not asked.token_ids:
        return _loaded(asked, head)

    def keep(response: shapes.Response) -> None:
        if asked.body.store is not False and not is_background(request):
            store_of(request).put(owner_of(request), response, asked.before, asked.items)

    if asked.offer.by_name:
        return await _with_servers(request, McpRounds(request, asked, head, keep), asked)
    generation = chat.generation(model, asked.token_ids)

    def respond(choices: Sequence[Choice]) -> shapes.Response:
        response = whole_response(head, choices, generation.progress)
        keep(response)
        return response

    if asked.body.stream:
        return await streamed(request, generation, ResponseEvents(head, keep), asked.warnings)
    return await whole(request, generation, respond, asked.warnings)


def _loaded(asked: Asked, head: ResponseHead) -> ASGIResponse:
    """Answer a request without input, with which clients load a model."""
    if not asked.body.stream:
        return json_response(head.ended([], Totals(), cut=False), warning_headers(asked.warnings))
    events = ResponseEvents(head, lambda response: None)
    written = events.start() + events.end(Totals())
    return ASGIResponse(body=written, media_type=EVENTS.media_type, headers=warning_headers(asked.warnings))


async def _with_servers(request: ApiRequest, rounds: McpRounds, asked: Asked) -> ASGIResponse:
    """Answer with tools that run here."""
    headers = warning_headers(asked.warnings)
    if not asked.body.stream:
        return json_response(await unless_disconnected(request.receive, rounds.whole()), headers)
    await rounds.open()
    return EventStream(rounds.stream(), rounds.close, headers)


@post(
    "/v1/responses/input_tokens",
    status_code=200,
    opt=TAKES_PICTURES,
    operation=Operation(shapes.ResponseInputTokens, BODY, also=OF_MODELS),
)
async def input_tokens(request: ApiRequest) -> ASGIResponse:
    """Count the prompt tokens of a request without running it."""
    asked = await read_asked(request, await json_body(request))
    counted = shapes.ResponseInputTokens("response.input_tokens", len(asked.token_ids))
    return json_response(counted, warning_headers(asked.warnings))
