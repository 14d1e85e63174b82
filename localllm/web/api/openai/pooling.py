"""POST /pooling and /classify, in vLLM's format: vectors, scores or rewards of texts, or of their tokens.

`/pooling` returns what the model computes: a vector of an embedding model, the scores of a classifier, rewards, or with
`task: token_embed` or `token_classify` an output for each token. `/classify` returns the probability of each class.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec
from litestar import post
from litestar.response.base import ASGIResponse

from localllm.engine.pooling_client import Answers, Text
from localllm.errors import InvalidParameter
from localllm.models.encoders.recipe import Want
from localllm.serving.answers.conversation import require_readable
from localllm.serving.served import ServedModel
from localllm.web.api.exchange import ApiRequest, json_body, json_response, served_model, warning_headers
from localllm.web.api.openai import shapes
from localllm.web.api.openai.embeddings import input_texts, vector_encoder
from localllm.web.api.openai.schema import RULES, read_body
from localllm.web.api.openapi import OF_MODELS, Operation, RequestBody
from localllm.web.errors import MissingParameter

TASKS = ("embed", "classify", "token_embed", "token_classify")


class PoolingBody(msgspec.Struct, kw_only=True):
    input: Any = None  # str, [str], [int] or [[int]]
    messages: list[dict[str, Any]] | None = None  # instead of input: a conversation, through the chat template
    model: str | None = None
    task: str | None = None  # one of TASKS; without it, what the model does
    encoding_format: str | None = None  # float, base64
    truncate_prompt_tokens: int | None = None
    use_activation: bool | None = None  # false: scores before the sigmoid or softmax
    add_generation_prompt: bool | None = None
    user: str | None = None


class ClassifyBody(msgspec.Struct, kw_only=True):
    input: Any = None
    messages: list[dict[str, Any]] | None = None
    model: str | None = None
    truncate_prompt_tokens: int | None = None
    use_activation: bool | None = None
    add_generation_prompt: bool | None = None
    user: str | None = None


POOLED = RequestBody(PoolingBody, RULES, example={"input": ["Blue light is scattered most."]})
CLASSIFIED = RequestBody(ClassifyBody, RULES, example={"input": ["What a fine day."]})


@post(
    "/pooling",
    status_code=200,
    operation=Operation(shapes.Pooled, POOLED, also=OF_MODELS, guide="embed-and-rerank"),
)
async def pooling(request: ApiRequest) -> ASGIResponse:
    """Return what a pooling model computes for texts, or for each of their tokens."""
    return await answer_pooling(request, await json_body(request))


async def answer_pooling(request: ApiRequest, raw: bytes) -> ASGIResponse:
    """Answer the pooling body `raw`, from a client or from a line of a batch."""
    body, warnings = await read_body(raw, PoolingBody)
    model = await _pooling_model(request, body.model)
    want = _want(body, model)
    answers = await _pool(body, model, want)
    encode, dim = vector_encoder(body.encoding_format), model.pooler.dim
    data = []
    for i, values in enumerate(answers.values):
        rows = [encode(values[at : at + dim]) for at in range(0, len(values), dim)]
        data.append(shapes.PooledText(i, "pooling", rows if want == "tokens" else rows[0]))
    usage = shapes.PoolingUsage(answers.num_tokens, answers.num_tokens)
    pooled = shapes.Pooled(f"pool-{uuid.uuid4().hex}", "list", int(time.time()), model.name, data, usage)
    return json_response(pooled, warning_headers(warnings))


@post(
    "/classify",
    status_code=200,
    operation=Operation(shapes.Classes, CLASSIFIED, also=OF_MODELS, guide="embed-and-rerank"),
)
async def classify(request: ApiRequest) -> ASGIResponse:
    """Return the probability of each class of a text, and the likeliest class."""
    return await answer_classify(request, await json_body(request))


async def answer_classify(request: ApiRequest, raw: bytes) -> ASGIResponse:
    """Answer the classify body `raw`, from a client or from a line of a batch."""
    body, warnings = await read_body(raw, ClassifyBody)
    model = await _pooling_model(request, body.model)
    model.require("score")
    if "tokens" in model.pooler.wants:
        what, why = f"{model.name} gives rewards, which are not probabilities of classes.", "It has no classes."
        raise InvalidParameter(what, why, "POST /pooling", param="model")
    answers = await _pool(body, model, "raw" if body.use_activation is False else "pooled")
    labels = model.pooler.labels
    data = [
        shapes.ClassifiedText(i, labels[max(range(len(probs)), key=probs.__getitem__)], probs, len(probs))
        for i, probs in enumerate(answers.values)
    ]
    usage = shapes.PoolingUsage(answers.num_tokens, answers.num_tokens)
    classes = shapes.Classes(f"classify-{uuid.uuid4().hex}", "list", int(time.time()), model.name, data, usage)
    return json_response(classes, warning_headers(warnings))


async def _pooling_model(request: ApiRequest, name: str | None) -> ServedModel:
    """Return the model of that name; without one, the last used model that scores. Raises `WrongTask` for a model that
    generates."""
    model = await served_model(request, name, "score")
    model.require("embed", "score")
    return model


def _want(body: PoolingBody, model: ServedModel) -> Want:
    """Return the output that the body asks for. Raises `InvalidParameter` for a task of another kind of model."""
    task, kind, wants = body.task, "embed" if model.spec.task == "embed" else "classify", model.pooler.wants
    if task is not None and (task not in TASKS or task.removeprefix("token_") != kind):
        what, why = f"task {task[:40]!r} is not supported by {model.name}.", f"Supported: {kind}, token_{kind}."
        raise InvalidParameter(what, why, param="task")
    if task == f"token_{kind}" or (task is None and "pooled" not in wants):
        return "tokens"
    # Of a reward, vLLM's default is the plain value, which "pooled" is as well.
    return "raw" if body.use_activation is False and kind == "classify" else "pooled"


async def _pool(body: PoolingBody | ClassifyBody, model: ServedModel, want: Want) -> Answers:
    texts = _texts(body, model)
    for text in texts:
        if isinstance(text, str):
            require_readable(len(text), model)
    truncate = body.truncate_prompt_tokens
    return await model.pooler.pool(texts, want, truncate=truncate, is_background=model.is_background)


def _texts(body: PoolingBody | ClassifyBody, model: ServedModel) -> list[Text]:
    if body.messages is None and body.input is None:
        raise MissingParameter("Missing required parameter: 'input'.", "Send input or messages.", param="input")
    if body.messages is None:
        return input_texts(body.input)
    if body.input is not None:
        raise InvalidParameter("Both input and messages were sent.", "Send one of the two.", param="messages")
    if not model.chat_template:
        what = f"{model.name} has no chat template."
        raise InvalidParameter(what, "A conversation needs one.", "Send input.", param="messages")
    require_readable(sum(len(str(each.get("content"))) for each in body.messages), model)
    text = model.chat_template.render(body.messages, add_generation_prompt=bool(body.add_generation_prompt))
    return [model.tokenizer.encode(text, add_special_tokens=False)]
