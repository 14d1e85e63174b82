"""Every kernel as it is served, compiled for GPUs that are not here: no spills, within its budgets, the MMA we mean.

A kernel whose source has not changed since it was last compiled on this machine is not compiled again: its result is in
the user's cache (ahead_of_time.py). Of a kernel that was never compiled here, `scripts/check` compiles the first
variant and a part of the others, another part each day; `scripts/check --slow` compiles all of them.

pytest tests/kernels/test_ahead_of_time.py                        with the installed Triton
PYTHONPATH=FOLDER pytest tests/kernels/test_ahead_of_time.py      with the one in FOLDER, where it was put by
    pip install --target FOLDER --no-deps triton==3.6.0
"""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")
from localllm.kernels.launch import INTERPRETED
from tests.conftest import DAY
from tests.kernels import ahead_of_time
from tests.kernels.ahead_of_time import (
    AMD_ARCHS,
    BUDGET_ARCH,
    SHARED_BYTES,
    Compiled,
    CompiledKernels,
    Variant,
    all_variants,
)

VARIANTS = [] if INTERPRETED else all_variants()
NUMBERED = list(enumerate(VARIANTS))
QUICK_DAYS = 8  # the quick tests of this many days compile every variant that the cache does not know
LIKE = {86: 80, 100: 90}  # GPUs that fewer people have, and the architecture whose kernels they run
FOREIGN_SPILLS = 8  # instructions, with settings that were chosen for another architecture
FURTHER = {
    number: [arch for arch, like in LIKE.items() if like in v.archs and arch not in v.archs]
    for number, v in {v.kernel: (number, v) for number, v in reversed(NUMBERED)}.values()
}
"""Of each kernel the first variant is compiled for those too."""
CASES = [
    pytest.param(
        number,
        arch,
        id=f"{v.kernel.__name__}-{v.name}-sm{arch}",
        marks=() if v.often and arch == BUDGET_ARCH else pytest.mark.slow,
    )
    for number, v in NUMBERED
    for arch in (*v.archs, *FURTHER.get(number, ()))
]
AMD_CASES = [
    pytest.param(number, arch, id=f"{v.kernel.__name__}-{v.name}-{arch}")
    for number, v in NUMBERED
    for arch in AMD_ARCHS
    if v.hip
]


FIRST = {v.kernel: number for number, v in reversed(NUMBERED) if v.often and BUDGET_ARCH in v.archs}
KERNELS = None if INTERPRETED else CompiledKernels()


def waits_for_its_day(number: int, arch: int, kernels: CompiledKernels, today: int) -> bool:
    """Return whether the quick tests leave this case to another day: it was never compiled here, so no change of its
    kernel is known, and the kernel's first variant is compiled anyway."""
    variant = VARIANTS[number]
    is_first = FIRST.get(variant.kernel) == number
    return not is_first and (number + today) % QUICK_DAYS != 0 and not kernels.known(variant, arch)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter replaces the compiler")
@pytest.mark.parametrize(("number", "arch"), CASES)
def test_keeps_its_budget(number: int, arch: int) -> None:
    if DAY and waits_for_its_day(number, arch, KERNELS, int(DAY)):
        pytest.skip("never compiled on this machine: the quick tests compile it on one of the next days")
    _check(VARIANTS[number], arch, KERNELS.compile(VARIANTS[number], arch))


def _check(variant: Variant, arch: int, compiled: Compiled) -> None:
    spills = variant.max_spills if arch in variant.archs else max(variant.max_spills, FOREIGN_SPILLS)
    assert compiled.spill_instructions <= spills
    assert variant.min_shared * 1024 <= compiled.shared_bytes <= SHARED_BYTES[arch] * 1024
    if variant.is_early(arch):
        # On every architecture: a load that the compiler moves in front of the wait reads what is not written yet.
        assert compiled.counts.get("ACQBULK") == 1, "a kernel that starts early waits once"
        assert compiled.before_wait.get("CCTL", 0) == variant.prefetches
        assert not [name for name in variant.not_early if compiled.before_wait.get(name)]
    if arch != 90:
        return
    assert compiled.registers <= variant.max_registers
    if variant.mma:
        assert compiled.mma in variant.mma.split("|")
    assert not [name for name in variant.forbidden if compiled.hottest.get(name)]
    if variant.hands_over:
        assert compiled.is_handed_over
    if limit := variant.max_instructions_per_element:
        assert compiled.instructions_per_element(variant.elements_per_loop) <= limit


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="the interpreter replaces the compiler")
@pytest.mark.parametrize(("number", "arch"), AMD_CASES)
def test_compiles_for_amd(number: int, arch: str) -> None:
    assert KERNELS.compile(VARIANTS[number], arch).spills <= VARIANTS[number].max_hip_spills


@pytest.mark.skipif(INTERPRETED, reason="the interpreter replaces the compiler")
def test_an_unchanged_kernel_is_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = min(FIRST.values(), key=lambda number: len(VARIANTS[number].signature))
    variant, kernels = VARIANTS[number], CompiledKernels(tmp_path)
    assert kernels.known(variant, BUDGET_ARCH) == ""
    compiled = kernels.compile(variant, BUDGET_ARCH)
    monkeypatch.setattr(ahead_of_time, "compile_variant", None)
    assert CompiledKernels(tmp_path).compile(variant, BUDGET_ARCH) == compiled
    monkeypatch.undo()
    changed = replace(variant, num_warps=2 * variant.num_warps)
    assert kernels.known(changed, BUDGET_ARCH) == "older"
    assert not waits_for_its_day(number, BUDGET_ARCH, kernels, 0)
    assert kernels.compile(changed, BUDGET_ARCH).num_warps == changed.num_warps


@pytest.mark.skipif(INTERPRETED, reason="the interpreter replaces the compiler")
def test_every_variant_has_its_day(tmp_path: Path) -> None:
    kernels = CompiledKernels(tmp_path)
    for number in range(len(VARIANTS)):
        assert not all(waits_for_its_day(number, BUDGET_ARCH, kernels, day) for day in range(QUICK_DAYS))
