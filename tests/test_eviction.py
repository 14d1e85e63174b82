"""Which models are evicted for another one, and the memory that they give back, on every device that they are on."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from localllm.config.settings import EngineConfig, ServerConfig, Settings
from localllm.engine.step import RankStats, RunnerStats
from localllm.machine.hardware import Gpu, Hardware, process_bytes
from localllm.models.fit import MemoryPlan, RankPlan
from localllm.models.spec.shard import even_heads, shards_of
from localllm.serving.entry import ModelEntry
from localllm.serving.eviction import candidates, hardware_once_free, has_room_on_host, reserved_bytes
from localllm.serving.served import ServedModel
from tests.ranks.harness import SPEC

GIB = 2**30


def plan_on(*devices: str) -> MemoryPlan:
    """A plan of 6 GiB on each device, of which 4 GiB are weights."""
    cut = shards_of(SPEC, even_heads(SPEC, len(devices)) or [])
    ranks = tuple(
        RankPlan(device, "", 0, shard, 4 * GIB, GIB, GIB // 2, 0, GIB // 2, 0, 0)
        for device, shard in zip(devices, cut, strict=True)
    )
    size = len(devices)
    whole = MemoryPlan(
        devices[0], "float32", "float32", 512, 8, 64, 32, 64, 16, 4 * GIB * size, GIB * size, GIB // 2 * size, 0, 0, 2,
        comm_bytes=GIB // 2 * size if size > 1 else 0,
    )  # fmt: skip
    return replace(whole, ranks=ranks) if size > 1 else whole


def entry(
    name: str, *devices: str, pid: int = 0, pinned: bool = False, used_s: float = 0.0, **asked: object
) -> ModelEntry:
    """An entry of a model; without devices one that is to be loaded."""
    settings = Settings(EngineConfig(model=name, **asked), ServerConfig())  # type: ignore[arg-type]
    made = ModelEntry(name, settings, frozenset((name,)), pinned=pinned, last_used_s=used_s)
    if devices:
        stats = RunnerStats(ranks=tuple(RankStats(n, 0, n, device, pid=pid) for n, device in enumerate(devices)))
        loop = SimpleNamespace(runner=SimpleNamespace(stats=lambda: stats))
        served = SimpleNamespace(plan=plan_on(*devices), spec=SimpleNamespace(task="generate"), engine=(loop, None))
        made.served, made.state = cast("ServedModel", served), "ready"
    return made


def names(entries: list[ModelEntry]) -> list[str]:
    return [each.name for each in entries]


def test_a_model_on_several_gpus_gives_back_the_memory_of_each() -> None:
    gpus = tuple(Gpu(n, "GPU", 24 * GIB, GIB, (9, 0)) for n in range(3))
    hardware = Hardware(gpus, "CPU", 4, 64 * GIB, 32 * GIB)
    free = hardware_once_free(hardware, [entry("a", "cuda:0", "cuda:2"), entry("b", "cuda:2"), entry("c", "cpu")])
    # "b" is in one process, so that its plan has no exchange between ranks.
    assert [gpu.free_bytes / GIB for gpu in free.gpus] == [7, 1, 12.5]
    assert free.ram_available_bytes == 36 * GIB
    assert hardware_once_free(hardware, [entry("a", "cuda:0", "cuda:2", pinned=True)]) == hardware
    ranks = hardware_once_free(hardware, [entry("a", "cpu", "cpu")])
    assert ranks.ram_available_bytes == (32 + 2 * 4.5) * GIB


def test_only_models_on_a_device_that_the_new_one_may_use_are_evicted() -> None:
    loaded = [
        entry("both", "cuda:0", "cuda:1", used_s=1), entry("zero", "cuda:0", used_s=2),
        entry("one", "cuda:1", used_s=3), entry("ranks", "cpu", "cpu", used_s=4), entry("cpu", "cpu", used_s=5),
    ]  # fmt: skip
    for asked, wanted in (
        ({"device": "cuda:1"}, ["both", "one"]),
        ({"device_ids": ("0",)}, ["both", "zero"]),
        ({"device_ids": ("GPU-1",)}, ["both", "zero", "one"]),
        ({"device": "cuda"}, ["both", "zero", "one"]),
        ({"tensor_parallel_size": 2}, ["both", "zero", "one"]),
        ({"device": "cpu"}, ["ranks", "cpu"]),
    ):
        new = entry("new", **asked)
        assert names(candidates(new, [*loaded, new])) == wanted, asked
    assert names(candidates(entry("new"), loaded[3:])) == ["ranks", "cpu"]


def test_only_models_on_gpus_sleep_when_they_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(available=10 * GIB, total=10 * GIB)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    assert has_room_on_host(entry("a", "cuda:0", "cuda:1"))
    memory.available = int(8.9 * GIB)  # the weights of both ranks take 8 GiB
    assert not has_room_on_host(entry("a", "cuda:0", "cuda:1"))
    memory.available = 10 * GIB
    assert not has_room_on_host(entry("a", "cpu", "cpu"))


def test_the_kv_cache_of_ranks_is_reserved_until_their_processes_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    held: dict[Path, int] = {}
    monkeypatch.setattr("localllm.serving.eviction.process_bytes", held.__getitem__)
    held[Path("/proc/7/status")] = int(4.5 * GIB)  # weights and the process
    ranks = entry("a", "cpu", "cpu", pid=7)
    assert reserved_bytes([ranks], 0) == 3 * GIB
    held[Path("/proc/7/status")] += GIB
    assert reserved_bytes([ranks], 0) == GIB
    held[Path("/proc/7/status")] += GIB
    assert reserved_bytes([ranks], 0) == 0
    assert reserved_bytes([entry("b", "cuda:0", "cuda:1", pid=7)], 0) == 0
    assert process_bytes(Path(f"/proc/{os.getpid()}/status")) == pytest.approx(process_bytes(), rel=0.1)
