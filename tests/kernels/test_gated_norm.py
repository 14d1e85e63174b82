"""The gated norms against their definitions in float64, and against transformers' classes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from localllm.kernels.gated_norm import gated_norm
from tests.kernels.conftest import DTYPES
from tests.kernels.rowwise import EXAMPLES, poisoned_memory  # noqa: F401

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # numpy's, when interpreted
    pytest.mark.usefixtures("implementation"),
]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def definition(x: Tensor, gate: Tensor, weight: Tensor, eps: float, gate_first: bool) -> Tensor:
    x, opened = x.double(), torch.nn.functional.silu(gate.double())
    y = x * opened if gate_first else x
    y = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + eps) * weight.double()
    return y if gate_first else y * opened


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(0, 5),
    groups=st.integers(1, 4),
    width=st.one_of(st.integers(1, 100), st.sampled_from([128, 1100])),
    dtype=st.sampled_from(DTYPES),
    gate_first=st.booleans(),
    shared=st.booleans(),
)
def test_matches_float64(
    rows: int, groups: int, width: int, dtype: torch.dtype, gate_first: bool, shared: bool, device: torch.device
) -> None:
    torch.manual_seed(0)
    wide = (torch.randn(2, rows, groups * width + 3, device=device) * 2).to(dtype)  # rows of wider tensors
    x, gate = (each[:, 1:-2].view(rows, groups, width) for each in wide)
    weight = torch.randn(*(() if shared else (groups,)), width, device=device)
    out = gated_norm(x, gate, weight, 1e-6, gate_first=gate_first)
    assert out.dtype == dtype
    assert out.is_contiguous()
    wanted = definition(x, gate, weight, 1e-6, gate_first)
    torch.testing.assert_close(out.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_matches_transformers(device: torch.device) -> None:
    from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridRMSNormGated
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

    x, gate = torch.randn(2, 5, 3, 32)
    weight = torch.randn(96)
    delta, scan = Qwen3_5RMSNormGated(32), GraniteMoeHybridRMSNormGated(96, 32)
    delta.weight.data, scan.weight.data = weight[:32], weight
    for norm, gate_first, shape in ((delta, False, (5, 3, 32)), (scan, True, (5, 96))):
        wanted = norm(x.view(shape), gate.view(shape)).detach().view(5, 3, 32)
        on_device = (each.to(device) for each in (x, gate, norm.weight.detach()))
        out = gated_norm(*on_device, 1e-6, gate_first=gate_first)
        torch.testing.assert_close(out.cpu(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("width", [8, 20, 32])
def test_a_row_is_the_same_in_any_batch(width: int, gate_first: bool, device: torch.device) -> None:
    x, gate = torch.randn(2, 7, 3, width, device=device)
    weight = torch.randn(width, device=device)
    out = gated_norm(x, gate, weight, 1e-6, gate_first=gate_first)
    for row in range(7):
        one = slice(row, row + 1)
        assert torch.equal(gated_norm(x[one], gate[one], weight, 1e-6, gate_first=gate_first), out[one])
