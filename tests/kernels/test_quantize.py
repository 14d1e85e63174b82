"""Rows in 8 bits: against torch's own rounding where the scale is 1, against the bound of half a step elsewhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.kernels.quantize import quantize, quantize_reference
from tests.kernels.conftest import DTYPES
from tests.kernels.rowwise import EIGHT_BITS, EXAMPLES, assert_quantized, poisoned_memory  # noqa: F401


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=2),
    width=st.integers(1, 130),
    scale=st.sampled_from([1e-4, 1.0, 1e3]),
    dtype=st.sampled_from(DTYPES),
    to=st.sampled_from(EIGHT_BITS),
)
def test_error_is_half_a_step(
    shape: list[int], width: int, scale: float, dtype: torch.dtype, to: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    x = (torch.randn(*shape, width, device=device) * scale).to(dtype)
    assert_quantized(quantize(x, to), x.double(), to, 0.0)


def test_fp8_is_rounded_as_torch_rounds_it(device: torch.device) -> None:
    """Every fp16 number up to 448: all e4m3 numbers, all ties between them, and the subnormals."""
    half = torch.arange(1 << 16).to(torch.int16).view(torch.float16)
    half = half[half.isfinite() & (half.abs() <= 448)]
    rows = torch.nn.functional.pad(half, (0, -len(half) % 4095)).view(-1, 4095)
    rows = torch.cat((rows, torch.full((len(rows), 1), 448.0).half()), dim=-1).to(device)
    values, scale = quantize(rows, torch.float8_e4m3fn)
    assert torch.equal(scale, torch.ones_like(scale))
    assert torch.equal(values.view(torch.uint8), rows.float().to(torch.float8_e4m3fn).view(torch.uint8))


def test_int8_rounds_ties_to_even(device: torch.device) -> None:
    x = torch.cat((torch.arange(-254, 255) / 2, torch.tensor([-127.0, 126.51, 0.49, -0.51]))).to(device)
    values, scale = quantize(x[None], torch.int8)
    assert scale.item() == 1.0
    assert torch.equal(values[0], x.round().to(torch.int8))


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("to", EIGHT_BITS)
def test_zeros_stay_zeros_and_what_is_not_finite_stays_so(to: torch.dtype, device: torch.device) -> None:
    x = torch.zeros(4, 9, device=device)
    x[1, 3], x[2, 5], x[3] = float("nan"), float("-inf"), 1e-30
    for values, scale in (quantize(x, to), quantize_reference(x, to)):
        back = values.float() * scale
        assert torch.equal(back[0], x[0])
        assert not back[1:3].isfinite().any()
        assert back[3].abs().max() < 1e-20


def test_no_rows_and_a_strided_input(device: torch.device) -> None:
    assert quantize(torch.zeros(0, 8, device=device), torch.int8).values.shape == (0, 8)
    x = torch.randn(6, 20, device=device)[::2, 3:14]
    assert_quantized(quantize(x, torch.int8), x.double(), torch.int8, 0.0)
