"""Checks of `localllm doctor` on the machine and the installation: Python, packages, GPU, driver, processor, memory.

torch is imported only where a GPU's driver is: without one, the check takes half a second and little memory.
Every `doctor` reads what comparisons of kernels with PyTorch have found on this GPU; `doctor --gpu` compares again what
needs no model, as a start does before it reads weights.
Does not know: files and ports (doctor_files.py), which model fits (suggestion.py), how kernels are compared.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from localllm.cli.config import package_versions
from localllm.cli.findings import Finding
from localllm.config.settings import EngineConfig
from localllm.errors import ConfigError
from localllm.kernels.cpu.native.choice import X86_V3, chosen_set, why_unusable
from localllm.machine.hardware import GPU_DEVICES, fast_instructions, may_have_gpu, read_cpu_flags
from localllm.machine.install_kind import how_to_install, install_kind
from localllm.machine.platforms import VERSION, is_wsl, this_platform
from localllm.units import format_bytes

if TYPE_CHECKING:
    from localllm.machine.hardware import Gpu, Hardware
    from localllm.machine.links import Link


LITTLE_RAM_BYTES = 2 * 1024**3


def check_python() -> Iterator[Finding]:
    where = "in a virtual environment" if sys.prefix != sys.base_prefix else "not in a virtual environment"
    yield Finding(
        "python", "ok", f"Python {platform.python_version()} on {platform.system()} {platform.machine()}, {where}"
    )
    promise = this_platform()
    yield Finding("platform", "ok" if promise.is_full else "note", promise.text, promise.remedy)
    yield Finding("installed as", "ok", f"{install_kind()}, in {sys.prefix}")


def check_packages() -> Iterator[Finding]:
    for name, found in package_versions().items():
        if found != "not installed":
            yield Finding(name, "ok", found)
        elif name == "triton":
            yield Finding(name, "note", "not installed; only a CUDA GPU needs it")
        else:
            yield Finding(name, "problem", "not installed", how_to_install(name))


# ---- processor and memory --------------------------------------------------------------------------------------------


def check_hardware() -> Iterator[Finding]:
    from localllm.machine.hardware import read_hardware

    hardware = read_hardware()
    for gpu in hardware.gpus:
        memory = f"{format_bytes(gpu.free_bytes)} of {format_bytes(gpu.total_bytes)} free"
        driver = f", driver {gpu.driver_version}" if gpu.driver_version else ""
        yield Finding(f"gpu {gpu.index}", "ok", f"{gpu.name}, {memory}{driver}{_place(gpu)}")
    yield from _links(hardware)
    yield Finding("cpu", "ok", f"{hardware.cpu_name}, {_cores(hardware.cpu_cores)}")
    yield _instructions(read_cpu_flags())
    memory = f"{format_bytes(hardware.ram_available_bytes)} of {format_bytes(hardware.ram_total_bytes)} available"
    if hardware.ram_available_bytes < LITTLE_RAM_BYTES:
        yield Finding("memory", "problem", memory, "Close other programs: even a small model needs 2 GiB.")
    else:
        yield Finding("memory", "ok", memory)
    yield from wsl_memory(hardware.ram_total_bytes)


def _cores(usable: int) -> str:
    """Return the cores that may be used, and how many there are if a container or an affinity mask allows fewer."""
    there = psutil.cpu_count(logical=False) or os.cpu_count() or usable
    noun = "core" if usable == 1 else "cores"
    return f"{usable} {noun}" if usable >= there else f"{usable} of {there} {noun} may be used (container or affinity)"


def _instructions(flags: set[str], machine: str = platform.machine()) -> Finding:
    """Report the instructions that matter for models on the CPU. flags: of /proc/cpuinfo."""
    names = ", ".join(fast_instructions(flags)) or "none that speeds up models"
    if machine.lower() in ("x86_64", "amd64") and flags and not flags >= X86_V3:
        text = f"{names}; the library for models on the CPU needs AVX2, without which they are several times slower"
        return Finding("instructions", "note", text)
    return Finding("instructions", "ok", names if flags else "unknown on this system")


def wsl_memory(ram_total_bytes: int, version: Path = VERSION) -> Iterator[Finding]:
    """Report the memory limit of WSL2, which is half of Windows' memory unless .wslconfig says otherwise."""
    if is_wsl(version):
        text = f"gives this system {format_bytes(ram_total_bytes)}, by default half of Windows' memory"
        remedy = "memory=24GB under [wsl2] in %UserProfile%\\.wslconfig, then wsl --shutdown in Windows"
        yield Finding("WSL2", "note", text, remedy)


def check_native() -> Iterator[Finding]:
    """Report the native library that decodes on a CPU, or why there is none."""
    name, why = chosen_set()
    why = why or why_unusable(name)
    if not why:
        yield Finding("cpu library", "ok", f"native, compiled for {name}")
    else:
        yield Finding("cpu library", "note", f"none; models on the CPU run through torch alone. {why}")


# ---- GPUs ------------------------------------------------------------------------------------------------------------


def check_gpu_use() -> Iterator[Finding]:
    """Check that the GPU can be used: its age, the driver's, torch's build, a folder for compiled kernels."""
    if not may_have_gpu():
        yield Finding("gpu", "note", _no_gpu())
        return
    yield from gpu_access()
    if find_spec("torch") is None:
        yield from _without_torch()
        return
    import torch

    from localllm.kernels.tuned import is_writable, triton_cache_dir
    from localllm.machine.gpu_support import gpu_problems

    if not (torch.cuda.is_available() or any(Path(path).exists() for path in GPU_DEVICES)):
        yield Finding("gpu", "note", _no_gpu())
        return
    problems = gpu_problems()
    for problem in problems:
        yield Finding("gpu", "problem", problem.what, problem.remedy)
    if not problems:
        yield _launches()
    folder = triton_cache_dir()
    if not is_writable(folder):
        text = f"{folder} is not writable: compiled kernels are stored elsewhere, or compiled again at every start"
        yield Finding("kernel cache", "note", text, "Set TRITON_CACHE_DIR to another folder.")
    elif not problems:
        yield Finding("kernel cache", "ok", str(folder))


def _launches() -> Finding:
    """Launch a kernel. It needs what all do: a C compiler, Python's headers, an assembler and the driver."""
    import torch

    from localllm.kernels.first_launch import require_launch
    from localllm.kernels.launch import triton

    try:
        require_launch(torch.device("cuda"))
    except ConfigError as error:
        return Finding("kernels", "problem", f"{error.what} {error.why}", error.hint)
    return Finding("kernels", "ok", f"Triton {triton.__version__} compiled and launched a kernel")


def gpu_access(devices: tuple[str, ...] = GPU_DEVICES) -> Iterator[Finding]:
    """Report device files of GPUs that this user may not open, and the group that may."""
    for path in map(Path, devices):
        if path.exists() and not os.access(path, os.R_OK | os.W_OK):
            group = _group_of(path)
            text = f"{path} belongs to the group {group}, and you are not in it"
            yield Finding("gpu access", "problem", text, f"sudo usermod -aG {group} $USER, then log in again")


def _group_of(path: Path) -> str:
    try:
        return path.group()
    except (KeyError, OSError, NotImplementedError):
        return "render"


def _without_torch() -> Iterator[Finding]:
    """Report the driver, and the builds of torch that it runs, where torch is not installed yet."""
    from localllm.machine.gpu_support import judge_driver, read_nvidia

    for problem in judge_driver(read_nvidia()):
        yield Finding("gpu", "problem", problem.what, problem.remedy)


def _no_gpu() -> str:
    if sys.platform == "darwin":
        return "macOS: models run on the CPU; Apple's GPUs are not supported."
    if sys.platform == "win32":
        return "No NVIDIA GPU: models run on the CPU. With one, use WSL2: native Windows is supported on the CPU only."
    return "No NVIDIA GPU: models run on the CPU."


def _place(gpu: Gpu) -> str:
    """Return a GPU's PCI address, NUMA node, memory bandwidth and UUID, as far as they are known."""
    place = gpu.place
    parts = [
        f"PCI {place.pci}" if place.pci else "",
        f"NUMA node {place.numa_node}" if place.numa_node is not None else "",
        f"{place.bandwidth / 1e9:.0f} GB/s" if place.bandwidth else "",
        gpu.uuid or "",
    ]
    return "".join(f", {part}" for part in parts if part)


def _links(hardware: Hardware) -> Iterator[Finding]:
    """Report how the GPUs are connected, a row of the matrix for each, and the shared memory that NCCL uses."""
    from localllm.machine.links import LINKS_IN_WORDS
    from localllm.models.fit.devices import SHM_BYTES_PER_RANK

    if len(hardware.gpus) < 2:
        return
    kinds = set()
    for gpu in hardware.gpus:
        cells = ", ".join(f"gpu {link.peer} {_link(link)}" for link in gpu.links)
        kinds |= {link.kind[:2] if link.is_nvlink else link.kind for link in gpu.links}
        yield Finding(f"links of {gpu.index}", "ok", cells)
    yield Finding("links", "ok", "; ".join(LINKS_IN_WORDS[kind] for kind in LINKS_IN_WORDS if kind in kinds))
    need = SHM_BYTES_PER_RANK * len(hardware.gpus)
    if hardware.shm_free_bytes is not None and hardware.shm_free_bytes < need:
        text = f"{format_bytes(hardware.shm_free_bytes)} free; several GPUs need {format_bytes(need)}"
        yield Finding("/dev/shm", "note", text, "docker run --ipc=host, or --shm-size=1g")
    elif hardware.shm_free_bytes is not None:
        yield Finding("/dev/shm", "ok", f"{format_bytes(hardware.shm_free_bytes)} free")


def _link(link: Link) -> str:
    peers = {True: "peer access", False: "no peer access", None: "peer access unknown"}[link.has_peer_access]
    return f"{link.kind} ({peers})"


REPORT = "localllm doctor --gpu --report > report.txt, and attach it to an issue"
NO_GPU = "there is no GPU that runs kernels; models on a CPU use none of them"


def check_recorded() -> Iterator[Finding]:
    """Report the kernels that fell back on this GPU at an earlier start."""
    if not _has_gpu():
        return
    import torch

    from localllm.kernels.checks.table import SUMS, TABLE
    from localllm.runner.self_check import known_choice, read_record

    device = torch.device("cuda", torch.cuda.current_device())
    record = read_record(device)
    for fall_back in known_choice(EngineConfig(), device, table=(*TABLE, SUMS)).fall_backs:
        yield Finding("fall-back", "note", str(fall_back).partition(" Please report")[0], REPORT)
    if record.passed:
        text = f"{len(record.passed)} comparisons with PyTorch passed on this GPU, in {record.seconds:.1f} s"
        yield Finding("kernels checked", "ok", text)


def check_kernels() -> Iterator[Finding]:
    """Compare with PyTorch what needs no model, again if it was compared before."""
    if not _has_gpu():
        yield Finding("kernels", "note", NO_GPU)
        return
    import torch

    from localllm.kernels.first_launch import require_launch
    from localllm.runner.opening import launch_options_of
    from localllm.runner.self_check import check_device

    device = torch.device("cuda", torch.cuda.current_device())
    config = replace(EngineConfig(), check_kernels="always")
    require_launch(device)
    choice = check_device(config, device, launch_options_of(config, device))
    fallen = {each.kernel: each for each in choice.fall_backs}
    for kernel, variant in choice.chosen.items():
        if kernel in fallen:
            yield Finding(kernel, "problem", str(fallen[kernel]).partition(" Please report")[0], REPORT)
        else:
            yield Finding(kernel, "ok", f"{variant.name}: as PyTorch")
    yield Finding("comparison", "ok", choice.summary or "nothing to compare")


def _has_gpu() -> bool:
    if not may_have_gpu() or find_spec("torch") is None or find_spec("triton") is None:
        return False
    import torch

    return torch.cuda.is_available()
