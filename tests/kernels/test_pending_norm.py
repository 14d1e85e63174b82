"""An RMSNorm between two products: the first adds itself to the stream, the second divides its sums by the root mean
square. Against the norm's own kernel, and float64."""

import pytest
import torch
from torch import Tensor

from localllm.kernels import linear as linear_file
from localllm.kernels import skinny_gemm as skinny_file
from localllm.kernels.fused_epilogue import PendingNorm, Unfinished, whole
from localllm.kernels.gated import gated
from localllm.kernels.launch import INTERPRETED, DeviceFeatures, LaunchOptions, launching_with
from localllm.kernels.linear import linear_unfinished
from localllm.kernels.rms_norm import add_rms_norm, add_rms_norm_pending, normed
from localllm.kernels.skinny_gemm import SkinnyGemmTile, skinny_gemm_unfinished
from tests.kernels.harness import e4m3

needs_kernels = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="the twins finish what they compute"
)
K, HIDDEN, EPS = 64, 140, 1e-5


@pytest.fixture(autouse=True)
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hidden size ends within the last of five tiles, and the kernel loads eight sums of squares."""
    monkeypatch.setattr(skinny_file, "settings_for", lambda *_: SkinnyGemmTile(16, 32, 32, 1, 4, 2))


def first_product(rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Unfinished, Tensor, Tensor]:
    """Return a product, the stream that it is added to, and the norm's weight."""
    torch.manual_seed(rows)
    x, weight, bias = (torch.randn(shape).to(device, dtype) for shape in ((rows, K), (HIDDEN, K), (HIDDEN,)))
    stream, gamma = torch.randn(rows, HIDDEN).to(device, dtype) * 30, torch.rand(HIDDEN, device=device) * 2
    return skinny_gemm_unfinished(x, weight, bias), stream, gamma


def pending_norm(rows: int, device: torch.device) -> PendingNorm:
    product, stream, gamma = first_product(rows, torch.float32, device)
    norm = add_rms_norm_pending(product, stream, gamma, EPS)
    assert isinstance(norm, PendingNorm)
    return norm


@needs_kernels
@pytest.mark.parametrize("rows", [1, 5, 19])
def test_a_product_adds_itself_to_the_stream(rows: int, device: torch.device) -> None:
    product, stream, gamma = first_product(rows, torch.float32, device)
    added = stream.clone()
    wanted = add_rms_norm(whole(product), added, gamma, EPS)
    norm = add_rms_norm_pending(product, stream, gamma, EPS)
    assert isinstance(norm, PendingNorm)
    assert torch.equal(stream, added)
    assert torch.equal(norm.scaled, stream * gamma)
    torch.testing.assert_close(norm.squares.double().sum(1), stream.double().square().sum(1), rtol=1e-6, atol=0)
    assert torch.equal(normed(norm), wanted)


@needs_kernels
@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "TMA"])
@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("kind", ["float", "e4m3"])
def test_a_product_divides_its_sums(
    kind: str, split: int, tma: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = pending_norm(5, device)
    monkeypatch.setattr(skinny_file, "settings_for", lambda *_: SkinnyGemmTile(16, 32, 32, split, 4, 2))
    if INTERPRETED:
        monkeypatch.setattr(skinny_file, "device_features", lambda _: DeviceFeatures(90, tma, False))
    weight, scales = torch.randn(48, HIDDEN, device=device), None
    bias, meant = torch.randn(48, device=device), weight.double()
    if kind == "e4m3":
        weight, scales = e4m3(48, HIDDEN, device), torch.rand(48, device=device) / 448
        meant = weight.double() * scales.double()[:, None]
    stream = norm.stream.double()
    x = stream * (stream.square().mean(1, keepdim=True) + EPS).rsqrt() * norm.weight.double()
    wanted = x @ meant.t() + bias.double()
    with launching_with(LaunchOptions(programmatic_launch=False)):
        y, act = (finish(skinny_gemm_unfinished(norm, weight, bias, scales))
                  for finish in (whole, lambda product: gated(product, "silu")))  # fmt: skip
    torch.testing.assert_close(y.double(), wanted, rtol=2e-6, atol=2e-5)
    assert torch.equal(act, gated(y, "silu"))


@needs_kernels
def test_another_kernel_reads_the_finished_norm(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    norm, weight = pending_norm(3, device), torch.randn(8, HIDDEN, device=device)
    monkeypatch.setattr(linear_file, "_uses_skinny_gemm", lambda x, weight: False)
    assert torch.equal(whole(linear_unfinished(norm, weight)), torch.nn.functional.linear(normed(norm), weight))


@needs_kernels
def test_half_precision_and_deterministic_mode_keep_the_norms_kernel(device: torch.device) -> None:
    """fp16 cannot hold the stream times the norm's weight where the stream is large."""
    half = first_product(3, torch.float16, device)
    with launching_with(LaunchOptions(deterministic=True)):
        fixed = first_product(3, torch.float32, device)
        assert isinstance(add_rms_norm_pending(*fixed, EPS), Tensor)
    assert isinstance(add_rms_norm_pending(*half, EPS), Tensor)


def test_dividing_the_sums_is_as_accurate_in_bfloat16() -> None:
    """The two ways round the same numbers once, before or after the division; sums are fp32 in both."""
    torch.manual_seed(0)
    stream = (torch.randn(64, 1024) * torch.logspace(-2, 2, 1024)[torch.randperm(1024)]).bfloat16()
    gamma, weight = torch.rand(1024) * 3, (torch.randn(256, 1024) / 32).bfloat16().float()
    inverse = (stream.float().square().mean(1, keepdim=True) + EPS).rsqrt()
    wanted = (stream.double() * inverse.double() * gamma.double()) @ weight.double().t()
    before = (stream.float() * inverse * gamma).bfloat16().float() @ weight.t()
    after = ((stream.float() * gamma).bfloat16().float() @ weight.t()) * inverse
    errors = [(y.double() - wanted).square().mean().sqrt() for y in (before, after)]
    assert errors[1] < 1.05 * errors[0]
