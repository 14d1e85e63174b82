"""The processor of this machine: its instructions, by the names that matter for models.

Does not know: which instructions a kernel needs (kernels/cpu/native/choice.py).
"""

from __future__ import annotations

from pathlib import Path

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
