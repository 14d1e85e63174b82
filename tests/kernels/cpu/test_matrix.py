"""Weights of layers as matrices of the native library: the library's product is that of the weight itself."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from localllm.kernels.cpu import half, matrix
from localllm.kernels.cpu.half import pack_half
from localllm.kernels.cpu.int8 import has_int8, int8_codes, pack_int8
from localllm.kernels.cpu.matrix import HeldMatrix, matrices_of, matrix_of
from localllm.kernels.cpu.native.library import native
from localllm.kernels.cpu.native.structures import Kind
from localllm.kernels.cpu.native_product import native_linear, native_unpack
from localllm.kernels.cpu.q4 import pack_q4
from localllm.kernels.int4_linear import quantize_int4
from localllm.kernels.int8_linear import quantize_int8
from localllm.kernels.linear import StackedWeight, pack_weight
from localllm.kernels.quantized_weight import QuantizedWeight

pytestmark = pytest.mark.skipif(native() is None, reason="matrices are the native library's")
Weight = Tensor | QuantizedWeight
SHAPE = (530, 512)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def int8(*shape: int) -> Weight:
    if not has_int8():
        pytest.skip("this torch on this processor has no int8 product")
    return pack_int8(*int8_codes(quantize_int8(normal(*(shape or SHAPE)))))


WEIGHTS: dict[str, Callable[[], Weight]] = {
    "F32": lambda: pack_weight(normal(*SHAPE)),
    "BF16": lambda: pack_half(normal(*SHAPE).bfloat16(), is_exact=True),
    "BF16_ROUNDED": lambda: pack_half(normal(*SHAPE).bfloat16()),
    "F16": lambda: pack_half(normal(*SHAPE).half()),
    "I8": int8,
    "I8 padded": lambda: int8(130, 416),
    "Q4_MIN": lambda: pack_q4(quantize_int4(normal(*SHAPE), 128)),
    "F32 copied": lambda: normal(100, 48),
    "F32 of int8": lambda: quantize_int8(normal(100, 48)),
}


def wide(weight: Weight) -> Tensor:
    if isinstance(weight, Tensor):
        return weight.to_dense() if weight.is_mkldnn else weight
    return weight.dequantize(torch.float32)


def held(weight: Weight, bias: Tensor | None = None) -> HeldMatrix:
    """Where oneDNN packs otherwise, which it may, there is nothing to test."""
    found = matrix_of(weight, bias)
    if found is None:
        pytest.skip("oneDNN has another layout on this processor")
    return found


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_each_kind(name: str, has_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native(), "multiplies_pairs", True)  # in one way or another, every library does
    monkeypatch.setattr(half, "has_amx", lambda: False)
    weight = WEIGHTS[name]()
    outputs, inputs = weight.shape
    bias = normal(outputs, seed=1) if has_bias else None
    found, exact, x = held(weight, bias), wide(weight), normal(3, inputs, seed=2).bfloat16().float()
    assert Kind(found.matrix.kind).name == name.split()[0]
    assert torch.equal(native_unpack(found.matrix, torch.float32), exact)
    y = x.double() @ exact.double().t()
    y = y if bias is None else y + bias
    got = native_linear(found.matrix, x, is_fine=True)
    assert float((got - y).norm() / y.norm()) < 1e-3


def test_parts_one_after_the_other() -> None:
    parts = [normal(100, 64), normal(30, 64, seed=1)]
    bias = normal(130, seed=2)
    found = matrices_of(StackedWeight(parts), bias)
    assert found is not None
    x = normal(2, 64, seed=3)
    y = torch.cat([native_linear(part.matrix, x, is_fine=True) for part in found], dim=1)
    assert torch.allclose(y, x @ torch.cat(parts).t() + bias, atol=1e-4)


def test_a_part_without_a_matrix_leaves_none() -> None:
    assert matrix_of(quantize_int8(normal(*SHAPE))) is None  # as stored, and too large to copy
    assert matrices_of(StackedWeight([normal(100, 512), quantize_int8(normal(*SHAPE))])) is None
    assert matrix_of(StackedWeight([normal(100, 64), normal(30, 64)])) is None


@pytest.mark.parametrize("name", ["F32", "I8"])
def test_a_layout_that_is_another_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The columns in memory are compared with the weight's own, which here are another weight's."""
    weight = WEIGHTS[name]()
    held(weight)
    if name == "I8":
        columns = matrix.int8_columns

        def others(w: object, places: object) -> Tensor:
            return columns(w, places).roll(1, 0)  # type: ignore[arg-type]

        monkeypatch.setattr(matrix, "int8_columns", others)
    else:
        monkeypatch.setattr(matrix, "linear", lambda x, w: matrix.F.linear(x, wide(w).roll(1, 0)))
    assert matrix_of(weight) is None
