"""The runners of all shards as one `Runner`: every call goes to each of them, in a thread of its own."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from localllm.engine.step import PendingStep, RunnerStats, StepPlan, StepResult, TokenMasks
from localllm.models.spec.model_spec import ModelSpec
from localllm.runner.kv_cache import KVCache, StateCache
from localllm.runner.runner import TorchRunner
from tests.kv import of_each
from tests.threads import Threads

T = TypeVar("T")


class ShardRunner:
    """Calls the runners of one stage together. The answers are the first shard's."""

    def __init__(
        self, models: Sequence[Any], threads: Threads, *, num_blocks: int, block_size: int,
        specs: Sequence[ModelSpec] = (), each: Sequence[Mapping[str, Any]] = (), kv_dtype: str = "float32",
        num_places: int = 0, **options: Any,
    ) -> None:  # fmt: skip
        """specs: the sizes that each shard holds; empty: its model says so. each: further options of each runner.
        num_places: of recurrent states, which are NaN at the start."""
        self._threads = threads

        def states_of(spec: ModelSpec) -> StateCache:
            states = StateCache(spec, num_places, cpu, torch.float32)
            for layer in states.layers.values():
                for tensor in layer.tensors():
                    tensor[1:] = torch.nan
            return states

        cpu = torch.device("cpu")
        self.runners = [
            TorchRunner(
                model,
                spec,
                KVCache(spec, of_each(spec, num_blocks), block_size, cpu, kv_dtype),
                block_size=block_size,
                device=cpu,
                group=member,
                states=states_of(spec),
                **options,
                **own,
            )
            for model, spec, member, own in zip(
                models,
                specs or [model.spec for model in models],
                threads.members(),
                each or [{}] * len(models),
                strict=True,
            )
        ]
        self.num_blocks = self.runners[0].num_blocks
        self.block_size, self.num_stages, self.profiler = block_size, 1, None
        self.block_bytes: tuple[int, ...] = ()
        self.vocab_size, self.drafts = self.runners[0].vocab_size, self.runners[0].drafts

    def forward(self, plan: StepPlan) -> None:
        self._each(lambda runner: runner.forward(plan))

    def sample(self, plan: StepPlan, masks: TokenMasks | None = None) -> PendingStep:
        return PendingSteps(self._each(lambda runner: runner.sample(plan, masks)))

    def warm_up(self) -> None:
        self._each(lambda runner: runner.warm_up())

    def use_idle_time(self) -> bool:
        answers = self._each(lambda runner: runner.use_idle_time())
        assert len(set(answers)) == 1, answers
        return answers[0]

    def stats(self) -> RunnerStats:
        return self.runners[0].stats()

    def reset(self) -> None:
        self._each(lambda runner: runner.reset())

    def close(self) -> None:
        self._each(lambda runner: runner.close())

    def _each(self, call: Callable[[TorchRunner], T]) -> list[T]:
        return self._threads.run([lambda runner=runner: call(runner) for runner in self.runners])


class PendingSteps:
    """The same step on every shard. All know the same ids, but for rows in error."""

    def __init__(self, steps: Sequence[PendingStep]) -> None:
        self._steps = steps

    def result(self) -> StepResult:
        first, *others = [step.result() for step in self._steps]
        for other in others:
            for mine, theirs in zip(first.rows, other.rows, strict=True):
                assert mine.error is not None or mine.token_ids == theirs.token_ids
                assert theirs.prompt_logprobs == theirs.logprobs == ()
        return first
