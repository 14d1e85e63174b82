"""Both sides in 8 bits: every kind of scale, against float64 on the quantised values, so that only sums can be off."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.kernels import w8a8_gemm as w8a8
from localllm.kernels.launch import INTERPRETED
from localllm.kernels.quantize import Quantized
from localllm.kernels.w8a8_gemm import scaled_mm, w8a8_gemm
from tests.kernels.conftest import DTYPES
from tests.kernels.harness import ERROR, e4m3, exact_weight

SHAPES = [(1, 16, 128), (5, 33, 257), (65, 40, 130), (130, 130, 64)]
E4M3 = torch.float8_e4m3fn


def check(
    x: Quantized, weight: Tensor, scales: Tensor, bias: Tensor | None, zeros: Tensor | None, dtype: torch.dtype
) -> None:
    out = w8a8_gemm(x, weight, scales, bias, zeros, dtype=dtype)
    wide_scale = x.scale.double()
    if wide_scale.shape[1] > 1:
        wide_scale = wide_scale.repeat_interleave(128, 1)[:, : x.values.shape[1]]
    wide, meant = x.values.double() * wide_scale, exact_weight(weight, scales, zeros)
    wanted = wide @ meant.t() + (0 if bias is None else bias.double())
    magnitude = wide.abs() @ meant.abs().t() + wanted.abs()
    assert (out.shape, out.dtype) == (wanted.shape, dtype)
    # 14 bits is what an e4m3 tensor core may keep of its sums before they are promoted.
    sums = 2e-6 if weight.dtype == torch.int8 or not out.is_cuda else 2**-13
    assert ((out.double() - wanted).abs() <= sums * magnitude + ERROR[dtype] * wanted.abs() + 1e-7).all()


def needs_fp8(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no e4m3 arithmetic on this GPU")


@pytest.mark.parametrize(("off", "works"), [(0.0, True), (0.5, False), (float("nan"), False)])
def test_torchs_product_is_used_only_if_it_is_right(off: float, works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def product(x: Any, weight: Any, scales: Any, bias: Any, dtype: Any) -> torch.Tensor:
        return w8a8.w8a8_gemm_reference(x, weight, scales, bias, dtype=dtype) + off * 100

    monkeypatch.setattr(w8a8, "scaled_mm", product)
    w8a8._has_scaled_mm.cache_clear()
    assert w8a8._has_scaled_mm(torch.device("cpu")) == works
    w8a8._has_scaled_mm.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("per", ["channel", "block"])
def test_e4m3(per: str, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    needs_fp8(device)
    rows, n, k = shape
    torch.manual_seed(n)
    blocks = -(-k // 128)
    x = Quantized(e4m3(rows, k, device), torch.rand(rows, 1 if per == "channel" else blocks, device=device) / 448)
    scales = torch.rand((n,) if per == "channel" else (-(-n // 128), blocks), device=device) / 448
    check(x, e4m3(n, k, device), scales, torch.randn(n).to(device, dtype), None, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_zeros", [False, True])
def test_int8(with_zeros: bool, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    rows, n, k = shape
    torch.manual_seed(n)
    draw = lambda *size: torch.randint(-128, 128, size, dtype=torch.int8).to(device)  # noqa: E731
    x = Quantized(draw(rows, k), torch.rand(rows, 1, device=device) / 127)
    check(x, draw(n, k), torch.rand(n, device=device) / 127, None, draw(n) if with_zeros else None, dtype)


def test_no_rows(device: torch.device) -> None:
    x = Quantized(torch.zeros(0, 32, dtype=torch.int8, device=device), torch.zeros(0, 1, device=device))
    weight = torch.zeros(7, 32, dtype=torch.int8, device=device)
    assert w8a8_gemm(x, weight, torch.ones(7, device=device), dtype=torch.float16).shape == (0, 7)


@pytest.mark.skipif(INTERPRETED, reason="torch's own product")
@pytest.mark.parametrize("newer_name", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_scaled_mm_under_both_of_its_names(
    with_bias: bool, newer_name: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_fp8(device)
    if newer_name and not hasattr(F, "scaled_mm"):
        pytest.skip("this torch has the older name only")
    if not newer_name:
        monkeypatch.delattr(F, "scaled_mm", raising=False)
    rows, n, k = 40, 48, 256
    x = Quantized(e4m3(rows, k, device), torch.rand(rows, 1, device=device) / 448)
    weight, scales = e4m3(n, k, device), torch.rand(n, device=device) / 448
    bias = torch.randn(n).to(device, torch.bfloat16) if with_bias else None
    out = scaled_mm(x, weight, scales, bias, torch.bfloat16)
    wanted = (x.values.double() * x.scale.double()) @ exact_weight(weight, scales).t()
    wanted = wanted if bias is None else wanted + bias.double()
    torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=2e-2 * float(wanted.abs().max()))
