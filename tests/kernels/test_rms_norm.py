"""RMSNorm against its definition in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from localllm.kernels.rms_norm import add_rms_norm, rms_norm
from tests.kernels.conftest import DTYPES
from tests.kernels.rowwise import EIGHT_BITS, EXAMPLES, TOLERANCE, assert_quantized, poisoned_memory  # noqa: F401


def definition(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=2),
    size=st.integers(1, 130),
    scale=st.sampled_from([1e-4, 1.0, 1e4]),
    dtype=st.sampled_from(DTYPES),
)
def test_matches_float64(
    shape: list[int], size: int, scale: float, dtype: torch.dtype, device: torch.device
) -> None:  # fmt: skip
    torch.manual_seed(0)
    scale = min(scale, 1e3) if dtype == torch.float16 else scale
    x = (torch.randn(*shape, size, device=device) * scale).to(dtype)
    weight = torch.randn(size, device=device)
    out = rms_norm(x, weight, 1e-5)
    assert out.dtype == dtype
    assert out.shape == x.shape
    torch.testing.assert_close(out.double(), definition(x, weight, 1e-5), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_weight_may_differ_per_head_and_heads_may_be_a_slice(device: torch.device) -> None:
    x, weight = torch.randn(5, 6, 17, device=device)[:, 1:4], torch.randn(3, 17, device=device)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6).double(), definition(x, weight, 1e-6), rtol=1e-5, atol=1e-5)


def test_zero_rows_stay_finite(device: torch.device) -> None:
    out = rms_norm(torch.zeros(2, 9, device=device), torch.ones(9, device=device), 1e-6)
    assert torch.equal(out, torch.zeros(2, 9, device=device))
    assert rms_norm(torch.zeros(0, 9, device=device), torch.ones(9, device=device), 1e-6).shape == (0, 9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_updates_the_residual_and_norms_the_sum(dtype: torch.dtype, device: torch.device) -> None:
    x, residual = (torch.randn(4, 33, device=device).to(dtype) for _ in range(2))
    weight, total = torch.randn(33, device=device), x + residual
    out = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, total)
    assert out.dtype == dtype
    torch.testing.assert_close(
        out.double(), definition(total, weight, 1e-6), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


def test_residual_may_be_wider_than_the_rest(device: torch.device) -> None:
    x, residual, weight = torch.randn(3, 20, device=device).half(), torch.randn(3, 20, device=device), torch.ones(20)
    total = x.float() + residual
    out = add_rms_norm(x, residual, weight.to(device), 1e-6)
    assert torch.equal(residual, total)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out.double(), definition(total, weight.to(device), 1e-6), rtol=2e-3, atol=2e-3)


def test_a_row_is_the_same_in_any_batch(device: torch.device) -> None:
    x, weight = torch.randn(9, 200, device=device), torch.randn(200, device=device)
    out = rms_norm(x, weight, 1e-6)
    for row in range(9):
        assert torch.equal(rms_norm(x[row : row + 1], weight, 1e-6), out[row : row + 1])
