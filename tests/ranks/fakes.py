"""A rank process whose model is made of memory, and what goes wrong in it on request.

`python -m tests.ranks.fakes` runs the real main of a rank with `FakeShare`. What it does comes from the path that the
server opens: JSON with the fault, the rank and the step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from localllm.config.settings import EngineConfig
from localllm.engine.step import RunnerStats, StepPlan, TokenMasks
from localllm.errors import DoesNotFit, ModelNotFound
from localllm.models.fit import MemoryPlan
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.spec.rope import RopeSpec
from localllm.models.spec.shard import Shard, shards_of
from localllm.ranks.executor import RankExecutor
from localllm.ranks.messages import Connect, Connected, Loaded, Open, OpenRunner, PutAdapter, Report
from localllm.ranks.rank import Agree, Tell, main
from tests.fake_runner import FakeRunner

COMMAND = (sys.executable, "-m", "tests.ranks.fakes")
BLOCK_SIZE, NUM_BLOCKS, VOCAB_SIZE = 4, 64, 32


@dataclass(frozen=True, slots=True)
class Fault:
    """What one rank does wrong: kill, stop, exit, raise or hang, in a phase or before a step."""

    what: str
    rank: int = 1
    at: str = "forward"  # hello, connect, load, open_runner, forward, sample
    step: int = 3

    def happen(self) -> None:
        if self.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.what == "exit":
            os._exit(3)
        elif self.what == "hang":
            time.sleep(3600)
        elif self.what == "refuse":
            raise DoesNotFit("Rank 1 has no memory.", "It has 1 byte.", "-pp 2")
        else:
            raise RuntimeError("asked to fail")


class FakeShare:
    """A rank's share that is a `FakeRunner`. Every rank computes everything, so each one checks all records."""

    def __init__(self) -> None:
        self.samples = self.answers_later = False
        self._rank = 0
        self._fault: Fault | None = None
        self._options: dict[str, Any] = {}

    def connect(self, rank: int, asked: Connect) -> Connected:
        self._rank = rank
        self.samples = rank == len(asked.devices) - asked.shards
        self.answers_later = asked.backend == "later"
        return Connected(1e-6 * (rank + 1), "1")

    def load(self, asked: Open, tell: Tell) -> Loaded:
        self._options = json.loads(asked.path)
        fault = self._options.get("fault")
        self._fault = Fault(**fault) if fault and fault["rank"] == self._rank else None
        tell(Report("", 5, 10))
        self._happen("load")
        return Loaded(100, 0.5, 2)

    def open_runner(self, asked: OpenRunner, agree: Agree, tell: Tell) -> tuple[FaultyRunner, MemoryPlan]:
        self._happen("open_runner")
        plan = replace(asked.plan, num_blocks=agree(asked.plan.num_blocks - 2 * self._rank))
        tell(Report("opened"))
        return FaultyRunner(plan.num_blocks, self._fault, self._options.get("sleep_s", 0.0), self.samples), plan

    def held_bytes(self) -> int:
        return 100 + self._rank

    def sleep(self) -> None:
        pass

    def wake(self) -> None:
        pass

    def put_adapter(self, asked: PutAdapter) -> None:
        if asked.path == "missing" and self._rank == 1:
            raise ModelNotFound("There is no such adapter.")

    def close(self) -> None:
        pass

    def _happen(self, at: str) -> None:
        if self._fault is not None and self._fault.at == at:
            self._fault.happen()


class FaultyRunner(FakeRunner):
    """A fake runner with a fault in one step. One that draws nothing cannot check what it reads back under masks."""

    def __init__(self, num_blocks: int, fault: Fault | None, sleep_s: float, samples: bool) -> None:
        super().__init__(num_blocks, BLOCK_SIZE, vocab_size=VOCAB_SIZE)
        self._fault, self._sleep_s, self._samples = fault, sleep_s, samples
        self._steps = 0

    def forward(self, plan: StepPlan) -> None:
        self._steps += 1
        if self._sleep_s:
            time.sleep(self._sleep_s)
        self._happen("forward")
        super().forward(plan)

    def sample(self, plan: StepPlan, masks: TokenMasks | None = None) -> Any:
        self._happen("sample")
        assert masks is None or self._samples, "only the rank that draws gets masks"
        return super().sample(plan, masks)

    def stats(self) -> RunnerStats:
        return RunnerStats(launched_steps=self._steps)

    def _happen(self, at: str) -> None:
        if self._fault is not None and self._fault.at == at and self._steps == self._fault.step:
            self._fault.happen()


# ---- the server's side -------------------------------------------------------------------------------------------------

SPEC = ModelSpec("Fake", 2, 64, 96, 8, 4, 8, VOCAB_SIZE * 64, 512, "silu", True, "float32", RopeSpec(10000.0))


@dataclass(frozen=True, slots=True)
class FakeRankPlan:
    """A rank of the plan below."""

    shard: Shard
    device: str = "cpu"
    stage: int = 0
    weights_bytes: int = 100
    kv_bytes: int = 64
    activation_bytes: int = 10
    graph_bytes: int = 0
    free_bytes: int = 1000
    reserve_bytes: int = 0
    numa_node: int | None = None


@dataclass(frozen=True, slots=True)
class FakePlan(MemoryPlan):
    """A memory plan with ranks."""

    ranks: tuple[FakeRankPlan, ...] = ()


def fake_plan(size: int) -> FakePlan:
    shards = shards_of(SPEC, [4] if size == 1 else [4 // size] * size)
    return FakePlan(
        "cpu", "float32", "float32", 512, 8, 64, 32, NUM_BLOCKS, BLOCK_SIZE, 100 * size, 64 * size, 10, 0, 1000, 2,
        ranks=tuple(FakeRankPlan(shard) for shard in shards),
    )  # fmt: skip


def fake_executor(size: int = 2, fault: Fault | None = None, **options: Any) -> RankExecutor:
    """Start ranks of the fake model."""
    named = {key: options.pop(key) for key in ("on_lost", "timeout_s", "report", "progress") if key in options}
    if fault is not None:
        options["fault"] = {name: getattr(fault, name) for name in Fault.__slots__}
    return RankExecutor.load(
        Path(json.dumps(options)), SPEC, EngineConfig(), fake_plan(size),
        named.pop("progress", lambda loaded, total: None), named.pop("report", lambda text: None),
        command=COMMAND, **named,
    )  # fmt: skip


if __name__ == "__main__":
    main(FakeShare)
