"""A minimal scheduler for tests of the runner: the test decides who runs how many tokens, `Desk` writes the plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from localllm.engine.params import SamplingParams
from localllm.engine.step import NewSlot, PendingStep, Row, RowResult, Runner, StepPlan, StepResult, TokenMasks

GREEDY = SamplingParams(temperature=0.0)


def run_again(step: Callable[[], None]) -> Callable[[], None]:
    """A `Capture` that records nothing: a replay runs the step again, including padding rows."""
    step()
    return step


WAYS: dict[str, dict[str, Any]] = {
    "host": {},  # as on a CPU
    "staged": {"staged": True},  # as on a GPU with --enforce-eager
    "replayed": {"capture": run_again},  # as on a GPU: each step padded to a recorded shape
}


@dataclass
class Sequence_:
    """One request as the desk knows it. `known`: tokens launched; `tokens`: tokens read."""

    name: str
    slot: int
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    known: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    results: list[RowResult] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]


class Desk:
    """Hands out blocks in a scattered order, never twice, unless `release` returns them."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._free = [b for start in (3, 1, 2) for b in range(start, min(runner.num_blocks), 3)]
        self._step_id = 0
        self._new: list[NewSlot] = []
        self._freed: list[int] = []

    def enter(
        self, name: str, slot: int, tokens: Sequence[int], params: SamplingParams = GREEDY, *,
        prompt_len: int | None = None, cached: Sequence[int] = (), bad_words: tuple[tuple[int, ...], ...] = (),
    ) -> Sequence_:  # fmt: skip
        """cached: blocks whose KV exists already."""
        computed = len(cached) * self.runner.block_size
        sequence = Sequence_(name, slot, list(tokens), prompt_len or len(tokens), params, len(tokens), computed,
                             list(cached))  # fmt: skip
        groups = (tuple(cached),) * len(self.runner.num_blocks)
        self._new.append(NewSlot(slot, name, tuple(tokens), sequence.prompt_len, params, groups, computed,
                                 (), bad_words))  # fmt: skip
        return sequence

    def leave(self, sequence: Sequence_, *, release: bool = False) -> None:
        self._freed.append(sequence.slot)
        if release:
            self._free = sequence.blocks + self._free

    def plan(self, *work: tuple[Sequence_, int]) -> StepPlan:
        self._step_id += 1
        rows = tuple(self._row(sequence, count) for sequence, count in work)
        plan = StepPlan(self._step_id, rows, tuple(self._new), tuple(self._freed))
        self._new, self._freed = [], []
        return plan

    def _row(self, sequence: Sequence_, count: int) -> Row:
        end = sequence.computed + count
        needed = -(-end // self.runner.block_size) - len(sequence.blocks)
        blocks = tuple(self._free.pop(0) for _ in range(max(0, needed)))
        sequence.blocks += blocks
        samples, groups = end == sequence.known, (blocks,) * len(self.runner.num_blocks) if blocks else ()
        row = Row(sequence.slot, sequence.name, sequence.computed, count, groups, samples)
        sequence.computed = end
        sequence.known += samples
        return row

    def launch(
        self, *work: tuple[Sequence_, int], masks: TokenMasks | None = None
    ) -> tuple[PendingStep, list[Sequence_]]:
        plan = self.plan(*work)
        self.runner.forward(plan)
        return self.runner.sample(plan, masks), [sequence for sequence, _ in work]

    def settle(self, launched: tuple[PendingStep, list[Sequence_]]) -> StepResult:
        pending, sequences = launched
        result = pending.result()
        for sequence, row in zip(sequences, result.rows, strict=True):
            sequence.tokens += row.token_ids
            sequence.results.append(row)
        return result

    def step(self, *work: tuple[Sequence_, int], masks: TokenMasks | None = None) -> StepResult:
        return self.settle(self.launch(*work, masks=masks))

    def generate(self, sequence: Sequence_, count: int, chunk: int = 10_000) -> list[int]:
        """Run a request alone: the prompt in chunks, then one token per step, `count` in all."""
        goal = len(sequence.tokens) + count
        while len(sequence.tokens) < goal:
            self.step((sequence, min(chunk, sequence.known - sequence.computed)))
        return sequence.tokens[goal - count : goal]
