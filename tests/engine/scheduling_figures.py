"""Measures how long a short prompt waits behind a long one, and how many tokens a full pool recomputes.

    python -m tests.engine.scheduling_figures

The scheduler and the loop run on the fake model, which takes no time: the results are counts of steps and tokens, the
same on every machine.
"""

import random
from dataclasses import dataclass

from localllm.engine.loop import EngineLoop
from localllm.engine.memory.block_names import BlockHasher
from localllm.engine.memory.cache_manager import CacheManager
from localllm.engine.memory.ledger import Ledger
from localllm.engine.outputs import EngineOutput
from localllm.engine.scheduler import Scheduler
from localllm.engine.scheduler_config import SchedulerConfig
from tests.engine.harness import make_request
from tests.fake_runner import FakeRunner

BLOCK_SIZE = 16
PROMPT_LEN, OUTPUT_LEN, NUM_REQUESTS = 64, 512, 64
MOST_STEPS = 100_000


@dataclass(frozen=True)
class Wait:
    """Steps from the arrival of the short prompt to its first token, and the same for the long prompt."""

    short: int
    long: int
    alone: int  # the long prompt alone


@dataclass(frozen=True)
class Churn:
    steps: int
    computed_tokens: int
    needed_tokens: int
    num_preemptions: int
    mean_running: float

    @property
    def ratio(self) -> float:
        return self.computed_tokens / self.needed_tokens


class Bench:
    """An engine that counts its steps."""

    def __init__(self, num_blocks: int, **config: int) -> None:
        limits = SchedulerConfig(block_size=BLOCK_SIZE, max_model_len=200_000, **config)
        ledger = Ledger((num_blocks + 1,), BLOCK_SIZE)
        self.scheduler = Scheduler(limits, CacheManager(limits, ledger, BlockHasher(b"a model", BLOCK_SIZE)))
        self.loop = EngineLoop(self.scheduler, FakeRunner(num_blocks + 1, BLOCK_SIZE, check=False), deliver=self.hear)
        self.steps = self.num_running = self.computed_tokens = 0
        self.first_token: dict[str, int] = {}
        self.num_generated: dict[str, int] = {}
        self.ends_after: dict[str, int] = {}

    def add(self, name: str, prompt: range, max_tokens: int, ends_after: int = 0) -> None:
        """Add a request. ends_after: tokens after which its client cancels, unknown to the scheduler; 0: never."""
        if ends_after:
            self.ends_after[name] = ends_after
        self.loop.submit(make_request(name, prompt, max_tokens=max_tokens))

    def hear(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            name = output.request_id
            assert output.error is None, output.error
            self.num_generated[name] = self.num_generated.get(name, 0) + len(output.token_ids)
            if output.token_ids:
                self.first_token.setdefault(name, self.steps)
            if self.num_generated[name] == self.ends_after.get(name):
                self.loop.cancel(name)

    def step(self) -> None:
        self.steps += 1
        before = self.scheduler.recorder.num_steps
        self.loop.step()
        if self.scheduler.recorder.num_steps > before:
            composition = self.scheduler.recorder.steps[-1]
            self.computed_tokens += composition.prefill_tokens + composition.decode_tokens
        self.num_running += len(self.scheduler.running)

    def run(self) -> None:
        while self.scheduler.has_work or self.loop._inbox:
            self.step()
            assert self.steps < MOST_STEPS, "the engine makes no progress"


def wait(long_len: int, budget: int, cap: int, *, num_streams: int = 0, num_long: int = 1) -> Wait:
    """Measure a prompt of 20 tokens that arrives one step after `num_long` long ones, while streams decode."""
    longs = [f"long{index}" for index in range(num_long)]

    def until_first_tokens(with_short: bool) -> Bench:
        bench = Bench(
            (num_long * long_len) // BLOCK_SIZE + 4096, max_num_batched_tokens=budget, long_prefill_token_threshold=cap
        )
        for index in range(num_streams):
            bench.add(f"stream{index}", range(index, index + 4), 10_000)
        for _ in range(2 * bool(num_streams)):
            bench.step()
        bench.steps = 0
        for index, name in enumerate(longs):
            bench.add(name, range(1000 * index, 1000 * index + long_len), 16)
        bench.step()
        if with_short:
            bench.add("short", range(7, 27), 16)
        while len(bench.first_token.keys() & {*longs, "short"}) < num_long + with_short:
            bench.step()
        return bench

    alone, both = until_first_tokens(False), until_first_tokens(True)
    return Wait(both.first_token["short"] - 1, both.first_token[longs[-1]], alone.first_token[longs[-1]])


def churn(fits: int, *, output_len: int = OUTPUT_LEN, mean_end: int = 0, max_num_seqs: int = 64) -> Churn:
    """Run 64 requests at once in a pool that holds `fits` of them at full length. mean_end: outputs end that early."""
    full = PROMPT_LEN + output_len
    bench = Bench(fits * full // BLOCK_SIZE, max_num_batched_tokens=2048, max_num_seqs=max_num_seqs)
    rng, needed = random.Random(1), 0
    for index in range(NUM_REQUESTS):
        end = min(output_len, max(1, round(rng.expovariate(1 / mean_end)))) if mean_end else output_len
        bench.add(f"r{index}", range(1000 * index, 1000 * index + PROMPT_LEN), output_len, end % output_len)
        needed += PROMPT_LEN + end - 1
    bench.run()
    return Churn(
        bench.steps,
        bench.computed_tokens,
        needed,
        bench.scheduler.recorder.num_preemptions,
        bench.num_running / bench.steps,
    )


def main() -> None:
    print("| a prompt of 20 tokens behind | budget / cap | streams | its first token | the long prompt's | alone |")
    print("| --: | --: | --: | --: | --: | --: |")
    for num_long, long_len, budget, cap, streams in (
        (1, 100_000, 2048, 512, 0), (1, 100_000, 2048, 512, 8), (1, 30_000, 2048, 512, 0), (1, 30_000, 2048, 512, 8),
        (1, 16_000, 1024, 256, 0), (1, 16_000, 1024, 256, 8), (3, 30_000, 2048, 512, 8),
    ):  # fmt: skip
        got = wait(long_len, budget, cap, num_streams=streams, num_long=num_long)
        print(
            f"| {num_long} x {long_len:,} | {budget:,} / {cap} | {streams} | {got.short} | {got.long} | {got.alone} |"
        )
    print("\n| outputs | pool for | computed / needed | preemptions | steps | running at a time |")
    print("| --- | --: | --: | --: | --: | --: |")
    for words, changes in (
        (f"all {OUTPUT_LEN}", {}),
        (f"up to {OUTPUT_LEN}, mean 64", {"mean_end": 64}),
        ("up to 4,096, mean 64", {"output_len": 4096, "mean_end": 64}),
    ):
        for fits in (48, 32, 16, 8) if "4,096" not in words else (8, 4, 2):
            got = churn(fits, **changes)
            row = (words, fits, f"{got.ratio:.2f}", got.num_preemptions, got.steps, f"{got.mean_running:.1f}")
            print(f"| {' | '.join(map(str, row))} |")


if __name__ == "__main__":
    main()
