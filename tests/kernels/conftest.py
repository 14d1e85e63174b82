"""Where an operation runs in these tests: its kernel on a GPU or in Triton's interpreter, else its plain-torch twin.

    pytest tests/kernels                          the twins
    TRITON_INTERPRET=1 pytest tests/kernels       the kernels, interpreted on CPU tensors: fp32 and fp16
    on a GPU: pytest tests/kernels                the kernels, compiled

The interpreter stores bfloat16 wrongly, so bfloat16 is left out there. It multiplies matrices with numpy, whose BLAS
rounds a row differently at another place of the matrix on some processors; here the terms are added in order of K, so
results have the same bits on every machine.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from localllm.kernels.cpu.native.library import native, why_none
from localllm.kernels.launch import INTERPRETED, LaunchOptions, launching_with
from tests.kernels.harness import poison


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Kernels are launched as in deterministic mode."""
    with launching_with(LaunchOptions(deterministic=True)):
        yield


@pytest.fixture(params=["kernel", "twin"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, recurrent operations run once through the native library and once through their twins."""
    if INTERPRETED or torch.cuda.is_available():
        if request.param == "twin":
            pytest.skip("the twins are tested on a CPU")
    elif native() is None and request.param == "kernel":
        pytest.skip(f"there is no native library: {why_none()}")
    elif request.param == "twin":
        for name in ("causal_conv", "gated_delta", "gated_norm", "selective_scan"):
            monkeypatch.setattr(f"localllm.kernels.{name}.native", lambda: None)


DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])


@pytest.fixture(scope="session", autouse=INTERPRETED)
def products_of_fixed_order() -> Iterator[None]:
    """`tl.dot` in the interpreter gives each element the same bits wherever it stands, as a GPU does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "matmul", ordered_product)
        yield


def ordered_product(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], dtype: Any = None) -> np.ndarray[Any, Any]:
    """`np.matmul` of matrices or stacks of them, one k after the other and without fused multiply-add."""
    a, b = (x.astype(dtype or np.result_type(a, b), copy=False) for x in (a, b))
    out = a[..., :, :1] * b[..., :1, :]
    for k in range(1, a.shape[-1]):
        out += a[..., :, k : k + 1] * b[..., k : k + 1, :]
    return out


def settings_with(kernel: str, chosen: Any) -> Callable[..., Any]:
    """In place of `settings_for`: one kernel's settings are given, all others by their heuristics, without a table."""
    return lambda asked, key, heuristic: chosen if asked == kernel else heuristic(*key)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN, or numbers that are not a result: what a kernel forgets to write shows."""
    empty = torch.empty
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *args, **options: poison(empty(*args, **options)))
        yield
