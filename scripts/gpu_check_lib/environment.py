"""Check whether anything can run here: versions, GPU, driver, missing packages. Works without torch."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from scripts.gpu_check_lib.stages import Context, Found

PACKAGES = ("torch", "triton", "transformers", "numpy", "litestar", "pytest", "hypothesis")
NEEDED = ("torch", "triton", "numpy", "msgspec", "platformdirs", "psutil", "safetensors", "transformers")
OLDEST = {"torch": (2, 9), "triton": (3, 5)}


def missing() -> list[str]:
    """Return a sentence with its remedy for each requirement that is not met."""
    problems = []
    for name in NEEDED:
        found = installed(name)
        if found is None:
            problems.append(
                f"The package {name} is not installed. Try: pip install {name}, or, for a machine without a package "
                "index, scripts/gpu_check --collect-wheels DIR elsewhere and --wheels DIR here."
            )
        elif as_numbers(found) < OLDEST.get(name, ()):
            oldest = ".".join(map(str, OLDEST[name]))
            problems.append(f"{name} {found} is too old: {oldest} or newer. Try: pip install --upgrade {name}")
    if problems:
        return problems
    from localllm.machine.gpu_support import gpu_problems

    return [f"{problem.what} Try: {problem.remedy}" for problem in gpu_problems()]


def machine() -> dict[str, Any]:
    """Return the facts about the machine that belong to every figure."""
    import torch

    from localllm import __version__
    from localllm.machine.hardware import read_hardware

    gpu = read_hardware().gpus[torch.cuda.current_device()]
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": gpu.name,
        "driver": gpu.driver_version or "unknown",
        "CUDA": torch.version.cuda,
        "python": platform.python_version(),
        **{name: found for name in PACKAGES[:3] if (found := installed(name))},
        "localllm": __version__,
        "capability": f"{properties.major}.{properties.minor}",
        "SMs": properties.multi_processor_count,
        "L2 MiB": round(properties.L2_cache_size / 2**20),
        "GiB": round(gpu.total_bytes / 2**30, 1),
        "GiB free": round(gpu.free_bytes / 2**30, 1),
    }


def check_environment(context: Context) -> Iterator[Found]:
    from localllm.kernels.tuned import is_writable, triton_cache_dir

    for name, value in machine().items():
        yield name, "note", str(value)
    absent = [name for name in PACKAGES if installed(name) is None]
    yield "packages", "note" if absent else "ok", f"missing: {', '.join(absent)}" if absent else "all are installed"
    yield (
        "host",
        "note",
        f"{loops_per_s() / 1e6:.0f} million iterations of an empty loop per second, {os.cpu_count()} cores",
    )
    compiler = shutil.which(os.environ.get("CC", "")) or shutil.which("gcc") or shutil.which("clang")
    yield "C compiler", "note", compiler or "none"
    folder = triton_cache_dir()
    writable = is_writable(folder)
    yield "kernel cache", "ok" if writable else "failed", f"{folder}{'' if writable else ' is not writable'}"


def loops_per_s(turns: int = 2_000_000) -> float:
    """Measure the speed of this machine's Python, which scales the host's part of a step."""
    started_s = time.perf_counter()
    for _ in range(turns):
        pass
    return turns / (time.perf_counter() - started_s)


def installed(package: str) -> str | None:
    """Return the version of a package; None: it cannot be imported."""
    try:
        return version(package)
    except PackageNotFoundError:
        if find_spec(package) is None:
            return None
        return str(getattr(import_module(package), "__version__", "0"))  # e.g. pytorch-triton, imported as triton


def as_numbers(text: str) -> tuple[int, ...]:
    """Parse a version: '2.11.0+cu130' -> (2, 11)."""
    parts = text.split("+")[0].split(".")[:2]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in parts)
