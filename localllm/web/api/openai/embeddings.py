"""POST /v1/embeddings: embed texts or token ids; vectors are numbers, or base64 of little-endian fp32."""

from __future__ import annotations

import base64
import struct
from typing import Any

import msgspec
from litestar import post
from litestar.response.base import ASGIResponse

from localllm.engine.pooling_client import Text
from localllm.errors import InvalidParameter
from localllm.serving.answers.conversation import require_readable
from localllm.web.api.exchange import ApiRequest, json_body, json_response, served_model, warning_headers
from localllm.web.api.openai import shapes
from localllm.web.api.openai.schema import RULES, read_body
from localllm.web.api.openapi import OF_MODELS, Operation, RequestBody
from localllm.web.api.remote import passed_on
from localllm.web.api.timings import MAX_INPUTS, shortened
from localllm.web.errors import InvalidType


class EmbeddingsBody(msgspec.Struct, kw_only=True):
    input: Any  # str, [str], [int] or [[int]]
    model: str | None = None
    encoding_format: str | None = None  # float, base64
    dimensions: int | None = None  # see `shortened`
    truncate_prompt_tokens: int | None = None
    prompt_name: str | None = None  # name of one of the checkpoint's prompts, which is put before each input
    user: str | None = None


@post(
    ["/v1/embeddings", "/embeddings"],
    status_code=200,
    operation=Operation(
        shapes.Embeddings,
        RequestBody(EmbeddingsBody, RULES, example={"input": ["Hello"]}),
        also=OF_MODELS,
        guide="embed-and-rerank",
    ),
)
async def embeddings(request: ApiRequest) -> ASGIResponse:
    """Embed each text."""
    return await answer_embeddings(request, await json_body(request))


async def answer_embeddings(request: ApiRequest, raw: bytes) -> ASGIResponse:
    """Answer the embeddings body `raw`, from a client or from a page."""
    if (answer := await passed_on(request, raw, "/embeddings")) is not None:
        return answer
    body, warnings = await read_body(raw, EmbeddingsBody)
    texts = input_texts(body.input)
    model = await served_model(request, body.model, "embed")
    model.require("embed")
    for text in texts:
        if isinstance(text, str):
            require_readable(len(text), model)
    pooler = model.pooler
    prompt = _prompt(texts, body, pooler.prompts)
    answers = await pooler.embed(
        texts, truncate=body.truncate_prompt_tokens, prompt=prompt, is_background=model.is_background
    )
    vectors = [shortened(vector, body.dimensions) for vector in answers.values]
    encode = vector_encoder(body.encoding_format)
    data = [shapes.OpenAIEmbedding("embedding", i, encode(vector)) for i, vector in enumerate(vectors)]
    usage = shapes.PoolingUsage(answers.num_tokens, answers.num_tokens)
    return json_response(shapes.Embeddings("list", data, model.name, usage), warning_headers(warnings))


def input_texts(given: Any) -> list[Text]:
    """Return the texts, or lists of token ids, of a field `input`. Raises `InvalidType`, `InvalidParameter`."""
    if isinstance(given, str) or (isinstance(given, list) and given and all(_is_id(each) for each in given)):
        given = [given]
    if not isinstance(given, list) or not given or not all(_is_text(each) for each in given):
        raise InvalidType(
            "Invalid type for 'input'.",
            "Expected a string, a list of strings, token ids, or a list of token id lists.",
            param="input",
        )
    if len(given) > MAX_INPUTS:
        raise InvalidParameter(
            f"{len(given)} inputs are too many.", f"A request may have at most {MAX_INPUTS}.", param="input"
        )
    return given


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(_is_id(each) for each in value))


def _prompt(texts: list[Text], body: EmbeddingsBody, prompts: dict[str, str]) -> str:
    if body.prompt_name is None:
        return ""
    if body.prompt_name not in prompts:
        known = ", ".join(sorted(prompts)) or "none"
        raise InvalidParameter(
            f"The model has no prompt named {body.prompt_name!r}.", f"Its prompts: {known}.", param="prompt_name"
        )
    if not all(isinstance(text, str) for text in texts):
        raise InvalidParameter("A prompt can be put before text, not before token ids.", param="prompt_name")
    return prompts[body.prompt_name]


def vector_encoder(name: str | None) -> Any:
    """Return the function that writes a vector in this `encoding_format`. Raises `InvalidParameter`."""
    if name in (None, "float"):
        return list
    if name == "base64":
        return lambda vector: base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
    raise InvalidParameter(f"encoding_format {name!r} is not known.", "Known: float, base64.", param="encoding_format")
