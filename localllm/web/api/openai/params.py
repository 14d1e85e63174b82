"""Translate a request body into `SamplingParams`: the client's value, else the model's generation_config, else
OpenAI's.

`SamplingParams` checks ranges and names the wrong field. This module has only the defaults, and the spellings that
differ between the API and the engine.
Does not know: prompts, HTTP.
"""

from __future__ import annotations

import uuid
from typing import Any

from localllm.engine.params import SamplingParams, given_params
from localllm.engine.request import RequestOptions
from localllm.errors import InvalidParameter, UnsupportedParameter
from localllm.serving.served import ServedModel
from localllm.web.api.conversation import sampling_params
from localllm.web.api.hints import MODEL_HINTS, thinking_budget
from localllm.web.api.openai.beams import length_penalty
from localllm.web.api.openai.schema import ChatBody, CompletionBody, GenerateBody
from localllm.web.api.openai.structured import structured_outputs

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
        max_tokens = 1  # the engine generates at least one token; bodies.py leaves it out
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
