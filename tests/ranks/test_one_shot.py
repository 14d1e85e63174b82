"""Sums over ranks in one shot, with stand-ins for torch's kernel and for memory that GPUs share."""

import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from localllm.config.settings import EngineConfig
from localllm.engine.step import Runner
from localllm.errors import CheckStoppedDevice
from localllm.kernels.checks import choose
from localllm.kernels.checks.choose import REPORT
from localllm.kernels.checks.record import STOPPED
from localllm.models.fit import MemoryPlan
from localllm.models.read_spec import read_spec
from localllm.ranks import one_shot
from localllm.ranks.executor import RankExecutor
from localllm.ranks.messages import Connect
from localllm.ranks.one_shot import SumChoice, choose_sums, most_bytes, why_not
from localllm.units import format_bytes
from tests.ranks.real import HARDWARE, config_for, plan_for, tokens_of
from tests.threads import Member, Threads

HIDDEN = 64
Fault = Callable[[int, Tensor], object]
"""What the stand-in for the kernel does on a shard, besides adding up into a tensor."""


class Shard(Member):
    """A shard of which the kernel knows only the name of its connection."""

    def __init__(self, threads: Threads, index: int) -> None:
        super().__init__(threads, index)
        self.connection = SimpleNamespace(group_name=str(index))
        self.small: Any = None


class Shards:
    """Shards on threads, and the kernel that adds up over them."""

    def __init__(self, size: int) -> None:
        self.threads = Threads(size, timeout_s=20)
        self.groups = [Shard(self.threads, index) for index in range(size)]
        self.fault: Fault = lambda index, out: None
        self.num_sums = 0

    def add_up(self, buffer: Tensor, own: Tensor, how: str, name: str, out: Tensor) -> Tensor:
        assert (how, buffer.shape) == ("sum", own.shape)
        assert own.is_contiguous()  # as torch's kernel demands
        assert own.storage_offset() * own.itemsize % 16 == 0
        self.num_sums += 1
        group = self.groups[int(name)]
        parts = self.threads.exchange(group.index, "sum", own, lambda parts: [each.clone() for each in parts])
        out.copy_(reduce(torch.add, parts))
        self.fault(group.index, out)
        return out

    def choose(self, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> list[SumChoice]:
        """Return what each shard chooses at one start."""
        self.num_sums = 0
        config = EngineConfig(**changes)
        return self.threads.run([partial(choose_sums, self.world(each), config, dtype, HIDDEN) for each in self.groups])

    def world(self, group: Shard) -> Any:
        def first_told(text: str) -> str:
            told = torch.tensor(list(text.encode()), dtype=torch.uint8)
            texts = self.threads.exchange(
                group.index, "told", told, lambda given: [bytes(each.tolist()) for each in given]
            )
            return next(filter(None, texts), b"").decode()

        return SimpleNamespace(
            group=group, device=torch.device("cpu"), asked=None, stage_devices=[], first_told=first_told
        )


@pytest.fixture
def shards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[int], Shards]]:
    """Return what makes shards whose kernel is torch's operator, implemented for a CPU."""
    made: list[Shards] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(one_shot, "is_checked", lambda config, device: config.kernels != "torch")
    monkeypatch.setattr(one_shot, "why_not", lambda *facts: "")
    monkeypatch.setattr(symmetric_memory, "empty", lambda size, dtype, device: torch.empty(size, dtype=dtype))
    monkeypatch.setattr(symmetric_memory, "rendezvous", lambda memory, name: None)
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl(one_shot.OPERATOR, lambda *given: made[0].add_up(*given), "CPU")

    def make(size: int) -> Shards:
        made.append(Shards(size))
        return made[0]

    yield make
    library._destroy()


@pytest.mark.parametrize("size", [2, 3, 8])
def test_small_sums_are_computed_in_one_shot_where_that_is_right(size: int, shards: Callable[[int], Shards]) -> None:
    stage = shards(size)
    first = stage.choose()
    assert {each.fall_back for each in first} == {None}
    assert first[0].note.startswith(f"sums over ranks of up to {format_bytes(most_bytes(size))} in one shot")
    assert stage.num_sums == 6 * size
    parts = [torch.randn(5, HIDDEN).bfloat16() for _ in range(size)]
    right = reduce(torch.add, parts)
    strided = [torch.cat([part, part], 1)[:, HIDDEN:] for part in parts]
    for given in (parts, strided):
        calls = [partial(group.small.sum_, x) for group, x in zip(stage.groups, given, strict=True)]
        for x, summed in zip(given, stage.threads.run(calls), strict=True):
            assert summed is x
            assert torch.equal(x, right)
    assert not any(each.note or each.fall_back for each in stage.choose())
    assert stage.num_sums == 0, "a later start compares nothing"
    assert stage.groups[0].small is not None
    stage.choose(check_kernels="always")
    assert stage.num_sums == 6 * size
    stage.choose(deterministic=True)
    assert stage.groups[0].small is None, "its sums are in fp32"


def test_the_size_of_a_sum_decides(shards: Callable[[int], Shards]) -> None:
    stage = shards(2)
    stage.choose()
    small, most = stage.groups[0].small, most_bytes(2) // 2
    assert small.takes(torch.empty(most, dtype=torch.bfloat16))
    larger, unaligned, other = torch.empty(most + 8), torch.empty(4), torch.empty(8, dtype=torch.float32)
    assert not any(small.takes(x) for x in (larger.bfloat16(), unaligned.bfloat16(), other))


def wrong_on_one(index: int, out: Tensor) -> None:
    out[-1, -1] += index


def raising(index: int, out: Tensor) -> None:
    raise RuntimeError("CUDA driver version is insufficient")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("fault", "words"), [(wrong_on_one, "the error was"), (raising, "driver version")])
def test_a_wrong_sum_and_an_error_leave_sums_to_nccl(
    fault: Fault, words: str, dtype: torch.dtype, shards: Callable[[int], Shards]
) -> None:  # fmt: skip
    stage = shards(2)
    stage.fault = fault
    for start in range(2):
        assert_left_to_nccl(stage, stage.choose(dtype), words)
        assert bool(stage.num_sums) == (start == 0), "it is remembered"


def assert_left_to_nccl(stage: Shards, chosen: Sequence[SumChoice], words: str, ends: str = REPORT) -> None:
    (fall_back,) = {each.fall_back for each in chosen}
    assert fall_back is not None
    assert (fall_back.kernel, fall_back.variant) == ("sums over ranks", "NCCL")
    assert re.fullmatch(rf"sums over ranks: NCCL \(one shot: .*{words}.*\)\. Up to 20 % .*\. ?{ends}", fall_back.text)
    assert not any(each.note for each in chosen)
    assert [group.small for group in stage.groups] == [None] * len(stage.groups)


def test_memory_that_cannot_be_shared_leaves_sums_to_nccl(
    shards: Callable[[int], Shards], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(memory: Tensor, name: str) -> None:
        if name == "1":
            raise RuntimeError("handle type is not supported\nat line 8")

    stage = shards(2)
    monkeypatch.setattr(symmetric_memory, "rendezvous", refuse)
    assert_left_to_nccl(stage, stage.choose(), "RuntimeError: handle type is not supported")


def test_what_was_not_compared_is_not_used(shards: Callable[[int], Shards]) -> None:
    stage = shards(2)
    assert_left_to_nccl(stage, stage.choose(check_kernels="off"), "not compared with NCCL: --check-kernels off", "")
    assert {each.fall_back for each in stage.choose()} == {None}, "it is not remembered as a failure"
    assert {each.fall_back for each in stage.choose(check_kernels="off")} == {None}
    assert stage.groups[0].small is not None
    assert {each.fall_back for each in stage.choose(kernels="torch")} == {None}
    assert stage.groups[0].small is None


def test_a_hang_ends_all_ranks_and_is_left_out_at_the_next_start(
    shards: Callable[[int], Shards], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "COMPILE_S", 0.5)
    stage, over, sums = shards(2), threading.Event(), count(1)
    stage.fault = lambda index, out: over.wait() if index and next(sums) == 6 else None  # the other has its last sum
    try:
        ended = stage.threads.run([partial(stopped, stage, group) for group in stage.groups])
        assert ["another" in text for text in ended] == [True, False]
        for check in ("first", "always"):
            assert_left_to_nccl(stage, stage.choose(check_kernels=check), STOPPED)
            assert stage.num_sums == 0
    finally:
        over.set()


def stopped(stage: Shards, group: Shard) -> str:
    with pytest.raises(CheckStoppedDevice) as raised:
        choose_sums(stage.world(group), EngineConfig(), torch.bfloat16, HIDDEN)
    return str(raised.value)


MACHINE: dict[str, Any] = {
    "devices": ["cuda:0", "cuda:1"], "capability": (9, 0), "peers": True, "dtype": torch.bfloat16, "store": "/memory",
    "hidden_size": 4096, "operator": one_shot.OPERATOR, "environ": "0",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"dtype": torch.float32}, ""),
        ({"store": "tcp://host:9"}, "several machines"),
        ({"devices": ["cuda:0", "cuda:0"]}, "share a GPU"),
        ({"devices": [f"cuda:{n}" for n in range(9)]}, "9 ranks add up, and it is for at most 8"),
        ({"dtype": torch.float16}, "the model is in float16"),
        ({"hidden_size": 1 << 18}, ""),
        ({"hidden_size": 1 << 19}, "a row has 1048576 bytes, and it is for multiples of 16 up to 524288"),
        ({"hidden_size": 1027}, "a row has 2054 bytes"),
        ({"operator": "not_there"}, r"torch 2.* does not have symm_mem\.not_there"),
        ({"environ": "1"}, "NCCL_P2P_DISABLE is set"),
        ({"capability": (7, 5)}, "cuda:0 has compute capability 7.5, and it needs 8.0"),
        ({"peers": False}, "cuda:0 cannot read the memory of cuda:1"),
    ],
)
def test_machines_that_cannot_share_memory_are_named(
    changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = MACHINE | changes
    monkeypatch.setenv("NCCL_P2P_DISABLE", facts["environ"])
    monkeypatch.setattr(one_shot, "OPERATOR", facts["operator"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: facts["capability"])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: facts["peers"])
    asked = Connect(facts["store"], 9.0, len(facts["devices"]), 1, facts["devices"])
    why = why_not(asked, asked.devices, facts["dtype"], facts["hidden_size"])
    assert bool(why) == bool(words)
    assert re.search(words, why)


# Of a rank on a CPU: torch's kernel is a gather over gloo, and every group of shards counts as GPUs that share memory.
RANK = """
import os, threading, torch, torch.distributed as dist
from localllm.kernels.checks import choose
from localllm.kernels.checks.choose import REPORT
from localllm.ranks import one_shot, rank as process
from localllm.ranks.__main__ import torch_share

choose.COMPILE_S = 2.0
one_shot.is_checked = lambda config, device: True
one_shot.why_not = lambda *facts: ""
one_shot.symmetric_memory.empty = lambda size, dtype, device: torch.empty(size, dtype=dtype)
one_shot.symmetric_memory.rendezvous = lambda memory, name: None

def add_up(buffer, own, how, name, out):
    group = dist.distributed_c10d._resolve_process_group(name)
    if FAULT == "hangs" and group.rank():
        threading.Event().wait()
    if FAULT == "raises":
        raise RuntimeError("asked to fail")
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    out.copy_(sum(parts[1:], parts[0]))
    if FAULT == "is wrong" and group.rank():
        out += 1
    with open(CALLS, "a") as file:
        file.write(".")
    return out

library = torch.library.Library("symm_mem", "IMPL")
library.impl(one_shot.OPERATOR, add_up, "CPU")
process.main(torch_share)
"""


@pytest.mark.parametrize("fault", ["is right", "is wrong", "raises", pytest.param("hangs", marks=pytest.mark.slow)])
def test_ranks_generate_the_tokens_of_one_process_whatever_one_shot_does(
    fault: str, checkpoint: Path, alone: tuple[Runner, MemoryPlan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config, calls = config_for(tensor_parallel_size=2), tmp_path / "calls"
    plan = plan_for(checkpoint, config)
    code = f"FAULT, CALLS = {fault!r}, {str(calls)!r}\n{RANK}"

    def start() -> None:
        executor = RankExecutor.load(
            checkpoint, read_spec(checkpoint), config, plan, lambda loaded, total: None, lambda text: None,
            command=(sys.executable, "-c", code),
        )  # fmt: skip
        try:
            runner, opened = executor.open_runner(config, plan, HARDWARE, lambda text: None)
            compared = calls.stat().st_size if calls.exists() else 0
            assert tokens_of(runner, plan, temperature=0.0) == tokens_of(*alone, temperature=0.0)
            served = (calls.stat().st_size if calls.exists() else 0) - compared
            texts = [each.text for each in runner.stats().fall_backs]
            assert set(texts) <= set(opened.notes)
            assert bool(served) == (fault == "is right") == (not texts)
            words = {"is wrong": "the error was", "raises": "RuntimeError: asked to fail", "hangs": STOPPED}
            assert words.get(fault, "") in "".join(texts)
        finally:
            executor.close()

    if fault == "hangs":
        with pytest.raises(CheckStoppedDevice, match="one shot"):
            start()
    start()
