"""`localllm doctor`: what localllm needs of this machine, looked at one by one, each finding with its remedy.

`--report` makes a text for an issue out of it: no user name, no host name, no key.
Does not know: how to mend anything.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from localllm import __version__
from localllm.cli.tell import package_versions
from localllm.config import Settings, resolve
from localllm.errors import LocalLLMError
from localllm.threads import set_thread_environment
from localllm.units import format_bytes

Verdict = Literal["ok", "note", "problem"]
SIGNS = {"ok": "✓", "note": "·", "problem": "✗"}
LITTLE_DISK_BYTES = 5 * 1024**3
LITTLE_RAM_BYTES = 2 * 1024**3


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str
    verdict: Verdict
    text: str
    remedy: str = ""


def doctor(options: argparse.Namespace) -> int:
    """0 when nothing stands in the way, else 1."""
    set_thread_environment()
    findings = [finding for check in CHECKS for finding in _guarded(check)]
    if options.json:
        print(_redacted(json.dumps([asdict(finding) for finding in findings], indent=2)))
    elif options.report:
        print(_redacted(_report(findings)))
    else:
        print("\n".join(_lines(findings)))
    return 1 if any(finding.verdict == "problem" for finding in findings) else 0


def _guarded(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """A check that breaks is itself a finding; the others still run."""
    try:
        yield from check()
    except LocalLLMError as error:
        yield Finding(check.__name__.removeprefix("check_"), "problem", str(error), error.hint)
    except Exception as error:
        yield Finding(check.__name__.removeprefix("check_"), "problem", f"{type(error).__name__}: {error}")


def check_python() -> Iterator[Finding]:
    where = "in a virtual environment" if sys.prefix != sys.base_prefix else "not in a virtual environment"
    yield Finding(
        "python", "ok", f"Python {platform.python_version()} on {platform.system()} {platform.machine()}, {where}"
    )


def check_packages() -> Iterator[Finding]:
    for name, found in package_versions().items():
        if found != "not installed":
            yield Finding(name, "ok", found)
        elif name == "triton":
            yield Finding(name, "note", "not installed; only a CUDA GPU needs it")
        else:
            yield Finding(name, "problem", "not installed", "scripts/up installs everything, or: pip install localllm")


def check_hardware() -> Iterator[Finding]:
    from localllm.hardware import read_hardware

    hardware = read_hardware()
    for gpu in hardware.gpus:
        memory = f"{format_bytes(gpu.free_bytes)} of {format_bytes(gpu.total_bytes)} free"
        driver = f", driver {gpu.driver_version}" if gpu.driver_version else ""
        yield Finding(f"gpu {gpu.index}", "ok", f"{gpu.name}, {memory}{driver}")
    yield Finding("cpu", "ok", f"{hardware.cpu_name}, {hardware.cpu_cores} cores")
    memory = f"{format_bytes(hardware.ram_available_bytes)} of {format_bytes(hardware.ram_total_bytes)} available"
    if hardware.ram_available_bytes < LITTLE_RAM_BYTES:
        yield Finding("memory", "problem", memory, "Close something: even a small model wants 2 GiB.")
    else:
        yield Finding("memory", "ok", memory)


def check_gpu_use() -> Iterator[Finding]:
    """Whether the GPU that is there can be used: its age, the driver's, torch's build, a place for compiled kernels."""
    import torch

    from localllm.gpu_support import gpu_obstacles
    from localllm.kernels.tuned import is_writable, triton_cache_dir

    there = Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists() or torch.cuda.is_available()
    if not there:
        yield Finding("gpu", "note", "No NVIDIA GPU: models run on the CPU.")
        return
    obstacles = gpu_obstacles()
    for obstacle in obstacles:
        yield Finding("gpu", "problem", obstacle.what, obstacle.remedy)
    folder = triton_cache_dir()
    if not is_writable(folder):
        text = f"{folder} is not writable: compiled kernels are kept elsewhere, or compiled again at every start"
        yield Finding("kernel cache", "note", text, "TRITON_CACHE_DIR names another folder.")
    elif not obstacles:
        yield Finding("kernel cache", "ok", str(folder))


def check_settings() -> Iterator[Finding]:
    settings = resolve({})
    changed = ", ".join(f"{name} ({source})" for name, source in sorted(settings.sources.items()))
    yield Finding("settings", "ok", changed or "all at their defaults")
    yield _port(settings)


def _port(settings: Settings) -> Finding:
    from localllm.up import take_address

    try:
        take_address(settings.server).close()
    except LocalLLMError as error:
        return Finding("port", "note", str(error), error.hint)
    return Finding("port", "ok", f"{settings.server.host}:{settings.server.port} is free")


def check_models() -> Iterator[Finding]:
    from localllm.models.catalog import list_models

    models = list_models()
    names = ", ".join(model.name for model in models)
    yield Finding("models", "ok", names) if names else Finding("models", "problem", "none", "reinstall localllm")


def check_disk() -> Iterator[Finding]:
    from localllm.models.catalog import hub_cache_dir

    cache = hub_cache_dir()
    folder = next(parent for parent in (cache, *cache.parents) if parent.exists())
    free = shutil.disk_usage(folder).free
    text = f"{format_bytes(free)} free for models in {cache}"
    if not os.access(folder, os.W_OK):
        yield Finding("disk", "note", f"{folder} is not writable", "HF_HOME names another folder for models.")
    elif free < LITTLE_DISK_BYTES:
        yield Finding("disk", "note", text, "A 7B model in 16 bits takes 15 GiB.")
    else:
        yield Finding("disk", "ok", text)


def check_data_folder() -> Iterator[Finding]:
    """Chats, hashes of keys and logs: nobody else on this machine should read them."""
    from localllm.folders import data_folder

    folder = data_folder()
    if not folder.exists():
        return
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & 0o077:
        text = f"others on this machine may look into {folder} (mode {mode:o})"
        yield Finding("data folder", "note", text, f"chmod -R go= {folder}")
    else:
        yield Finding("data folder", "ok", str(folder))


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_python,
    check_packages,
    check_hardware,
    check_gpu_use,
    check_settings,
    check_models,
    check_disk,
    check_data_folder,
)


def _lines(findings: list[Finding]) -> Iterator[str]:
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        yield f"{SIGNS[finding.verdict]} {finding.subject.ljust(width)}  {finding.text}"
        if finding.remedy:
            yield f"  {' ' * width}  Try: {finding.remedy}"
    problems = sum(finding.verdict == "problem" for finding in findings)
    yield "" if problems else "\nNothing stands in the way: localllm up"
    if problems:
        yield f"{problems} problem{'s' if problems > 1 else ''} found."


def _report(findings: list[Finding]) -> str:
    """Markdown for an issue."""
    rows = "\n".join(_lines(findings))
    return f"### localllm {__version__}\n```\n{rows}\n```"


def _redacted(text: str) -> str:
    """Without what names a person or a machine."""
    home, host = str(Path.home()), socket.gethostname()
    text = text.replace(home, "~") if len(home) > 1 else text
    return text.replace(host, "HOST") if host and host != "localhost" else text
