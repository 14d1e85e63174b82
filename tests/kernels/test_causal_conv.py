"""The causal convolution with states against torch's convolution in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from localllm.kernels.causal_conv import causal_conv
from localllm.kernels.layer_cache import StateStep
from tests.kernels.conftest import DTYPES
from tests.kernels.state_rows import (
    LENGTHS,
    MARKS,
    Compute,
    assert_any_schedule_is_the_same,
    assert_places_are_respected,
    poisoned_pool,
    whole,
)

pytestmark = MARKS
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def convolution(weight: Tensor, bias: Tensor | None, *, silu: bool) -> Compute:
    def compute(inputs: list[Tensor], pool: Tensor, step: StateStep) -> Tensor:
        return causal_conv(inputs[0], weight, bias, pool, step, silu=silu)

    return compute


def weights(channels: int, taps: int, device: torch.device, *, with_bias: bool = True) -> tuple[Tensor, Tensor | None]:
    torch.manual_seed(1)
    return torch.randn(taps, channels, device=device), torch.randn(channels, device=device) if with_bias else None


def definition(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """x [T, C] -> [T, C] in float64, of a request from its first token."""
    taps, channels = weight.shape
    y = torch.nn.functional.conv1d(
        x.double().t()[None], weight.double().t()[:, None], None if bias is None else bias.double(),
        padding=taps - 1, groups=channels,
    )[0, :, : len(x)].t()  # fmt: skip
    return torch.nn.functional.silu(y) if silu else y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", sorted({*LENGTHS, 2, 3}))
def test_matches_float64(length: int, dtype: torch.dtype, device: torch.device) -> None:
    for channels, taps, with_bias, silu in ((24, 4, False, True), (129, 3, True, False), (200, 4, True, True)):
        weight, bias = weights(channels, taps, device, with_bias=with_bias)
        x = torch.randn(length, channels + 5, device=device).to(dtype)[:, 2:-3]  # columns of a wider tensor
        pool = poisoned_pool((channels, taps - 1), 2, dtype, device)
        out, state = whole(convolution(weight, bias, silu=silu), [x], pool)
        assert out.dtype == dtype
        wanted = definition(x, weight, bias, silu)
        torch.testing.assert_close(out.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        inputs = torch.cat((torch.zeros(taps - 1, channels, dtype=dtype, device=device), x))
        assert torch.equal(state, inputs[length:].t())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(2))
def test_any_schedule_is_the_same(seed: int, dtype: torch.dtype, device: torch.device) -> None:
    channels, taps = (40, 4) if seed % 2 else (130, 3)
    weight, bias = weights(channels, taps, device)
    requests = [[torch.randn(length, channels, device=device).to(dtype)] for length in (18, 1, 33)]
    compute = convolution(weight, bias, silu=True)
    assert_any_schedule_is_the_same(compute, requests, (channels, taps - 1), dtype, seed)


@pytest.mark.parametrize("length", [2, 3, 20])
def test_places_are_respected(length: int, device: torch.device) -> None:
    weight, bias = weights(24, 4, device)
    compute = convolution(weight, bias, silu=True)
    assert_places_are_respected(compute, [torch.randn(length, 24, device=device)], (24, 3))


def test_far_out(device: torch.device) -> None:
    """SiLU's ends are 0 and its input."""
    x = torch.tensor([[-1e9, -1e4, -200.0, 200.0, 1e4, 1e38]], device=device)
    pool = poisoned_pool((6, 2), 2, torch.float32, device)
    out, _ = whole(convolution(torch.ones(3, 6, device=device), None, silu=True), [x], pool)
    torch.testing.assert_close(out, x.clamp(min=0.0), rtol=1e-6, atol=1e-28)
