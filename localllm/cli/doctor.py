"""`localllm doctor`: check what localllm needs on this machine; each finding comes with a remedy.

`--report` prints the findings as text for an issue, without user name, host name or keys. `--server` checks a running
server and its parts instead.
Does not know: how to repair anything.
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
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from localllm.cli.tell import package_versions
from localllm.config.resolve import resolve
from localllm.config.settings import Settings
from localllm.errors import LocalLLMError
from localllm.machine.install_kind import how_to_install
from localllm.machine.threads import set_thread_environment
from localllm.units import format_bytes, format_seconds
from localllm.version import __version__

if TYPE_CHECKING:
    from localllm.machine.hardware import Gpu, Hardware
    from localllm.machine.links import Link

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
    """Run the checks and print the findings. Return 1 if there is a problem, else 0."""
    set_thread_environment()
    checks = CHECKS if not options.server else (partial(check_server, options),)
    findings = [finding for check in checks for finding in _guarded(check)]
    if options.json:
        print(_redacted(json.dumps([asdict(finding) for finding in findings], indent=2)))
    elif options.report:
        print(_redacted(_report(findings)))
    else:
        print("\n".join(_lines(findings, "localllm up" if not options.server else "")))
    return 1 if any(finding.verdict == "problem" for finding in findings) else 0


def _guarded(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Run one check. An exception in it becomes a finding, and the other checks still run."""
    try:
        yield from check()
    except LocalLLMError as error:
        yield Finding(_subject(check), "problem", str(error), error.hint)
    except Exception as error:
        yield Finding(_subject(check), "problem", f"{type(error).__name__}: {error}")


def _subject(check: Callable[[], Iterator[Finding]]) -> str:
    function = check.func if isinstance(check, partial) else check
    return function.__name__.removeprefix("check_")


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
            yield Finding(name, "problem", "not installed", how_to_install(name))


def check_hardware() -> Iterator[Finding]:
    from localllm.machine.hardware import read_hardware

    hardware = read_hardware()
    for gpu in hardware.gpus:
        memory = f"{format_bytes(gpu.free_bytes)} of {format_bytes(gpu.total_bytes)} free"
        driver = f", driver {gpu.driver_version}" if gpu.driver_version else ""
        yield Finding(f"gpu {gpu.index}", "ok", f"{gpu.name}, {memory}{driver}{_place(gpu)}")
    yield from _links(hardware)
    yield Finding("cpu", "ok", f"{hardware.cpu_name}, {hardware.cpu_cores} cores")
    memory = f"{format_bytes(hardware.ram_available_bytes)} of {format_bytes(hardware.ram_total_bytes)} available"
    if hardware.ram_available_bytes < LITTLE_RAM_BYTES:
        yield Finding("memory", "problem", memory, "Close other programs: even a small model needs 2 GiB.")
    else:
        yield Finding("memory", "ok", memory)


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


def check_native() -> Iterator[Finding]:
    """Report the native library that decodes on a CPU, or why there is none."""
    from localllm.kernels.cpu.native.library import native, why_none

    library = native()
    if library is not None:
        yield Finding("cpu library", "ok", f"native, compiled for {library.instruction_set}")
    else:
        yield Finding("cpu library", "note", f"none; models on the CPU run through torch alone. {why_none()}")


def check_gpu_use() -> Iterator[Finding]:
    """Check that the GPU can be used: its age, the driver's, torch's build, a folder for compiled kernels."""
    import torch

    from localllm.kernels.tuned import is_writable, triton_cache_dir
    from localllm.machine.gpu_support import gpu_problems

    there = Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists() or torch.cuda.is_available()
    if not there:
        yield Finding("gpu", "note", "No NVIDIA GPU: models run on the CPU.")
        return
    problems = gpu_problems()
    for problem in problems:
        yield Finding("gpu", "problem", problem.what, problem.remedy)
    folder = triton_cache_dir()
    if not is_writable(folder):
        text = f"{folder} is not writable: compiled kernels are stored elsewhere, or compiled again at every start"
        yield Finding("kernel cache", "note", text, "Set TRITON_CACHE_DIR to another folder.")
    elif not problems:
        yield Finding("kernel cache", "ok", str(folder))


def check_settings() -> Iterator[Finding]:
    settings = resolve({})
    changed = ", ".join(f"{name} ({source})" for name, source in sorted(settings.sources.items()))
    yield Finding("settings", "ok", changed or "all at their defaults")
    yield _port(settings)


def _port(settings: Settings) -> Finding:
    from localllm.up import bind_address

    try:
        bind_address(settings.server).close()
    except LocalLLMError as error:
        return Finding("port", "note", str(error), error.hint)
    return Finding("port", "ok", f"{settings.server.host}:{settings.server.port} is free")


def check_models() -> Iterator[Finding]:
    from localllm.models.library.catalog import list_models

    models = list_models()
    names = ", ".join(model.name for model in models)
    yield Finding("models", "ok", names) if names else Finding("models", "problem", "none", "reinstall localllm")


def check_disk() -> Iterator[Finding]:
    from localllm.models.library.catalog import hub_cache_dir

    cache = hub_cache_dir()
    folder = next(parent for parent in (cache, *cache.parents) if parent.exists())
    free = shutil.disk_usage(folder).free
    text = f"{format_bytes(free)} free for models in {cache}"
    if not os.access(folder, os.W_OK):
        yield Finding("disk", "note", f"{folder} is not writable", "Set HF_HOME to another folder for models.")
    elif free < LITTLE_DISK_BYTES:
        yield Finding("disk", "note", text, "Free some space: a 7B model in 16 bits takes 15 GiB.")
    else:
        yield Finding("disk", "ok", text)


def check_data_folder() -> Iterator[Finding]:
    """Check that other users of this machine cannot read the chats, key hashes and logs."""
    from localllm.files.folders import data_folder

    folder = data_folder()
    if not folder.exists():
        return
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & 0o077:
        text = f"other users of this machine can read {folder} (mode {mode:o})"
        yield Finding("data folder", "note", text, f"chmod -R go= {folder}")
    else:
        yield Finding("data folder", "ok", str(folder))


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_python,
    check_packages,
    check_hardware,
    check_native,
    check_gpu_use,
    check_settings,
    check_models,
    check_disk,
    check_data_folder,
)


# A running server -----------------------------------------------------------------------------------------------------


ANSWER_S = 15.0
"""A server that takes longer to answer is stuck."""
LAG_S = 1.0


def check_server(options: argparse.Namespace) -> Iterator[Finding]:
    """Report a running server's parts, models, memory and last fault."""
    from localllm.cli.running import state_of
    from localllm.cli.server import ServerClient
    from localllm.engine.step import RunnerStats

    server = ServerClient.of(options)
    began_s = time.perf_counter()
    told = server.ask("GET", "/localllm/v1/server", timeout_s=ANSWER_S)
    took_s = time.perf_counter() - began_s
    text = f"localllm {told['version']} answered at {server.url} in {format_seconds(took_s)}"
    yield Finding("server", "ok", f"{text}, pid {told['pid']}, up for {format_seconds(told['uptime_s'])}")
    yield from (_part(part) for part in told["parts"])
    for model in server.ask("GET", "/localllm/v1/models/stats", timeout_s=ANSWER_S)["data"]:
        engine = told["engines"].get(model["name"])
        verdict: Verdict = "problem" if model["state"] == "failed" else "ok"
        yield Finding(f"model {model['name']}", verdict, f"{state_of(model)}{_step(engine)}")
        if model["stats"] and (decodes := RunnerStats(*model["stats"]["runner"]).decode_steps):
            yield Finding(f"model {model['name']}", "ok", decodes)
    lag_s, longest_s = told["loop_lag_s"], told["longest_loop_lag_s"]
    lag = f"event loop delayed by {format_seconds(lag_s)}, at most {format_seconds(longest_s)} in the last minute"
    yield Finding("lag", "note" if longest_s > LAG_S else "ok", lag)
    yield Finding("memory", "ok", f"{format_bytes(told['rss_bytes'])} resident, {told['num_threads']} threads")
    yield Finding("requests", "ok", f"{told['open_requests']} open")
    last = told["last_fault"]
    if last is None:
        yield Finding("faults", "ok", "none since the start")
    else:
        ago = format_seconds(max(0.0, time.time() - last["at_s"]))
        text = f"{told['num_faults']} since the start, the last one {ago} ago in {last['where']}: {last['what']}"
        remedy = (
            f"report it, with localllm doctor --report and the content of {told['fault_file']}"
            if told["fault_file"]
            else ""
        )
        yield Finding("faults", "note", text, remedy)


def _part(part: Mapping[str, Any]) -> Finding:
    verdicts: Mapping[str, Verdict] = {"ok": "ok", "slow": "note"}
    return Finding(part["part"], verdicts.get(part["state"], "problem"), part["why"] or "works")


def _step(engine: Mapping[str, Any] | None) -> str:
    if engine is None:
        return ""
    if engine["step_age_s"] is not None:
        return f", its current step began {format_seconds(engine['step_age_s'])} ago"
    return f", idle for {format_seconds(engine['rests_s'])}"


def _lines(findings: list[Finding], next_command: str = "localllm up") -> Iterator[str]:
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        yield f"{SIGNS[finding.verdict]} {finding.subject.ljust(width)}  {finding.text}"
        if finding.remedy:
            yield f"  {' ' * width}  Try: {finding.remedy}"
    problems = sum(finding.verdict == "problem" for finding in findings)
    yield "" if problems or not next_command else f"\nNo problems found. Next: {next_command}"
    if problems:
        yield f"{problems} problem{'s' if problems > 1 else ''} found."


def _report(findings: list[Finding]) -> str:
    """Format the findings as Markdown for an issue."""
    rows = "\n".join(_lines(findings))
    return f"### localllm {__version__}\n```\n{rows}\n```"


def _redacted(text: str) -> str:
    """Replace the home folder and the host name in a text."""
    home, host = str(Path.home()), socket.gethostname()
    text = text.replace(home, "~") if len(home) > 1 else text
    return text.replace(host, "HOST") if host and host != "localhost" else text
