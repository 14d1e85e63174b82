"""Requests and answers for embeddings, reranking and scores, in the formats of OpenAI, Cohere and vLLM.

Does not know: how answers are made (api/openai).
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from localllm.web.api.openai.embeddings import EmbeddingsBody, embeddings
from localllm.web.api.openai.fields import RULES
from localllm.web.api.openai.rerank import RerankBody, ScoreBody, rerank, score
from localllm.web.openapi.bodies import Body
from localllm.web.openapi.document import OF_MODELS, Operation, Shape, Table


class PoolingUsage(Shape):
    prompt_tokens: int
    total_tokens: int


class Embedding(Shape):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # str: base64 of little-endian fp32


class Embeddings(Shape):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: PoolingUsage


class RankedText(Shape):
    text: str


class Ranked(Shape):
    index: int
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class Ranking(Shape):
    id: str
    model: str
    results: list[Ranked]
    usage: PoolingUsage


class Score(Shape):
    index: int
    object: Literal["score"]
    score: float


class Scores(Shape):
    id: str
    object: Literal["list"]
    model: str
    data: list[Score]
    usage: PoolingUsage


_DOCUMENTS = ["Blue light is scattered most.", "Rust is iron oxide."]

TABLE: Table = {
    embeddings: Operation(
        "Embed each text.", Embeddings, Body(EmbeddingsBody, RULES, example={"input": ["Hello"]}),
        also=OF_MODELS,
    ),
    rerank: Operation(
        "Rank documents by their relevance to a query.", Ranking,
        Body(RerankBody, RULES, example={"query": "Why is the sky blue?", "documents": _DOCUMENTS}), also=OF_MODELS,
    ),
    score: Operation(
        "Score the relevance of texts to a text.", Scores,
        Body(ScoreBody, RULES, example={"text_1": "Why is the sky blue?", "text_2": _DOCUMENTS}), also=OF_MODELS,
    ),
}  # fmt: skip
