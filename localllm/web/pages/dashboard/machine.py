"""The load of this machine: processor, memory, GPUs. Read at most once a second, and only on request.

Does not know: the engine, templates.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import TypeVar

import psutil

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
