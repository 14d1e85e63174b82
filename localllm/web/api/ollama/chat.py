"""POST /api/chat and /api/generate. Without a prompt they load the model, or unload it if keep_alive is 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from litestar import post
from litestar.response.base import ASGIResponse

from localllm.config.settings import Task
from localllm.errors import InvalidParameter
from localllm.serving.answers.conversation import (
    CONTINUE,
    NO_TOOLS,
    ChatRequest,
    Conversation,
    encode,
    ended,
    fill_in_of,
    infill_token_ids,
    within_context,
)
from localllm.serving.answers.generation import generation_of
from localllm.serving.answers.pictures import PromptIds
from localllm.serving.entry import ModelEntry
from localllm.serving.served import ServedModel
from localllm.web.access.caller import may, require
from localllm.web.api.answer import streamed, whole
from localllm.web.api.exchange import (
    TAKES_PICTURES,
    ApiRequest,
    json_response,
    keep_alive_seconds,
    manager_of,
    served_model,
    warning_headers,
)
from localllm.web.api.ollama import shapes
from localllm.web.api.ollama.conversation import (
    capped_context,
    is_to_be_continued,
    params_of,
    plain_messages,
    read_options,
    structured_outputs,
    think_switches,
    tools_of,
    with_logprobs,
    with_pictures,
)
from localllm.web.api.ollama.lines import LINES, OllamaHead, OllamaLines, RequestClock
from localllm.web.api.ollama.models import plain_name
from localllm.web.api.ollama.remote import remote_answer
from localllm.web.api.ollama.schema import (
    CHAT_RULES,
    GENERATE_RULES,
    INSIDE,
    AskBody,
    EmbedBody,
    OllamaChatBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    Options,
    read_body,
)
from localllm.web.api.ollama.shapes import OllamaMessage
from localllm.web.api.openapi import OF_MODELS, Operation, RequestBody
from localllm.web.api.pictures import readable
from localllm.web.errors import MissingParameter

CONVERSATION = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "options": {"num_predict": 64}}
PROMPT = {"prompt": "Why is the sky blue?", "options": {"num_predict": 64}}


@post(
    "/api/chat",
    status_code=200,
    opt=TAKES_PICTURES,
    operation=Operation(
        shapes.ChatLine, RequestBody(OllamaChatBody, CHAT_RULES, INSIDE, CONVERSATION), shapes.ChatLine, also=OF_MODELS
    ),
)
async def chat(request: ApiRequest) -> ASGIResponse:
    """Answer a conversation.

    With `stream: false` the answer is sent in one piece.
    """
    clock = RequestClock()
    body, warnings = await read_body(request, OllamaChatBody, CHAT_RULES)
    messages = body.messages or []
    template: dict[str, Any] = {}
    if is_to_be_continued(messages):
        template = dict(CONTINUE)
    return await _answer(request, body, "chat", plain_messages(messages) or None, template, warnings, clock)


@post(
    "/api/generate",
    status_code=200,
    opt=TAKES_PICTURES,
    operation=Operation(
        shapes.GenerateLine,
        RequestBody(OllamaGenerateBody, GENERATE_RULES, INSIDE, PROMPT),
        shapes.GenerateLine,
        also=OF_MODELS,
    ),
)
async def generate(request: ApiRequest) -> ASGIResponse:
    """Answer a prompt, or continue it (`raw`).

    With `stream: false` the answer is sent in one piece.
    """
    clock = RequestClock()
    body, warnings = await read_body(request, OllamaGenerateBody, GENERATE_RULES)
    for name in ("system", "think", "images"):
        if body.raw and getattr(body, name):
            raise InvalidParameter(
                f"{name!r} cannot be combined with a raw prompt.", "Write it into the prompt.", param=name
            )
    asked: str | list[dict[str, Any]] | None = body.prompt or None
    if body.suffix:
        for name in ("raw", "system", "think", "format"):
            if getattr(body, name):
                raise InvalidParameter(
                    f"{name!r} cannot be combined with a suffix.", "The prompt is made of two texts.", param=name
                )
        return await _answer(request, body, "generate", body.prompt or "", {}, warnings, clock)
    if asked is not None and not body.raw:
        system = [{"role": "system", "content": body.system}] if body.system else []
        content = with_pictures(str(asked), body.images, "images") if body.images else asked
        asked = [*system, {"role": "user", "content": content}]
    return await _answer(request, body, "generate", asked, {}, warnings, clock)


async def _answer(
    request: ApiRequest,
    body: AskBody,
    kind: Literal["chat", "generate"],
    asked: str | list[dict[str, Any]] | None,  # a raw prompt, or messages; None: no prompt
    template: dict[str, Any],
    warnings: list[str],
    clock: RequestClock,
) -> ASGIResponse:
    options, more = read_options(body.options)
    warnings = [*warnings, *more]
    if asked is None and not body.model:
        raise MissingParameter("model is required", param="model")
    if asked is None and keep_alive_seconds(body.keep_alive) == 0:
        return await _unload(request, body, kind, clock)
    if asked is not None and (answer := await remote_answer(request, body, kind, asked, warnings, clock)) is not None:
        return answer
    model = await asked_model(request, body, options, warnings)
    clock.has_model()
    head = OllamaHead(model.shown_name, kind, clock, model.tokenizer if body.logprobs else None)
    if asked is None:
        loaded = head.line(
            OllamaMessage("assistant", ""), done=True, done_reason="load", total_duration=clock.total_ns()
        )
        return json_response(loaded, warning_headers(warnings))
    params = with_logprobs(params_of(options, model), body, model)
    if (structure := structured_outputs(body.format)) is not None:
        params = replace(params, structured_outputs=structure)
    if isinstance(asked, str):
        token_ids: Sequence[int]
        if isinstance(body, OllamaGenerateBody) and body.suffix:
            fill_in = fill_in_of(model)
            token_ids, params = await infill_token_ids(model, fill_in, asked, body.suffix), ended(params, fill_in)
        else:
            token_ids = await encode(asked, True, model)
        generation = generation_of(model, within_context(params, len(token_ids), model), [token_ids])
    else:
        messages, more = readable(asked, model)
        switches, still_more = think_switches(body.think, model)
        warnings += [*more, *still_more]
        tools = tools_of(body.tools, model) if isinstance(body, OllamaChatBody) else NO_TOOLS
        chat_request = ChatRequest(Conversation(messages, template | switches, tools), params)
        prompt = await _token_ids(chat_request, kind, model)
        warnings += prompt.warnings
        generation = chat_request.within_context(len(prompt), model).generation(model, prompt)
    if body.stream is not False:
        return await streamed(request, generation, OllamaLines(head), warnings, LINES)
    return await whole(request, generation, lambda choices: head.whole(choices, generation.progress), warnings)


async def _token_ids(asked: ChatRequest, kind: str, model: ServedModel) -> PromptIds:
    """Return the prompt. For a model without a chat template, a prompt without a system message is not changed."""
    content = asked.conversation.messages[-1]["content"]
    is_plain = len(asked.conversation.messages) == 1 and isinstance(content, str)
    if kind == "generate" and is_plain and not model.chat_template:
        return PromptIds(await encode(content, True, model))
    return await asked.token_ids(model)


async def asked_model(
    request: ApiRequest,
    body: AskBody | EmbedBody | OllamaEmbeddingsBody,
    options: Options,
    warnings: list[str],
    task: Task = "generate",
) -> ServedModel:
    """Return the model that the body names, kept loaded as long as the body says. Adds to `warnings` if the time cannot
    be kept.
    """
    name, keep_alive_s = plain_name(body.model), keep_alive_seconds(body.keep_alive)
    if keep_alive_s is not None and not may(request, "admin"):  # how long a model stays affects all clients
        warnings.append("field 'keep_alive' has no effect: it needs a key with the scope admin")
        keep_alive_s = None
    model = await served_model(request, name, task, keep_alive_s=keep_alive_s)
    warnings += capped_context(options, model)
    if keep_alive_s is not None and any(
        entry.pinned and entry.name == model.name for entry in manager_of(request).entries
    ):
        warnings.append("field 'keep_alive' has no effect: the model is pinned")
    return model


async def _unload(
    request: ApiRequest, body: AskBody, kind: Literal["chat", "generate"], clock: RequestClock
) -> ASGIResponse:
    require(request, "admin")
    manager, name = manager_of(request), plain_name(body.model)
    entry = await manager.register.look_up(name) if name else manager.register.default
    if isinstance(entry, ModelEntry) and entry.state not in ("unloaded", "failed"):
        await manager.unload(name or entry.name)
    shown = entry.name if isinstance(entry, ModelEntry) else name or ""
    return json_response(
        OllamaHead(shown, kind, clock).line(OllamaMessage("assistant", ""), done=True, done_reason="unload")
    )
