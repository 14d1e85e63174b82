"""Sampling parameters of a request: vLLM's names and meanings, validated once, frozen afterwards.

Does not know: the model (context length and vocabulary are checked in admission.py), torch, HTTP.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from typing import Any

from localllm.errors import InvalidParameter
from localllm.text.structured import StructuredOutputsParams

MAX_LOGPROBS = 20
"""Default of --max-logprobs, per position, and the number that samplers reserve room for."""
MOST_ITEMS = {"stop": 256, "bad_words": 1024, "stop_token_ids": 1024, "logit_bias": 8192, "allowed_token_ids": 2**20}
"""Most items per field: more than a real request needs, few enough to be checked without delaying other requests."""
MAX_WORD_CHARS = 1000
"""Most characters of one stop string or bad word.
That much of an answer may be held back until it is known not to match."""
MAX_STOP_CHARS = 4096
"""Most characters of all stop strings of a request: their automaton is built while other requests wait."""
MAX_BAD_WORD_CHARS = 16_384
"""Most characters of all bad words of a request."""
LEAST_REPETITION_PENALTY = 0.01
"""Smallest repetition penalty. Logits are divided by it in fp32, so a penalty near 0 would make them infinite."""
GREEDY_TEMPERATURE = 1e-5
"""Temperature up to which sampling takes the argmax of the processed logits and divides nothing."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters for choosing tokens and for stopping. Raises `InvalidParameter` that names the wrong field."""

    n: int = 1  # completions of the same prompt
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # keep the smallest set of tokens with at least this probability mass
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0  # drop tokens below this share of the likeliest one's probability
    repetition_penalty: float = 1.0  # over prompt and output (Keskar et al. 2019, arXiv:1909.05858)
    presence_penalty: float = 0.0  # over output only, once per distinct token
    frequency_penalty: float = 0.0  # over output only, per occurrence
    repeat_last_n: int = -1  # penalties look at the last N tokens only; 0: none, -1: all (llama.cpp's name)
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()  # words that must not be completed
    seed: int | None = None  # same seed, same tokens in any batch, as far as the logits do not depend on the batch
    max_tokens: int | None = 16  # None: up to the context length
    min_tokens: int = 0  # no end token and no stop string before this many tokens
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # this many likeliest tokens for each output token; -1: the whole vocabulary
    prompt_logprobs: int | None = None  # the same for each prompt token
    detokenize: bool = True
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None  # JSON schema, regex, grammar, ...
    thinking_token_budget: int | None = None  # most reasoning tokens, then its end is forced; None, -1: unlimited
    truncate_prompt_tokens: int | None = None  # keep only the last N prompt tokens; never done unless requested

    def __post_init__(self) -> None:
        put = object.__setattr__  # only here a frozen field is normalised
        for field, most in MOST_ITEMS.items():
            value = getattr(self, field)
            if value is not None and not isinstance(value, str) and len(value) > most:
                raise InvalidParameter(f"{field} has {len(value)} items.", f"At most {most} are allowed.", param=field)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        put(self, "stop", stop)
        put(self, "bad_words", tuple(self.bad_words or ()))
        put(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        put(self, "top_k", max(0, self.top_k) if _is_int(self.top_k) and self.top_k >= -1 else self.top_k)
        if _is_int(self.thinking_token_budget) and self.thinking_token_budget == -1:
            put(self, "thinking_token_budget", None)
        if self.logit_bias is not None:
            put(self, "logit_bias", {_token_id(k, "logit_bias"): v for k, v in dict(self.logit_bias).items()})
        if self.allowed_token_ids is not None:
            put(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        self._check()

    def _check(self) -> None:
        _whole(self.n, "n", 1, 256)
        _real(self.temperature, "temperature", 0.0, 100.0)
        _real(self.top_p, "top_p", 0.0, 1.0, above_low=True)
        _whole(self.top_k, "top_k", 0)
        _real(self.min_p, "min_p", 0.0, 1.0)
        _real(self.repetition_penalty, "repetition_penalty", LEAST_REPETITION_PENALTY, 100.0)
        _real(self.presence_penalty, "presence_penalty", -2.0, 2.0)
        _real(self.frequency_penalty, "frequency_penalty", -2.0, 2.0)
        _whole(self.repeat_last_n, "repeat_last_n", -1)
        for bias in (self.logit_bias or {}).values():
            _real(bias, "logit_bias", -100.0, 100.0)
        if self.seed is not None:
            _whole(self.seed, "seed", -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _whole(self.max_tokens, "max_tokens", 1)
        _whole(self.min_tokens, "min_tokens", 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens}).", param="min_tokens"
            )
        for field in ("stop", "bad_words"):
            for word in getattr(self, field):
                if not isinstance(word, str) or not word:
                    raise InvalidParameter(f"{field} must hold non-empty strings.", f"Got {word!r}.", param=field)
                if len(word) > MAX_WORD_CHARS:
                    why = f"It has {len(word)} characters; at most {MAX_WORD_CHARS} are allowed."
                    raise InvalidParameter(f"{field} holds a string that is too long.", why, param=field)
        for field, most in {"stop": MAX_STOP_CHARS, "bad_words": MAX_BAD_WORD_CHARS}.items():
            if (chars := sum(map(len, getattr(self, field) or ()))) > most:
                why = f"Together its strings have {chars} characters; at most {most} are allowed."
                raise InvalidParameter(
                    f"{field} holds too much text.", why, "Send fewer or shorter strings.", param=field
                )
        for field in ("stop_token_ids", "allowed_token_ids"):
            token_ids = getattr(self, field) or ()
            if set(map(type, token_ids)) - {int} or min(token_ids, default=0) < 0:  # fast path: there may be 2**20 ids
                for token_id in token_ids:
                    _whole(token_id, field, 0)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidParameter("allowed_token_ids is empty: no token could be sampled.", param="allowed_token_ids")
        for field in ("logprobs", "prompt_logprobs"):
            if getattr(self, field) is not None:
                _whole(getattr(self, field), field, -1)
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise InvalidParameter(
                "structured_outputs must be a StructuredOutputsParams.",
                f"Got {type(self.structured_outputs).__name__}.",
                param="structured_outputs",
            )
        if self.thinking_token_budget is not None:
            _whole(self.thinking_token_budget, "thinking_token_budget", 0)
        if self.truncate_prompt_tokens is not None:
            _whole(self.truncate_prompt_tokens, "truncate_prompt_tokens", 1)
        if self.stop and not self.detokenize:
            raise InvalidParameter("Stop strings need detokenize=True.", param="stop")

    @property
    def is_greedy(self) -> bool:
        return self.temperature <= GREEDY_TEMPERATURE

    @property
    def penalises(self) -> bool:
        """True if a token's logit depends on its earlier occurrences."""
        changes = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)
        return changes and self.repeat_last_n != 0

    def child(self, index: int) -> SamplingParams:
        """Return the parameters of choice `index` of `n`: one completion, with its own seed."""
        return self._changed(n=1, seed=None if self.seed is None else self.seed + index)

    def seeded(self, seed: int) -> SamplingParams:
        """Return a copy with this seed."""
        return self._changed(seed=seed)

    def with_logprobs(self, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
        """Return a copy with these counts."""
        return self._changed(logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def _changed(self, **values: int | None) -> SamplingParams:
        """Return a changed copy. It is not validated again, since there may be 256 choices."""
        changed = copy(self)
        for name, value in values.items():
            object.__setattr__(changed, name, value)
        return changed

    def changed(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, for logs and the dashboard."""
        plain = SamplingParams()
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) != getattr(plain, f.name)}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _token_id(key: object, param: str) -> int:
    """Parse a logit_bias key. JSON keys are strings."""
    try:
        token_id = int(key)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        token_id = -1
    if token_id < 0:
        raise InvalidParameter(f"The keys of {param} must be token ids.", f"Got {key!r}.", param=param)
    return int(token_id)


def _whole(value: object, param: str, low: int, high: int | None = None) -> None:
    if not _is_int(value):
        raise InvalidParameter(f"{param} must be a whole number.", f"Got {value!r}.", param=param)
    assert isinstance(value, int)
    if value < low or (high is not None and value > high):
        span = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidParameter(f"{param} must be {span}.", f"Got {value}.", param=param)


def _real(value: object, param: str, low: float, high: float, *, above_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidParameter(f"{param} must be a finite number.", f"Got {value!r}.", param=param)
    if value > high or value < low or (above_low and value == low):
        span = f"above {low:g} and at most {high:g}" if above_low else f"between {low:g} and {high:g}"
        raise InvalidParameter(f"{param} must be {span}.", f"Got {value:g}.", param=param)
