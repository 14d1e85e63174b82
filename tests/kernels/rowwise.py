"""What the tests of row-wise operations share: poisoned memory, and the bound that 8-bit results must keep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.kernels.launch import INTERPRETED
from localllm.kernels.quantize import Quantized, largest

EIGHT_BITS = [torch.float8_e4m3fn, torch.int8]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
EXAMPLES = 12 if INTERPRETED else 40


@pytest.fixture(scope="module", autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN, or bytes that are not a result: what a kernel forgets to write shows."""
    empty = torch.empty

    def poisoned(*args: Any, **options: Any) -> Tensor:
        out: Tensor = empty(*args, **options)
        return poison(out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", poisoned)
        yield


def poison(tensor: Tensor) -> Tensor:
    """Filled with NaN; int8 with 85."""
    if tensor.dtype.itemsize > 1:
        return tensor.fill_(float("nan"))
    tensor.view(torch.uint8).fill_(85 if tensor.dtype == torch.int8 else 0x7F)
    return tensor


def assert_quantized(out: Quantized, wanted: Tensor, dtype: torch.dtype, slack: float) -> None:
    """Every value is the nearest one, or next to a tie; the row's largest is on the largest. wanted: float64.

    slack: relative error of what was quantised.
    """
    values, scale = out
    assert values.dtype == dtype
    assert values.shape == wanted.shape
    assert scale.dtype == torch.float32
    assert scale.shape == (*wanted.shape[:-1], 1)
    peak = wanted.abs().amax(-1, keepdim=True)
    torch.testing.assert_close(scale.double() * largest(dtype), peak.clamp(min=1e-20), rtol=slack + 1e-6, atol=0.0)
    step = scale.double() * (1.0 if dtype == torch.int8 else 2.0**-9)
    half = step / 2 if dtype == torch.int8 else torch.maximum(wanted.abs() * 2.0**-4, step / 2)
    error = (values.double() * scale.double() - wanted).abs()
    assert bool((error <= half * (1 + 1e-4) + slack * (wanted.abs() + peak)).all()), (error / half).max()
