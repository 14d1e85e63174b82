"""What this machine has, as plain frozen values: GPUs, CPU, memory.

Tolerant: no NVIDIA driver, no NVML, a container with a memory limit are all ordinary. torch and pynvml are imported
only when asked, so that a command which needs neither starts fast.
Does not know: models, what anybody wants to do with the memory (models/fit.py does).
"""

from __future__ import annotations

import math
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

MIN_COMPUTE_CAPABILITY = (7, 5)
"""Turing. Triton's compiler supports nothing older."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device, under the index by which torch knows it."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int  # now, other processes' use already taken off
    compute_capability: tuple[int, int]
    driver_version: str | None = None  # None: NVML is not there to ask

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self.free_bytes

    @property
    def supports_bfloat16(self) -> bool:
        return self.compute_capability >= (8, 0)

    @property
    def is_supported(self) -> bool:
        """Whether the kernels compile for it."""
        return self.compute_capability >= MIN_COMPUTE_CAPABILITY


@dataclass(frozen=True, slots=True)
class Hardware:
    """One machine, or the part of it that this process may use."""

    gpus: tuple[Gpu, ...]
    cpu_name: str
    cpu_cores: int  # physical cores that this process may use
    ram_total_bytes: int  # of the machine, or the container's limit where that is smaller
    ram_available_bytes: int  # can be taken without swapping


def read_hardware() -> Hardware:
    """Look once; nothing is cached, since free memory changes."""
    total, available = _read_ram()
    return Hardware(_read_gpus(), _read_cpu_name(), count_cores(), total, available)


# ---- memory ----------------------------------------------------------------------------------------------------------


def _read_ram(cgroup_root: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    for limit, used in _cgroup_memory(cgroup_root):
        total, available = min(total, limit), min(available, max(0, limit - used))
    return total, available


def _cgroup_memory(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) of every control group above this process that has a limit; page cache is not counted as used."""
    for folder in _cgroup_folders(root):
        limit, used = _read_number(folder / "memory.max"), _read_number(folder / "memory.current")
        cache_key = "inactive_file"
        if limit is None:  # version 1, where "no limit" is a number near 2**63
            limit = _read_number(folder / "memory.limit_in_bytes")
            used = _read_number(folder / "memory.usage_in_bytes")
            cache_key = "total_inactive_file"
        if limit is not None and used is not None and limit < 2**60:
            yield limit, max(0, used - _read_stat(folder / "memory.stat", cache_key))


def _cgroup_folders(root: Path) -> list[Path]:
    """The process's own group and its parents; in a container usually the root alone."""
    folders = [root, root / "memory"]
    for line in _read_text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        folder = (root if not controllers else root / "memory") / path.lstrip("/")
        while folder not in folders and root in folder.parents:
            folders.append(folder)
            folder = folder.parent
    return folders


def _read_stat(path: Path, key: str) -> int:
    for line in _read_text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def _read_number(path: Path) -> int | None:
    text = _read_text(path).strip()
    return int(text) if text.isdigit() else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def process_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Memory that this process alone holds; where the system does not tell, all that is resident, files included."""
    for line in _read_text(status).splitlines():
        name, _, value = line.partition(":")
        if name == "RssAnon":
            return int(value.split()[0]) * 1024
    return int(psutil.Process().memory_info().rss)


# ---- CPU -------------------------------------------------------------------------------------------------------------


def _read_cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    for line in _read_text(cpuinfo).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def count_cores(cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """Physical cores, or fewer where the affinity mask or a container's CPU quota says so."""
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    if sys.platform != "darwin" and hasattr(os, "sched_getaffinity"):
        cores = min(cores, len(os.sched_getaffinity(0)))
    quota, _, period = _read_text(cgroup_root / "cpu.max").strip().partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


# ---- GPUs ------------------------------------------------------------------------------------------------------------


def _read_gpus() -> tuple[Gpu, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    nvml = open_nvml()
    try:
        driver = None if nvml is None else as_text(nvml.nvmlSystemGetDriverVersion())
        return tuple(_read_gpu(torch, nvml, index, driver) for index in range(torch.cuda.device_count()))
    finally:
        if nvml is not None:
            nvml.nvmlShutdown()


def _read_gpu(torch: Any, nvml: Any, index: int, driver: str | None) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    free: int | None
    if getattr(properties, "is_integrated", False):  # the driver counts the system's page cache as used
        free = min(int(properties.total_memory), _read_ram()[1])
    else:
        free = _nvml_free_bytes(nvml, getattr(properties, "uuid", None))
    if free is None:  # asking torch creates a context on the device: the second choice
        free = torch.cuda.mem_get_info(index)[0]
    capability = (int(properties.major), int(properties.minor))
    return Gpu(index, str(properties.name), int(properties.total_memory), int(free), capability, driver)


def open_nvml() -> Any:
    """NVML, opened; None where the package or the library is missing."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _nvml_free_bytes(nvml: Any, uuid: Any) -> int | None:
    """By uuid, because NVML's order of devices is not torch's when CUDA_VISIBLE_DEVICES is set."""
    if nvml is None or uuid is None:
        return None
    name = str(uuid)
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(name if name.startswith(("GPU-", "MIG-")) else f"GPU-{name}")
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).free)
    except nvml.NVMLError:
        return None


def as_text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
