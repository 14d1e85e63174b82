"""A kernel that adds the splits of the product before it returns the same bits as one that reads the sum."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from localllm.kernels import skinny_gemm as skinny_file
from localllm.kernels.gated import gated
from localllm.kernels.int4_linear import quantize_int4
from localllm.kernels.launch import INTERPRETED
from localllm.kernels.layer_kv import LayerKV
from localllm.kernels.planar import linear as planar_file
from localllm.kernels.planar.kernels import PlanarTile
from localllm.kernels.rms_norm import add_rms_norm
from localllm.kernels.rotary_store_kv import plan_rotation, rotary_store_kv
from localllm.kernels.skinny_gemm import SkinnyGemmTile, skinny_gemm, skinny_gemm_unfinished
from localllm.kernels.split_sum import SplitSum
from localllm.kernels.unfinished import Unfinished, whole
from localllm.models.layers.linear import Linear
from localllm.models.layers.mlp import GatedMLP
from localllm.models.layers.norm import RMSNorm
from tests.kernels.conftest import DTYPES, settings_with

pytestmark = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="products are split by kernels only"
)
HEADS, KV_HEADS, HEAD_DIM = 5, 2, 12


def a_sum(splits: int, rows: int, n: int, dtype: torch.dtype, device: torch.device, *, bias: bool) -> SplitSum:
    torch.manual_seed(splits * rows + n)
    parts = torch.randn(splits, rows, n) * torch.logspace(-2, 0, splits)[:, None, None]  # in which order matters
    return SplitSum(parts.to(device), torch.randn(n).to(device, dtype) if bias else None, dtype)


def by_hand(y: SplitSum) -> Tensor:
    total = torch.zeros(y.shape, device=y.device)
    for part in y.parts:
        total += part
    return (total if y.bias is None else total + y.bias.float()).to(y.dtype)


def rotate(y: Unfinished) -> list[Tensor]:
    rows, cache = y.shape[0], torch.zeros(2, KV_HEADS, 3, 4, HEAD_DIM, dtype=y.dtype, device=y.device)
    table = torch.linspace(-1, 1, 16 * HEAD_DIM, device=y.device).view(16, HEAD_DIM)
    rotation = plan_rotation(table, torch.arange(rows, device=y.device))
    norm = torch.linspace(0.5, 2, (HEADS + KV_HEADS) * HEAD_DIM, device=y.device).view(-1, HEAD_DIM)
    slots = torch.arange(rows, device=y.device) * 2
    q = rotary_store_kv(y, LayerKV(cache[0], cache[1]), slots, rotation, norm, 1e-6)
    return [q, cache]


def add_and_norm(y: Unfinished) -> list[Tensor]:
    residual = torch.linspace(-2, 2, y.shape[0] * y.shape[1], device=y.device).view(y.shape).to(y.dtype)
    weight = torch.linspace(0.5, 2, y.shape[1], device=y.device)
    return [add_rms_norm(y, residual, weight, 1e-6), residual]


READERS: dict[str, tuple[int, Callable[[Unfinished], list[Tensor]]]] = {
    "rotary_store_kv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, rotate),
    "gated": (2 * 37, lambda y: [gated(y, "silu")]),
    "add_rms_norm": (77, add_and_norm),
}


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("splits", [2, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reader", READERS)
def test_readers_add_splits(reader: str, dtype: torch.dtype, splits: int, bias: bool, device: torch.device) -> None:
    width, read = READERS[reader]
    y = a_sum(splits, 5, width, dtype, device, bias=bias)
    added = whole(y)
    assert torch.equal(added, by_hand(y))
    for one, other in zip(read(y), read(added), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rows", [1, 300])
def test_a_layer_leaves_the_splits_of_its_last_product(rows: int, device: torch.device) -> None:
    torch.manual_seed(0)
    width, wide = 64, 1024  # enough of K for two splits
    shapes = [(2 * wide, width), (width, wide)]
    weights = [torch.randn(shape).div(16).to(device, torch.float16) for shape in shapes]
    mlp = GatedMLP(Linear(weights[0]), Linear(weights[1]), "silu")
    x = torch.randn(rows, width).to(device, torch.float16)
    left, added = mlp.unfinished(x), mlp(x)
    assert isinstance(left, SplitSum) == (rows == 1)
    norm, residuals = RMSNorm(torch.ones(width, device=device), 1e-6), [torch.zeros_like(x), torch.zeros_like(x)]
    for y, residual in zip((left, added), residuals, strict=True):
        norm.add(y, residual)
    assert torch.equal(*residuals)


def test_products_leave_their_splits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny_file, "settings_for", lambda *_: SkinnyGemmTile(16, 32, 32, 4, 4, 2))
    monkeypatch.setattr(planar_file, "settings_for", settings_with("planar_linear", PlanarTile(16, 64, 2, 4, 3)))
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(shape).to(device, torch.float16) for shape in ((3, 512), (64, 512), (64,)))
    quantised = quantize_int4(weight, 128)
    for left, added in (
        (skinny_gemm_unfinished(x, weight, bias), skinny_gemm(x, weight, bias)),
        (quantised.unfinished(x, bias), quantised.linear(x, bias)),
    ):
        assert isinstance(left, SplitSum)
        assert torch.equal(whole(left), added)
