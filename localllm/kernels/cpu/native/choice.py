"""Choose the native library for this processor: the best instruction set that it runs and that was compiled.

Torch is imported only on systems without /proc/cpuinfo, so a memory plan or `localllm doctor` can ask as well.
Does not know: what is in a library, whether its products are right (library.py).
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence

from localllm.kernels.cpu.native.sources import FOLDER, library_name, source_hash
from localllm.machine.hardware import read_cpu_flags
from localllm.machine.install_kind import how_to_install

VARIABLE = "LOCALLLM_CPU_SET"
SETS = {"x86_64": ("avx512bf16", "avx512vnni", "avxvnni", "avx2"), "aarch64": ("dotprod",)}
"""Instruction sets by architecture, best first."""
X86_V3 = {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm"}
X86_V4 = X86_V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
NEEDED = {
    "avx2": X86_V3,
    "avxvnni": X86_V3 | {"avx_vnni"},
    "avx512vnni": X86_V4 | {"avx512_vnni"},
    "avx512bf16": X86_V4 | {"avx512_vnni", "avx512_bf16"},
    "dotprod": {"asimddp", "asimdhp"},
}
"""The flags of /proc/cpuinfo that each set needs. Linux names only what it also saves when it switches threads."""


def chosen_set() -> tuple[str, str]:
    """Return (the instruction set whose library is used if its products are right, ""), or ("", why there is none)."""
    names, reason = chosen_sets()
    return (names[0] if names else ""), reason


def chosen_sets() -> tuple[list[str], str]:
    """Return (the instruction sets to try, ""), or ([], why there is none)."""
    compiled = [name for names in SETS.values() for name in names if (FOLDER / library_name(name)).exists()]
    return choose(os.environ.get(VARIABLE, ""), usable_sets(), compiled)


def why_unusable(name: str) -> str:
    """Return why the library of a set cannot be opened, or that it is older than its sources; "" if it is fine. Whether
    its products are right is tested when a model is loaded."""
    try:
        library = ctypes.CDLL(str(FOLDER / library_name(name)))
        library.localllm_source_hash.restype = ctypes.c_char_p
        compiled = library.localllm_source_hash().decode()
    except (OSError, AttributeError) as error:
        return f"The library for {name} cannot be opened: {error}; {compile_again()}."
    is_old = source_hash() not in ("", compiled)
    return f"The compiled libraries are older than their sources; {compile_again()}." if is_old else ""


def choose(wanted: str, usable: Sequence[str], compiled: Sequence[str]) -> tuple[list[str], str]:
    """Return (the sets to open, ""), or ([], why there is none). The sets come best first."""
    if wanted == "none":
        return [], f"{VARIABLE}=none is set."
    if not usable:
        known = ", ".join(name for names in SETS.values() for name in names)
        return [], f"This processor ({platform.machine()}) has none of the instruction sets {known}."
    if wanted and wanted not in usable:
        return [], f"{VARIABLE}={wanted} is set, but this processor runs: {', '.join(usable)}, none."
    if not compiled:
        return [], f"The package was installed without compiled libraries: a C compiler was missing; {compile_again()}."
    found = [name for name in usable if name in compiled and wanted in ("", name)]
    if not found:
        there = f"There is no library for {wanted or ' or '.join(usable)}, only for {', '.join(compiled)}"
        return [], f"{there}; {compile_again()}."
    return found, ""


def compile_again() -> str:
    """Return the advice to install localllm again, which compiles the libraries."""
    return f"run `{how_to_install('localllm')}`"


def usable_sets() -> list[str]:
    """Return the sets whose instructions this processor and its system run, best first."""
    machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    candidates = SETS.get(machine, ())
    system = platform.system()
    if system == "Linux":
        flags = read_cpu_flags()
        return [name for name in candidates if NEEDED[name] <= flags]
    if system == "Darwin":
        return [name for name in candidates if name == "dotprod"]  # every Apple processor since the M1
    return [name for name in candidates if _torch_sees(name)]


def _torch_sees(name: str) -> bool:
    """Return whether torch finds a set's instructions, on systems that have no /proc/cpuinfo."""
    import torch

    if name == "avx2":
        return torch.cpu._is_avx2_supported()
    has_vnni = torch.cpu._is_avx512_supported() and torch.cpu._is_vnni_supported()
    return has_vnni and (name == "avx512vnni" or (name == "avx512bf16" and torch.cpu._is_avx512_bf16_supported()))
