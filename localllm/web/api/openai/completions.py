"""POST /v1/completions: continue text or token ids, one or many."""

from __future__ import annotations

from dataclasses import replace

from litestar import post
from litestar.response.base import ASGIResponse

from localllm.errors import ContextTooLong, UnsupportedParameter
from localllm.serving.answers.conversation import answer_start, ended, fill_in_of, in_language
from localllm.serving.answers.generation import generation_of
from localllm.web.api.answer import streamed, whole
from localllm.web.api.exchange import ApiRequest, json_body, served_model
from localllm.web.api.openai import shapes
from localllm.web.api.openai.answer import CompletionChunks, completion_response, new_head
from localllm.web.api.openai.logprobs import TokenNames
from localllm.web.api.openai.params import completion_params, request_options, without_effect
from localllm.web.api.openai.prompts import completion_prompts
from localllm.web.api.openai.schema import RULES, CompletionBody, read_body
from localllm.web.api.openapi import OF_MODELS, Operation, RequestBody
from localllm.web.api.remote import passed_on

BODY = RequestBody(CompletionBody, RULES, example={"prompt": "The sky is", "max_tokens": 16})


@post(
    ["/v1/completions", "/completions"],
    status_code=200,
    operation=Operation(shapes.Completion, BODY, shapes.CompletionChunk, also=OF_MODELS),
)
async def completions(request: ApiRequest) -> ASGIResponse:
    """Continue a text, a list of texts, or token ids; with a suffix, fill the gap between both.

    With `stream: true` the answer is sent as events.
    """
    return await answer_completion(request, await json_body(request))


async def answer_completion(request: ApiRequest, raw: bytes) -> ASGIResponse:
    """Answer the completion body `raw`, from a client or from a page."""
    try:
        return await _complete(request, raw)
    except ContextTooLong as error:
        if error.param == "messages":  # the engine names the usual cause; here the field is called prompt
            error.param = "prompt"
        raise


async def _complete(request: ApiRequest, raw: bytes) -> ASGIResponse:
    if (answer := await passed_on(request, raw, "/completions", "prompt")) is not None:
        return answer
    body, warnings = await read_body(raw, CompletionBody)
    warnings += without_effect(body)
    model = await served_model(request, body.model)
    params, more = completion_params(body, model)
    warnings += more
    if body.suffix:
        params = ended(params, fill_in_of(model))
    if body.echo and model.spec.source is not None:
        what, why = f"echo is not supported by {model.shown_name}.", "Its answer does not continue the prompt."
        raise UnsupportedParameter(what, why, "Leave echo out.", param="echo")
    prompts = await completion_prompts(body, model, params.n)
    embeds = {index: prompt.embeds for index, prompt in enumerate(prompts) if prompt.embeds is not None}
    names = TokenNames(model.tokenizer, bool(body.return_tokens_as_token_ids))
    token_ids = [in_language(model, prompt.token_ids, body.src_lang) for prompt in prompts]
    begun = answer_start(model, body.decoder_prompt, body.tgt_lang)
    options = replace(request_options(body), decoder_prompt_token_ids=begun)
    generation = generation_of(model, params, token_ids, options, embeds=embeds)
    head = new_head("cmpl", "text_completion", model.shown_name, body.request_id)
    if body.stream:
        chunks = CompletionChunks(head, body, prompts, params.n, names if body.logprobs is not None else None)
        return await streamed(request, generation, chunks, warnings)
    return await whole(
        request,
        generation,
        lambda choices: completion_response(head, body, prompts, choices, generation.progress, names),
        warnings,
    )
