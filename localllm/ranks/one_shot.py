"""Sums of few rows over ranks in one shot: each GPU reads the parts of all others in their memory and adds them up.

NCCL passes a small sum through several transfers, which take longer than its bytes do. torch's symmetric memory has a
kernel of one launch for it. The first start compares it with NCCL on the GPUs at hand; NCCL serves what is larger, and
everything where the comparison fails or the machine cannot do it.
Does not know: which layers ask for a sum, how kernels are compared (kernels/checks).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from itertools import permutations
from typing import Any, NamedTuple

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from localllm.config.settings import EngineConfig
from localllm.engine.step import KernelFallBack
from localllm.errors import CheckStoppedDevice
from localllm.kernels.checks.case import Case, Subject, close_to
from localllm.kernels.checks.choose import REPORT, Chooser
from localllm.kernels.checks.record import STOPPED, CheckRecord, VariantFailure
from localllm.kernels.checks.table import SUMS
from localllm.kernels.launch import DEFAULTS
from localllm.ranks.group import World
from localllm.ranks.messages import Connect
from localllm.ranks.peers import DISABLE
from localllm.runner.graphs import CudaCapture
from localllm.runner.self_check import is_checked, read_record
from localllm.units import format_bytes

log = logging.getLogger(__name__)

READ_BYTES = 512 << 10
"""Bytes that a rank reads from all others for one sum, at most. Larger sums are bound by the links, and NCCL's."""
ALIGNMENT = 16  # bytes; the kernel loads this much at once
MOST_RANKS = 8
OPERATOR = "one_shot_all_reduce_copy_out"
LEAST_CAPABILITY = (8, 0)  # the kernel adds pairs of bfloat16
REPLAYS = 3
ONE_SHOT = SUMS.variants[0].name
NOT_COMPARED = "it was not compared with NCCL: --check-kernels off"
NO_MEMORY = "too little memory to compare it with NCCL"
PASSING = NOT_COMPARED, NO_MEMORY  # say nothing about the GPUs, and are not remembered


class OneShot:
    """A buffer that the shards of a stage read from each other, and the sum over it. Implements `group.SmallSum`."""

    def __init__(self, group: Any, size: int, dtype: torch.dtype, device: torch.device) -> None:
        """All shards of the group of torch.distributed call this at once. Raises what torch raises where GPUs cannot
        share memory: errors of many kinds."""
        self._buffer = symmetric_memory.empty(most_bytes(size) // dtype.itemsize, dtype=dtype, device=device)
        symmetric_memory.rendezvous(self._buffer, group.group_name)
        self._name = group.group_name

    def takes(self, x: Tensor) -> bool:
        """Return whether x is small enough, by what is the same on every shard."""
        has_size = 0 < x.numel() <= self._buffer.numel() and x.numel() * x.itemsize % ALIGNMENT == 0
        return has_size and x.dtype == self._buffer.dtype

    def sum_(self, x: Tensor) -> Tensor:
        """Add up x over the shards, in place and in their order, so that every shard gets the same bits."""
        starts_aligned = x.storage_offset() * x.itemsize % ALIGNMENT == 0
        own = x if x.is_contiguous() and starts_aligned else x.clone(memory_format=torch.contiguous_format)
        staged = self._buffer[: x.numel()].view(x.shape)
        getattr(torch.ops.symm_mem, OPERATOR)(staged, own, "sum", self._name, own)
        return x if own is x else x.copy_(own)


def most_bytes(size: int) -> int:
    """Return the bytes of the largest sum that `size` shards add up in one shot."""
    return READ_BYTES // (size - 1) // ALIGNMENT * ALIGNMENT


def why_not(asked: Connect, devices: Sequence[str], dtype: torch.dtype, hidden_size: int) -> str:
    """Return why the GPUs of a stage cannot add up in one shot; empty if nothing speaks against it."""
    row_bytes = hidden_size * dtype.itemsize
    if asked.store.startswith("tcp://"):
        return "the ranks are on several machines"
    if len(set(devices)) < len(devices):
        return "several ranks share a GPU"
    if len(devices) > MOST_RANKS:
        return f"{len(devices)} ranks add up, and it is for at most {MOST_RANKS}"
    if dtype not in (torch.bfloat16, torch.float32):
        return f"it adds up bfloat16 and float32, and the model is in {str(dtype).removeprefix('torch.')}"
    if row_bytes > most_bytes(len(devices)) or row_bytes % ALIGNMENT:
        return f"a row has {row_bytes} bytes, and it is for multiples of {ALIGNMENT} up to {most_bytes(len(devices))}"
    if not hasattr(torch.ops.symm_mem, OPERATOR):
        return f"torch {torch.__version__} does not have symm_mem.{OPERATOR}"
    if os.environ.get(DISABLE, "0") != "0":
        return f"{DISABLE} is set"
    for device in devices:
        if (capability := torch.cuda.get_device_capability(device)) < LEAST_CAPABILITY:
            return f"{device} has compute capability {'.'.join(map(str, capability))}, and it needs 8.0"
    for one, other in permutations(devices, 2):
        if not torch.cuda.can_device_access_peer(torch.device(one), torch.device(other)):
            return f"{one} cannot read the memory of {other}"
    return ""


class SumChoice(NamedTuple):
    """The result of the choice. fall_back: None where small sums are computed in one shot."""

    fall_back: KernelFallBack | None = None
    note: str = ""  # about a comparison that was made now; empty: none was


def choose_sums(world: World, config: EngineConfig, dtype: torch.dtype, hidden_size: int) -> SumChoice:
    """Have the shards of this rank's stage add up small sums in one shot, if that is right on the GPUs of every stage.
    All ranks call this at once, and choose the same. Raises `CheckStoppedDevice` on all of them if one has stopped."""
    group = world.group
    group.small = None
    if group.size == 1 or config.deterministic or not is_checked(config, world.device):
        return SumChoice()
    if unfit := world.first_told(why_not(world.asked, world.stage_devices, dtype, hidden_size)):
        return SumChoice(_fall_back(unfit))
    record, case = read_record(world.device), f"{group.size} ranks, {hidden_size} numbers of {dtype}"
    has_passed = record.passed_with(SUMS.name, ONE_SHOT, case)
    is_new = bool(world.first_told("" if has_passed and config.check_kernels != "always" else "new"))
    small, note = None, ""
    why = world.first_told(_known_failure(record, config, has_passed=has_passed))
    if not why:
        small, failure = _opened(record, world, dtype, case)
        why = world.first_told(failure)
        if why:
            _keep(record, case, why)
    if small is not None and not why and is_new:
        begun = time.monotonic()
        why = _compared(world, config, record, _case(case, world, small, config, dtype, hidden_size))
        largest, seconds = format_bytes(most_bytes(group.size)), time.monotonic() - begun
        note = f"sums over ranks of up to {largest} in one shot: compared with NCCL in {seconds:.1f} s, once"
    if why:
        return SumChoice(_fall_back(why, "" if why in PASSING else f" {REPORT}"))
    group.small = small
    return SumChoice(None, note)


def _known_failure(record: CheckRecord, config: EngineConfig, *, has_passed: bool) -> str:
    """Return what earlier starts say against one shot; empty: nothing."""
    known = record.failed_with(SUMS.name, ONE_SHOT)
    if known is not None and (config.check_kernels != "always" or known.why == STOPPED):
        return known.why
    return NOT_COMPARED if config.check_kernels == "off" and not has_passed else ""


def _opened(record: CheckRecord, world: World, dtype: torch.dtype, case: str) -> tuple[OneShot | None, str]:
    """Return the memory that this rank shares with the others, or why it cannot."""
    record.begin(SUMS.name, ONE_SHOT, case)
    try:
        return OneShot(world.group.connection, world.group.size, dtype, world.device), ""
    except Exception as error:  # drivers and torch raise errors of many kinds
        return None, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    finally:
        record.end()


def _case(
    name: str, world: World, small: OneShot, config: EngineConfig, dtype: torch.dtype, hidden_size: int
) -> Case:  # fmt: skip
    """Return the comparison of sums of one row, three rows and as many as fit, twice each, with NCCL's sums in fp32.
    The limit is what adding up in the order of ranks in the model's type gives. All ranks call this at once."""
    group, device = world.group, world.device
    most, dice = most_bytes(group.size) // (hidden_size * dtype.itemsize), torch.Generator()
    dice.manual_seed(8 + group.index)
    numbers = [min(rows, most) for rows in (1, 3, most, 1, 3, most)]
    parts = [torch.randn(rows, hidden_size, generator=dice).to(device, dtype) for rows in numbers]
    record = CudaCapture(device) if device.type == "cuda" and not config.enforce_eager else None
    compared = parts if record is None else [*parts, parts[0]]
    right = [group.sum_(part.to(torch.float32, copy=True)) for part in compared]
    gathered = [group.gather(part, [hidden_size] * group.size).chunk(group.size, -1) for part in compared]
    rounded = [reduce(torch.add, each) for each in gathered]

    def run() -> list[Tensor]:
        sums = [small.sum_(part.clone()) for part in parts]
        if record is not None:
            replayed = parts[0].clone()

            def step() -> None:
                small.sum_(replayed.copy_(parts[0]))

            replay = record(step)
            for _ in range(REPLAYS):
                replay()
            sums.append(replayed)
        return sums

    return Case(name, run, close_to(lambda: _joined(right), lambda: _joined(rounded)))


def _joined(sums: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.flatten() for each in sums])


def _compared(world: World, config: EngineConfig, record: CheckRecord, case: Case) -> str:
    """Return what is wrong with one shot on any rank; empty: nothing. Raises `CheckStoppedDevice`."""
    stopped, chooser = None, Chooser(
        Subject(world.device), record, DEFAULTS, again=True, table=[replace(SUMS, cases=lambda subject: iter([case]))]
    )  # fmt: skip
    why = ""
    try:
        choice = chooser.choose(with_model=True)
        why = choice.fall_backs[0].failures[0].why if choice.fall_backs else NO_MEMORY if choice.unverified else ""
    except CheckStoppedDevice as error:
        stopped, why = error, STOPPED
    first = world.first_told(why)
    if first:
        _keep(record, case.name, first)
    if first == STOPPED:
        raise stopped or CheckStoppedDevice(f"The check of {SUMS.name} ({ONE_SHOT}) stopped another GPU.")
    return first


def _keep(record: CheckRecord, case: str, why: str) -> None:
    """Remember what speaks against one shot, also where another rank has found it."""
    if why not in PASSING and record.failed_with(SUMS.name, ONE_SHOT) is None:
        record.fail(VariantFailure(SUMS.name, ONE_SHOT, case, why))
        record.write()


def _fall_back(why: str, ask: str = "") -> KernelFallBack:
    last = SUMS.variants[-1]
    text = f"{SUMS.name}: {last.name} ({ONE_SHOT}: {why}). {last.cost[0].upper()}{last.cost[1:]}.{ask}"
    log.warning("kernel fall-back %s", text)
    return KernelFallBack(SUMS.name, last.name, text)
