"""POST /v1/responses and /v1/responses/input_tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from litestar import post
from litestar.response.base import ASGIResponse

from localllm.serving.chat import Conversation
from localllm.serving.served import ServedModel
from localllm.web.access.caller import owner_of
from localllm.web.api.answer import streamed, whole
from localllm.web.api.conversation import ChatRequest
from localllm.web.api.exchange import ApiRequest, json_body, json_response, served_model, warning_headers
from localllm.web.api.generation import Choice
from localllm.web.api.operation import OF_MODELS, Operation, RequestBody
from localllm.web.api.reading import read
from localllm.web.api.responses import shapes
from localllm.web.api.responses.answer import ResponseEvents, ResponseHead, whole_response
from localllm.web.api.responses.fields import REASONING_RULES, RULES, TEXT_RULES
from localllm.web.api.responses.items import Item, Message, messages_of, read_items
from localllm.web.api.responses.params import params_of, template_of, tools_of
from localllm.web.api.responses.schema import ResponseReasoning, ResponsesBody, TextConfig
from localllm.web.api.responses.store import decoded
from localllm.web.api.responses.stored import store_of
from localllm.web.api.responses.truncation import truncated, wanted_tokens
from localllm.web.errors import MissingParameter


@dataclass(frozen=True, slots=True)
class _Asked:
    body: ResponsesBody
    model: ServedModel
    before: Sequence[bytes]  # items of earlier rounds
    items: Sequence[Item]  # items of this round
    chat: ChatRequest
    token_ids: Sequence[int]  # the prompt
    num_truncated: int  # number of the oldest items that are not in the prompt
    warnings: Sequence[str]


BODY = RequestBody(
    ResponsesBody,
    RULES,
    {"text": RequestBody(TextConfig, TEXT_RULES), "reasoning": RequestBody(ResponseReasoning, REASONING_RULES)},
    {"input": "Why is the sky blue?", "max_output_tokens": 64},
)


@post("/v1/responses", status_code=200, operation=Operation(shapes.Response, BODY, shapes.AnyEvent, also=OF_MODELS))
async def responses(request: ApiRequest) -> ASGIResponse:
    """Answer input items with output items.

    The answer is stored unless `store` is false. With `stream: true` it is sent as events.
    """
    asked = await _asked(request)
    model, chat = asked.model, asked.chat.within_context(len(asked.token_ids), asked.model)
    generation = chat.generation(model, asked.token_ids)
    head = ResponseHead.new(model.shown_name, asked.body, chat.params, asked.num_truncated)

    def keep(response: shapes.Response) -> None:
        if asked.body.store is not False:
            store_of(request).put(owner_of(request), response, asked.before, asked.items)

    def respond(choices: Sequence[Choice]) -> shapes.Response:
        response = whole_response(head, choices, generation.progress)
        keep(response)
        return response

    if asked.body.stream:
        return await streamed(request, generation, ResponseEvents(head, keep), asked.warnings)
    return await whole(request, generation, respond, asked.warnings)


@post(
    "/v1/responses/input_tokens", status_code=200, operation=Operation(shapes.ResponseInputTokens, BODY, also=OF_MODELS)
)
async def input_tokens(request: ApiRequest) -> ASGIResponse:
    """Count the prompt tokens of a request without running it."""
    asked = await _asked(request)
    counted = shapes.ResponseInputTokens("response.input_tokens", len(asked.token_ids))
    return json_response(counted, warning_headers(asked.warnings))


async def _asked(request: ApiRequest) -> _Asked:
    body, warnings = await read(await json_body(request), ResponsesBody, RULES)
    store, owner = store_of(request), owner_of(request)
    before = store.context(owner, body.previous_response_id)
    items = read_items(body.input or [], partial(store.item, owner))
    if not before and not items:
        raise MissingParameter("Missing required parameter: 'input'.", "There is nothing to answer.", param="input")
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    everything = [*decoded(before), *items]
    messages = [*instructions, *messages_of(everything)]
    model = await served_model(request, body.model)
    params, more = params_of(body, model)
    template, still_more = template_of(body, model)
    chat = ChatRequest(Conversation(messages, template, tools_of(body, model)), params)
    warnings = [*warnings, *more, *still_more]
    asked = _Asked(body, model, before, items, chat, await chat.token_ids(model), 0, warnings)
    room = model.plan.max_model_len - wanted_tokens(body.max_output_tokens, model.plan.max_model_len)
    if body.truncation != "auto" or len(asked.token_ids) <= room:
        return asked
    return await _with_fewer_items(asked, everything, instructions)


async def _with_fewer_items(asked: _Asked, everything: Sequence[Item], instructions: Sequence[Message]) -> _Asked:
    body, model = asked.body, asked.model

    def asking(items: Sequence[Item]) -> ChatRequest:
        conversation = replace(asked.chat.conversation, messages=[*instructions, *messages_of(items)])
        return replace(asked.chat, conversation=conversation)

    async def count(items: Sequence[Item]) -> int:
        return len(await asking(items).token_ids(model))

    kept = await truncated(everything, count, model.plan.max_model_len, body.max_output_tokens)
    chat, num_truncated = asking(kept), len(everything) - len(kept)
    warning = f"truncation: items that are not in the prompt, the oldest: {num_truncated} of {len(everything)}"
    return replace(
        asked,
        chat=chat,
        token_ids=await chat.token_ids(model),
        num_truncated=num_truncated,
        warnings=[*asked.warnings, *([warning] if num_truncated else [])],
    )
