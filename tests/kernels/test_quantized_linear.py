"""Fp8Weight and Int8Weight: made from a 16-bit weight, close to it; a product as exact as its activations allow."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.kernels import fp8_linear, int8_linear
from localllm.kernels.choice import Crossover
from localllm.kernels.fp8_linear import E4M3, Fp8Weight, Granularity, quantize_fp8
from localllm.kernels.int8_linear import Int8Weight, quantize_int8
from localllm.kernels.launch import INTERPRETED, DeviceFeatures
from localllm.kernels.quantize import Quantized
from localllm.kernels.quantized_weight import QuantizedWeight
from localllm.models.layers.linear import Linear
from tests.kernels.conftest import DTYPES, settings_with
from tests.kernels.harness import ERROR

MAKERS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "fp8 per tensor": lambda w: quantize_fp8(w, "tensor"),
    "fp8 per channel": lambda w: quantize_fp8(w, "channel"),
    "fp8 per block": lambda w: quantize_fp8(w, "block"),
    "fp8, 16-bit activations": lambda w: quantize_fp8(w, "block", "16-bit"),
    "int8": quantize_int8,
    "int8 with zeros": lambda w: quantize_int8(w, symmetric=False),
    "int8, int8 activations": lambda w: quantize_int8(w, activations="dynamic"),
    "int8 with zeros, int8 activations": lambda w: quantize_int8(w, symmetric=False, activations="dynamic"),
}
ACTIVATION_ERROR = {"fp8": 2**-4, "int8": 1 / 250}
"""Of the row's part that an element is (e4m3, 3 bits of mantissa) or of the row's largest element (int8, 127 steps)."""


def made(name: str, n: int, k: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, QuantizedWeight]:
    torch.manual_seed(k)
    weight = (torch.randn(n, k) * torch.rand(n, 1)).to(device, dtype)
    return weight, MAKERS[name](weight)


def bound(name: str, x: Tensor, weight: QuantizedWeight, wanted: Tensor) -> Tensor:
    """What sums, the output's type and, where there are many rows, quantised activations may differ by."""
    meant = weight.dequantize(torch.float64).abs()
    limit = 4e-7 * (x.double().abs() @ meant.t()) + ERROR[x.dtype] * wanted.abs() + 1e-6
    if x.shape[0] > 32 and not ("16-bit" in name or name in ("int8", "int8 with zeros")):
        if name.startswith("fp8"):
            limit = limit + (ACTIVATION_ERROR["fp8"] + 2**-13) * (x.double().abs() @ meant.t())
        else:
            peak = x.double().abs().amax(1, keepdim=True)
            limit = limit + ACTIVATION_ERROR["int8"] * peak * meant.sum(1)
    return limit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 7, 70])
@pytest.mark.parametrize("name", MAKERS)
def test_linear_matches_float64(name: str, rows: int, dtype: torch.dtype, device: torch.device) -> None:
    n, k = 72, 144  # a block of 128 is half full in both directions
    _, weight = made(name, n, k, dtype, device)
    x, bias = torch.randn(rows, k).to(device, dtype), torch.randn(n).to(device, dtype)
    out = Linear(weight, bias)(x)
    wanted = x.double() @ weight.dequantize(torch.float64).t() + bias.double()
    assert (out.shape, out.dtype) == ((rows, n), dtype)
    assert ((out.double() - wanted).abs() <= bound(name, x, weight, wanted)).all()


@pytest.mark.parametrize("name", MAKERS)
def test_quantised_weight_stays_close(name: str, device: torch.device) -> None:
    weight, quantised = made(name, 300, 260, torch.float16, device)
    error = (quantised.dequantize(torch.float32) - weight.float()).abs()
    if name.startswith("fp8"):  # half a step of three bits of mantissa, or of the smallest subnormal
        peak = weight.float().abs().amax()
        assert (error <= weight.float().abs() / 16 + peak / 448 * 2**-9).all()
    else:
        spread = weight.float().amax(1, keepdim=True) - weight.float().amin(1, keepdim=True)
        widest = weight.float().abs().amax(1, keepdim=True) / 127
        assert (error <= (spread / 255 if "zeros" in name else widest) * 0.51).all()
    assert quantised.shape == (300, 260)
    assert 300 * 260 <= quantised.nbytes <= 300 * 260 + 300 * 5


@pytest.mark.parametrize("name", MAKERS)
def test_quantising_in_parts_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    _, whole = made(name, 300, 130, torch.float16, device)
    for module in ("fp8_linear", "int8_linear"):
        monkeypatch.setattr(f"localllm.kernels.{module}.ROW_BLOCK", 128)
    _, parts = made(name, 300, 130, torch.float16, device)
    assert torch.equal(whole.dequantize(torch.float32), parts.dequantize(torch.float32))


@pytest.mark.parametrize("name", MAKERS)
def test_a_row_of_zeros_stays_zero(name: str, device: torch.device) -> None:
    weight = torch.randn(40, 64).to(device, torch.float16)
    weight[3] = 0
    x = torch.randn(40, 64).to(device, torch.float16)
    x[5] = 0
    quantised = MAKERS[name](weight)
    assert (quantised.dequantize(torch.float32)[3] == 0).all()
    out = quantised.linear(x)
    assert (out[:, 3] == 0).all()
    assert (out[5] == 0).all()


def test_static_activation_scale(device: torch.device) -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 128).to(device, torch.float16)
    dynamic = quantize_fp8(torch.randn(48, 128).to(device, torch.float16), "channel")
    scale = x.abs().amax().float().view(1) / 448
    static = Fp8Weight(dynamic.values, dynamic.scales, "static", scale)
    wanted = x.double() @ static.dequantize(torch.float64).t()
    limit = bound("fp8 per channel", x, static, wanted) + 448 * float(scale) * 2**-9
    assert ((static.linear(x).double() - wanted).abs() <= limit).all()


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_deterministic_rows_do_not_depend_on_the_batch(granularity: Granularity, device: torch.device) -> None:
    if not (INTERPRETED or device.type == "cuda"):
        pytest.skip("the twin leaves the order of sums to torch")
    weight = quantize_fp8(torch.randn(40, 260).to(device, torch.float16), granularity)
    x = torch.randn(40, 260).to(device, torch.float16)
    assert torch.equal(weight.linear(x)[7:8], weight.linear(x[7:8].clone()))


@pytest.mark.parametrize(("arch", "quantises"), [(75, False), (80, True)])
def test_turing_never_multiplies_int8_by_int8(arch: int, quantises: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton does not compile such a product before sm_80: 16-bit activations stand in, at any number of rows."""
    taken: list[str] = []

    def gemm(name: str) -> Any:
        return lambda x, *_, **__: taken.append(name) or torch.zeros(40, 8)

    monkeypatch.setattr(int8_linear, "runs_triton", lambda x, kernel: True)
    monkeypatch.setattr(int8_linear, "device_features", lambda device: DeviceFeatures(arch, False, False))
    for name in ("w8a16_gemm", "w8a8_gemm"):
        monkeypatch.setattr(int8_linear, name, gemm(name))
    weight = quantize_int8(torch.randn(8, 64), activations="dynamic")
    weight.linear(torch.randn(40, 64))
    assert taken == ["w8a8_gemm" if quantises else "w8a16_gemm"]


@pytest.mark.parametrize("file", [fp8_linear, int8_linear])
@pytest.mark.parametrize(("rows", "quantises"), [(48, False), (49, True)])
def test_a_measured_crossover_decides_where_activations_are_quantised(
    file: Any, rows: int, quantises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    name = file.__name__.rpartition(".")[2]
    monkeypatch.setattr(file, "settings_for", settings_with(name, Crossover(48)))
    monkeypatch.setattr(file, "runs_triton", lambda x, kernel: True)
    monkeypatch.setattr(file, "device_features", lambda device: DeviceFeatures(90, True, True))
    monkeypatch.setattr(fp8_linear, "_has_mma", lambda device: True)
    monkeypatch.setattr(file, "w8a16_gemm", lambda x, *_: taken.append("unquantised") or x)
    monkeypatch.setattr(file, "w8a8_gemm", lambda x, *_, **__: taken.append("quantised") or x.values)
    monkeypatch.setattr(file, "_quantized_input" if file is fp8_linear else "quantize", lambda x, _: Quantized(x, x))
    x, weight = torch.zeros(rows, 64), torch.randn(8, 64)
    (quantize_fp8(weight, "channel") if file is fp8_linear else quantize_int8(weight, activations="dynamic")).linear(x)
    assert taken == ["quantised" if quantises else "unquantised"]


def test_scales_of_the_wrong_shape_are_refused() -> None:
    values = torch.zeros(256, 128, dtype=E4M3)
    with pytest.raises(AssertionError, match="scales"):
        Fp8Weight(values, torch.ones(128))
    with pytest.raises(AssertionError, match="scales"):
        Int8Weight(values.to(torch.int8), torch.ones(128))
