"""POST /tokenize and /detokenize, in the formats of vLLM and llama.cpp; GET /tokenizer_info in vLLM's."""

from __future__ import annotations

from litestar import get, post
from litestar.response.base import ASGIResponse

from localllm.errors import ContextTooLong, InvalidParameter
from localllm.serving.answers.conversation import Conversation, chat_token_ids, encode, most_chars
from localllm.serving.answers.off_loop import off_loop
from localllm.serving.served import ServedModel
from localllm.units import format_count
from localllm.web.api.exchange import (
    TAKES_PICTURES,
    ApiRequest,
    json_body,
    json_response,
    served_model,
    warning_headers,
)
from localllm.web.api.openai import shapes
from localllm.web.api.openai.prompts import template_switches
from localllm.web.api.openai.schema import RULES, ChatBody, DetokenizeBody, TokenizeBody, read_body
from localllm.web.api.openapi import OF_MODELS, Operation, RequestBody
from localllm.web.api.pictures import readable
from localllm.web.api.reading import ModelQuery
from localllm.web.errors import MissingParameter


@post(
    ["/tokenize", "/v1/tokenize"],
    status_code=200,
    opt=TAKES_PICTURES,
    operation=Operation(shapes.Tokens, RequestBody(TokenizeBody, RULES, example={"prompt": "Hello"}), also=OF_MODELS),
)
async def tokenize(request: ApiRequest) -> ASGIResponse:
    """Tokenize `prompt`, `content` or `messages`.

    Messages are rendered by the chat template.
    """
    return await answer_tokenize(request, await json_body(request))


async def answer_tokenize(request: ApiRequest, raw: bytes) -> ASGIResponse:
    """Answer the tokenize body `raw`, from a client or from a page."""
    body, warnings = await read_body(raw, TokenizeBody)
    model = await served_model(request, body.model)
    token_ids = await _token_ids(body, model)

    def written() -> ASGIResponse:
        answer = shapes.Tokens(len(token_ids), model.plan.max_model_len, token_ids)
        if body.return_token_strs:
            answer.token_strs = [model.tokenizer.token_text(token_id) for token_id in token_ids]
        return json_response(answer, warning_headers(warnings))

    return await off_loop(len(token_ids), written)


@post(
    ["/detokenize", "/v1/detokenize"],
    status_code=200,
    operation=Operation(shapes.Text, RequestBody(DetokenizeBody, RULES, example={"tokens": [5, 6]}), also=OF_MODELS),
)
async def detokenize(request: ApiRequest) -> ASGIResponse:
    """Convert token ids to text."""
    body, warnings = await read_body(await json_body(request), DetokenizeBody)
    model = await served_model(request, body.model)
    if len(body.tokens) > (most := most_chars(model)):
        why = f"A request may have at most {format_count(most)}."
        what = f"{format_count(len(body.tokens))} token ids are too many."
        raise InvalidParameter(what, why, "Send them in parts.", param="tokens")

    def written() -> ASGIResponse:
        for token_id in body.tokens:
            if not 0 <= token_id < model.spec.vocab_size:
                raise InvalidParameter(
                    f"Token id {token_id} is outside the vocabulary.",
                    f"Ids run from 0 to {model.spec.vocab_size - 1}.",
                    param="tokens",
                )
        text = model.tokenizer.decode(body.tokens, skip_special_tokens=False)
        return json_response(shapes.Text(prompt=text, content=text), warning_headers(warnings))

    return await off_loop(len(body.tokens), written)


@get(
    ["/tokenizer_info", "/v1/tokenizer_info"],
    operation=Operation(shapes.TokenizerInfo, query=ModelQuery, also=OF_MODELS),
)
async def tokenizer_info(request: ApiRequest) -> ASGIResponse:
    """Show a model's special tokens, chat template and context length.

    For clients that tokenise through /tokenize.
    """
    model = await served_model(request, request.query_params.get("model"))
    special = model.tokenizer.special_tokens
    info = shapes.TokenizerInfo(
        bos_token=special.get("bos_token"),
        eos_token=special.get("eos_token"),
        pad_token=special.get("pad_token"),
        chat_template=model.chat_template.source() if model.chat_template else None,
        model_max_length=model.plan.max_model_len,
    )
    return json_response(info)


async def _token_ids(body: TokenizeBody, model: ServedModel) -> list[int]:
    if body.messages is not None:
        chat = ChatBody(
            messages=body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=body.chat_template_kwargs,
        )
        switches, _ = template_switches(chat, model)
        special = bool(body.add_special_tokens)
        messages, _ = readable(body.messages, model)
        return await chat_token_ids(model, Conversation(messages, switches, add_special_tokens=special))
    if body.prompt is not None:
        return await _encoded(body.prompt, body.add_special_tokens is not False, model, "prompt")
    if body.content is not None:  # llama.cpp adds special tokens only on request
        return await _encoded(body.content, bool(body.add_special), model, "content")
    raise MissingParameter("Missing required parameter: 'prompt'.", "Or send messages.", param="prompt")


async def _encoded(text: str, special: bool, model: ServedModel, param: str) -> list[int]:
    try:
        return await encode(text, special, model)
    except ContextTooLong as error:
        error.param = param
        raise
