"""RMSNorm against its definition in float64."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from localllm.kernels.rms_norm import add_rms_norm, rms_norm


def definition(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=2),
    size=st.integers(1, 130),
    scale=st.sampled_from([1e-4, 1.0, 1e4]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_matches_float64(shape: list[int], size: int, scale: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(*shape, size) * min(scale, 1e3 if dtype == torch.float16 else scale)).to(dtype)
    weight = torch.randn(size)
    out = rms_norm(x, weight, 1e-5)
    assert out.dtype == dtype
    assert out.shape == x.shape
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(out.double(), definition(x, weight, 1e-5), rtol=tolerance, atol=tolerance)


def test_weight_may_differ_per_head() -> None:
    x, weight = torch.randn(5, 3, 17), torch.randn(3, 17)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6).double(), definition(x, weight, 1e-6), rtol=1e-5, atol=1e-5)


def test_zero_rows_stay_finite() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 9), torch.ones(9), 1e-6), torch.zeros(2, 9))


def test_add_updates_the_residual_and_norms_the_sum() -> None:
    x, residual, weight = torch.randn(4, 33), torch.randn(4, 33), torch.randn(33)
    total = x + residual
    out = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, total)
    torch.testing.assert_close(out.double(), definition(total, weight, 1e-6), rtol=1e-5, atol=1e-5)
