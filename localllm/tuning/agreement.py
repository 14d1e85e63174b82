"""Check that an 8-bit KV cache does not change what the model says: speed must not cost correctness.

The model answers a few prompts greedily with its own cache. Then it reads these answers with the 8-bit cache, and the
check counts the positions where it would have chosen the same token. Teacher forcing keeps one difference from causing
others. All prompts run in one batch, which costs a slow machine little more than one prompt.
Does not know: speed, which cache is chosen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.engine.client import EngineClient, GenerationRequest
from localllm.engine.params import SamplingParams
from localllm.serving.served import ServedModel
from localllm.tuning.drive import running
from localllm.tuning.trial import TrialRunner
from localllm.tuning.workload import PromptSource

PROMPTS, PROMPT_LEN, ANSWER_LEN = 6, 48, 24
LEAST_AGREEMENT = 0.97


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


def agreement(runner: TrialRunner, base: Mapping[str, Any], changed: Mapping[str, Any], seed: int = 0) -> Agreement:
    """Compare the answers under two settings. Raises what opening either engine raises."""
    source = PromptSource(seed, runner.vocab_size)
    prompts = [source.prompt(PROMPT_LEN) for _ in range(PROMPTS)]
    answers = asyncio.run(_greedy_answers(runner.open(base), prompts))
    return asyncio.run(_agreement_of(runner.open(changed), prompts, answers))


async def _greedy_answers(model: ServedModel, prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_LEN, ignore_eos=True, detokenize=False)
    async with running(model) as client:
        return await asyncio.gather(
            *(_tokens(client, f"guard-{i}", prompt, params) for i, prompt in enumerate(prompts))
        )


async def _tokens(client: EngineClient, name: str, prompt: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
    tokens: list[int] = []
    async for event in client.generate(GenerationRequest(name, prompt, params)):
        if event.error is not None:
            raise event.error
        tokens += event.token_ids
    return tuple(tokens)


async def _agreement_of(
    model: ServedModel, prompts: Sequence[tuple[int, ...]], answers: Sequence[tuple[int, ...]]
) -> Agreement:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    async with running(model) as client:
        ranks = await asyncio.gather(
            *(
                _ranks(client, GenerationRequest(f"guard-{i}", prompt + answer, params), len(answer))
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
