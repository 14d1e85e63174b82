"""The processor of this machine: its instructions, its caches, and how many of its cores this process may use.

Does not know: which instructions a kernel needs (kernels/cpu/native/choice.py).
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from localllm.units import parse_bytes

CPUINFO = Path("/proc/cpuinfo")
PROCESSORS = Path("/sys/devices/system/cpu")
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


def last_cache_bytes(processors: Path = PROCESSORS) -> int:
    """Return the size of all last-level caches of this machine's processors together; 0: the system does not say."""
    caches: dict[tuple[int, str], int] = {}
    for folder in processors.glob("cpu[0-9]*/cache/index[0-9]*"):
        with suppress(OSError, ValueError):
            level, shared, size = ((folder / name).read_text().strip() for name in ("level", "shared_cpu_list", "size"))
            caches[int(level), shared] = parse_bytes(size)
    last = max((level for level, _ in caches), default=0)
    return sum(size for (level, _), size in caches.items() if level == last)
