"""Seeded workloads: the same requests, token for token, for every engine and in every run.

Prompts are token ids, so that every engine sees prompts of equal length whatever its tokenizer. They differ from the
first token on, except where a repeated prompt is intended.
Does not know: which server runs them, clocks, text.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from localllm.errors import ConfigError

DEFAULT_VOCAB_SIZE = 1000
"""Prompt token ids are below this: every model has them, and they are ordinary text in nearly all tokenizers."""
FIRST_ID = 100
"""Smallest prompt token id: lower ids are special tokens in some tokenizers."""
OWN_MODULES = ("scheduler.py", "memory/ledger.py", "memory/block_pool.py", "request_table.py", "loop.py")
REPEATED_SHARE = 1 / 8
"""Share of a prompt that repeats its beginning."""


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One completion request, for exactly `max_tokens` tokens."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order in which they are sent."""

    name: str
    seed: int
    requests: tuple[WorkloadRequest, ...]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt_token_ids) for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.max_tokens for request in self.requests)


class PromptSource:
    """Random prompts from a seed. Two sources with one seed and one vocabulary give the same prompts."""

    def __init__(self, seed: int, vocab_size: int = DEFAULT_VOCAB_SIZE) -> None:
        if vocab_size < 8:
            raise ConfigError(
                f"A vocabulary of {vocab_size} is too small to draw prompts from.", "At least 8 ids are needed."
            )
        self.random = random.Random(seed)
        self._ids = range(min(FIRST_ID, vocab_size // 4), vocab_size)

    def prompt(self, length: int) -> tuple[int, ...]:
        return tuple(self.random.choices(self._ids, k=length))

    def begun_again(self, length: int, text_ids: Sequence[int] = ()) -> tuple[int, ...]:
        """Return a part of a text, then the beginning of the same part, which a model is likely to continue.

        text_ids: a text longer than the prompts; (): random tokens in its place.
        """
        again = max(1, round(REPEATED_SHARE * length)) if length > 1 else 0
        size = length - again
        start = self.random.randrange(max(1, len(text_ids) - size))
        part = tuple(text_ids[start : start + size]) if len(text_ids) >= size else self.prompt(size)
        return part + part[:again]


def own_text() -> str:
    """Return a text that every installation has: some modules of this package."""
    folder = Path(__file__).parent.parent / "engine"
    return "\n".join([(folder / name).read_text(encoding="utf-8") for name in OWN_MODULES])


def fixed_lengths(
    num_requests: int, input_len: int, output_len: int, *, seed: int = 0, vocab_size: int = DEFAULT_VOCAB_SIZE
) -> Workload:
    """Return requests with `input_len` prompt tokens and `output_len` answer tokens each."""
    _positive(num_requests=num_requests, input_len=input_len, output_len=output_len)
    source = PromptSource(seed, vocab_size)
    lengths = [(input_len, output_len)] * num_requests
    return _workload(f"fixed {input_len}/{output_len}", seed, source, lengths)


def uniform_lengths(
    num_requests: int, shortest: int, longest: int, *, seed: int = 0, vocab_size: int = DEFAULT_VOCAB_SIZE
) -> Workload:
    """Return requests with lengths drawn evenly from shortest to longest (both included)."""
    _positive(num_requests=num_requests, shortest=shortest, longest=longest)
    source = PromptSource(seed, vocab_size)
    draw = source.random.randint
    lengths = [(draw(shortest, longest), draw(shortest, longest)) for _ in range(num_requests)]
    return _workload(f"uniform {shortest} to {longest}", seed, source, lengths)


def chat_lengths(
    num_requests: int,
    *,
    max_input_len: int = 2048,
    max_output_len: int = 1024,
    seed: int = 0,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
) -> Workload:
    """Return requests with lengths as in vLLM's ShareGPT sample: log-normal, means near 215 in and 197 out."""
    _positive(num_requests=num_requests, max_input_len=max_input_len, max_output_len=max_output_len)
    source = PromptSource(seed, vocab_size)
    lengths = [
        (
            _log_normal(source.random, median=92, sigma=1.3, low=4, high=max_input_len),
            _log_normal(source.random, median=119, sigma=1.0, low=1, high=max_output_len),
        )
        for _ in range(num_requests)
    ]
    return _workload("chat", seed, source, lengths)


def repeated_prompt(
    times: int, input_len: int, output_len: int, *, seed: int = 0, vocab_size: int = DEFAULT_VOCAB_SIZE
) -> Workload:
    """Return the same request many times, which the prefix cache should answer quickly."""
    _positive(times=times, input_len=input_len, output_len=output_len)
    request = WorkloadRequest(PromptSource(seed, vocab_size).prompt(input_len), output_len)
    return Workload(f"repeated {input_len}", seed, (request,) * times)


def _workload(name: str, seed: int, source: PromptSource, lengths: Iterable[tuple[int, int]]) -> Workload:
    requests = tuple(WorkloadRequest(source.prompt(input_len), output_len) for input_len, output_len in lengths)
    return Workload(name, seed, requests)


def _log_normal(source: random.Random, *, median: float, sigma: float, low: int, high: int) -> int:
    return max(low, min(high, round(source.lognormvariate(math.log(median), sigma))))


def _positive(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} must be at least 1.", f"Got {value}.", param=name)
