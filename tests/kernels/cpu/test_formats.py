"""Weights of every 4-bit format in the layout of the native library, and what happens without the library."""

import pytest
import torch
from torch import Tensor

from localllm.kernels.cpu import half, pack
from localllm.kernels.cpu.half import fits_half
from localllm.kernels.cpu.native.library import native
from localllm.kernels.cpu.native.structures import Kind
from localllm.kernels.cpu.q4 import CpuQ4Weight, fits_q4, pack_q4, q4_nbytes
from localllm.kernels.gguf_blocks import E2M1_DOUBLED
from localllm.kernels.int4_linear import pack_int4, quantize_int4
from localllm.kernels.launch import INTERPRETED
from localllm.kernels.planar.linear import PlanarWeight
from localllm.models.formats.matrices import table_weight
from localllm.models.weights.parameters import held_bytes
from tests.kernels.harness import gguf_linear as gguf

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


def nvfp4(rows: int, columns: int) -> PlanarWeight:
    rng = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=rng)
    return table_weight(codes, torch.rand(rows, columns // 16, generator=rng).half(), 16, E2M1_DOUBLED)


FOUR_BITS = {
    "Q4_0": (lambda: gguf("Q4_0", 100, 160), Kind.Q4, 0.0),
    "Q4_1": (lambda: gguf("Q4_1", 64, 96), Kind.Q4_MIN, 0.0),
    "Q4_K": (lambda: gguf("Q4_K", 130, 512), Kind.Q4_MIN, 2.0**-10),
    "MXFP4": (lambda: gguf("MXFP4", 70, 96), Kind.MXFP4, 0.0),
    "NVFP4": (lambda: nvfp4(70, 96), Kind.NVFP4, 0.0),
    "IQ4_NL": (lambda: gguf("IQ4_NL", 33, 160), Kind.IQ4, 0.0),
    "IQ4_XS": (lambda: gguf("IQ4_XS", 64, 512), Kind.IQ4, 2.0**-10),
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
    assert q4_nbytes(gguf("MXFP4", 64, 512)) / (64 * 512) == 0.53125
    assert q4_nbytes(gguf("IQ4_XS", 64, 512)) / (64 * 512) == 0.5625
    assert q4_nbytes(nvfp4(64, 512)) / (64 * 512) == 0.625


NF4 = table_weight(torch.zeros(64, 256, dtype=torch.uint8), torch.ones(64, 4).half(), 64, [i / 15 for i in range(16)])


@pytest.mark.parametrize("weight", [NF4, gguf("Q3_K", 64, 256), quantize_int4(normal(64, 80), 16)])
def test_codes_of_other_tables_and_short_groups_do_not_fit(weight: PlanarWeight) -> None:
    assert not fits_q4(weight)


def test_without_the_library_weights_take_torchs_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (half, pack):
        monkeypatch.setattr(module, "native", lambda: None)
    monkeypatch.setattr(pack, "PACK_MIN_ELEMENTS", 0)
    assert not fits_half(torch.bfloat16, 1024, 1024)
    assert pack.cpu_layout(gguf("Q4_0", 64, 64), "fast") != "q4"
    assert "4-bit" not in pack.describe_layout("fast")


@needs_library
def test_a_packed_weight_is_a_cpu_q4_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "PACK_MIN_ELEMENTS", 0)
    weight = gguf("Q4_K", 64, 256)
    for mode in ("fast", "small"):
        packed = pack.CpuPacker(mode).pack(weight)
        assert isinstance(packed, CpuQ4Weight)
        assert packed.nbytes == pack.packed_nbytes(weight, mode)
    assert pack.CpuPacker("exact").pack(weight) is weight
