"""Parts of answers that several dialects have: timings in llama.cpp's format, logprobs of one position, shortened
vectors.

Does not know: where the numbers come from.
"""

from __future__ import annotations

from typing import Any, Protocol

from msgspec import UNSET, UnsetType

from localllm.engine.outputs import ExplainedMiss, Timings, Usage
from localllm.engine.prompt_history import Reason
from localllm.engine.step import TokenLogprobs
from localllm.errors import InvalidParameter
from localllm.text.tokenizer import Tokenizer
from localllm.web.shape import Shape


class ApiCacheMiss(Shape, kw_only=True):
    """The reason why the prefix cache did not hold more of the prompt. The texts are of this prompt, never of the
    earlier one, which may be another user's behind the same key."""

    reason: Reason
    token: int | UnsetType = UNSET  # prompt tokens before the place where it left the nearest earlier prompt
    tokens: int = 0  # tokens computed again that an earlier request had computed
    ms: float = 0.0  # their part of prompt_ms
    before: str | UnsetType = UNSET  # the text at that place
    here: str | UnsetType = UNSET


class ApiTimings(Shape, kw_only=True):
    """Timings in llama.cpp's format. The rate of generation is that of the tokens after the first one."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float | UnsetType = UNSET  # absent for a single token
    predicted_per_second: float | UnsetType = UNSET
    queue_ms: float
    ttft_ms: float
    draft_n: int | UnsetType = UNSET  # tokens guessed ahead and verified
    draft_n_accepted: int | UnsetType = UNSET
    cache_miss: ApiCacheMiss | UnsetType = UNSET  # absent: there was no more of the prompt to find


class Timed(Protocol):
    """The tokens and the times of a request so far."""

    @property
    def timings(self) -> Timings: ...

    @property
    def cache_miss(self) -> ExplainedMiss | None: ...

    @property
    def tokens_per_s(self) -> float | None: ...

    def usage(self) -> Usage: ...


def timings_object(progress: Timed) -> ApiTimings:
    """Return llama.cpp's timings. prompt_n counts computed tokens only, and predicted_n the tokens of all choices. With
    several choices, the times and the rate belong to the longest one.
    """
    usage, timings = progress.usage(), progress.timings
    prompt_n, rate = usage.prompt_tokens - usage.cached_tokens, progress.tokens_per_s
    return ApiTimings(
        cache_n=usage.cached_tokens,
        prompt_n=prompt_n,
        prompt_ms=timings.prefill_s * 1e3,
        prompt_per_token_ms=timings.prefill_s * 1e3 / prompt_n if prompt_n else 0.0,
        prompt_per_second=prompt_n / timings.prefill_s if timings.prefill_s > 0 else 0.0,
        predicted_n=usage.completion_tokens,
        predicted_ms=timings.decode_s * 1e3,
        predicted_per_token_ms=UNSET if rate is None else 1e3 / rate,
        predicted_per_second=UNSET if rate is None else rate,
        queue_ms=timings.queue_s * 1e3,
        ttft_ms=timings.ttft_s * 1e3,
        draft_n=usage.drafts.checked or UNSET,
        draft_n_accepted=usage.drafts.accepted if usage.drafts.checked else UNSET,
        cache_miss=UNSET if progress.cache_miss is None else _cache_miss(progress.cache_miss),
    )


def _cache_miss(found: ExplainedMiss) -> ApiCacheMiss:
    miss = found.miss
    told = ApiCacheMiss(reason=miss.reason, tokens=miss.num_tokens, ms=found.seconds * 1e3)
    if miss.reason not in ("new", "off"):
        told.token = miss.position
    if miss.reason == "changed":
        told.before, told.here = found.before, found.here
    return told


FLOOR = -9999.0
"""Replaces minus infinity, which JSON does not have."""


def scored(entry: TokenLogprobs, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the token at a position and then the likeliest ones, each with its text, bytes and logprob."""
    found = []
    for token_id, logprob in zip(entry.token_ids, entry.logprobs, strict=True):
        raw = tokenizer.token_bytes(token_id)
        found.append(
            {"token": raw.decode("utf-8", "replace"), "bytes": list(raw), "logprob": max(float(logprob), FLOOR)}
        )
    return found


MAX_INPUTS = 2048
"""Inputs per request, as in OpenAI's API."""


def shortened(vector: list[float], dimensions: int | None) -> list[float]:
    """Return the first `dimensions` numbers, normalised to length 1 (Matryoshka, arXiv:2205.13147)."""
    if dimensions is None or dimensions == len(vector):
        return vector
    if not 0 < dimensions < len(vector):
        raise InvalidParameter(
            f"dimensions {dimensions} is out of range.",
            f"Vectors of this model have {len(vector)} dimensions.",
            param="dimensions",
        )
    part = vector[:dimensions]
    length = sum(number * number for number in part) ** 0.5 or 1.0
    return [number / length for number in part]
