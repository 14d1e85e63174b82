"""What comes out of the engine: first per step in token ids, then per choice as text events.

`EngineOutput` crosses from the engine thread once per step. `GenerationEvent` is the one internal event stream that
every API dialect and the offline API translate; text, token ids and logprobs in an event always belong together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from localllm.engine.step import TokenLogprobs
from localllm.errors import LocalLLMError
from localllm.text.answers.parts import Part


class EngineOutput(NamedTuple):
    """One request's news from one step. A request gets exactly one with a `finish_reason`, its last."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # whole, once, with the first token
    finish_reason: str | None = None  # stop, length, abort, error
    stop_reason: int | None = None  # the stop token id that ended it (None for eos)
    num_cached_tokens: int = 0
    scheduled_s: float = 0.0  # when the request first entered a step
    num_prompt_tokens_done: int | None = None  # where progress was asked for, until the first token
    error: LocalLLMError | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request; `completion_tokens` is summed over its choices when n > 1."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds, from the host's clock. prefill: first scheduled to first token; decode: first to last token."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ttft_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How much of a prompt has been read."""

    total: int  # tokens
    cached: int  # of those, found in the prefix cache
    processed: int  # of those, read or found
    seconds: float  # since the prompt first entered a step


class GenerationEvent(msgspec.Struct, frozen=True):  # made for every token: a dataclass takes ten times as long
    """News of one choice. `text` may lag behind the model while a stop string or a UTF-8 character is open."""

    index: int  # which of the n choices
    text: str = ""
    token_ids: tuple[int, ...] = ()  # the tokens whose text is complete with this event
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None  # stop, length, abort, error: the choice's last event
    stop_reason: int | str | None = None  # the stop string or stop token id that matched
    usage: Usage | None = None  # of this choice alone, so far; with the last event, or with all where asked
    timings: Timings | None = None  # with the same
    prompt_progress: PromptProgress | None = None  # where asked: once a step until the first token, with it the last
    parts: tuple[Part, ...] | None = None  # what the text says, where somebody has read it; None: content
    error: LocalLLMError | None = None
