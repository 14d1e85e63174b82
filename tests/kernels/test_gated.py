"""Gated activations against their definitions in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from localllm.kernels.gated import ACTIVATIONS, gated
from localllm.kernels.launch import runs_triton
from tests.kernels.conftest import DTYPES
from tests.kernels.rowwise import EIGHT_BITS, EXAMPLES, assert_quantized, poisoned_memory  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, when interpreted
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def definition(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.double().chunk(2, -1)
    if activation == "silu":
        return gate / (1 + (-gate).exp()) * up
    if activation == "gelu":
        return gate * 0.5 * (1 + torch.erf(gate / 2**0.5)) * up
    return gate * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    rows=st.integers(0, 6),
    width=st.one_of(st.integers(1, 100), st.sampled_from([1024, 1100])),
    dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from(ACTIVATIONS),
)
def test_matches_float64(rows: int, width: int, dtype: torch.dtype, activation: str, device: torch.device) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(rows, 2 * width + 3, device=device) * 3).to(dtype)[:, 1:-2]  # rows of a wider tensor
    before = gate_up.clone()
    out = gated(gate_up, activation)
    assert out.dtype == dtype
    assert out.is_contiguous()
    torch.testing.assert_close(
        out.double(), definition(gate_up, activation), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_far_out(activation: str, device: torch.device) -> None:
    """Nothing overflows on the way: the ends of the activation are 0 and the gate itself."""
    gate = torch.tensor([[-1e38, -1e4, -200.0, 200.0, 1e4, 1e38]], device=device)
    out = gated(torch.cat((gate, torch.ones_like(gate)), dim=-1), activation)
    torch.testing.assert_close(out, gate.clamp(min=0.0), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_row_is_the_same_in_any_batch(activation: str, device: torch.device) -> None:
    gate_up = torch.randn(5, 260, device=device)
    if activation == "gelu" and not runs_triton(gate_up, "activations"):
        pytest.skip("torch's erf rounds the last elements of a buffer otherwise than those before")
    out = gated(gate_up, activation)
    for row in range(5):
        assert torch.equal(gated(gate_up[row : row + 1], activation), out[row : row + 1])
