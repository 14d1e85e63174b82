"""Translate a request body into `SamplingParams` and `RequestOptions`: the client's value, else the model's
generation_config, else OpenAI's.

`SamplingParams` checks ranges and names the wrong field. This module has only the defaults, and the spellings that
differ between the API and the engine. The ways in which clients ask for structured output become one value:

    response_format      OpenAI: {"type": "json_schema", "json_schema": {"schema": ...}}, json_object, text;
                         vLLM: structural_tag, with the tag's fields beside the type
    structured_outputs   vLLM: json, json_object, regex, choice, grammar, structural_tag
    guided_*             vLLM, until 0.12
    grammar, json_schema llama.cpp
`use_beam_search` is vLLM's. OpenAI's `prediction` is a text that the answer may repeat, such as the file that it edits;
the answer does not depend on it: it is a source of guesses, which are verified (engine/speculation.py).
Does not know: prompts, HTTP.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import anyio.to_thread
import msgspec

from localllm.engine.beam_search import check_length_penalty
from localllm.engine.params import SamplingParams, given_params
from localllm.engine.request import RequestOptions
from localllm.errors import InvalidParameter, UnsupportedParameter
from localllm.serving.answers.conversation import sampling_params
from localllm.serving.served import ServedModel
from localllm.text.structured import StructuredOutputsParams
from localllm.web.api.hints import MODEL_HINTS, thinking_budget
from localllm.web.api.openai.schema import ChatBody, CompletionBody, GenerateBody, Prediction
from localllm.web.errors import InvalidType, MissingParameter

ALONE = {
    "guided_json": "json", "guided_json_object": "json_object", "guided_regex": "regex", "guided_choice": "choice",
    "guided_grammar": "grammar", "structural_tag": "structural_tag", "grammar": "grammar", "json_schema": "json",
}  # fmt: skip
"""Fields that each set one kind of structured output."""


def structured_outputs(body: GenerateBody) -> StructuredOutputsParams | None:
    """Return the requested structured output. Raises `RequestError` if a request combines two of the ways, or one is
    invalid.
    """
    ways = {
        name: _alone(name, value, body) for name in ALONE if (value := getattr(body, name)) not in (None, False, "")
    }
    if body.response_format is not None and (asked := _response_format(body.response_format)) is not None:
        ways["response_format"] = asked
    if body.structured_outputs is not None:
        fields = msgspec.structs.asdict(body.structured_outputs)
        if asked := {name: value for name, value in fields.items() if value is not None}:
            ways["structured_outputs"] = asked
    if len(ways) > 1:
        first, second, *_ = ways
        raise InvalidParameter(f"{first} and {second} cannot be combined.", "Send only one of the two.", param=second)
    return next((StructuredOutputsParams(**asked, param=name) for name, asked in ways.items()), None)


def _alone(name: str, value: Any, body: GenerateBody) -> dict[str, Any]:
    pattern = {"whitespace_pattern": body.guided_whitespace_pattern} if body.guided_whitespace_pattern else {}
    return {ALONE[name]: value, **pattern}


def _response_format(asked: dict[str, Any]) -> dict[str, Any] | None:
    kind = asked.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        return {"json": _schema(asked)}
    if kind == "structural_tag":
        return {"structural_tag": {name: value for name, value in asked.items() if name != "type"}}
    raise InvalidParameter(
        f"Unknown response_format type {kind!r}.",
        "Known: text, json_object, json_schema, structural_tag.",
        param="response_format.type",
    )


def _schema(asked: dict[str, Any]) -> Any:
    """Return the schema. `strict` changes nothing: a schema is either enforced completely or refused."""
    named = asked.get("json_schema")
    if named is None:
        raise MissingParameter(
            "Missing required parameter: 'response_format.json_schema'.", param="response_format.json_schema"
        )
    if not isinstance(named, dict):
        raise InvalidType(
            "Invalid type for 'response_format.json_schema'.", "Expected an object.", param="response_format"
        )
    for field in ("name", "schema"):  # an object without both is invalid; OpenAI's error asks for the name
        if named.get(field) is None:
            where = f"response_format.json_schema.{field}"
            raise MissingParameter(f"Missing required parameter: {where!r}.", param=where)
    schema = named["schema"]
    if not isinstance(schema, dict | bool):
        raise InvalidType(
            "Invalid type for 'response_format.json_schema.schema'.", "Expected an object.", param="response_format"
        )
    return schema


NOT_WITH_BEAMS: Mapping[str, tuple[Any, ...]] = {
    "stream": (False,), "prompt_logprobs": (), "min_tokens": (0,), "stop": ([],), "stop_token_ids": ([],),
    "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "presence_penalty": (0,), "frequency_penalty": (0,),
    "repetition_penalty": (1,), "logit_bias": ({},), "allowed_token_ids": (), "bad_words": ([],),
}  # fmt: skip
"""Fields that a beam search does not support, and their values that have no effect."""


def length_penalty(body: GenerateBody) -> float | None:
    """Return the length penalty of the requested beam search; None: no beam search. Raises `RequestError` if a field
    does not go with a beam search.
    """
    given = body.length_penalty
    penalty = 1.0 if given is None else given
    if not body.use_beam_search:
        if penalty != 1.0:
            raise UnsupportedParameter(
                "length_penalty needs a beam search.", "", "Send use_beam_search: true.", param="length_penalty"
            )
        return None
    check_length_penalty(penalty)
    for name, neutral in NOT_WITH_BEAMS.items():
        value = getattr(body, name)
        if value is not None and value not in neutral:
            raise _not_with_beams(name)
    if isinstance(body, CompletionBody) and body.echo and body.logprobs is not None:
        raise _not_with_beams("echo", "logprobs of an echoed prompt")
    return penalty


def without_effect(body: GenerateBody) -> list[str]:
    """Return a warning for each field whose value has no effect."""
    warnings = ["field 'store' has no effect: only POST /v1/responses stores answers"] if body.store else []
    if body.use_beam_search and body.temperature:
        warnings.append("field 'temperature' has no effect: a beam search does not sample")
    return warnings


def _not_with_beams(name: str, what: str = "") -> UnsupportedParameter:
    return UnsupportedParameter(
        f"{what or repr(name)} cannot be combined with a beam search.",
        "A beam search finds the likeliest answers, and has them only at the end.",
        f"Leave out {name} or use_beam_search.",
        param=name,
    )


async def with_prediction(options: RequestOptions, prediction: Prediction, model: ServedModel) -> RequestOptions:
    """Return the options with the prediction's tokens, as many as the context has. Raises `InvalidParameter`."""
    text = _predicted_text(prediction)
    token_ids = await anyio.to_thread.run_sync(
        lambda: model.tokenizer.encode(text, add_special_tokens=False)[: model.plan.max_model_len]
    )
    return replace(options, prediction_token_ids=tuple(token_ids))


def _predicted_text(prediction: Prediction) -> str:
    if prediction.type != "content":
        raise InvalidParameter(
            f"prediction.type {prediction.type!r} is not known.", "It is always content.", param="prediction.type"
        )
    if isinstance(prediction.content, str):
        return prediction.content
    parts = [part.get("text") if part.get("type") == "text" else None for part in prediction.content]
    texts = [text for text in parts if isinstance(text, str)]
    if len(texts) < len(parts):
        raise InvalidParameter(
            "prediction.content has a part that is not text.",
            'A part is {"type": "text", "text": ...}.',
            param="prediction.content",
        )
    return "".join(texts)


COMPLETION_MAX_TOKENS = 16


def chat_params(body: ChatBody, model: ServedModel) -> tuple[SamplingParams, list[str]]:
    """Return the parameters of a chat request, and warnings.

    Without a limit the answer may fill the rest of the context.
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidParameter("top_logprobs needs logprobs: true.", param="top_logprobs")
    if body.top_logprobs is not None:  # checked here because here the field's name is known
        model.generator.limits.num_logprobs(body.top_logprobs, "top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    max_tokens = _chat_limit(body)
    if max_tokens is None:
        max_tokens = model.sampling_defaults.get("max_tokens")
    return _params(body, model, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=body.prompt_logprobs)


def completion_params(body: CompletionBody, model: ServedModel) -> tuple[SamplingParams, list[str]]:
    """Return the parameters of a completion request, and warnings."""
    prompt_logprobs = body.prompt_logprobs
    if body.echo and prompt_logprobs is None:
        prompt_logprobs = body.logprobs  # the echoed prompt has logprobs too
    max_tokens = body.max_tokens
    if max_tokens is None:
        max_tokens = model.sampling_defaults.get("max_tokens", COMPLETION_MAX_TOKENS)
    if only_echoes(body):
        max_tokens = 1  # the engine generates at least one token; answer.py leaves it out
    decided: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": body.logprobs, "prompt_logprobs": prompt_logprobs}
    if body.prompt_embeds is not None and body.repetition_penalty is None:
        decided["repetition_penalty"] = 1.0  # overrides the checkpoint: embeddings have no token ids to count
    return _params(body, model, **decided)


def only_echoes(body: CompletionBody) -> bool:
    """Return whether the request wants only the prompt and its logprobs. Raises if it also wants a stream."""
    if not body.echo or body.max_tokens != 0:
        return False
    if body.stream:
        raise UnsupportedParameter(
            "max_tokens 0 cannot be streamed.", "The echoed prompt is sent in one piece: send stream: false.",
            param="max_tokens",
        )  # fmt: skip
    return True


def _chat_limit(body: ChatBody) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidParameter(
            "max_tokens and max_completion_tokens contradict each other.",
            f"{old} and {new}; send one.",
            param="max_tokens",
        )
    return new if new is not None else old


def _params(body: GenerateBody, model: ServedModel, **decided: Any) -> tuple[SamplingParams, list[str]]:
    if body.stream and body.prompt_logprobs is not None:
        raise UnsupportedParameter(
            "prompt_logprobs cannot be streamed.", "Send stream: false.", param="prompt_logprobs"
        )
    if body.stream_options is not None and not body.stream:
        raise InvalidParameter("stream_options needs stream: true.", param="stream_options")
    if body.return_progress and not body.stream:
        raise InvalidParameter(
            "return_progress needs stream: true.",
            "Progress is sent while the prompt is processed.",
            param="return_progress",
        )
    decided["structured_outputs"] = structured_outputs(body)
    budgets = {name: getattr(body, name) for name in MODEL_HINTS["budget"]["openai"]}
    decided["thinking_token_budget"], warnings = thinking_budget(budgets, model)
    return sampling_params(model, given_params(body) | decided), warnings


def request_options(body: GenerateBody) -> RequestOptions:
    """Return the options beside sampling. Timings matter in a stream only; a whole answer has them anyway."""
    return RequestOptions(
        priority=body.priority or 0,
        cache_salt=_cache_salt(body),
        length_penalty=length_penalty(body),
        timings_per_token=bool(body.stream and body.timings_per_token),
        progress=bool(body.return_progress),
        max_drafts=_max_drafts(body),
        keeps_no_copy=body.store is False,
    )


def _max_drafts(body: GenerateBody) -> int | None:
    """Return the most tokens to guess ahead at a time; None: as the server does."""
    most = body.speculative_n_max
    if most is not None and most < 0:
        raise InvalidParameter(
            "speculative.n_max must be at least 0.", f"Got {most}; 0 turns it off.", param="speculative.n_max"
        )
    return 0 if body.speculative is False else most


def _cache_salt(body: GenerateBody) -> str | None:
    """Return the client's cache salt, or a new random one if the request forbids reuse of the prefix cache."""
    if body.cache_prompt is False:
        return uuid.uuid4().hex
    salt = body.cache_salt
    if salt is not None and (not 1 <= len(salt) <= 128 or any(character in salt for character in "@/\\\0")):
        raise InvalidParameter(
            "cache_salt must have 1 to 128 characters.", "@, /, \\ and NUL are not allowed.", param="cache_salt"
        )
    return salt
