"""LayerNorm against its definition in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from localllm.kernels.layer_norm import add_layer_norm, layer_norm
from tests.kernels.conftest import DTYPES
from tests.kernels.rowwise import EXAMPLES, TOLERANCE, poisoned_memory  # noqa: F401


def definition(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    out = centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    return out if bias is None else out + bias.double()


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    rows=st.integers(0, 5),
    size=st.integers(2, 130),
    mean=st.sampled_from([0.0, 30.0]),
    has_bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_matches_float64(
    rows: int, size: int, mean: float, has_bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    x = (torch.randn(rows, size, device=device) + mean).to(dtype)
    weight, bias = torch.randn(2, size, device=device)
    out = layer_norm(x, weight, bias if has_bias else None, 1e-5)
    wanted = definition(x, weight, bias if has_bias else None, 1e-5)
    assert out.dtype == dtype
    tolerance = max(TOLERANCE[dtype], 3e-4 if mean else 0)  # a mean of 30 costs fp32 five bits of the sum
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_updates_the_residual_and_norms_the_sum(dtype: torch.dtype, device: torch.device) -> None:
    x, residual = (torch.randn(4, 33, device=device).to(dtype) for _ in range(2))
    weight, bias = torch.randn(2, 33, device=device)
    total = x + residual
    out = add_layer_norm(x, residual, weight, bias, 1e-6)
    assert torch.equal(residual, total)
    wanted = definition(total, weight, bias, 1e-6)
    torch.testing.assert_close(out.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_a_row_is_the_same_in_any_batch(device: torch.device) -> None:
    x, weight = torch.randn(6, 200, device=device), torch.randn(200, device=device)
    out = layer_norm(x, weight, None, 1e-6)
    for row in range(6):
        assert torch.equal(layer_norm(x[row : row + 1], weight, None, 1e-6), out[row : row + 1])
