"""POST /api/embed, and /api/embeddings for older clients."""

from __future__ import annotations

from litestar import post
from litestar.response.base import ASGIResponse

from localllm.engine.pooling_client import Answers
from localllm.errors import ContextTooLong, InvalidParameter
from localllm.serving.served import ServedModel
from localllm.web.api.exchange import ApiRequest, json_response, warning_headers
from localllm.web.api.ollama import shapes
from localllm.web.api.ollama.chat import asked_model
from localllm.web.api.ollama.conversation import read_options
from localllm.web.api.ollama.lines import RequestClock
from localllm.web.api.ollama.schema import INSIDE, NO_RULES, EmbedBody, OllamaEmbeddingsBody, read_body
from localllm.web.api.openapi import OF_MODELS, Operation, RequestBody
from localllm.web.api.timings import MAX_INPUTS, shortened


@post(
    "/api/embed",
    status_code=200,
    operation=Operation(
        shapes.Embedded, RequestBody(EmbedBody, NO_RULES, INSIDE, {"input": ["Hello"]}), also=OF_MODELS
    ),
)
async def embed(request: ApiRequest) -> ASGIResponse:
    """Embed each text of `input`."""
    clock = RequestClock()
    body, warnings = await read_body(request, EmbedBody, NO_RULES)
    texts = [body.input] if isinstance(body.input, str) else body.input
    if not 0 < len(texts) <= MAX_INPUTS:
        raise InvalidParameter(f"{len(texts)} inputs.", f"A request may have 1 to {MAX_INPUTS}.", param="input")
    model, warnings = await _model(request, body, warnings)
    clock.has_model()
    answers = await _embedded(model, texts, truncate=body.truncate is True)
    answer = shapes.Embedded(
        model=model.name,
        embeddings=[shortened(vector, body.dimensions) for vector in answers.values],
        total_duration=clock.total_ns(),
        load_duration=clock.load_ns,
        prompt_eval_count=answers.num_tokens,
    )
    return json_response(answer, warning_headers(warnings))


@post(
    "/api/embeddings",
    status_code=200,
    operation=Operation(
        shapes.OneEmbedding, RequestBody(OllamaEmbeddingsBody, NO_RULES, INSIDE, {"prompt": "Hello"}), also=OF_MODELS
    ),
)
async def embeddings(request: ApiRequest) -> ASGIResponse:
    """Embed `prompt`."""
    body, warnings = await read_body(request, OllamaEmbeddingsBody, NO_RULES)
    model, warnings = await _model(request, body, warnings)
    answers = await _embedded(model, [body.prompt], truncate=False)
    return json_response(shapes.OneEmbedding(answers.values[0]), warning_headers(warnings))


async def _model(
    request: ApiRequest, body: EmbedBody | OllamaEmbeddingsBody, warnings: list[str]
) -> tuple[ServedModel, list[str]]:
    options, more = read_options(body.options)
    warnings = [*warnings, *more]
    model = await asked_model(request, body, options, warnings, "embed")
    model.require("embed")
    return model, warnings


async def _embedded(model: ServedModel, texts: list[str], *, truncate: bool) -> Answers:
    try:
        return await model.pooler.embed(texts, truncate=-1 if truncate else None)
    except ContextTooLong as error:
        raise ContextTooLong(error.what, error.why, "Split the text, or send truncate: true.", param="input") from None
