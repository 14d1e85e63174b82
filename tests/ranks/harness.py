"""The server's side of fake ranks: their executor, with a plan for as many as a test wants."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm.config.settings import EngineConfig
from localllm.models.fit import MemoryPlan
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.spec.rope import RopeSpec
from localllm.models.spec.shard import Shard, shards_of
from localllm.ranks.executor import RankExecutor
from tests.ranks.fakes import BLOCK_SIZE, COMMAND, VOCAB_SIZE, Fault

NUM_BLOCKS = 64

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
