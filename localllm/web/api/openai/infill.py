"""POST /infill: fill in the middle of a text, as llama.cpp's editors ask for it (llama.vim, llama.vscode)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec
from litestar import post
from litestar.response.base import ASGIResponse

from localllm.engine.outputs import GenerationEvent
from localllm.errors import InvalidParameter, LocalLLMError
from localllm.serving.answers.conversation import ended, fill_in_of, infill_token_ids
from localllm.serving.answers.generation import Choice, Progress, generation_of
from localllm.serving.served import ServedModel
from localllm.text.fill_in import ExtraFile
from localllm.web.api.answer import streamed, whole
from localllm.web.api.exchange import ApiRequest, json_body, served_model
from localllm.web.api.fields import FieldRules, Hint, Refused, one_of
from localllm.web.api.openai import shapes
from localllm.web.api.openai.params import completion_params, request_options
from localllm.web.api.openai.schema import HARMLESS, HINTS, REFUSED, CompletionBody
from localllm.web.api.openapi import OF_MODELS, Operation, RequestBody
from localllm.web.api.reading import read
from localllm.web.api.timings import timings_object
from localllm.web.errors import openai_error
from localllm.web.shape import Shape

RESERVE = 256  # tokens that a prompt leaves for an answer without a limit
_ORDER = Hint("samplers apply in a fixed order")
_WHOLE = Hint("a step takes milliseconds")
_ELSEWHERE = (
    "suffix", "echo", "prompt_embeds", "logprobs", "prompt_logprobs", "truncate_prompt_tokens", "use_beam_search",
    "return_token_ids",
)  # fmt: skip
INFILL_RULES = FieldRules(
    HARMLESS | {"response_fields", "n_indent"},
    {**HINTS, "samplers": _ORDER, "t_max_prompt_ms": _WHOLE, "t_max_predict_ms": _WHOLE},
    {**REFUSED, **dict.fromkeys(_ELSEWHERE, Refused("Use POST /v1/completions with a suffix.", one_of(False, "")))},
)


class InfillFile(msgspec.Struct, kw_only=True):
    text: str
    filename: str | None = None


class InfillBody(CompletionBody, kw_only=True):
    input_prefix: str | None = None  # before the gap
    input_suffix: str | None = None  # behind it
    input_extra: list[InfillFile] | None = None  # other files
    prompt: str | None = None  # behind input_prefix: what the line has so far
    n_predict: int | None = None  # llama.cpp's max_tokens; -1: up to the context, 0: only read the prompt
    repeat_penalty: float | None = None  # llama.cpp's repetition_penalty


BODY = RequestBody(
    InfillBody, INFILL_RULES, example={"input_prefix": "def add(a, b):\n", "input_suffix": "\n", "n_predict": 16}
)


class InfillPieces:
    """Writes the events of a stream in llama.cpp's format."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def event(self, event: GenerationEvent, progress: Progress) -> bytes:
        if event.finish_reason is None:
            return _event(shapes.InfillPiece(event.text, stop=False)) if event.text else b""
        return _event(infill_response(self._model, event.text, event.finish_reason, event.stop_reason, progress))

    def end(self, progress: Progress) -> bytes:
        return b""

    def error(self, error: LocalLLMError) -> bytes:
        return _event(openai_error(error))


def _event(shape: Shape) -> bytes:
    return b"data: " + msgspec.json.encode(shape) + b"\n\n"


@post("/infill", status_code=200, operation=Operation(shapes.Infill, BODY, shapes.InfillPiece, also=OF_MODELS))
async def infill(request: ApiRequest) -> ASGIResponse:
    """Fill in the text between `input_prefix` and `input_suffix`, in llama.cpp's format.

    What does not fit into the context is left out, beginning with what is farthest from the gap.
    """
    body, warnings = await read(await json_body(request), InfillBody, INFILL_RULES)
    model = await served_model(request, body.model)
    if body.n is not None and body.n != 1:
        raise InvalidParameter("n must be 1.", "/infill returns one text.", param="n")
    fill_in = fill_in_of(model, "input_suffix")
    only_reads = body.n_predict == 0
    if body.max_tokens is None and body.n_predict is not None and body.n_predict >= 0:
        body.max_tokens = max(1, body.n_predict)
    if body.repeat_penalty is not None and body.repetition_penalty is None:
        body.repetition_penalty = body.repeat_penalty
    params, more = completion_params(body, model)
    params, warnings = ended(params, fill_in), warnings + more
    if body.max_tokens is None:
        params = replace(params, max_tokens=None)
    room = model.plan.max_model_len - min(params.max_tokens or RESERVE, model.plan.max_model_len // 2)
    extra = [ExtraFile(file.filename or "tmp", file.text) for file in body.input_extra or ()]
    before = (body.input_prefix or "") + (body.prompt or "")
    token_ids = await infill_token_ids(model, fill_in, before, body.input_suffix or "", extra, room)
    generation = generation_of(model, params, [token_ids], request_options(body))
    if body.stream:
        return await streamed(request, generation, InfillPieces(model), warnings)

    def respond(choices: Sequence[Choice]) -> shapes.Infill:
        [choice] = choices
        text = "" if only_reads else choice.text
        return infill_response(model, text, choice.finish_reason, choice.stop_reason, generation.progress)

    return await whole(request, generation, respond, warnings)


def infill_response(
    model: ServedModel, text: str, finish_reason: str | None, stop_reason: Any, progress: Progress
) -> shapes.Infill:
    usage = progress.usage()
    word = stop_reason if isinstance(stop_reason, str) else ""
    ended_by: Literal["eos", "word"] = "word" if word else "eos"
    return shapes.Infill(
        content=text,
        stop=True,
        model=model.shown_name,
        tokens_predicted=usage.completion_tokens,
        tokens_evaluated=usage.prompt_tokens,
        tokens_cached=usage.cached_tokens,
        stop_type="limit" if finish_reason == "length" else ended_by,
        stopping_word=word,
        timings=timings_object(progress),
    )
