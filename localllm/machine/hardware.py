"""The GPUs, CPU and memory of this machine, as plain frozen values.

A missing NVIDIA driver, a missing NVML and a container with a memory limit are all supported. torch and pynvml are
imported only when needed, so that other commands start fast: without a GPU's driver neither is.
Does not know: models, how memory is planned (models/fit).
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from localllm.machine.links import Link, Place, read_links, read_place

MIN_COMPUTE_CAPABILITY = (7, 5)
"""Turing. Triton's compiler supports nothing older."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device, with torch's index."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int  # free now: memory of other processes is already subtracted
    compute_capability: tuple[int, int]
    driver_version: str | None = None  # None: NVML is missing
    uuid: str | None = None  # GPU-... or MIG-...
    place: Place = field(default_factory=Place)
    links: tuple[Link, ...] = ()  # to each other GPU; empty: there is only this one

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self.free_bytes

    @property
    def supports_bfloat16(self) -> bool:
        return self.compute_capability >= (8, 0)

    @property
    def is_supported(self) -> bool:
        """Return whether the kernels support this GPU."""
        return self.compute_capability >= MIN_COMPUTE_CAPABILITY


class Speeds(NamedTuple):
    """The measured speeds of a machine (bandwidth.py); None: not measured."""

    ram: float | None = None  # bytes/s that all processors read together
    disk: float | None = None  # bytes/s of large files in the cache folder
    narrow: float | None = None  # multiply-adds/s of the CPU with weights of 8 bits and less, in a prompt
    wide: float | None = None  # the same with weights of 16 and 32 bits


NOT_MEASURED = Speeds()


@dataclass(frozen=True, slots=True)
class Hardware:
    """The machine, or the part of it that this process may use."""

    gpus: tuple[Gpu, ...]
    cpu_name: str
    cpu_cores: int  # physical cores that this process may use
    ram_total_bytes: int  # of the machine, or of the container if its limit is smaller
    ram_available_bytes: int  # can be allocated without swapping
    shm_free_bytes: int | None = None  # of /dev/shm, through which GPUs without peer access exchange; None: unknown
    speeds: Speeds = NOT_MEASURED


def read_hardware() -> Hardware:
    """Read the hardware. Nothing is cached, since free memory changes."""
    total, available = _read_ram()
    return Hardware(_read_gpus(), _read_cpu_name(), count_cores(), total, available, _read_shm())


def available_ram() -> int:
    """Return the bytes of RAM that can be allocated now without swapping, within a container's limit."""
    return _read_ram()[1]


def _read_shm(folder: Path = Path("/dev/shm")) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


# ---- memory ----------------------------------------------------------------------------------------------------------


def _read_ram(cgroup_root: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    for limit, used in _cgroup_memory(cgroup_root):
        total, available = min(total, limit), min(available, max(0, limit - used))
    return total, available


def _cgroup_memory(root: Path) -> Iterator[tuple[int, int]]:
    """Return (limit, used) of each control group of this process with a limit; page cache does not count as used."""
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
    """Return the folders of the process's control group and its parents; in a container usually only the root."""
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
    """Return the private memory of this process; if unknown, its resident memory, which includes mapped files."""
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
    return _mac_cpu_name() or platform.processor() or platform.machine()


def _mac_cpu_name() -> str:
    """Return the name that macOS shows, e.g. "Apple M2 Pro", where `platform` says only "arm"; empty elsewhere."""
    system: str = sys.platform
    if system != "darwin":
        return ""
    try:
        told = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return ""
    return told.stdout.strip()


def count_cores(cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """Count the physical cores, limited by the affinity mask and a container's CPU quota."""
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    if sys.platform != "darwin" and hasattr(os, "sched_getaffinity"):
        cores = min(cores, len(os.sched_getaffinity(0)))
    quota, _, period = _read_text(cgroup_root / "cpu.max").strip().partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


# ---- GPUs ------------------------------------------------------------------------------------------------------------


GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvmap", "/dev/kfd")
"""Device files of GPU drivers: NVIDIA's, WSL's, Tegra's and AMD's."""


def may_have_gpu() -> bool:
    """Return whether torch has to be asked for GPUs: a driver's device is there. Without one, importing torch would
    take a second and 200 MiB to find nothing. On Windows, NVML answers."""
    if "torch" in sys.modules or any(Path(path).exists() for path in GPU_DEVICES):
        return True
    if platform.system() != "Windows":
        return False
    nvml = open_nvml()
    if nvml is not None:
        nvml.nvmlShutdown()
    return nvml is not None


def _read_gpus() -> tuple[Gpu, ...]:
    if not may_have_gpu():
        return ()
    import torch

    if torch.version.hip or not torch.cuda.is_available():  # no AMD GPU has run the kernels
        return ()
    nvml = open_nvml()
    try:
        driver = None if nvml is None else as_text(nvml.nvmlSystemGetDriverVersion())
        gpus = [_read_gpu(torch, nvml, index, driver) for index in range(torch.cuda.device_count())]
        links = read_links(nvml, [_handle(nvml, gpu.uuid) for gpu in gpus])
        return tuple(replace(gpu, links=found) for gpu, found in zip(gpus, links, strict=True))
    finally:
        if nvml is not None:
            nvml.nvmlShutdown()


def _read_gpu(torch: Any, nvml: Any, index: int, driver: str | None) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    uuid = _uuid(properties)
    handle = _handle(nvml, uuid)
    free: int | None
    if getattr(properties, "is_integrated", False):  # the driver counts the system's page cache as used
        free = min(int(properties.total_memory), _read_ram()[1])
    else:
        free = _nvml_free_bytes(nvml, handle)
    if free is None:  # fallback, since asking torch creates a context on the device
        free = torch.cuda.mem_get_info(index)[0]
    capability = (int(properties.major), int(properties.minor))
    place = Place() if handle is None else read_place(nvml, handle)
    return Gpu(index, str(properties.name), int(properties.total_memory), int(free), capability, driver, uuid, place)


def _uuid(properties: Any) -> str | None:
    """Return a device's UUID as NVML names it; torch leaves out the GPU- in front."""
    uuid = getattr(properties, "uuid", None)
    name = str(uuid)
    return None if uuid is None else name if name.startswith(("GPU-", "MIG-")) else f"GPU-{name}"


def open_nvml() -> Any:
    """Return an initialised NVML; None if the package or the library is missing."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _handle(nvml: Any, uuid: str | None) -> Any:
    """Return NVML's device, found by UUID, because NVML ignores CUDA_VISIBLE_DEVICES and torch does not."""
    if nvml is None or uuid is None:
        return None
    try:
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:
        return None


def _nvml_free_bytes(nvml: Any, handle: Any) -> int | None:
    if handle is None:
        return None
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).free)
    except nvml.NVMLError:
        return None


def as_text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


CPUINFO = Path("/proc/cpuinfo")
FAST = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx_vnni": "VNNI",
    "avx512_vnni": "VNNI",
    "avx512_bf16": "BF16",
    "amx_tile": "AMX",
    "asimddp": "dot products",
    "i8mm": "I8MM",
    "sve": "SVE",
}
"""Flags of /proc/cpuinfo that make products of weights fast -> their names for people."""


def read_cpu_flags(path: Path = CPUINFO) -> set[str]:
    """Return the instructions that all processors of /proc/cpuinfo have; empty where there is no such file."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    each = [set(line.partition(":")[2].split()) for line in lines if line.startswith(("flags", "Features"))]
    return set.intersection(*each) if each else set()


def fast_instructions(flags: set[str]) -> tuple[str, ...]:
    """Return the names of the instructions that matter for a model on the CPU, without repeats."""
    return tuple(dict.fromkeys(name for flag, name in FAST.items() if flag in flags))
