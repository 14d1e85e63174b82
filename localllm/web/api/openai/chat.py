"""POST /v1/chat/completions."""

from __future__ import annotations

from litestar import post
from litestar.response.base import ASGIResponse

from localllm.web.api.exchange import ApiRequest, json_body, served_model
from localllm.web.api.openai.answer import generation_of, streamed, whole
from localllm.web.api.openai.bodies import chat_response
from localllm.web.api.openai.chunks import ChatChunks, Head
from localllm.web.api.openai.logprobs import TokenNames
from localllm.web.api.openai.params import chat_params
from localllm.web.api.openai.prompts import chat_prompt
from localllm.web.api.openai.schema import ChatBody, read_body


@post(["/v1/chat/completions", "/chat/completions"], status_code=200)
async def chat_completions(request: ApiRequest) -> ASGIResponse:
    """Answer a conversation."""
    body, warnings = read_body(await json_body(request), ChatBody)
    model = await served_model(request, body.model)
    params = chat_params(body, model)
    prompt = await chat_prompt(body, model)
    names = TokenNames(model.tokenizer, bool(body.return_tokens_as_token_ids))
    generation = generation_of(model, body, params, [prompt])
    if body.stream:
        head = Head.new("chatcmpl", "chat.completion.chunk", model.shown_name, body.request_id)
        chunks = ChatChunks(head, body, [prompt], params.n, names if body.logprobs else None)
        return await streamed(request, generation, chunks, warnings)
    head = Head.new("chatcmpl", "chat.completion", model.shown_name, body.request_id)
    return await whole(
        request,
        generation,
        lambda choices: chat_response(head, body, prompt, choices, generation.progress, names),
        warnings,
    )
