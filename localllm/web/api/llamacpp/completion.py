"""POST /completion, llama.cpp's own route: continue a text, in its fields and events; and GET /props."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from litestar import get, post
from litestar.response.base import ASGIResponse

from localllm.engine.outputs import GenerationEvent
from localllm.engine.params import SAMPLING_PARAMS, SamplingParams, given_params
from localllm.engine.request import RequestOptions
from localllm.engine.step import TokenLogprobs
from localllm.errors import ContextTooLong, InvalidParameter, LocalLLMError
from localllm.serving.answers.conversation import encode, sampling_params, within_context
from localllm.serving.answers.generation import Choice, Progress, generation_of, parts_of
from localllm.serving.entry import ModelLoading
from localllm.serving.served import ServedModel
from localllm.text.structured import StructuredOutputsParams
from localllm.version import __version__
from localllm.web.api.answer import streamed, whole
from localllm.web.api.exchange import ApiRequest, json_body, json_response, manager_of, served_model
from localllm.web.api.llamacpp import schema as shapes
from localllm.web.api.llamacpp.schema import RULES, LlamaBody
from localllm.web.api.model_facts import facts_of
from localllm.web.api.openapi import OF_MODELS, Operation, RequestBody
from localllm.web.api.reading import ModelQuery, read
from localllm.web.api.timings import scored, timings_object
from localllm.web.errors import openai_error
from localllm.web.shape import event_bytes

DIALECT = "llamacpp"  # a key of ParamInfo.spellings
RANDOM_SEED, TO_THE_END = -1, -1


@post(
    "/completion",
    status_code=200,
    operation=Operation(
        shapes.LlamaCompletion,
        RequestBody(LlamaBody, RULES, example={"prompt": "The sky is", "n_predict": 16}),
        shapes.LlamaCompletion,
        also=OF_MODELS,
    ),
)
async def completion(request: ApiRequest) -> ASGIResponse:
    """Continue a text.

    llama.cpp has the same route. With `stream: true` the answer is sent as events.
    """
    body, warnings = await read(await json_body(request), LlamaBody, RULES)
    model = await served_model(request, body.model)
    prompt = body.prompt
    token_ids = await encode(prompt, True, model) if isinstance(prompt, str) else prompt
    params = within_context(params_of(body, model), len(token_ids), model)
    options = RequestOptions(cache_salt=uuid.uuid4().hex if body.cache_prompt is False else None)
    generation = generation_of(model, params, [token_ids], options)
    pieces = LlamaPieces(model, params, tokens=bool(body.return_tokens))
    try:
        if body.stream:
            return await streamed(request, generation, pieces, warnings)
        return await whole(request, generation, lambda choices: pieces.whole(choices[0], generation.progress), warnings)
    except ContextTooLong as error:
        error.param = "prompt"
        raise


def params_of(body: LlamaBody, model: ServedModel) -> SamplingParams:
    """Return the parameters. Raises the error that names the wrong field in llama.cpp's spelling."""
    asked: dict[str, Any] = given_params(body, DIALECT)
    if asked.get("seed") == RANDOM_SEED:
        del asked["seed"]
    if asked.get("max_tokens", TO_THE_END) == TO_THE_END:
        asked["max_tokens"] = None
    if body.n_probs:
        asked["logprobs"] = model.generator.limits.num_logprobs(body.n_probs, "n_probs")
    if body.grammar and body.json_schema is not None:
        raise InvalidParameter("grammar and json_schema cannot be combined.", "Send one.", param="json_schema")
    if body.grammar:
        asked["structured_outputs"] = StructuredOutputsParams(grammar=body.grammar, param="grammar")
    if body.json_schema is not None:
        asked["structured_outputs"] = StructuredOutputsParams(json=body.json_schema, param="json_schema")
    try:
        return sampling_params(model, asked)
    except InvalidParameter as error:
        ours = error.param or ""
        theirs = SAMPLING_PARAMS[ours].spellings.get(DIALECT, ours) if ours in SAMPLING_PARAMS else ours
        raise InvalidParameter(error.what.replace(ours, theirs), error.why, param=theirs) from None


@dataclass(slots=True)
class LlamaPieces:
    """The pieces of one answer."""

    model: ServedModel
    params: SamplingParams
    tokens: bool  # with token ids
    _reason: str | None = None
    _stop: int | str | None = None

    def event(self, event: GenerationEvent, progress: Progress) -> bytes:
        self._reason, self._stop = event.finish_reason, event.stop_reason
        text = "".join(part.text for part in parts_of(event) if hasattr(part, "text"))
        return self._piece(text, event.token_ids, event.logprobs) if text or event.token_ids else b""

    def end(self, progress: Progress) -> bytes:
        return _event(self._last("", (), progress))

    def error(self, error: LocalLLMError) -> bytes:
        return event_bytes(openai_error(error))

    def whole(self, choice: Choice, progress: Progress) -> shapes.LlamaCompletion:
        self._reason, self._stop = choice.finish_reason, choice.stop_reason
        found = self._last(choice.text, choice.token_ids, progress)
        if self.params.logprobs is not None:
            found.completion_probabilities = self._probabilities(choice.logprobs)
        return found

    def _piece(self, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> bytes:
        piece = shapes.LlamaCompletion(content=text, tokens=list(token_ids) if self.tokens else [], stop=False)
        if self.params.logprobs is not None:
            piece.completion_probabilities = self._probabilities(logprobs)
        return _event(piece)

    def _probabilities(self, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        found = []
        for entry in entries:
            first, *top = [
                {"id": token_id, **each} for token_id, each in
                zip(entry.token_ids, scored(entry, self.model.tokenizer), strict=True)
            ]  # fmt: skip
            found.append({**first, "top_logprobs": top})
        return found

    def _last(self, text: str, token_ids: Sequence[int], progress: Progress) -> shapes.LlamaCompletion:
        usage = progress.usage()
        stop = "word" if isinstance(self._stop, str) else "limit" if self._reason == "length" else "eos"
        return shapes.LlamaCompletion(
            content=text,
            tokens=list(token_ids) if self.tokens else [],
            stop=True,
            model=self.model.shown_name,
            tokens_predicted=usage.completion_tokens,
            tokens_evaluated=usage.prompt_tokens,
            tokens_cached=usage.cached_tokens,
            truncated=False,
            stop_type=stop,
            stopping_word=self._stop if isinstance(self._stop, str) else "",
            generation_settings=settings_of(self.params, self.model),
            timings=timings_object(progress),
        )


def _event(piece: shapes.LlamaCompletion) -> bytes:
    return b"data: " + msgspec.json.encode(piece) + b"\n\n"


def settings_of(params: SamplingParams, model: ServedModel) -> dict[str, Any]:
    """Return sampling parameters in llama.cpp's spelling."""
    named = {info.spellings.get(DIALECT, name): getattr(params, name) for name, info in SAMPLING_PARAMS.items()}
    shown = {name: value for name, value in named.items() if isinstance(value, int | float | str)}
    return {"n_ctx": model.plan.max_model_len, **shown, "n_predict": params.max_tokens or TO_THE_END}


@get("/props", operation=Operation(shapes.LlamaProps, query=ModelQuery, also=OF_MODELS))
async def props(request: ApiRequest) -> ASGIResponse:
    """Describe a model: its context, its chat template and its defaults. Nothing is loaded.

    llama.cpp has the same route. Without `model` in the query it describes the model that a request without a name
    would get.
    """
    manager, name = manager_of(request), request.query_params.get("model")
    if not name:
        if (default := manager.register.default) is None:
            raise ModelLoading("The model is loading.", hint="Try again in a moment.")
        name = default.name
    model = await facts_of(manager, name)
    served = model.entry.served if model.entry is not None else None
    special = served.tokenizer.special_tokens if served is not None else {}
    answer = shapes.LlamaProps(
        default_generation_settings=shapes.LlamaSettings(
            model.context, settings_of(served.default_params, served) if served is not None else {}
        ),
        total_slots=served.plan.max_num_seqs if served is not None else 1,
        model_alias=model.name,
        model_path=str(model.path or ""),
        modalities={"vision": model.abilities.vision, "audio": model.abilities.hearing},
        chat_template=model.abilities.template,
        chat_template_caps={"supports_tools": model.abilities.tools, "supports_tool_calls": model.abilities.tools},
        bos_token=special.get("bos_token", ""),
        eos_token=special.get("eos_token", ""),
        build_info=f"localllm {__version__}",
        is_sleeping=model.entry is not None and model.entry.state == "sleeping",
    )
    return json_response(answer)
