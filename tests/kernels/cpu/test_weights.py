"""Weights in the layouts of the native library: their values and products against float64, their bytes, their matrices.

A processor without the library runs the tests of what happens then.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from localllm.kernels.cpu import half, pack
from localllm.kernels.cpu.half import HALVES, CpuHalfWeight, fits_half, half_nbytes, pack_half
from localllm.kernels.cpu.int8 import pack_int8, round_rows
from localllm.kernels.cpu.matrix import matrices_of, matrix_of
from localllm.kernels.cpu.native.library import native
from localllm.kernels.cpu.native.structures import Kind
from localllm.kernels.cpu.native_product import has_fast_bf16_instructions, native_linear, native_unpack
from localllm.kernels.cpu.q4 import CpuQ4Weight, fits_q4, pack_q4, q4_nbytes
from localllm.kernels.int4_linear import pack_int4, quantize_int4
from localllm.kernels.launch import INTERPRETED
from localllm.kernels.linear import PACK_MIN_ELEMENTS, pack_weight, should_pack
from localllm.kernels.planar.linear import PlanarWeight
from localllm.kernels.quantized_weight import MetaWeight, QuantizedWeight
from localllm.kernels.stacked_weight import StackedWeight
from localllm.models.weights.parameters import held_bytes
from tests.kernels.test_cpu_linear import gguf

needs_library = pytest.mark.skipif(native() is None or INTERPRETED, reason="there is no native library here")
ROWS = (0, 1, 2, 8, 9, 33)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))


def with_zeros(rows: int, columns: int, group: int, *, ordered: bool = True) -> PlanarWeight:
    rng = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=rng)
    groups = -(-columns // group)
    scales = (torch.rand((groups, rows), generator=rng) + 0.5).half()
    zeros = torch.randint(0, 17, (groups, rows), dtype=torch.uint8, generator=rng)
    order = None if ordered else torch.randperm(columns, generator=rng) // group
    return pack_int4(codes, scales, zeros, group, g_idx=order)


FOUR_BITS = {
    "Q4_0": (lambda: gguf("Q4_0", 100, 160), Kind.Q4, 0.0),
    "Q4_1": (lambda: gguf("Q4_1", 64, 96), Kind.Q4_MIN, 0.0),
    "Q4_K": (lambda: gguf("Q4_K", 130, 512), Kind.Q4_MIN, 2.0**-10),
    "groups of 64": (lambda: with_zeros(70, 192, 64), Kind.Q4_MIN, 2.0**-10),
    "groups of 128, the last one short": (lambda: quantize_int4(normal(33, 160), 128), Kind.Q4_MIN, 2.0**-10),
    "desc_act": (lambda: with_zeros(48, 256, 128, ordered=False), Kind.Q4_MIN, 2.0**-10),
}


@needs_library
@pytest.mark.parametrize("name", FOUR_BITS)
def test_four_bits_keep_the_checkpoints_values(name: str) -> None:
    make, kind, rounding = FOUR_BITS[name]
    weight = make()
    assert fits_q4(weight)
    packed, exact = pack_q4(weight), weight.dequantize(torch.float32)
    assert packed.kind == kind
    assert tuple(packed.shape) == tuple(weight.shape)
    assert packed.nbytes == q4_nbytes(weight) == held_bytes(packed)
    values = packed.dequantize(torch.float32)
    assert error(values, exact) <= rounding
    some = torch.tensor([weight.shape[0] - 1, 0, 31, 0])
    assert torch.equal(packed.dequantize_rows(some, torch.float32), values[some])
    bias = normal(weight.shape[0], seed=1)
    for rows in ROWS:
        x = normal(rows, weight.shape[1], seed=2)
        y = packed.linear(x, bias)
        assert y.shape == (rows, weight.shape[0])
        assert error(y, x.double() @ values.double().t() + bias) < (2e-4 if rows <= 8 else 0.02)
        assert packed.linear(x.bfloat16()).dtype == torch.bfloat16


@needs_library
def test_four_bits_take_little_more_than_four() -> None:
    plain, minima = gguf("Q4_0", 64, 512), gguf("Q4_K", 64, 512)
    assert q4_nbytes(plain) / (64 * 512) == 0.5625
    assert q4_nbytes(minima) / (64 * 512) == 0.625


@pytest.mark.parametrize("weight", [gguf("IQ4_NL", 64, 256), gguf("Q3_K", 64, 256), quantize_int4(normal(64, 80), 16)])
def test_codes_of_a_table_and_short_groups_do_not_fit(weight: PlanarWeight) -> None:
    assert not fits_q4(weight)


@needs_library
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (200, 96), (65, 320)])
def test_halves_against_float64(
    dtype: torch.dtype, is_fast: bool, outputs: int, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_fast and not has_fast_bf16_instructions():
        pytest.skip("this processor has no product of bf16")
    monkeypatch.setattr(half, "has_fast_bf16_instructions", lambda: is_fast)
    w, bias = normal(outputs, inputs).to(dtype), normal(outputs, seed=1)
    weight = pack_half(w)
    assert isinstance(weight, CpuHalfWeight)
    assert tuple(weight.shape) == (outputs, inputs)
    assert weight.nbytes == half_nbytes(outputs, inputs) == held_bytes(weight)
    assert pack_half(torch.empty(w.shape, dtype=dtype, device="meta")) == MetaWeight(tuple(w.shape), weight.nbytes)
    assert torch.equal(weight.dequantize(dtype), w)
    some = torch.tensor([outputs - 1, 0, 63, 0])
    assert torch.equal(weight.dequantize_rows(some, torch.float32), w[some].float())
    for rows in ROWS:
        x = normal(rows, inputs, seed=2)
        wanted = x.double() @ w.double().t() + bias
        allowed = 2.0**-8 if is_fast and dtype == torch.bfloat16 and rows > 8 else 2e-6
        assert error(weight.linear(x, bias), wanted) < allowed


@pytest.mark.skipif(
    native() is None or not has_fast_bf16_instructions(), reason="there is no fast product of bf16 here"
)
def test_a_heads_logits_are_not_rounded_to_eight_bits() -> None:
    """With values that bf16 holds only the result is rounded; a constant offset makes that as coarse as can be."""
    w = torch.cat((normal(64, 256), torch.ones(64, 64)), dim=1).bfloat16()
    x = torch.cat((normal(12, 256), torch.ones(12, 64)), dim=1).bfloat16().float()
    wanted = x.double() @ w.double().t()
    assert error(pack_half(w).linear(x), wanted) > 1e-3
    assert error(pack_half(w, is_head=True).linear(x), wanted) < 1e-5


def every_kind() -> dict[str, tuple[Tensor | QuantizedWeight, Kind]]:
    large = normal(520, 640)
    kinds: dict[str, tuple[Tensor | QuantizedWeight, Kind]] = {
        "small": (normal(70, 35), Kind.F32),
        "small and quantised": (gguf("Q6_K", 70, 256), Kind.F32),
        "int8": (pack_int8(*round_rows(normal(128, 64))), Kind.I8),
        "int8, padded": (pack_int8(*round_rows(normal(100, 128))), Kind.I8),
        "bf16": (pack_half(normal(100, 64).bfloat16()), Kind.BF16),
        "fp16": (pack_half(normal(100, 64).half()), Kind.F16),
        "4 bits": (pack_q4(gguf("Q4_0", 100, 64)), Kind.Q4),
        "4 bits with minima": (pack_q4(gguf("Q4_1", 100, 64)), Kind.Q4_MIN),
    }
    if should_pack(large.numel(), large.device, large.dtype):
        kinds["fp32"] = (pack_weight(large), Kind.F32)
    return kinds


@needs_library
def test_each_weights_matrix_has_its_values_and_bias() -> None:
    for name, (weight, kind) in every_kind().items():
        bias = normal(weight.shape[0], seed=1)
        held = matrix_of(weight, bias)
        if held is None:
            assert name.startswith(("int8", "fp32")), name  # where oneDNN packs otherwise
            continue
        assert held.matrix.kind == kind, name
        values = weight.to_dense() if isinstance(weight, Tensor) else weight.dequantize(torch.float32)
        assert error(native_unpack(held.matrix, torch.float32), values) < 1e-7, name
        x = normal(2, weight.shape[1], seed=2)
        assert error(native_linear(held.matrix, x, is_fine=True), x.double() @ values.double().t() + bias) < 3e-4, name
        plain = matrix_of(weight)
        assert plain is not None
        assert not plain.matrix.bias


@needs_library
def test_a_layout_that_is_another_has_no_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if oneDNN had packed blocks of other outputs: the columns in memory are not those of the product."""
    from localllm.kernels.cpu import matrix

    weights = [pack_int8(*round_rows(normal(128, 128))), pack_weight(normal(512, 512))]
    monkeypatch.setattr(matrix, "OUTPUTS", 32)
    assert all(matrix_of(weight) is None for weight in weights if not isinstance(weight, Tensor) or weight.is_mkldnn)


@needs_library
def test_parts_have_a_matrix_each_and_their_part_of_the_bias() -> None:
    parts = [pack_q4(gguf("Q4_0", 70, 64)), pack_half(normal(50, 64).bfloat16()), normal(3, 64)]
    held, bias = matrices_of(StackedWeight(parts), normal(123)), normal(123)
    assert held is not None
    x = normal(1, 64, seed=3)
    y = torch.cat([native_linear(each.matrix, x, is_fine=True) for each in held], dim=1)
    assert error(y, x.double() @ StackedWeight(parts).dequantize(torch.float64).t() + bias) < 2e-4
    large = gguf("Q6_K", 1100, 256)
    assert large.shape[0] * large.shape[1] >= PACK_MIN_ELEMENTS
    assert matrices_of(StackedWeight([parts[0], gguf("Q6_K", 8, 64 * 4)][:1])) is not None
    assert matrix_of(large) is None


def test_without_the_library_weights_take_torchs_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (half, pack):
        monkeypatch.setattr(module, "native", lambda: None)
    monkeypatch.setattr(pack, "PACK_MIN_ELEMENTS", 0)
    assert not fits_half(torch.bfloat16, 1024, 1024)
    assert pack.cpu_layout(gguf("Q4_0", 64, 64), "fast") != "q4"
    assert "4-bit" not in pack.describe_layout("fast")


@needs_library
def test_which_halves_stay_halves() -> None:
    assert fits_half(torch.bfloat16, 1024, 1024)
    assert fits_half(torch.float16, 1024, 1024)
    assert not fits_half(torch.float32, 1024, 1024)
    assert not fits_half(torch.bfloat16, 64, 64)  # small
    assert not fits_half(torch.bfloat16, 4096, 1000)  # 32 does not divide the inputs


@needs_library
def test_a_packed_weight_is_a_cpu_q4_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "PACK_MIN_ELEMENTS", 0)
    weight = gguf("Q4_K", 64, 256)
    for mode in ("fast", "small"):
        packed = pack.pack_for_cpu(weight, mode)
        assert isinstance(packed, CpuQ4Weight)
        assert packed.nbytes == pack.packed_nbytes(weight, mode)
    assert pack.pack_for_cpu(weight, "exact") is weight
