"""The lists of compiled variants are complete: they have every kernel that the package launches."""

import pytest

pytest.importorskip("triton")

from localllm.kernels.launch import INTERPRETED
from tests.kernels.ahead_of_time import BUDGET_ARCH as QUICK
from tests.kernels.ahead_of_time import all_variants, launched_kernels

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter replaces the compiler")


def test_every_kernel_is_compiled() -> None:
    """By the quick tests, for the GPU whose budgets are held."""
    launched = launched_kernels()
    assert len(launched) > 30
    compiled = {id(v.kernel) for v in all_variants() if v.often and QUICK in v.archs}
    assert not [kernel.__name__ for key, kernel in launched.items() if key not in compiled]
    assert not {v.kernel.__name__ for v in all_variants() if id(v.kernel) not in launched}


def test_every_kernel_is_compiled_for_amd() -> None:
    compiled = {id(v.kernel) for v in all_variants() if v.hip}
    assert not [kernel.__name__ for key, kernel in launched_kernels().items() if key not in compiled]
