"""The load of this machine: processor, memory, GPUs, read at most once a second and only on request. The ranks of a
model that runs on several devices.

Does not know: HTTP, the engine's requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, TypeVar

import psutil

from localllm.engine.step import RankStats, RunnerStats
from localllm.fleet.upstream import Upstream
from localllm.fleet.upstreams import Upstreams
from localllm.units import format_bytes, format_count, format_seconds
from localllm.web.pages.frame.views import Fact, Gauge, Segment, View, stacked, view

log = logging.getLogger(__name__)
MIN_AGE_S = 1.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GPUReading:
    """One GPU as reported by its driver, all processes together."""

    name: str
    utilization: float  # 0 to 1
    used_bytes: int
    total_bytes: int
    process_bytes: int = 0  # of these, the memory of this server and its ranks
    sm_clock_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None


@dataclass(frozen=True, slots=True)
class MachineReading:
    """The state of the machine at one moment."""

    cpu: float  # 0 to 1, over all cores, since the previous reading
    cores: int
    memory_used_bytes: int
    memory_total_bytes: int
    process_bytes: int  # resident memory of this server and its ranks
    gpus: tuple[GPUReading, ...] = ()


class MachineMonitor:
    """Reads the machine in a thread, because a driver may be slow, and caches a reading for one second."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._nvml = _NVML()
        self._reading: MachineReading | None = None
        self._taken_s = 0.0

    async def read(self, rank_pids: Sequence[int] = ()) -> MachineReading:
        """Return the reading; the memory of the ranks' processes counts as this server's."""
        now = time.monotonic()
        if self._reading is None or now - self._taken_s >= MIN_AGE_S:
            self._taken_s = now
            self._reading = await asyncio.to_thread(self._read, rank_pids)
        return self._reading

    def _read(self, rank_pids: Sequence[int]) -> MachineReading:
        memory = psutil.virtual_memory()
        return MachineReading(
            cpu=psutil.cpu_percent(interval=None) / 100,
            cores=psutil.cpu_count() or 1,
            memory_used_bytes=memory.total - memory.available,
            memory_total_bytes=memory.total,
            process_bytes=self._process.memory_info().rss + sum(map(_resident_bytes, rank_pids)),
            gpus=self._nvml.read({self._process.pid, *rank_pids}),
        )


def _resident_bytes(pid: int) -> int:
    """Return the resident memory of a process, 0 if it has ended."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


class _NVML:
    """The NVIDIA driver's values; empty without such a driver."""

    def __init__(self) -> None:
        self._available: bool | None = None

    def read(self, pids: Set[int]) -> tuple[GPUReading, ...]:
        """Return a reading of each GPU; `pids` are the processes of this server."""
        if self._available is None:
            self._available = self._start()
        if not self._available:
            return ()
        import pynvml

        try:
            return tuple(self._gpu(index, pids) for index in range(pynvml.nvmlDeviceGetCount()))
        except pynvml.NVMLError as error:
            log.warning("GPU statistics stopped: the driver returned %s", error)
            self._available = False
            return ()

    @staticmethod
    def _start() -> bool:
        import pynvml

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return False  # there is no driver on most machines without an NVIDIA GPU
        return True

    @staticmethod
    def _gpu(index: int, pids: Set[int]) -> GPUReading:
        import pynvml

        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        name = pynvml.nvmlDeviceGetName(handle)
        power = _or_none(lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000)
        processes = _or_none(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle)) or []
        ours = [process.usedGpuMemory or 0 for process in processes if process.pid in pids]
        return GPUReading(
            name=name.decode() if isinstance(name, bytes) else str(name),
            utilization=pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            used_bytes=int(memory.used),
            total_bytes=int(memory.total),
            process_bytes=sum(ours),
            sm_clock_mhz=_or_none(lambda: int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))),
            temperature_c=_or_none(lambda: int(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))),
            power_w=power,
        )


def _or_none(read: Callable[[], T]) -> T | None:
    """Return the value; None if this board or driver does not report it."""
    import pynvml

    try:
        return read()
    except pynvml.NVMLError:
        return None


@dataclass(frozen=True, slots=True)
class GPUUse:
    """The utilisation and memory of one GPU."""

    index: int
    name: str
    utilization: Gauge
    memory: tuple[Segment, ...]
    facts: tuple[Fact, ...]


@view("dashboard/_machine_use.html")
class MachineUse(View):
    """CPU, memory and GPUs right now."""

    gauges: tuple[Gauge, ...]
    facts: tuple[Fact, ...] = ()
    gpus: tuple[GPUUse, ...] = ()


@dataclass(frozen=True, slots=True)
class RankTile:
    """One rank: its device, memory by part, and step time."""

    number: int
    device: str
    is_up: bool
    memory: tuple[Segment, ...]
    held: str  # memory of all parts, of the whole device
    facts: tuple[Fact, ...]
    last_words: str  # why the last lost process of this rank was lost


@dataclass(frozen=True, slots=True)
class StageTile:
    """The ranks of one pipeline stage."""

    number: int
    ranks: tuple[RankTile, ...]
    bubble_ratio: float | None  # share of the time in which the stage computed nothing; None: unknown, or one stage


@view("dashboard/_ranks.html")
class Ranks(View):
    """The ranks of a model on several devices; hidden if the model runs in the server's process."""

    stages: tuple[StageTile, ...] = ()
    num_ranks: int = 0
    num_lost: int = 0


@dataclass(frozen=True, slots=True)
class ServerTile:
    """One other server behind this address."""

    name: str
    url: str
    is_up: bool
    failure: str  # why it does not answer
    models: str
    facts: tuple[Fact, ...]


@view("dashboard/_other_servers.html")
class OtherServers(View):
    """Other servers that answer requests; hidden if there are none."""

    servers: tuple[ServerTile, ...] = ()


MOST_NAMES = 8
"""Models of a server that its tile names."""


class FarUse(NamedTuple):
    """The computation of experts in RAM in the last minute."""

    share: float  # of the time
    read_rate: float | None  # bytes/s of RAM meanwhile; None: nothing was computed, or the experts are on disk
    bandwidth: float | None  # of RAM, measured before the load; None: unknown

    @property
    def words(self) -> str:
        computed = f"computed in {self.share:.0%} of the last minute"
        if not self.read_rate:
            return computed
        most = f" of {self.bandwidth / 1e9:.3g}" if self.bandwidth else ""
        return f"{computed}, reading {self.read_rate / 1e9:.3g}{most} GB/s"


def machine_use(machine: MachineReading, far: FarUse | None = None) -> MachineUse:
    """far: the experts in RAM; None: the model has none there."""
    used, total = machine.memory_used_bytes, machine.memory_total_bytes
    gauges: tuple[Gauge, ...] = (
        Gauge("CPU", machine.cpu, f"{machine.cpu:.0%} of {machine.cores} cores"),
        Gauge("Memory", used / total if total else 0.0, f"{format_bytes(used)} of {format_bytes(total)}"),
    )
    if far is not None:
        gauges = *gauges, Gauge("Experts in RAM", far.share, far.words)
    facts = (Fact("This server", format_bytes(machine.process_bytes), "resident memory"),)
    return MachineUse(gauges, facts, tuple(_gpu(index, gpu) for index, gpu in enumerate(machine.gpus)))


def _gpu(index: int, gpu: GPUReading) -> GPUUse:
    others = max(0, gpu.used_bytes - gpu.process_bytes)
    parts = (
        ("This server", "used", gpu.process_bytes),
        ("Others", "queue", others),
        ("Free", "idle", max(0, gpu.total_bytes - gpu.process_bytes - others)),
    )
    facts = (
        ("Clock", f"{gpu.sm_clock_mhz} MHz" if gpu.sm_clock_mhz is not None else ""),
        ("Temperature", f"{gpu.temperature_c} °C" if gpu.temperature_c is not None else ""),
        ("Power", f"{gpu.power_w:.0f} W" if gpu.power_w is not None else ""),
    )
    return GPUUse(
        index=index,
        name=gpu.name,
        utilization=Gauge("Busy", gpu.utilization, f"{gpu.utilization:.0%}"),
        memory=stacked([(name, kind, size, format_bytes(size)) for name, kind, size in parts]),
        facts=tuple(Fact(name, value) for name, value in facts if value),
    )


def other_servers(upstreams: Upstreams) -> OtherServers:
    """Return the tile of the servers behind this address; it has none if there are none."""
    return OtherServers(tuple(map(_server, upstreams.all)))


def _server(server: Upstream) -> ServerTile:
    stats = server.stats
    names = [each.name for each in server.models]
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    ended = {outcome: format_count(stats.requests[outcome]) for outcome in ("ok", "refused", "failed", "cancelled")}
    facts = [
        Fact("Requests", format_count(server.num_open), "running"),
        Fact("Answered", ended["ok"], f"{ended['failed']} failed, {ended['refused']} refused"),
        Fact("Sent elsewhere", format_count(stats.retried), "failed before their first token"),
        Fact("Generated", f"{format_count(stats.completion_tokens)} tokens"),
    ]
    if stats.first_tokens:
        facts.append(Fact("To the first token", format_seconds(stats.ttft_s / stats.first_tokens), "on average"))
    return ServerTile(
        name=server.name,
        url=server.config.url,
        is_up=server.is_up,
        failure="" if server.failure is None else str(server.failure),
        models=(", ".join(names[:MOST_NAMES]) + more) or "No models.",
        facts=tuple(facts),
    )


def ranks(runner: RunnerStats) -> Ranks:
    """Return the tile of all ranks; it has no stages if the model runs in the server's process."""
    bubbles = runner.bubble_ratios()
    grouped = {stage: tuple(map(_rank, members)) for stage, members in groupby(runner.ranks, lambda rank: rank.stage)}
    stages = [StageTile(stage, tiles, bubbles.get(stage)) for stage, tiles in grouped.items()]
    return Ranks(tuple(stages), len(runner.ranks), sum(not rank.is_up for rank in runner.ranks))


def _rank(rank: RankStats) -> RankTile:
    size = f" of {format_bytes(rank.device_bytes)}" if rank.device_bytes else ""
    return RankTile(
        number=rank.rank,
        device=", ".join(filter(None, (rank.device, rank.device_name))),
        is_up=rank.is_up,
        memory=_memory(rank),
        held=format_bytes(rank.memory.held_bytes) + size,
        facts=tuple(_facts(rank)),
        last_words=rank.last_words,
    )


def _memory(rank: RankStats) -> tuple[Segment, ...]:
    memory = rank.memory
    parts = [
        ("Weights", "weights", memory.weights_bytes),
        ("KV cache", "used", memory.kv_bytes),
        ("Activations", "prefill", memory.activation_bytes),
        ("Other", "queue", memory.other_bytes),
    ]
    return stacked([(name, kind, size, format_bytes(size)) for name, kind, size in parts], rank.device_bytes)


def _facts(rank: RankStats) -> Iterator[Fact]:
    yield Fact("Step", format_seconds(rank.step_s))
    yield Fact("Lag", f"{format_count(rank.lag_steps)} {'step' if rank.lag_steps == 1 else 'steps'}")
    if rank.busy_ratio is not None:
        yield Fact("Computing", f"{rank.busy_ratio:.0%}")
    if rank.restarts:
        yield Fact("Restarts", format_count(rank.restarts), rank.last_words if rank.is_up else "")
