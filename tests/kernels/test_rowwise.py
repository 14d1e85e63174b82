"""Operations on single rows: norms, gated activations, gated norms and rows in 8 bits.

`CASES` is the table of those with floating-point results. Each is held to its definition in float64 at odd sizes and
in every type, on rows of a wider tensor and with no rows, and a row has the same bits in any batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from localllm.kernels.cpu.native.library import native
from localllm.kernels.gated import ACTIVATIONS, gated
from localllm.kernels.gated_norm import gated_norm
from localllm.kernels.launch import INTERPRETED, runs_triton
from localllm.kernels.layer_norm import add_layer_norm, layer_norm
from localllm.kernels.quantize import quantize, quantize_reference
from localllm.kernels.rms_norm import add_rms_norm, rms_norm
from tests.kernels.conftest import DTYPES
from tests.kernels.harness import EIGHT_BITS, EXAMPLES, TOLERANCE, assert_quantized

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # numpy's, when interpreted
HEADS = 3


def rms(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def layer(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    centred = x.double() - x.double().mean(-1, keepdim=True)
    out = centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    return out if bias is None else out + bias.double()


def activated(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.double().chunk(2, -1)
    if activation == "silu<=2.5":
        return (gate / (1 + (-gate).exp())).clamp(max=2.5) * up.clamp(-2.5, 2.5)
    if activation == "silu":
        return gate / (1 + (-gate).exp()) * up
    if activation == "gelu":
        return gate * 0.5 * (1 + torch.erf(gate / 2**0.5)) * up
    return gate * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up


def norm_and_gate(x: Tensor, gate: Tensor, weight: Tensor, gate_first: bool) -> Tensor:
    opened = torch.nn.functional.silu(gate.double())
    y = rms(x.double() * opened if gate_first else x, weight, 1e-6)
    return y if gate_first else y * opened


def gated_norm_twin(*args: Any, **options: Any) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("localllm.kernels.gated_norm.native", lambda: None)
        return gated_norm(*args, **options)


@dataclass(frozen=True)
class Case:
    call: Callable[..., Tensor]  # of the inputs, then the weights
    definition: Callable[..., Tensor]  # of the same, in float64
    weights: Callable[[int], tuple[int, ...]] | None = None  # shape of fp32 weights for a row of this size
    num_weights: int = 1
    heads: int = 0  # of an input [rows, heads, size]; 0: [rows, size]
    num_inputs: int = 1
    parts: int = 1  # of a row, each of which has the size
    scales: tuple[float, ...] = (1.0,)
    means: tuple[float, ...] = (0.0,)
    looser: float = 1.0  # than TOLERANCE

    def inputs(
        self,
        rows: int,
        size: int,
        device: torch.device,
        mean: float = 0.0,
        scale: float = 1.0,
        dtype: torch.dtype = torch.float32,
    ) -> list[Tensor]:
        """Rows of wider tensors."""
        width = size * self.parts * max(self.heads, 1)
        wide = (torch.randn(self.num_inputs, rows, width + 3, device=device) * scale + mean).to(dtype)[..., 1:-2]
        return list(wide.unflatten(-1, (self.heads, -1)) if self.heads else wide)

    def arguments(self, size: int, device: torch.device) -> list[Tensor]:
        shape = self.weights(size) if self.weights else ()
        return [torch.randn(shape, device=device) for _ in range(self.num_weights if self.weights else 0)]


def one(size: int) -> tuple[int, ...]:
    return (size,)


def each(size: int) -> tuple[int, ...]:
    return HEADS, size


CASES = {
    "rms_norm": Case(lambda x, w: rms_norm(x, w, 1e-5), rms, one, scales=(1e-4, 1.0, 1e4)),
    "rms_norm of heads": Case(lambda x, w: rms_norm(x, w, 1e-5), rms, one, heads=HEADS),
    "rms_norm, a weight for each head": Case(lambda x, w: rms_norm(x, w, 1e-5), rms, each, heads=HEADS),
    # a mean of 30 costs fp32 five bits of the sum
    "layer_norm": Case(lambda x, *w: layer_norm(x, *w, 1e-5), layer, one, 2, means=(0.0, 30.0)),
    "layer_norm without a bias": Case(lambda x, w: layer_norm(x, w, None, 1e-5), layer, one, means=(0.0, 30.0)),
    **{activation: Case(partial(lambda x, a: gated(x, a), a=activation), partial(activated, activation=activation),
                        parts=2, scales=(3.0,), looser=2) for activation in (*ACTIVATIONS, "silu<=2.5")},
    **{f"gated_norm, {'gate' if first else 'norm'} first, {shape.__name__} weight{by}": Case(
        partial(lambda x, g, w, call, first: call(x, g, w, 1e-6, gate_first=first), call=call, first=first),
        partial(norm_and_gate, gate_first=first), shape, heads=HEADS, num_inputs=2, scales=(2.0,), looser=2)
       for first in (False, True) for shape in (one, each)
       for by, call in (("", gated_norm), (", twin", gated_norm_twin))},
}  # fmt: skip


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    """The twin of a kernel of the native library is tested where that library is used."""
    if "twin" in request.param and (INTERPRETED or torch.cuda.is_available() or native() is None):
        pytest.skip("tested without the native library")
    return CASES[request.param]


@pytest.mark.parametrize("case", CASES, indirect=True)
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    rows=st.integers(0, 6),
    size=st.one_of(st.integers(1, 130), st.sampled_from([1024, 1100])),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_matches_float64(
    case: Case, rows: int, size: int, dtype: torch.dtype, device: torch.device, data: st.DataObject
) -> None:
    torch.manual_seed(0)
    mean, scale = data.draw(st.sampled_from(case.means)), data.draw(st.sampled_from(case.scales))
    size = max(size, 2) if case.definition is layer else size
    scale = min(scale, 1e3) if dtype == torch.float16 else scale
    inputs = case.inputs(rows, size, device, mean, scale, dtype)
    before, weights = [x.clone() for x in inputs], case.arguments(size, device)
    out, wanted = case.call(*inputs, *weights), case.definition(*inputs, *weights)
    assert (out.dtype, out.shape, out.is_contiguous()) == (dtype, wanted.shape, True)
    tolerance = max(TOLERANCE[dtype] * case.looser, 3e-4 if mean else 0)
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance)
    assert all(torch.equal(x, old) for x, old in zip(inputs, before, strict=True))


@pytest.mark.parametrize("size", [8, 20, 32, 200])
@pytest.mark.parametrize("case", CASES, indirect=True)
def test_a_row_is_the_same_in_any_batch(case: Case, size: int, device: torch.device) -> None:
    inputs, weights = case.inputs(7, size, device), case.arguments(size, device)
    if case is CASES["gelu"] and not runs_triton(inputs[0], "activations"):
        pytest.skip("torch's erf rounds the last elements of a buffer otherwise than those before")
    out = case.call(*inputs, *weights)
    for row in range(7):
        alone = case.call(*(x[row : row + 1].contiguous() for x in inputs), *weights)
        assert torch.equal(alone, out[row : row + 1])


# Norms with a residual ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wide", [False, True], ids=["", "residual in fp32"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("add", "definition", "num_weights"), [(add_rms_norm, rms, 1), (add_layer_norm, layer, 2)])
def test_add_updates_the_residual_and_norms_the_sum(
    add: Any, definition: Any, num_weights: int, dtype: torch.dtype, wide: bool, device: torch.device
) -> None:
    x, residual = (torch.randn(4, 33, device=device).to(dtype) for _ in range(2))
    residual = residual.float() if wide else residual
    weights, total = torch.randn(num_weights, 33, device=device), x + residual
    out = add(x, residual, *weights, 1e-6)
    assert torch.equal(residual, total)
    assert out.dtype == dtype
    wanted = definition(total, *weights, eps=1e-6)
    torch.testing.assert_close(out.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_zero_rows_stay_finite(device: torch.device) -> None:
    out = rms_norm(torch.zeros(2, 9, device=device), torch.ones(9, device=device), 1e-6)
    assert torch.equal(out, torch.zeros(2, 9, device=device))


def test_gated_norms_match_transformers(device: torch.device) -> None:
    from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridRMSNormGated
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

    x, gate = torch.randn(2, 5, 3, 32)
    weight = torch.randn(96)
    delta, scan = Qwen3_5RMSNormGated(32), GraniteMoeHybridRMSNormGated(96, 32)
    delta.weight.data, scan.weight.data = weight[:32], weight
    for norm, gate_first, shape in ((delta, False, (5, 3, 32)), (scan, True, (5, 96))):
        wanted = norm(x.view(shape), gate.view(shape)).detach().view(5, 3, 32)
        on_device = [each.to(device) for each in (x, gate, norm.weight.detach())]
        for call in (gated_norm, gated_norm_twin):
            out = call(*on_device, 1e-6, gate_first=gate_first)
            torch.testing.assert_close(out.cpu(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_far_out(activation: str, device: torch.device) -> None:
    """Nothing overflows on the way: the ends of the activation are 0 and the gate itself."""
    gate = torch.tensor([[-1e38, -1e4, -200.0, 200.0, 1e4, 1e38]], device=device)
    out = gated(torch.cat((gate, torch.ones_like(gate)), dim=-1), activation)
    torch.testing.assert_close(out, gate.clamp(min=0.0), rtol=1e-6, atol=1e-30)


# Rows in 8 bits -------------------------------------------------------------------------------------------------------


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=2),
    width=st.integers(1, 130),
    scale=st.sampled_from([1e-4, 1.0, 1e3]),
    dtype=st.sampled_from(DTYPES),
    to=st.sampled_from(EIGHT_BITS),
)
def test_error_in_8_bits_is_half_a_step(
    shape: list[int], width: int, scale: float, dtype: torch.dtype, to: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    x = (torch.randn(*shape, width + 3, device=device) * scale).to(dtype)[..., 1:-2]
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


@pytest.mark.parametrize("to", EIGHT_BITS)
def test_zeros_stay_zeros_and_what_is_not_finite_stays_so(to: torch.dtype, device: torch.device) -> None:
    x = torch.zeros(4, 9, device=device)
    x[1, 3], x[2, 5], x[3] = float("nan"), float("-inf"), 1e-30
    for values, scale in (quantize(x, to), quantize_reference(x, to)):
        back = values.float() * scale
        assert torch.equal(back[0], x[0])
        assert not back[1:3].isfinite().any()
        assert back[3].abs().max() < 1e-20
