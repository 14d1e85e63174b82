"""POST /v1/chat/completions, /v1/chat/completions/input_tokens and /apply-template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from litestar import post
from litestar.response.base import ASGIResponse

from localllm.errors import InvalidParameter, UnsupportedParameter
from localllm.serving.answers.conversation import ChatRequest, Conversation, Tools
from localllm.serving.served import ServedModel
from localllm.web.api.answer import streamed, whole
from localllm.web.api.exchange import (
    TAKES_PICTURES,
    ApiRequest,
    json_body,
    json_response,
    served_model,
    warning_headers,
)
from localllm.web.api.openai import shapes
from localllm.web.api.openai.answer import ChatChunks, chat_response, new_head
from localllm.web.api.openai.logprobs import TokenNames
from localllm.web.api.openai.params import chat_params, request_options, with_prediction, without_effect
from localllm.web.api.openai.prompts import RawPrompt, chat_echo, template_switches
from localllm.web.api.openai.schema import CHAT_RULES, ChatBody, read_body
from localllm.web.api.openapi import OF_MODELS, Operation, RequestBody
from localllm.web.api.pictures import readable
from localllm.web.api.remote import passed_on
from localllm.web.api.tools import chosen, read_tool


def tools_of(body: ChatBody, model: ServedModel) -> Tools:
    """Return the tools of a body. Raises `RequestError` if a tool or the choice is invalid."""
    offered = [read_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())]
    return chosen(offered, body.tool_choice, body.parallel_tool_calls, model)


EXAMPLE = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64}
CHAT = RequestBody(ChatBody, CHAT_RULES, example=EXAMPLE)


@post(
    ["/v1/chat/completions", "/chat/completions"],
    status_code=200,
    opt=TAKES_PICTURES,
    operation=Operation(shapes.ChatCompletion, CHAT, shapes.ChatCompletionChunk, also=OF_MODELS),
)
async def chat_completions(request: ApiRequest) -> ASGIResponse:
    """Answer a conversation.

    With `stream: true` the answer is sent as events.
    """
    return await answer_chat(request, await json_body(request))


async def answer_chat(request: ApiRequest, raw: bytes) -> ASGIResponse:
    """Answer the chat body `raw`, from a client or from a page."""
    if (answer := await passed_on(request, raw, "/chat/completions", "messages")) is not None:
        return answer
    body, warnings = await read_body(raw, ChatBody)
    warnings += without_effect(body)
    model = await served_model(request, body.model)
    asked, more = _asked(body, model)
    warnings += more
    token_ids = await asked.token_ids(model)
    prompt, warnings = RawPrompt(token_ids, chat_echo(body)), [*warnings, *token_ids.warnings]
    if body.prediction is not None:
        asked = replace(asked, options=await with_prediction(asked.options, body.prediction, model))
    names = TokenNames(model.tokenizer, bool(body.return_tokens_as_token_ids))
    generation = asked.generation(model, token_ids)
    if body.stream:
        head = new_head("chatcmpl", "chat.completion.chunk", model.shown_name, body.request_id)
        chunks = ChatChunks(head, body, [prompt], asked.params.n, names if body.logprobs else None)
        return await streamed(request, generation, chunks, warnings)
    head = new_head("chatcmpl", "chat.completion", model.shown_name, body.request_id)
    return await whole(
        request,
        generation,
        lambda choices: chat_response(head, body, prompt, choices, generation.progress, names),
        warnings,
    )


@post(
    ["/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"],
    status_code=200,
    opt=TAKES_PICTURES,
    operation=Operation(shapes.InputTokens, CHAT, also=OF_MODELS),
)
async def chat_input_tokens(request: ApiRequest) -> ASGIResponse:
    """Count the prompt tokens of a request without running it."""
    body, warnings = await read_body(await json_body(request), ChatBody)
    model = await served_model(request, body.model)
    asked, more = _asked(body, model)
    token_ids = await asked.token_ids(model)
    counted = shapes.InputTokens("response.input_tokens", len(token_ids))
    return json_response(counted, warning_headers([*warnings, *more, *token_ids.warnings]))


@post(
    "/apply-template",
    status_code=200,
    opt=TAKES_PICTURES,
    operation=Operation(shapes.OpenAIPrompt, CHAT, also=OF_MODELS),
)
async def apply_template(request: ApiRequest) -> ASGIResponse:
    """Render the prompt of a chat request as text.

    llama.cpp has the same route.
    """
    body, warnings = await read_body(await json_body(request), ChatBody)
    model = await served_model(request, body.model)
    asked, more = _asked(body, model)
    return json_response(shapes.OpenAIPrompt(await asked.prompt(model)), warning_headers([*warnings, *more]))


async def chat_prompt(request: ApiRequest, raw: bytes) -> tuple[ServedModel, Sequence[int]]:
    """Return the model of a chat body, and the token ids of its prompt."""
    body, _ = await read_body(raw, ChatBody)
    model = await served_model(request, body.model)
    asked, _ = _asked(body, model)
    return model, await asked.token_ids(model)


def _asked(body: ChatBody, model: ServedModel) -> tuple[ChatRequest, list[str]]:
    """Return the translated request, and its warnings."""
    template, warnings = template_switches(body, model)
    params, more = chat_params(body, model)
    if body.mm_processor_kwargs and model.sight is None:
        what, why = "'mm_processor_kwargs' is not supported.", f"{model.shown_name} reads text."
        raise UnsupportedParameter(what, why, param="mm_processor_kwargs")
    messages, still_more = readable(body.messages, model, options=body.mm_processor_kwargs)
    asked = ChatRequest(
        params=params,
        options=request_options(body),
        conversation=Conversation(
            messages,
            template,
            tools_of(body, model),
            add_special_tokens=bool(body.add_special_tokens),
            inline_reasoning=_is_inline(body),
        ),
    )
    return asked, [*warnings, *more, *still_more]


def _is_inline(body: ChatBody) -> bool:
    known = ("none", "auto", "deepseek")
    if body.reasoning_format not in (None, *known):
        raise InvalidParameter(
            f"Unknown reasoning_format {body.reasoning_format!r}.",
            f"Known: {', '.join(known)}.",
            param="reasoning_format",
        )
    return body.reasoning_format == "none"
