"""Every kernel as it is served, compiled for GPUs that are not here: no spills, within its budgets, the MMA we mean.

pytest tests/kernels/test_ahead_of_time.py                        with the installed Triton
PYTHONPATH=FOLDER pytest tests/kernels/test_ahead_of_time.py      with the one in FOLDER, where it was put by
    pip install --target FOLDER --no-deps triton==3.6.0
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import pytest

pytest.importorskip("triton")
from localllm.kernels.launch import INTERPRETED
from tests.kernels.ahead_of_time import (
    AMD_ARCHS,
    SHARED_BYTES,
    Compiled,
    HipCompiled,
    Variant,
    all_variants,
    compile_by_number,
)

VARIANTS = [] if INTERPRETED else all_variants()
NUMBERED = list(enumerate(VARIANTS))
QUICK = 90  # the one whose budgets are held; the others are slow
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
        marks=() if v.often and arch == QUICK else pytest.mark.slow,
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


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> Iterator[dict[tuple[int, int | str], Future[Compiled | HipCompiled]]]:
    """What the tests that were selected will ask for, on its way on all cores: compiling is all they do."""
    asked = [
        (item.callspec.params["number"], item.callspec.params["arch"])
        for item in request.session.items
        if item.path == request.path and isinstance(item, pytest.Function) and hasattr(item, "callspec")
    ]
    pool = ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn"))
    yield {case: pool.submit(compile_by_number, *case) for case in asked}
    pool.shutdown(cancel_futures=True)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter replaces the compiler")
@pytest.mark.parametrize(("number", "arch"), CASES)
def test_keeps_its_budget(compiled: dict[tuple[int, int], Future[Compiled]], number: int, arch: int) -> None:
    _check(VARIANTS[number], arch, compiled[number, arch].result())


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
def test_compiles_for_amd(compiled: dict[tuple[int, str], Future[HipCompiled]], number: int, arch: str) -> None:
    assert compiled[number, arch].result().spills <= VARIANTS[number].max_hip_spills
