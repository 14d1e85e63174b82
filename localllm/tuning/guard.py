"""Whether a KV cache in eight bits still says what the model says: settings are never bought with wrong answers.

The model answers a few prompts with the cache that it would have, greedily; then it reads its own answers with the
other cache, and it is counted at how many places it would have said the same. Reading does not drift: one difference
stays one. All prompts at once: a batch costs a slow machine little more than one of them.
Does not know: speed, which cache is chosen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.engine.client import EngineClient, GenerationRequest
from localllm.engine.params import SamplingParams
from localllm.served import ServedModel
from localllm.tuning.drive import running
from localllm.tuning.trial import TrialBed
from localllm.tuning.workload import PromptSource

PROMPTS, PROMPT_LEN, ANSWER_LEN = 6, 48, 24
LEAST_AGREEMENT = 0.97


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of the tokens compared, the share that is the same."""

    same: int
    compared: int

    @property
    def share(self) -> float:
        return self.same / self.compared if self.compared else 1.0

    @property
    def is_enough(self) -> bool:
        return self.share >= LEAST_AGREEMENT

    def __str__(self) -> str:
        return f"{self.same} of {self.compared} tokens as with the model's own cache ({self.share:.1%})"


def agreement(bed: TrialBed, base: Mapping[str, Any], changed: Mapping[str, Any], seed: int = 0) -> Agreement:
    """Of two settings that should say the same. Raises what opening either raises."""
    source = PromptSource(seed, bed.vocab_size)
    prompts = [source.prompt(PROMPT_LEN) for _ in range(PROMPTS)]
    answers = asyncio.run(_answers(bed.open(base), prompts))
    return asyncio.run(_read(bed.open(changed), prompts, answers))


async def _answers(model: ServedModel, prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
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


async def _read(
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
    """Of the prompt's last tokens, each among all that the model might have said in its place; 1 is the likeliest."""
    ranks: list[int] = []
    async for event in client.generate(request):
        if event.error is not None:
            raise event.error
        if event.prompt_logprobs is not None:
            ranks = [each.rank for each in event.prompt_logprobs[-last:]]
    return ranks
