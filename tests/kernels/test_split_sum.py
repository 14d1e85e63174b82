"""A product whose K is split: the last program of a tile adds the parts in order, and does the reader's work."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.kernels import skinny_gemm as skinny_file
from localllm.kernels.fused_epilogue import PendingNorm, Unfinished, new_counters, parts_and_counters, whole
from localllm.kernels.gated import gated
from localllm.kernels.int4_linear import quantize_int4
from localllm.kernels.launch import INTERPRETED, LaunchOptions, launching_with
from localllm.kernels.planar import linear as planar_file
from localllm.kernels.planar.kernels import PlanarTile
from localllm.kernels.prepare_step import SlotTokens, StepInputs, prepare_step, staged_size
from localllm.kernels.rms_norm import add_rms_norm, add_rms_norm_pending, normed
from localllm.kernels.skinny_gemm import SkinnyGemmTile, skinny_gemm_unfinished
from tests.kernels.conftest import settings_with

pytestmark = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="products are split by kernels only"
)
K, N, EPS = 512, 90, 1e-5  # the last tile is not full

Multiply = Callable[[Tensor | PendingNorm], Unfinished]


@pytest.fixture(params=["float", "int8", "int4"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def product_of(
    kind: str, k: int, device: torch.device, monkeypatch: pytest.MonkeyPatch, splits: int, dtype: torch.dtype
) -> Multiply:
    """Return a product with a matrix [N, k] whose K is split."""
    monkeypatch.setattr(skinny_file, "settings_for", lambda *_: SkinnyGemmTile(16, 32, 32, splits, 4, 2))
    monkeypatch.setattr(planar_file, "settings_for", settings_with("planar_linear", PlanarTile(16, 64, splits, 4, 3)))
    torch.manual_seed(0)
    weight, bias = torch.randn(N, k), torch.randn(N).to(device, dtype)
    if kind == "int4":
        return partial(quantize_int4(weight.to(device, torch.float16), 128).unfinished, bias=bias)
    if kind == "int8":
        codes = (weight * 40).round().clamp(-127, 127).to(torch.int8).to(device)
        return partial(skinny_gemm_unfinished, weight=codes, bias=bias, scales=torch.rand(N, device=device) / 40)
    return partial(skinny_gemm_unfinished, weight=weight.to(device, dtype), bias=bias)


@pytest.mark.parametrize("splits", [2, 4, 8])
def test_parts_are_added_in_order(
    kind: str, splits: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded are the parts that the programs wrote; added by hand, they have the product's bits."""
    multiply = product_of(kind, K, device, monkeypatch, splits, torch.float32)
    recorded: list[Tensor] = []

    def recording(*sizes: int, device: torch.device) -> tuple[Tensor, Tensor]:
        scratch = parts_and_counters(*sizes, device=device)
        recorded.append(scratch[0])
        return scratch

    for file in (skinny_file, planar_file):
        monkeypatch.setattr(file, "parts_and_counters", lambda s, r, n, d: recording(s, r, n, device=d))
    x = torch.randn(5, K).to(device) * torch.logspace(-2, 2, K).to(device)  # in which order matters
    product = multiply(x)
    y = whole(product)
    (parts,) = recorded
    assert len(parts) == splits
    total = torch.zeros(parts.shape[1:], device=device)
    for part in parts:
        total += part
    if kind == "int8":
        total *= product.scales  # type: ignore[union-attr]
    assert torch.equal(y, total + product.bias)  # type: ignore[union-attr]


@pytest.mark.parametrize("splits", [2, 4])
def test_the_last_program_does_the_readers_work(
    kind: str, splits: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the kernels of the activation and of the norm."""
    multiply = product_of(kind, K, device, monkeypatch, splits, torch.float32)
    x, gamma = torch.randn(5, K).to(device), torch.rand(N, device=device) * 2
    y = whole(multiply(x))
    assert torch.equal(gated(multiply(x), "silu"), gated(y, "silu"))
    streams = [torch.linspace(-3, 3, 5 * N, device=device).view(5, N).clone() for _ in range(2)]
    norm = add_rms_norm_pending(multiply(x), streams[0], gamma, EPS)
    assert isinstance(norm, PendingNorm)
    wanted = add_rms_norm(y, streams[1], gamma, EPS)
    assert torch.equal(*streams)
    assert torch.equal(normed(norm), wanted)
    torch.testing.assert_close(norm.squares.double().sum(1), streams[1].double().square().sum(1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("splits", [1, 4])
def test_a_split_product_finishes_the_norm_that_it_reads(
    kind: str, splits: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply = product_of(kind, K, device, monkeypatch, splits, torch.float32)
    stream, gamma = torch.randn(5, K).to(device) * 20, torch.rand(K, device=device) * 2
    parts = stream.view(5, 4, K // 4).square().sum(2)
    pending = PendingNorm(stream, gamma, EPS, stream * gamma, parts)
    wanted = whole(multiply(normed(pending)))
    torch.testing.assert_close(whole(multiply(pending)), wanted, rtol=1e-4, atol=1e-4)


def test_counters_are_left_at_zero(kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = product_of(kind, K, device, monkeypatch, 4, torch.float32)
    counters = new_counters(device)
    with launching_with(LaunchOptions(counters=counters)):
        x = torch.randn(40, K).to(device)
        first = whole(multiply(x))
        assert not counters.any()
        assert torch.equal(whole(multiply(x)), first)
    assert not counters.any()


def test_a_step_begins_with_counters_of_zero(device: torch.device) -> None:
    """A step that was aborted may have left some."""
    counters = new_counters(device) + 3
    slots = SlotTokens(
        torch.zeros(1, 8, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int64, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
    )  # fmt: skip
    tables = torch.zeros(1, 1, 2, dtype=torch.int32, device=device)
    staged = torch.zeros(staged_size(0, 0), dtype=torch.int32, device=device)
    with launching_with(LaunchOptions(counters=counters)):
        prepare_step(staged, slots, tables, StepInputs.empty(0, 0, 2, device), 4, 0)
    assert not counters.any()


def test_each_program_takes_all_of_k_where_the_last_one_may_not_add(
    kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply = product_of(kind, K, device, monkeypatch, 4, torch.float32)
    x = torch.randn(5, K).to(device)
    together = whole(multiply(x))
    monkeypatch.setattr(skinny_file, "parts_and_counters", None)
    monkeypatch.setattr(planar_file, "parts_and_counters", None)
    with launching_with(LaunchOptions(avoids=frozenset({"product merge"}))):
        alone = whole(multiply(x))
    if kind != "int4":  # the splits are computed one after another and added in the same order
        assert torch.equal(alone, together)
    torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-4)


def test_a_large_tile_is_the_same_kernel_with_and_without_splits(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    weight = quantize_int4(torch.randn(N, K).to(device, torch.float16), 128)
    x, counters = torch.randn(5, K).to(device), new_counters(device)
    results, given = [], []

    def noting(*sizes: Any) -> tuple[Tensor, Tensor]:
        given.append(parts_and_counters(*sizes))
        return given[-1]

    monkeypatch.setattr(planar_file, "parts_and_counters", noting)
    with launching_with(LaunchOptions(counters=counters)):
        for num_warps in (4, 8):
            tile = PlanarTile(16, 64, 1, num_warps, 3)
            monkeypatch.setattr(planar_file, "settings_for", settings_with("planar_linear", tile))
            results.append(whole(weight.unfinished(x)))
    assert torch.equal(*results)
    assert [len(parts) for parts, _ in given] == [1], "only the tile of eight warps has scratch memory"
    assert not counters.any(), "nothing is counted without splits"
