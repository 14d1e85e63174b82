"""Rotation and gated activations against their definitions in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from localllm.kernels.gelu_mul import gelu_mul
from localllm.kernels.rotary import rotary, rotary_angles
from localllm.kernels.silu_mul import silu_mul


def rotate_by_hand(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """One pair of dimensions at a time."""
    out = x.double().clone()
    half = table.shape[1] // 2
    for token, position in enumerate(positions.tolist()):
        for i in range(half):
            cos, sin = table[position, i].double(), table[position, half + i].double()
            a, b = x[token, :, i].double(), x[token, :, i + half].double()
            out[token, :, i], out[token, :, i + half] = a * cos - b * sin, b * cos + a * sin
    return out


@settings(max_examples=30, deadline=None)
@given(tokens=st.integers(1, 9), heads=st.integers(1, 7), half=st.integers(1, 8), rest=st.integers(0, 5))
def test_rotary_turns_pairs_and_passes_the_rest(tokens: int, heads: int, half: int, rest: int) -> None:
    torch.manual_seed(0)
    angles = torch.rand(50, half) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.randint(0, 50, (tokens,))
    x = torch.randn(tokens, heads + 2, 2 * half + rest)[:, 1:-1]  # a slice, as of a fused projection
    out = rotary(x, *rotary_angles(table, positions))
    torch.testing.assert_close(out.double(), rotate_by_hand(x, table, positions), rtol=1e-5, atol=1e-5)


def test_rotary_keeps_the_type_and_computes_in_fp32() -> None:
    table = torch.cat((torch.full((1, 4), 0.8), torch.full((1, 4), 0.6)), dim=-1)
    x = torch.randn(3, 2, 8).bfloat16()
    out = rotary(x, *rotary_angles(table, torch.zeros(3, dtype=torch.int64)))
    assert out.dtype == torch.bfloat16
    wanted = rotate_by_hand(x, table, torch.zeros(3, dtype=torch.int64)).bfloat16()
    torch.testing.assert_close(out, wanted, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (63, 5), (4, 97)])
def test_gated_activations(tokens: int, width: int, dtype: torch.dtype) -> None:
    gate_up = torch.randn(tokens, 2 * width).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    cube = gate + 0.044715 * gate**3
    wanted = {
        "silu": gate / (1 + (-gate).exp()) * up,
        "none": gate * 0.5 * (1 + torch.erf(gate / 2**0.5)) * up,
        "tanh": gate * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * cube)) * up,
    }
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    before = gate_up.clone()
    for name, out in (
        ("silu", silu_mul(gate_up)),
        ("none", gelu_mul(gate_up, "none")),
        ("tanh", gelu_mul(gate_up, "tanh")),
    ):
        assert out.is_contiguous()
        torch.testing.assert_close(out.double(), wanted[name], rtol=tolerance, atol=tolerance)
    assert torch.equal(gate_up, before)
