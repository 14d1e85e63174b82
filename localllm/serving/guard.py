"""Check that a smaller KV cache does not change what the model says: memory and speed must not cost correctness.

The model answers a few prompts greedily with its own cache. Then it reads these answers with the smaller cache, and the
check counts the positions where it would have chosen the same token. Teacher forcing keeps one difference from causing
others. All prompts run in one batch, which costs a slow machine little more than one prompt.
A cache of 4 bits is checked at every load, since small models often lose their way with it where larger ones do not
notice. A tuning run checks each smaller cache that it wants to try.
Does not know: how engines are opened, speed, which cache is chosen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localllm.config.settings import EngineConfig
from localllm.engine.client import EngineClient, GenerationRequest
from localllm.engine.params import SamplingParams
from localllm.errors import UnsupportedOption

if TYPE_CHECKING:
    from localllm.models.fit import MemoryPlan
    from localllm.text.tokenizer import Tokenizer

LEAST_AGREEMENT, REFUSED_BELOW = 0.97, 0.90
QUESTIONS = (
    "What is the capital of France, and what is the city known for?",
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Count from one to twelve in words.",
    "def fibonacci(n):",
    "List five things to pack for a week in the mountains.",
    "The history of the printing press begins",
    "Translate into German: The train leaves at half past seven.",
)
ANSWER_LEN = 32  # tokens of each answer: 256 in all
MOST_PROMPT = 48  # tokens

Opened = Callable[[], AbstractAsyncContextManager[EngineClient]]
"""Opens an engine, and closes it at the end of the context."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """The number of compared tokens that are the same."""

    same: int
    compared: int

    @property
    def share(self) -> float:
        return self.same / self.compared if self.compared else 1.0

    @property
    def is_enough(self) -> bool:
        return self.share >= LEAST_AGREEMENT

    def __str__(self) -> str:
        return f"{self.same} of {self.compared} tokens are the same as with the model's own cache ({self.share:.1%})"


def agreement(base: Opened, changed: Opened, prompts: Sequence[Sequence[int]], answer_len: int) -> Agreement:
    """Compare the answers of two engines. Raises what opening either engine raises."""
    answers = asyncio.run(_greedy_answers(base, prompts, answer_len))
    return asyncio.run(_agreement_of(changed, prompts, answers))


def require_agreement(found: Agreement, kv_cache_dtype: str) -> str:
    """Return a warning about a cache of 4 bits; empty if its answers are the same. Raises `UnsupportedOption` if too
    many tokens differ."""
    if found.share < REFUSED_BELOW:
        why = f"When it reads its own answers, {found}; at least {REFUSED_BELOW:.0%} must be."
        what = f"--kv-cache-dtype {kv_cache_dtype} would change the answers of this model."
        raise UnsupportedOption(what, why, "--kv-cache-dtype int8", param="kv_cache_dtype")
    if found.is_enough:
        return ""
    return f"The KV cache in {kv_cache_dtype} changes some answers: {found}. --kv-cache-dtype int8 is closer."


def questions(tokenizer: Tokenizer, plan: MemoryPlan) -> list[tuple[int, ...]]:
    """Return the prompts of the check at load, each short enough for the context."""
    most = max(1, min(MOST_PROMPT, plan.max_model_len - ANSWER_LEN - 1))
    return [tuple(tokenizer.encode(text)[-most:]) for text in QUESTIONS]


def guard_config(config: EngineConfig, plan: MemoryPlan, kv_cache_dtype: str) -> EngineConfig:
    """Return the settings of a small engine for the check: a KV cache for its prompts, nothing kept elsewhere, and no
    graphs."""
    tokens = len(QUESTIONS) * min(MOST_PROMPT + ANSWER_LEN + 1, plan.max_model_len)
    per_token = plan.kv_bytes / max(1, plan.num_kv_tokens)
    return replace(
        config, kv_cache_dtype=kv_cache_dtype, max_num_seqs=len(QUESTIONS), enforce_eager=True, kv_offloading_size=0.0,
        swap_space=0.0, kv_disk_gib=0.0, max_model_len=min(plan.max_model_len, MOST_PROMPT + ANSWER_LEN + 1),
        kv_cache_memory_bytes=int(16 * per_token * (tokens + 2 * len(QUESTIONS) * plan.block_size)),
    )  # fmt: skip


async def _greedy_answers(opened: Opened, prompts: Sequence[Sequence[int]], length: int) -> list[tuple[int, ...]]:
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
    async with opened() as client:
        return await asyncio.gather(
            *(_tokens(client, f"guard-{i}", prompt, params) for i, prompt in enumerate(prompts))
        )


async def _tokens(client: EngineClient, name: str, prompt: Sequence[int], params: SamplingParams) -> tuple[int, ...]:
    tokens: list[int] = []
    async for event in client.generate(GenerationRequest(name, tuple(prompt), params)):
        if event.error is not None:
            raise event.error
        tokens += event.token_ids
    return tuple(tokens)


async def _agreement_of(
    opened: Opened, prompts: Sequence[Sequence[int]], answers: Sequence[tuple[int, ...]]
) -> Agreement:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    async with opened() as client:
        ranks = await asyncio.gather(
            *(
                _ranks(client, GenerationRequest(f"guard-{i}", (*prompt, *answer), params), len(answer))
                for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
            )
        )
    return Agreement(sum(each.count(1) for each in ranks), sum(map(len, ranks)))


async def _ranks(client: EngineClient, request: GenerationRequest, last: int) -> list[int]:
    """Return the rank of each of the prompt's last tokens among all candidates; 1 is the likeliest."""
    ranks: list[int] = []
    async for event in client.generate(request):
        if event.error is not None:
            raise event.error
        if event.prompt_logprobs is not None:
            ranks = [each.rank for each in event.prompt_logprobs[-last:]]
    return ranks
