"""Compiles a kernel for a GPU that is not there, and reads from its machine code what it will cost.

A `Variant` is one kernel as it is launched while serving: argument types, compile-time constants, launch options, and
the limits it must keep. Each file in tests/kernels/variants/ lists those of one kernel file; test_ahead_of_time.py
holds them to their limits and scripts/make_docs writes the table in docs/reference/kernels.md from the same lists.

`CompiledKernels` keeps what was read in a folder of the user's cache, one small file for each variant, architecture and
version of Triton. A file is used as long as the source of the kernel, and of all functions that it calls, is the same.
"""

import ast
import hashlib
import importlib
import os
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec
import platformdirs
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import localllm.kernels
from tests.kernels.machine_code import before_wait, count, hottest_loop, instructions, is_handed_over, num_spills

AMD_ARCHS = ("gfx1100", "gfx1151", "gfx1201")
"""RDNA 3 (Radeon RX 7900), RDNA 3.5 (Strix Halo) and RDNA 4 (Radeon RX 9070)."""
SHARED_BYTES = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory one program may use, by compute capability."""
MEMORY = ("LDG", "LDGSTS", "UTMALDG", "STG", "ATOM", "ATOMG", "RED")
"""Instructions that reach memory: a kernel without weights has none before it waits."""


@dataclass(frozen=True)
class Variant:
    """One kernel as served. Budgets hold on sm_90 unless said otherwise; that of spills holds everywhere."""

    name: str  # for people: "decode, head_dim 128, bf16"
    kernel: Any  # the @triton.jit function
    signature: Mapping[str, str]  # argument -> "*bf16", "i32", "fp32", "tensordesc<bf16[64,128]>"; constants left out
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    aligned: tuple[str, ...] = ()  # integer arguments that are multiples of 16 in this use
    unaligned: tuple[str, ...] = ()  # pointers that may not be 16-byte aligned
    archs: tuple[int, ...] = (80, 89, 90, 120)
    max_registers: int = 255
    max_spills: int = 0  # instructions, on any architecture and with any version of Triton
    often: bool = True  # compiled by every run of the tests for the architectures that most people have
    mma: str = ""  # on sm_90, in the hottest loop: HGMMA, QGMMA, HMMA or IMMA and no other; "A|B": or; "": any
    forbidden: tuple[str, ...] = ()  # instructions that must not occur in the hottest loop, as "I2F", "F2F"
    elements_per_loop: int = 0  # weights (or bytes) that one program takes per turn of its hottest loop
    max_instructions_per_element: float = 0.0  # thread instructions; 0: not limited
    prefetches: int = 0  # from sm_90 on, of each thread, before the kernel waits for the previous one
    not_early: tuple[str, ...] = ()  # instructions that must not occur before that wait; for those that wait
    min_shared: int = 0  # KiB on every architecture: so many tiles are on their way or in use
    hands_over: bool = False  # on sm_90, reads after an atomic addition what other programs wrote before theirs
    options: Mapping[str, Any] = field(default_factory=dict)  # further compile options; PDL is chosen where not given
    hip: bool = False  # compiled for AMD_ARCHS as well; one variant of each kernel
    max_hip_spills: int = 0  # vector registers, on any of AMD_ARCHS

    def is_early(self, arch: int) -> bool:
        """Return whether the kernel is launched on sm_<arch> while the previous one finishes: from sm_90 on, if it can
        wait and the variant does not say otherwise."""
        return bool(self.constants.get("PDL", arch >= 90 and "PDL" in self.kernel.arg_names))


@dataclass(frozen=True)
class Compiled:
    """What the machine code says."""

    registers: int
    stack_bytes: int
    spill_instructions: int  # machine_code.num_spills says which these are
    shared_bytes: int
    counts: Mapping[str, int]  # of each opcode in the whole kernel
    loop: Mapping[str, int]  # of each opcode in the hottest loop (machine_code.hottest_loop says which that is)
    before_wait: Mapping[str, int]  # of each opcode before the wait for the previous kernel; none without a wait
    num_warps: int
    is_handed_over: bool  # machine_code.is_handed_over says what

    @property
    def hottest(self) -> Mapping[str, int]:
        """Of the hottest loop; of the whole kernel where there is no loop, so that no limit holds by being empty."""
        return self.loop or self.counts

    @property
    def mma(self) -> str:
        """The tensor-core instructions that do the work, as "HGMMA"; "HGMMA+HMMA" where a loop mixes them."""
        return "+".join(name for name in ("HGMMA", "QGMMA", "IGMMA", "HMMA", "QMMA", "IMMA") if self.hottest.get(name))

    def instructions_per_element(self, elements_per_loop: int) -> float:
        """Thread instructions in the hottest loop for each element it takes."""
        return sum(self.hottest.values()) * 32 * self.num_warps / elements_per_loop


def compile_variant(variant: Variant, arch: int) -> Compiled:
    """Machine code of a variant for sm_<arch>. Triton caches by content, so asking twice costs little."""
    source = _source(variant, arch)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "enable_fp_fusion": True}
    if variant.is_early(arch):
        options["launch_pdl"] = True
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={**options, **variant.options})
    usage, machine_code = _disassemble(compiled.asm["cubin"])
    code = instructions(machine_code)
    counts, loop = count(code), count(hottest_loop(code))
    registers, stack = (int(n) for n in re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    spills = num_spills(machine_code)
    before = count(before_wait(code))
    return Compiled(
        registers, stack, spills, compiled.metadata.shared, counts, loop, before, variant.num_warps,
        is_handed_over(machine_code),
    )  # fmt: skip


@dataclass(frozen=True)
class HipCompiled:
    """What the metadata of an AMD kernel's machine code says, for one thread."""

    registers: int  # vector registers
    spills: int  # vector registers kept in memory
    stack_bytes: int


def compile_for_hip(variant: Variant, arch: str) -> HipCompiled:
    """Return the registers of a variant on the AMD GPU `arch`, e.g. "gfx1100"."""
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    compiled = triton.compile(_source(variant, 0), target=GPUTarget("hip", arch, 32), options=options)
    assert compiled.asm["hsaco"], "the machine code was not linked"
    names = ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size")
    found = [re.search(rf"\.{name}:\s*(\d+)", compiled.asm["amdgcn"]) for name in names]
    return HipCompiled(*(int(each[1]) for each in found if each))


Result = TypeVar("Result", Compiled, HipCompiled)


@dataclass(frozen=True)
class Kept(Generic[Result]):
    """What a file of the cache holds."""

    source: str  # hash of the kernel, of what it calls, of its arguments and of the files that read its machine code
    compiled: Result


class CompiledKernels:
    """Compiles variants, and keeps the results in a folder between runs."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or platformdirs.user_cache_path("localllm") / "compiled-kernels" / triton.__version__

    def known(self, variant: Variant, arch: int | str) -> Literal["", "older", "same"]:
        """Return whether the folder has a result of this variant, of an older source or of the same."""
        kept = self._read(variant, arch)
        return "" if kept is None else "same" if kept.source == _source_hash(variant, arch) else "older"

    def compile(self, variant: Variant, arch: int | str) -> Compiled | HipCompiled:
        """Return the result of this very source, from the folder or from the compiler."""
        kept, source = self._read(variant, arch), _source_hash(variant, arch)
        if kept is not None and kept.source == source:
            return kept.compiled
        compiled = compile_for_hip(variant, arch) if isinstance(arch, str) else compile_variant(variant, arch)
        path = self._path(variant, arch)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(msgspec.json.encode(Kept(source, compiled)))
        part.replace(path)
        return compiled

    def _path(self, variant: Variant, arch: int | str) -> Path:
        name = re.sub(r"[^\w.]+", "-", f"{variant.kernel.__name__}-{variant.name}")
        return self.folder / f"{name}-{arch}.json"

    def _read(self, variant: Variant, arch: int | str) -> Kept[Compiled] | Kept[HipCompiled] | None:
        kind = Kept[HipCompiled] if isinstance(arch, str) else Kept[Compiled]
        try:
            return msgspec.json.decode(self._path(variant, arch).read_bytes(), type=kind)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None


def _source_hash(variant: Variant, arch: int | str) -> str:
    readers = (Path(__file__), Path(__file__).with_name("machine_code.py"))
    source = _source(variant, 0 if isinstance(arch, str) else arch)
    options = (arch, variant.num_warps, variant.num_stages, sorted(variant.options.items()), triton.__version__)
    text = f"{source.hash()} {options} {[path.read_bytes() for path in readers]}"
    return hashlib.sha256(text.encode()).hexdigest()


def all_variants() -> list[Variant]:
    """Every variant of every kernel file."""
    package = importlib.import_module("tests.kernels.variants")
    modules = sorted(info.name for info in pkgutil.iter_modules(package.__path__))
    return [v for name in modules for v in importlib.import_module(f"{package.__name__}.{name}").VARIANTS]


def _source(variant: Variant, arch: int) -> ASTSource:
    names = variant.kernel.arg_names
    given = dict(variant.constants)
    if "PDL" in names:
        given["PDL"] = variant.is_early(arch)
    constants = {(names.index(name),): value for name, value in given.items()}
    unknown = [n for n in (*variant.signature, *given) if n not in names]
    assert not unknown, f"{variant.name}: {variant.kernel.__name__} has no argument {unknown}"
    signature = {name: "constexpr" if name in given else variant.signature[name] for name in names}
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if (signature[name].startswith("*") and name not in variant.unaligned) or name in variant.aligned
    }
    return ASTSource(variant.kernel, signature=signature, constexprs=constants, attrs=attributes)


@cache
def _cuobjdump() -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """(resource usage, SASS)"""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = (
            subprocess.run([_cuobjdump(), flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    return usage, sass


BUDGET_ARCH = 90  # the one whose budgets are held; the others are slow


def triton_functions() -> Iterator[Any]:
    """Yield every @triton.jit function of the package."""
    for info in pkgutil.walk_packages(localllm.kernels.__path__, "localllm.kernels."):
        if ".cpu" not in info.name:
            values = vars(importlib.import_module(info.name)).values()
            yield from {id(each): each for each in values if isinstance(each, JITFunction)}.values()


def called_by(function: Any) -> Iterator[Any]:
    """Yield the functions that a kernel calls, by the names that its module has for them."""
    for node in ast.walk(function.parse()):
        if isinstance(node, ast.Name) and isinstance(found := function.fn.__globals__.get(node.id), JITFunction):
            yield found


def launched_kernels() -> dict[int, Any]:
    """Return the functions that no other one calls: those that are launched."""
    found = {id(function): function for function in triton_functions()}
    helpers = {id(called) for function in found.values() for called in called_by(function) if called is not function}
    return {key: function for key, function in found.items() if key not in helpers}
