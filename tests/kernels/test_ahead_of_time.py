"""Every kernel as it is served, compiled for GPUs that are not here: no spills, within its budgets, the MMA we mean."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from localllm.kernels.launch import INTERPRETED
from tests.kernels.ahead_of_time import SHARED_BYTES, Variant, all_variants, compile_for_hip, compile_variant

VARIANTS = [] if INTERPRETED else all_variants()
CASES = [pytest.param(v, arch, id=f"{v.kernel.__name__}-{v.name}-sm{arch}") for v in VARIANTS for arch in v.archs]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter replaces the compiler")
@pytest.mark.parametrize(("variant", "arch"), CASES)
def test_keeps_its_budget(variant: Variant, arch: int) -> None:
    compiled = compile_variant(variant, arch)
    assert compiled.spill_instructions == 0
    assert compiled.shared_bytes <= SHARED_BYTES[arch] * 1024
    if arch != 90:
        return
    assert compiled.registers <= variant.max_registers
    if variant.mma:
        assert compiled.mma in variant.mma.split("|")
    assert not [name for name in variant.forbidden if compiled.hottest.get(name)]
    if limit := variant.max_instructions_per_element:
        assert compiled.instructions_per_element(variant.elements_per_loop) <= limit


@pytest.mark.skipif(INTERPRETED, reason="the interpreter replaces the compiler")
@pytest.mark.parametrize("variant", [pytest.param(v, id=f"{v.kernel.__name__}-{v.name}") for v in VARIANTS if v.hip])
def test_compiles_for_amd(variant: Variant) -> None:
    assert compile_for_hip(variant)
