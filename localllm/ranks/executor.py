"""Owns a model whose weights are in the processes of several ranks. The twin of runner/executor.py's `LocalExecutor`.

`RankExecutor.load` starts the processes and waits for them phase by phase, each with a deadline: the ranks, their
connections, the weights. What goes wrong in between, Ctrl-C included, ends all processes.
Does not know: how a model is divided (models/fit), requests, what ranks compute.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from subprocess import Popen
from typing import Self

from localllm.config.settings import EngineConfig
from localllm.engine.step import RankStats
from localllm.errors import ConfigError, LocalLLMError, RanksLost
from localllm.machine.hardware import Hardware, read_hardware
from localllm.models.fit import Measured as MeasuredMemory
from localllm.models.fit import MemoryPlan, RankPlan
from localllm.models.loader import check_all_used
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.spec.shard import Shard
from localllm.models.weights.lora import LoraFile
from localllm.models.weights.source import Progress
from localllm.ranks.handshake import checkpoint_fingerprint
from localllm.ranks.links import Links, OnReport
from localllm.ranks.machines import MachineSupervisor
from localllm.ranks.messages import (
    Connect,
    Connected,
    Loaded,
    Measured,
    Open,
    Opened,
    OpenRunner,
    PutAdapter,
    Report,
)  # fmt: skip
from localllm.ranks.peers import peer_environment
from localllm.ranks.placement import placement_of
from localllm.ranks.progress import RankProgress
from localllm.ranks.remote import RankRunner
from localllm.ranks.states import RankStates
from localllm.ranks.supervisor import COMMAND, TICK_S, RankPlace, Supervisor
from localllm.ranks.wire import Kind, encode
from localllm.runner.executor import AdapterSlots
from localllm.runner.opening import ReportDetail, replan

log = logging.getLogger(__name__)

START_S = 30.0  # for all processes to be there
CONNECT_S = 90.0  # to import torch and to meet the others
QUIET_S = 300.0  # between two reports of ranks that load, measure or capture

OnLost = Callable[[RanksLost], None]


class RankExecutor:
    """A model on several devices, with a process for each. Implements `runner.executor.Executor`."""

    def __init__(
        self, supervisor: Supervisor, links: Links, spec: ModelSpec, plan: MemoryPlan, loaded: Sequence[Loaded],
        timeout_s: float, note: str = "",
    ) -> None:  # fmt: skip
        """plan: that the weights were loaded with. note: about the start of the ranks."""
        self._supervisor, self._links, self._spec, self._plan = supervisor, links, spec, plan
        self._loaded = loaded
        self._timeout_s, self._note = timeout_s, note
        self._on_host = False
        self._states = RankStates(supervisor, plan.ranks)

    @classmethod
    def load(
        cls, path: Path, spec: ModelSpec, config: EngineConfig, plan: MemoryPlan, progress: Progress,
        report: ReportDetail, *, command: Sequence[str] = COMMAND, tick_s: float = TICK_S,
    ) -> Self:  # fmt: skip
        """Start the plan's ranks, and load each one's share of the checkpoint.

        command: that starts a rank. tick_s: between two looks at the ranks' signs of life. Raises what `load_model`
        raises, and `RanksLost`.
        """
        ranks, placement = plan.ranks, placement_of(config)
        timeout_s, places = float(config.rank_timeout), [place_of(rank) for rank in plan.ranks]
        if placement is not None:
            note, devices = placement.note, placement.devices
            supervisor: Supervisor = MachineSupervisor(places, placement, tick_s=tick_s)
        else:
            added, note = peer_environment(ranks, lambda: read_hardware().gpus, os.environ)
            devices = [rank.device for rank in ranks]
            supervisor = Supervisor(places, command=command, tick_s=tick_s, added=added)
        with ExitStack() as undo:
            undo.callback(supervisor.stop)
            links = supervisor.start()
            pids = links.answers(0, int, START_S, "their start")
            report(f"{len(pids)} ranks started")
            shares_device = placement is None and len(set(devices)) < len(devices)
            asked_connect = Connect(
                supervisor.store, timeout_s, ranks[0].shard.size, len(ranks) // ranks[0].shard.size, list(devices),
                "gloo" if shares_device else "",
            )  # fmt: skip
            connected = links.call(Kind.CONNECT, asked_connect, Connected, CONNECT_S)
            ways = "; ".join(sorted({each.transport for each in connected}))
            slowest_us = max(each.all_reduce_s for each in connected) * 1e6
            report(f"ranks connected over {ways}, a small all-reduce takes {slowest_us:.0f} µs")
            own = () if spec.drafter is None or spec.drafter.path == path else (spec.drafter.path,)
            for each in (path, *own) if placement is not None else ():
                _check_files(each, links.call(Kind.CHECK, str(each), dict[str, str], QUIET_S), supervisor.names)
            shares = [
                encode(Open(str(path), spec, config, replace(plan_of(plan, rank), device=device), rank.shard))
                for rank, device in zip(ranks, devices, strict=True)
            ]
            asked = links.ask(Kind.OPEN, shares)
            loaded = links.answers(asked, Loaded, QUIET_S, "loading", _sum_of(progress, len(ranks)))
            check_all_used(spec, [each.unused_tensors for each in loaded])
            supervisor.watches_beats = True
            undo.pop_all()
        return cls(supervisor, links, spec, plan, loaded, timeout_s, note)

    @property
    def weights_bytes(self) -> int:
        return sum(self._bytes_of(rank, self._plan.max_model_len) for rank in range(len(self._loaded)))

    @property
    def adapter_slots(self) -> AdapterSlots | None:
        counts = [loaded.max_loras for loaded in self._loaded if loaded.max_loras is not None]
        return RankSlots(self._links, min(counts), self._timeout_s) if counts else None

    def resident_bytes(
        self, device: str, dtype: str, max_model_len: int, quantization: str | None, shard: Shard | None = None, /
    ) -> int:
        """Return the bytes of one shard's weights, or of all, with the tables of another context length."""
        ranks = [rank for rank, each in enumerate(self._plan.ranks) if shard is None or each.shard == shard]
        return sum(self._bytes_of(rank, max_model_len) for rank in ranks)

    def _bytes_of(self, rank: int, max_model_len: int) -> int:
        loaded = self._loaded[rank]
        return loaded.fixed_bytes + round(loaded.table_bytes_per_token * max_model_len)

    def as_if_not_loaded(self, hardware: Hardware) -> Hardware:
        held = [
            (each.device, self._bytes_of(rank, self._plan.max_model_len)) for rank, each in enumerate(self._plan.ranks)
        ]
        if self._plan.device == "cpu":
            return replace(hardware, ram_available_bytes=hardware.ram_available_bytes + self.weights_bytes)
        if self._on_host:
            return hardware
        gpus = [
            replace(
                gpu, free_bytes=gpu.free_bytes + sum(size for device, size in held if device == f"cuda:{gpu.index}")
            )
            for gpu in hardware.gpus
        ]
        return replace(hardware, gpus=tuple(gpus))

    def open_runner(
        self, config: EngineConfig, plan: MemoryPlan, hardware: Hardware, report: ReportDetail
    ) -> tuple[RankRunner, MemoryPlan]:
        """Return a runner on all ranks, and the plan it was built with. On GPUs each rank measures first; the KV cache
        then has as many blocks as the rank with the least memory can hold. Raises `DoesNotFit`, `RanksLost`."""
        self._supervisor.watches_beats = False  # kernels are compiled, graphs captured
        try:
            plan, opened = self._open_runners(
                config, plan, hardware, lambda rank, told: report(told.text) if rank == 0 else None
            )
        except LocalLLMError:
            with contextlib.suppress(RanksLost):
                self._links.call(Kind.CLOSE_RUNNER, None, type(None), QUIET_S)
            raise
        finally:
            self._supervisor.watches_beats = True
        self._plan, self._states.ranks = plan, plan.ranks
        self._states.device_bytes = {f"cuda:{gpu.index}": gpu.total_bytes for gpu in hardware.gpus}
        self._states.device_bytes["cpu"] = hardware.ram_total_bytes
        shards = plan.ranks[0].shard.size
        sampling = len(plan.ranks) - shards  # the first shard of the last stage
        stages = len(plan.ranks) // shards
        runner = RankRunner(
            self._links, opened[sampling], num_stages=stages, sampling_rank=sampling, timeout_s=self._timeout_s,
            read_ranks=self._states.read, in_flight=self._states.in_flight,
        )  # fmt: skip
        return runner, plan

    def _open_runners(
        self, config: EngineConfig, plan: MemoryPlan, hardware: Hardware, tell: OnReport
    ) -> tuple[MemoryPlan, list[Opened]]:
        """Open a runner on each rank, in two answers: what it has measured, and what it has opened."""
        seq = self._links.ask(
            Kind.OPEN_RUNNER, [encode(OpenRunner(config, plan_of(plan, each))) for each in plan.ranks]
        )
        try:
            measured = self._links.answers(seq, Measured, QUIET_S, "measuring", tell)
            plan = self._replan(config, plan, hardware, measured)
        except LocalLLMError:
            self._links.post(Kind.ALLOCATE, [b""])
            raise
        self._links.expect(seq)
        self._links.post(Kind.ALLOCATE, [encode(plan_of(plan, each)) for each in plan.ranks])
        opened = self._links.answers(seq, Opened, QUIET_S, "opening a runner", tell)
        notes = dict.fromkeys((*plan.notes, self._note, *(note for each in opened for note in each.plan.notes)))
        return replace(plan, notes=tuple(filter(None, notes))), opened

    def _replan(
        self, config: EngineConfig, plan: MemoryPlan, hardware: Hardware, measured: Sequence[Measured]
    ) -> MemoryPlan:
        """Return the plan made from what all ranks have measured; on a CPU nothing is."""
        memory = [
            MeasuredMemory(each.weights_bytes, each.activation_bytes, each.comm_bytes)
            for each in measured
            if each.weights_bytes is not None
        ]
        return replan(self._spec, config, plan, hardware, memory) if memory else plan

    def move_to_host(self) -> None:
        self._links.call(Kind.SLEEP, None, type(None), QUIET_S)
        self._on_host = True

    def move_to_device(self) -> None:
        self._links.call(Kind.WAKE, None, type(None), QUIET_S)
        self._on_host = False

    def continue_from(self, lost: Sequence[RankStats]) -> None:
        self._states.lost = lost

    def when_lost(self, act: OnLost) -> None:
        """Have `act` called from another thread when a rank is lost, at once if one is. Requests hear of a loss by
        themselves; an idle engine does not."""
        self._supervisor.when_lost(act)

    def close(self) -> None:
        """End the ranks. Idempotent."""
        self._supervisor.stop()

    @property
    def processes(self) -> Sequence[Popen[bytes]]:
        """The processes of the ranks, by rank."""
        return self._supervisor.processes

    @property
    def progress(self) -> list[RankProgress]:
        """Return what each rank has done last. No rank is asked."""
        return self._supervisor.progress.read_all()


class RankSlots:
    """The slots for adapters of all ranks. An adapter that one rank refuses stays unused on the others."""

    def __init__(self, links: Links, max_loras: int, timeout_s: float) -> None:
        self._links, self.max_loras, self._timeout_s = links, max_loras, timeout_s

    def put(self, slot: int, lora: LoraFile) -> None:
        self._links.call(Kind.ADAPTER, PutAdapter(slot, str(lora.path)), type(None), self._timeout_s)


def plan_of(whole: MemoryPlan, rank: RankPlan) -> MemoryPlan:
    """Return the memory plan of one rank alone."""
    return replace(
        whole, device=rank.device, weights_bytes=rank.weights_bytes, kv_bytes=rank.kv_bytes,
        activation_bytes=rank.activation_bytes, graph_bytes=rank.graph_bytes, comm_bytes=rank.comm_bytes,
        free_bytes=rank.free_bytes, reserve_bytes=rank.reserve_bytes, state_bytes=rank.state_bytes, ranks=(),
    )  # fmt: skip


def place_of(rank: RankPlan) -> RankPlace:
    return RankPlace(rank.device, -1 if rank.numa_node is None else rank.numa_node)


def _check_files(path: Path, found: Sequence[Mapping[str, str]], names: Sequence[str]) -> None:
    """Raise `ConfigError` unless each rank's machine has the same files of the checkpoint as this one."""
    here = checkpoint_fingerprint(path)
    for name, theirs in zip(names, found, strict=True):
        differing = sorted(file for file in here.keys() | theirs.keys() if here.get(file) != theirs.get(file))
        if differing:
            raise ConfigError(
                "The machines have different files of the model.",
                f"{name} differs in {', '.join(differing[:5])} of {path}.",
                "Copy the folder from one machine to the others, or use one that all of them share.",
                param="nodes",
            )


def _sum_of(progress: Progress, size: int) -> OnReport:
    """Return a callback that adds up the ranks' loaded bytes."""
    loaded, totals = [0] * size, [0] * size

    def add(rank: int, report: Report) -> None:
        loaded[rank], totals[rank] = report.loaded, report.total
        if all(totals):  # every rank has told how much it reads
            progress(sum(loaded), sum(totals))

    return add
