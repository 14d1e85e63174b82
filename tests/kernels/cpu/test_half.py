"""16-bit weights that stay 16 bits wide, against float64."""

import pytest
import torch
from torch import Tensor

from localllm.kernels.cpu import bf16, half
from localllm.kernels.cpu.bf16 import blocked
from localllm.kernels.cpu.half import TILED_ROWS, CpuHalfWeight, HalfRows, fits_half, half_nbytes, pack_half
from localllm.kernels.cpu.matrix import matrix_of
from localllm.kernels.cpu.native.library import native
from localllm.kernels.cpu.native.structures import Kind
from localllm.kernels.cpu.native_product import native_linear
from localllm.kernels.quantized_weight import MetaWeight
from localllm.models.layers.linear import as_head
from localllm.models.weights.parameters import held_bytes
from tests.marks import needs_library

TYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(params=["pairs", "bf16 product", "widened"])
def product(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How bf16 is multiplied."""
    if request.param == "bf16 product" and not bf16.has_fast_bf16():
        pytest.skip("this processor has no fast product of bf16")
    for module in (half, bf16):
        monkeypatch.setattr(module, "has_fast_bf16", lambda: request.param == "bf16 product")
    set_pairs(monkeypatch, multiplies=request.param == "pairs")
    return str(request.param)


def set_pairs(monkeypatch: pytest.MonkeyPatch, *, multiplies: bool) -> None:
    """Have the library multiply pairs of bf16, or not. Every library has the kind; only some have the instruction."""
    monkeypatch.setattr(native(), "multiplies_pairs", multiplies)
    monkeypatch.setattr(half, "has_amx", lambda: False)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed(weight: Tensor, *, is_head: bool = False, is_exact: bool = False) -> CpuHalfWeight:
    found = pack_half(weight, is_head=is_head, is_exact=is_exact)
    assert isinstance(found, CpuHalfWeight)
    return found


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@needs_library
@pytest.mark.usefixtures("product")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (100, 96), (320, 128)])
def test_values_stay_what_they_are(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    values = normal(outputs, inputs).to(dtype)
    weight, rows = packed(values), torch.tensor([outputs - 1, 0, 63, 0])
    assert weight.shape == (outputs, inputs)
    assert weight.nbytes == half_nbytes(outputs, inputs) == held_bytes(weight)
    assert torch.equal(weight.dequantize(dtype), values)
    assert torch.equal(weight.dequantize_rows(rows, torch.float32), values[rows].float())


@needs_library
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [0, 1, 8, 9, 70])
def test_products(rows: int, dtype: torch.dtype, product: str) -> None:
    values, x, bias = normal(100, 96).to(dtype), normal(rows, 96, seed=1), normal(100, seed=2)
    y = packed(values).linear(x, bias)
    assert y.shape == (rows, 100)
    assert y.dtype == torch.float32
    if rows:
        rounds = product == "pairs" and dtype == torch.bfloat16
        exact = (x.bfloat16() if rounds else x).double() @ values.double().t() + bias
        assert error(y, exact) < (1e-6 if rows <= 8 or rounds or dtype == torch.float16 else 0.01)


@needs_library
def test_exact_weights_round_no_row_that_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    set_pairs(monkeypatch, multiplies=True)
    values, x = normal(100, 96).bfloat16(), normal(8, 96, seed=1)
    wanted = x.double() @ values.double().t()
    for weight in (packed(values, is_exact=True), HalfRows((values,), is_exact=True).packed()):
        assert weight.matrix().kind == Kind.BF16
        assert error(weight.linear(x), wanted) < 1e-6
    rounded = packed(values)
    assert rounded.matrix().kind == HalfRows((values,)).matrix().kind == Kind.BF16_ROUNDED
    assert 1e-4 < error(rounded.linear(x), wanted) < 2**-8
    assert torch.equal(torch.cat([rounded.linear(row[None]) for row in x]), rounded.linear(x))
    monkeypatch.setattr(half, "has_amx", lambda: True)
    assert rounded.matrix().kind == Kind.BF16


@needs_library
@pytest.mark.parametrize("has_amx", [True, False])
@pytest.mark.parametrize("rows", [9, TILED_ROWS, TILED_ROWS + 1])
def test_a_heads_logits_are_not_rounded_to_bf16(
    rows: int, has_amx: bool, product: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """x of bf16 values, so that only the rounding of results is left: 2^-9 in a layer."""
    monkeypatch.setattr(half, "has_amx", lambda: has_amx)
    values, x = normal(320, 96).bfloat16(), normal(rows, 96, seed=1).bfloat16().float()
    head = as_head(packed(values))
    assert isinstance(head, CpuHalfWeight)
    assert head.is_head
    is_native = not has_amx and (product == "pairs" or rows <= TILED_ROWS)
    if is_native and product != "pairs":  # rounds no activations either
        x = x + normal(rows, 96, seed=2) * 2**-10
    assert error(head.linear(x), x.double() @ values.double().t()) < (1e-6 if is_native else 2**-13)


@needs_library
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("columns", [2, 32, 38, 70, 129])
@pytest.mark.parametrize("heights", [(1,), (64,), (67, 61), (30, 3, 170)])
def test_rows_of_a_file_are_packed_where_they_stay(heights: tuple[int, ...], columns: int, dtype: torch.dtype) -> None:
    """As `blocked` packs a copy of them: any bits, rows of any distance, nothing before or behind the blocks."""
    whole = torch.randint(-(2**15), 2**15, (sum(heights), 2 * columns + 1), dtype=torch.int16).view(dtype)
    rows = HalfRows(tuple(part[:, 3 : 3 + columns] for part in whole.split(heights)))
    values = torch.cat(rows.parts).view(torch.int16)
    padded = torch.nn.functional.pad(values, (0, columns % 2))
    wanted = blocked(padded.view(dtype)).view(torch.int16).flatten()
    memory = torch.full((len(wanted) + 64,), 12345, dtype=torch.int16)
    rows.write(memory.data_ptr() + 64)
    assert torch.equal(memory[32:-32], wanted)
    assert memory[:32].eq(12345).all()
    assert memory[-32:].eq(12345).all()


@needs_library
def test_rows_of_a_file_have_the_packed_weights_products() -> None:
    whole, bias = normal(200, 96).bfloat16(), normal(200, seed=3)
    rows, x = HalfRows((whole[:70], whole[70:]), is_exact=True), normal(5, 96, seed=1)
    assert rows.shape == (200, 96)
    assert rows.nbytes == 200 * 96 * 2
    assert torch.equal(rows.dequantize(torch.bfloat16), whole)
    assert torch.equal(rows.packed().dequantize(torch.bfloat16), whole)
    assert error(rows.linear(x, bias), packed(whole, is_exact=True).linear(x, bias)) < 1e-6
    held = matrix_of(rows, bias)
    assert held is not None
    assert error(native_linear(held.matrix, x, is_fine=True), rows.linear(x, bias)) < 1e-6


@needs_library
@pytest.mark.parametrize("dtype", TYPES)
def test_bytes_are_known_before(dtype: torch.dtype) -> None:
    size = pack_half(torch.empty((100, 96), dtype=dtype, device="meta"))
    assert isinstance(size, MetaWeight)
    assert size.nbytes == packed(normal(100, 96).to(dtype)).nbytes


def test_which_stay_16_bits_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    has_library = native() is not None
    assert fits_half(torch.bfloat16, 512, 512) == fits_half(torch.float16, 512, 512) == has_library
    assert not fits_half(torch.float32, 512, 512)
    assert not fits_half(torch.bfloat16, 512, 511)  # oneDNN would pad
    assert not fits_half(torch.bfloat16, 64, 64)  # too small to matter
    monkeypatch.setattr(half, "native", lambda: None)
    assert not fits_half(torch.bfloat16, 512, 512)
