"""A tiny model on real ranks, and what an engine on them generates."""

import socket
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from localllm.config.settings import EngineConfig
from localllm.engine.loop import EngineLoop
from localllm.engine.memory.block_names import BlockHasher
from localllm.engine.memory.cache_manager import CacheManager
from localllm.engine.memory.ledger import Ledger
from localllm.engine.memory.state_pool import StatePool
from localllm.engine.outputs import EngineOutput
from localllm.engine.params import SamplingParams
from localllm.engine.request import Request, RequestOptions
from localllm.engine.scheduler import Scheduler
from localllm.engine.scheduler_config import SchedulerConfig
from localllm.engine.step import Runner
from localllm.machine.hardware import Hardware
from localllm.models.fit import MemoryPlan, plan_memory
from localllm.models.loader import resident_bytes
from localllm.models.read_spec import read_spec
from localllm.ranks.executor import RankExecutor
from localllm.runner.executor import Executor
from tests.runner.harness import Widest

HARDWARE = Hardware((), "a processor", 4, 2**34, 2**34)
PROMPTS = {"a": list(range(5, 40)), "b": [9] * 7, "c": [3, 1, 4, 1, 5]}


def plan_for(path: Path, config: EngineConfig) -> MemoryPlan:
    spec = read_spec(path)

    def count(device: str, dtype: str, length: int, quantization: str | None, shard: Any = None, /) -> int:
        return resident_bytes(path, spec, torch.device("cpu"), torch.float32, max_model_len=length, shard=shard)

    return plan_memory(config, spec, 1 << 20, HARDWARE, resident_bytes=count)


def config_for(**changes: Any) -> EngineConfig:
    return EngineConfig(device="cpu", dtype="float32", max_model_len=128, kv_cache_memory_bytes=1 << 20, **changes)


def tokens_of(runner: Runner, plan: MemoryPlan, *, repeats: bool = False, **params: Any) -> dict[str, list[int]]:
    """Return what an engine on this runner generates after the prompts. repeats: of two tokens, so that some drafts by
    lookup are right."""
    count = 40 if repeats else 10
    params |= {"allowed_token_ids": [5, 6]} if repeats else {}
    runner.reset()
    config = SchedulerConfig(4, 16, plan.max_model_len, plan.block_size, num_stages=runner.num_stages)
    outputs: dict[str, list[int]] = {}

    def deliver(news: list[EngineOutput]) -> None:
        for output in news:
            assert output.error is None, output.error
            outputs.setdefault(output.request_id, []).extend(output.token_ids)

    pool = StatePool(plan.num_places) if plan.num_places else None
    cache = CacheManager(config, Ledger(runner.num_blocks, plan.block_size), BlockHasher(b"m", plan.block_size), pool)
    scheduler = Scheduler(config, cache, speculation=Widest(runner.drafts))
    loop = EngineLoop(scheduler, runner, depth=max(2, runner.num_stages), deliver=deliver)
    for name, prompt in PROMPTS.items():
        asked = SamplingParams(max_tokens=count, **params)
        loop.submit(Request(name, prompt, asked, RequestOptions(), max_output_tokens=count))
    loop.step()
    while loop.scheduler.has_work:
        loop.step()
    drafts = scheduler.speculation
    assert drafts is not None
    assert not repeats or not runner.drafts.most or drafts.stats().num_accepted_tokens
    return outputs


def executor_of(checkpoint: Path, config: EngineConfig) -> tuple[Executor, MemoryPlan]:
    plan = plan_for(checkpoint, config)
    assert len(plan.ranks) > 1
    spec = read_spec(checkpoint)
    executor = RankExecutor.load(checkpoint, spec, config, plan, lambda loaded, total: None, lambda text: None)
    return executor, plan


def assert_closed_to_others(executor: Executor) -> None:
    """Ranks listen on this machine only, and another program cannot connect."""
    ranks = [psutil.Process(process.pid) for process in executor.processes]  # type: ignore[attr-defined]
    listening = [c.laddr for rank in ranks for c in rank.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert listening
    for address in listening:
        assert address.ip in ("127.0.0.1", "::1")
        with pytest.raises(TimeoutError):
            socket.create_connection(address, timeout=0.2)
