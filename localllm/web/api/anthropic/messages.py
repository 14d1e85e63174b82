"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from litestar import post
from litestar.response.base import ASGIResponse

from localllm.engine.params import SamplingParams
from localllm.web.api.answer import streamed, whole
from localllm.web.api.anthropic.answer import FRAMING, Head, MessageEvents, message_object
from localllm.web.api.anthropic.conversation import chat_request, params_of
from localllm.web.api.anthropic.fields import RULES
from localllm.web.api.anthropic.schema import CountBody, MessagesBody
from localllm.web.api.exchange import ApiRequest, json_body, json_response, served_model, warning_headers
from localllm.web.api.reading import read


@post("/v1/messages", status_code=200)
async def messages(request: ApiRequest) -> ASGIResponse:
    """Answer a conversation."""
    body, warnings = await read(await json_body(request), MessagesBody, RULES)
    model = await served_model(request, body.model)
    asked, more = chat_request(body, params_of(body, model), model)
    token_ids = await asked.token_ids(model)
    generation = asked.within_context(len(token_ids), model).generation(model, token_ids)
    head = Head.new(model.shown_name, len(token_ids), body.max_tokens)
    if body.stream:
        events = MessageEvents(head, request.scope)
        return await streamed(request, generation, events, [*warnings, *more], FRAMING)
    return await whole(
        request,
        generation,
        lambda choices: message_object(head, choices, generation.progress),
        [*warnings, *more],
    )


@post("/v1/messages/count_tokens", status_code=200)
async def count_tokens(request: ApiRequest) -> ASGIResponse:
    """Count the prompt tokens of these messages."""
    body, warnings = await read(await json_body(request), CountBody, RULES)
    model = await served_model(request, body.model)
    asked, more = chat_request(body, SamplingParams(max_tokens=None), model)
    token_ids = await asked.token_ids(model)
    return json_response({"input_tokens": len(token_ids)}, warning_headers([*warnings, *more]))
