"""POST /v1/rerank (in the format of Cohere and Jina) and /v1/score (vLLM): how relevant texts are to a text."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec
from litestar import post
from litestar.response.base import ASGIResponse

from localllm.engine.pooling_client import Answers
from localllm.errors import InvalidParameter
from localllm.serving.answers.conversation import require_readable
from localllm.serving.served import ServedModel
from localllm.units import format_count
from localllm.web.api.exchange import ApiRequest, json_body, json_response, served_model, warning_headers
from localllm.web.api.openai import shapes
from localllm.web.api.openai.schema import RULES, read_body
from localllm.web.api.openapi import OF_MODELS, Operation, RequestBody
from localllm.web.errors import InvalidType

MAX_DOCUMENTS = 2048
MAX_PAIR_CHARS = 16_000_000
"""All pairs of a request together; they take some five seconds to tokenise."""


class RerankBody(msgspec.Struct, kw_only=True):
    query: str
    documents: list[str | dict[str, Any]]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    truncate_prompt_tokens: int | None = None


class ScoreBody(msgspec.Struct, kw_only=True):
    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None
    truncate_prompt_tokens: int | None = None
    encoding_format: str | None = None


DOCUMENTS = ["Blue light is scattered most.", "Rust is iron oxide."]
RANKED = RequestBody(RerankBody, RULES, example={"query": "Why is the sky blue?", "documents": DOCUMENTS})
SCORED = RequestBody(ScoreBody, RULES, example={"text_1": "Why is the sky blue?", "text_2": DOCUMENTS})


@post(
    ["/v1/rerank", "/rerank", "/v2/rerank"],
    status_code=200,
    operation=Operation(shapes.Ranking, RANKED, also=OF_MODELS, guide="embed-and-rerank"),
)
async def rerank(request: ApiRequest) -> ASGIResponse:
    """Rank documents by their relevance to a query.

    The most relevant document comes first.
    """
    return await answer_rerank(request, await json_body(request))


async def answer_rerank(request: ApiRequest, raw: bytes) -> ASGIResponse:
    """Answer the rerank body `raw`, from a client or from a line of a batch."""
    body, warnings = await read_body(raw, RerankBody)
    documents = [_text_of(document, i) for i, document in enumerate(body.documents)]
    if not documents or len(documents) > MAX_DOCUMENTS:
        raise InvalidParameter(
            f"{len(documents)} documents were sent.", f"Send 1 to {MAX_DOCUMENTS}.", param="documents"
        )
    if body.top_n is not None and body.top_n < 1:
        raise InvalidParameter(f"top_n {body.top_n} is out of range.", "It must be at least 1.", param="top_n")
    model = await _scorer(request, body.model)
    pairs = _readable([(body.query, each) for each in documents], model)
    answers = await _scores(model, pairs, body.truncate_prompt_tokens)
    results = [shapes.Ranked(i, values[0]) for i, values in enumerate(answers.values)]
    results.sort(key=lambda result: (-result.relevance_score, result.index))
    if body.return_documents is not False:
        for result in results:
            result.document = shapes.RankedText(documents[result.index])
    answer = shapes.Ranking(
        id=f"rerank-{uuid.uuid4().hex}",
        model=model.name,
        results=results[: body.top_n],
        usage=shapes.PoolingUsage(answers.num_tokens, answers.num_tokens),
    )
    return json_response(answer, warning_headers(warnings))


@post(
    ["/v1/score", "/score"],
    status_code=200,
    operation=Operation(shapes.Scores, SCORED, also=OF_MODELS, guide="embed-and-rerank"),
)
async def score(request: ApiRequest) -> ASGIResponse:
    """Score the relevance of texts to a text.

    One text is paired with each of the others; equally many texts are paired in their order.
    """
    return await answer_score(request, await json_body(request))


async def answer_score(request: ApiRequest, raw: bytes) -> ASGIResponse:
    """Answer the score body `raw`, from a client or from a line of a batch."""
    body, warnings = await read_body(raw, ScoreBody)
    firsts = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    seconds = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if max(len(firsts), len(seconds)) > MAX_DOCUMENTS:
        what = f"{max(len(firsts), len(seconds))} texts are too many."
        raise InvalidParameter(what, f"A request may have at most {MAX_DOCUMENTS}.", param="text_2")
    firsts = firsts * len(seconds) if len(firsts) == 1 else firsts
    if len(firsts) != len(seconds) or not firsts:
        raise InvalidParameter(
            f"{len(firsts)} texts cannot be paired with {len(seconds)}.",
            "text_1 must have one text, or as many as text_2.",
            param="text_1",
        )
    model = await _scorer(request, body.model)
    pairs = _readable(list(zip(firsts, seconds, strict=True)), model)
    answers = await _scores(model, pairs, body.truncate_prompt_tokens)
    answer = shapes.Scores(
        id=f"score-{uuid.uuid4().hex}",
        object="list",
        model=model.name,
        data=[shapes.OpenAIScore(i, "score", values[0]) for i, values in enumerate(answers.values)],
        usage=shapes.PoolingUsage(answers.num_tokens, answers.num_tokens),
    )
    return json_response(answer, warning_headers(warnings))


async def _scores(model: ServedModel, pairs: list[tuple[str, str]], truncate: int | None) -> Answers:
    return await model.pooler.score(pairs, truncate=truncate, is_background=model.is_background)


async def _scorer(request: ApiRequest, name: str | None) -> ServedModel:
    """Return a model with one score per pair. A model with several classes is refused: no class stands
    for relevance.
    """
    model = await served_model(request, name, "score")
    model.require("score")
    if model.pooler.dim != 1:
        raise InvalidParameter(
            f"{model.name} is a classifier of {model.pooler.dim} classes.",
            "A reranker must have one score.",
            param="model",
        )
    return model


def _readable(pairs: list[tuple[str, str]], model: ServedModel) -> list[tuple[str, str]]:
    """Return the pairs. Raises if they are too long to tokenise: the query counts again with each document."""
    for pair in pairs:
        require_readable(sum(map(len, pair)), model)
    num_chars = sum(len(first) + len(second) for first, second in pairs)
    if num_chars > MAX_PAIR_CHARS:
        raise InvalidParameter(
            f"The pairs have {format_count(num_chars)} characters together.",
            f"A request may have at most {format_count(MAX_PAIR_CHARS)}; the query counts once for each document.",
            "Send fewer documents, or a shorter query.",
        )
    return pairs


def _text_of(document: str | dict[str, Any], index: int) -> str:
    text = document if isinstance(document, str) else document.get("text")
    if not isinstance(text, str):
        raise InvalidType(f"Invalid type for 'documents[{index}]'.", 'Expected a text or {"text": ...}.',
                          param="documents")  # fmt: skip
    return text
