"""A model with the timing of a GPU that does no work: launches return at once, results are ready `step_s` later.

The "device" runs one step after another, as a CUDA stream does. Waiting for a result releases the GIL, as waiting for a
CUDA event does, and so do the few calls that launch a step.
"""

from __future__ import annotations

import gc
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm.engine.loop import EngineLoop
from localllm.engine.memory.block_names import BlockHasher
from localllm.engine.memory.cache_manager import CacheManager
from localllm.engine.memory.ledger import Ledger
from localllm.engine.scheduler import Scheduler
from localllm.engine.scheduler_config import SchedulerConfig
from localllm.engine.step import RowResult, Runner, RunnerStats, StepPlan, StepResult, StepTimings, TokenMasks
from localllm.fleet.routing import Policy

BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048


@dataclass(frozen=True, slots=True)
class Pace:
    """One case of the benchmark. Plain data, passed to the processes as JSON."""

    num_rows: int  # requests that decode in every step, of each replica
    step_s: float  # device time of a step
    depth: int  # steps in flight
    steps: int  # measured steps, after the warm-up
    report: str  # file for the measured times
    token_ids: tuple[int, ...]  # the model's output, repeated
    releases: int = 8  # calls per step that release the GIL and take it again
    model: str = ""  # a real model on this machine's cores instead of the paced one
    warm_up_steps: int = 100
    block_size: int = BLOCK_SIZE
    max_model_len: int = MAX_MODEL_LEN  # each row has blocks for this many tokens
    policy: Policy = "prefix"
    replicas: int = 0  # engines behind localllm/fleet/replicas.py; 0: one engine without it

    @classmethod
    def read(cls, text: str) -> Pace:
        fields = json.loads(text)
        return cls(**{**fields, "token_ids": tuple(fields["token_ids"])})


def paced_loop(pace: Pace) -> EngineLoop:
    """Return the real loop and scheduler around the paced model."""
    config = SchedulerConfig(
        max_num_seqs=pace.num_rows,
        max_num_batched_tokens=max(2048, pace.num_rows),
        max_model_len=pace.max_model_len,
        block_size=pace.block_size,
    )
    cache = CacheManager(config, Ledger((num_blocks(pace),), pace.block_size), BlockHasher(b"paced", pace.block_size))
    return EngineLoop(Scheduler(config, cache), PacedRunner(pace), depth=pace.depth)


def num_blocks(pace: Pace) -> int:
    return pace.num_rows * (pace.max_model_len // pace.block_size) + 1


def settle_memory() -> None:
    """Keep the collector from walking set-up objects while the clock runs."""
    gc.collect()
    gc.freeze()


class Meter:
    """Records launches: `pace.steps` of them after the warm-up with a full batch, then writes the report."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._full_steps = 0
        self._launched: list[float] = []
        self._idle: list[float] = []
        self._cpu_s = 0.0

    def note(self, plan: StepPlan, idle_s: float = 0.0) -> None:
        """Record the launch of a step, on a device that was idle for `idle_s` before."""
        least = self._pace.num_rows if self._pace.replicas < 2 else self._pace.num_rows * 15 // 16  # routed, not dealt
        is_full = least <= len(plan.rows) == plan.num_tokens
        self._full_steps = self._full_steps + 1 if is_full else 0
        over = self._full_steps - self._pace.warm_up_steps
        if over == 1 and self._pace.report:
            Path(self._pace.report + ".begun").touch()
            self._cpu_s = time.thread_time()
        if 1 <= over <= self._pace.steps + 1:
            self._launched.append(time.perf_counter())
            self._idle.append(idle_s)
        if over == self._pace.steps + 1:
            self._write()

    def _write(self) -> None:
        if not self._pace.report:
            return
        figures = {
            "launched_s": self._launched,
            "idle_s": self._idle[1:],
            "engine_cpu_s": time.thread_time() - self._cpu_s,
        }
        part = Path(self._pace.report + ".part")
        part.write_text(json.dumps(figures))
        os.replace(part, self._pace.report)


class MeteredRunner:
    """Any runner, with a meter."""

    def __init__(self, runner: Runner, pace: Pace) -> None:
        self._runner, self._meter = runner, Meter(pace)

    def forward(self, plan: StepPlan) -> None:
        self._meter.note(plan)
        self._runner.forward(plan)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


class PacedRunner:
    """An `engine.step.Runner` with the given pace."""

    num_stages = 1
    block_bytes: tuple[int, ...] = ()
    profiler = None

    def __init__(self, pace: Pace) -> None:
        self.num_blocks, self.block_size, self._pace, self._meter = (
            (num_blocks(pace),),
            pace.block_size,
            pace,
            Meter(pace),
        )
        self.vocab_size = max(pace.token_ids) + 1
        self._free_s = 0.0  # when the device has finished everything that was launched

    def forward(self, plan: StepPlan) -> None:
        for _ in range(self._pace.releases):
            os.access("/", os.F_OK)  # a minimal system call, which releases the GIL
        start_s = max(time.perf_counter(), self._free_s)
        self._meter.note(plan, start_s - self._free_s)
        self._free_s = start_s + self._pace.step_s

    def sample(self, plan: StepPlan, masks: TokenMasks | None = None) -> _Running:
        return _Running(self, plan, self._free_s)

    def wait(self, ready_s: float) -> None:
        left_s = ready_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)

    def answer(self, plan: StepPlan) -> StepResult:
        says = self._pace.token_ids
        count = len(says)
        rows = [
            RowResult((says[(row.num_computed_tokens + row.slot) % count],)) if row.samples else RowResult()
            for row in plan.rows
        ]
        return StepResult(plan.step_id, tuple(rows), StepTimings(self._pace.step_s, 0.0))

    def use_idle_time(self) -> bool:
        return False

    def stats(self) -> RunnerStats:
        return RunnerStats()

    def reset(self) -> None:
        self._free_s = 0.0

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Running:
    runner: PacedRunner
    plan: StepPlan
    ready_s: float

    def result(self) -> StepResult:
        self.runner.wait(self.ready_s)
        return self.runner.answer(self.plan)
