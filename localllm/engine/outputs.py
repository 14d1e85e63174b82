"""Outputs of the engine: per step as token ids (`EngineOutput`), then per choice as text events (`GenerationEvent`).

`EngineOutput` crosses from the engine thread once per step. `GenerationEvent` is the one internal event that every API
dialect and the offline API translate; text, token ids and logprobs in an event always belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from localllm.engine.prompt_history import CacheMiss
from localllm.engine.step import TokenLogprobs
from localllm.errors import LocalLLMError
from localllm.text.answers.parts import Part

HANDED_OVER = "handed_over"
"""Finish reason of a request that another engine continues (`RequestOptions.hands_over`). No client sees it."""


class DraftCounts(NamedTuple):
    """Drafts of a request that were verified so far."""

    checked: int = 0
    accepted: int = 0
    predicted_accepted: int = 0  # of those that came from the request's prediction
    predicted_rejected: int = 0

    def plus(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(*map(sum, zip(self, other, strict=True)))


NO_COUNTS = DraftCounts()


class EngineOutput(NamedTuple):
    """One request's output of one step. Exactly one output of a request has a `finish_reason`: the last."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # all positions at once, with the first token
    finish_reason: str | None = None  # stop, length, abort, error; between engines handed_over
    stop_reason: int | None = None  # the stop token id that ended the request (None for eos)
    num_cached_tokens: int = 0
    scheduled_s: float = 0.0  # when the request first entered a step
    num_prompt_tokens_done: int | None = None  # if progress was requested, until the first token
    error: LocalLLMError | None = None
    drafts: DraftCounts = NO_COUNTS  # so far
    cache_miss: CacheMiss | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request; `completion_tokens` is summed over its choices when n > 1."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    drafts: DraftCounts = NO_COUNTS
    image_tokens: int = 0  # of the prompt
    audio_tokens: int = 0  # of the prompt

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class ExplainedMiss:
    """A cache miss with the texts around the place where the prompt left an earlier one, and its cost."""

    miss: CacheMiss
    seconds: float  # of the prefill that went into tokens computed again
    before: str = ""
    here: str = ""
    earlier: str = ""


def explained(miss: CacheMiss, seconds: float, decode: Callable[[Sequence[int], bool], str]) -> ExplainedMiss:
    """Return a cache miss with its texts. decode: makes text of token ids; False: special tokens, too."""
    return ExplainedMiss(miss, seconds, *[decode(ids, False) for ids in (miss.before, miss.here, miss.earlier)])


def most_missed(*misses: ExplainedMiss | None) -> ExplainedMiss | None:
    """Return the one that cost most tokens, the first of several; None if there is none."""
    return max([each for each in misses if each is not None], key=lambda each: each.miss.num_tokens, default=None)


@dataclass(frozen=True, slots=True)
class Timings:
    """Phases in seconds by the host's clock. prefill: first scheduled to first token; decode: first to last token."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ttft_s: float = 0.0
    cache_miss: ExplainedMiss | None = None  # None: no earlier prompt had more than was found in the prefix cache


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """Progress of a prompt's prefill."""

    total: int  # tokens
    cached: int  # tokens found in the prefix cache
    processed: int  # tokens computed, or found in the prefix cache
    seconds: float  # since the prompt first entered a step


class GenerationEvent(msgspec.Struct, frozen=True):  # made for every token: a dataclass takes ten times as long
    """An event of one choice.
    `text` may lag behind the tokens while a stop string or a UTF-8 character is incomplete."""

    index: int  # which of the n choices
    text: str = ""
    token_ids: tuple[int, ...] = ()  # the tokens whose text is complete with this event
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None  # stop, length, abort, error: the choice's last event
    stop_reason: int | str | None = None  # the stop string or stop token id that matched
    usage: Usage | None = None  # of this choice so far; with the last event, or with all if requested
    timings: Timings | None = None  # with the same events as `usage`
    prompt_progress: PromptProgress | None = None  # if requested: once a step, last with the first token
    parts: tuple[Part, ...] | None = None  # content, reasoning, tool calls, if parsed; None: all is content
    error: LocalLLMError | None = None
