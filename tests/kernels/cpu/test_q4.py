"""4-bit weights of checkpoints in blocks for the native library, against their definition."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from localllm.kernels.cpu import bf16, q4
from localllm.kernels.cpu.native.structures import Kind
from localllm.kernels.cpu.q4 import fits_q4, pack_q4, q4_nbytes
from localllm.kernels.int4_linear import meta_int4, pack_int4, quantize_int4
from tests.marks import needs_library

pytestmark = needs_library


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def codes(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def positive(*shape: int, seed: int = 0) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5).half()


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 200), groups=st.integers(1, 5), group=st.sampled_from([32, 64, 128]), seed=st.integers(0, 9))
def test_codes_and_scales_of_a_checkpoint_lose_nothing(rows: int, groups: int, group: int, seed: int) -> None:
    weight = pack_int4(codes(rows, groups * group, seed), positive(groups, rows, seed=seed), None, group)
    packed = pack_q4(weight)
    assert packed.kind == Kind.Q4
    assert packed.nbytes == q4_nbytes(weight) == -(-rows // 64) * groups * group // 32 * 1152
    assert torch.equal(packed.dequantize(torch.float32), weight.dequantize(torch.float32))


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 200), groups=st.integers(1, 5), group=st.sampled_from([32, 128]), seed=st.integers(0, 9))
def test_zero_points_are_rounded_once(rows: int, groups: int, group: int, seed: int) -> None:
    scales = positive(groups, rows, seed=seed)
    weight = pack_int4(codes(rows, groups * group, seed), scales, codes(groups, rows, seed + 1), group)
    packed = pack_q4(weight)
    has_zeros = weight.zeros is not None  # all may be the middle
    assert packed.kind == (Kind.Q4_MIN if has_zeros else Kind.Q4)
    blocks = -(-rows // 64) * groups * group // 32
    assert packed.nbytes == q4_nbytes(weight) == blocks * (1280 if has_zeros else 1152)
    off = (packed.dequantize(torch.float32) - weight.dequantize(torch.float32)).abs()
    assert float((off / scales.float().t().repeat_interleave(group, 1)).max()) <= 15 * 2**-11


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 40, q4.UNPACK_ROWS - 1, q4.UNPACK_ROWS])
@pytest.mark.parametrize("order", [False, True])
def test_products_of_any_number_of_rows(rows: int, order: bool) -> None:
    groups = torch.arange(256) % 8 if order else None
    weight = pack_int4(codes(100, 256), positive(8, 100), None, 32, g_idx=groups)
    packed, x, bias = pack_q4(weight), normal(rows, 256), normal(100)
    y = packed.linear(x, bias)
    assert y.dtype == torch.float32
    exact = x.double() @ weight.dequantize(torch.float32).double().t() + bias
    assert error(y, exact) < (1e-3 if rows <= 8 else 0.02)
    assert error(packed.linear(x.bfloat16(), bias), exact) < 0.02
    assert torch.equal(packed.dequantize_rows(torch.tensor([99, 0, 64]), torch.float32),
                       packed.dequantize(torch.float32)[[99, 0, 64]])  # fmt: skip


def test_no_rows() -> None:
    assert pack_q4(quantize_int4(normal(64, 64), 32)).linear(torch.empty(0, 64)).shape == (0, 64)


@pytest.mark.skipif(not bf16.has_fast_bf16(), reason="this processor has no fast product of bf16")
@pytest.mark.parametrize(("outputs", "at_a_time"), [(64, 1), (300, 64 * 96), (300, 3 * 64 * 96), (320, 1 << 30)])
def test_some_outputs_at_a_time(outputs: int, at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16, "UNPACKED_AT_A_TIME", at_a_time)
    weight, x = pack_q4(quantize_int4(normal(outputs, 96), 32)), normal(5, 96)
    exact = x.double() @ weight.dequantize(torch.float32).double().t()
    y = bf16.unpacked_linear(weight.matrix(), x.bfloat16())
    if y is None:
        pytest.skip("oneDNN packs bf16 in another layout here")
    assert error(y, exact) < 0.01


def test_what_does_not_fit() -> None:
    assert fits_q4(meta_int4((64, 256), 128, torch.float16, zeros=True))
    assert not fits_q4(meta_int4((64, 256), 16, torch.float16, zeros=True))  # groups that 32 does not divide
    assert not fits_q4(meta_int4((64, 240), -1, torch.float16, zeros=True))  # inputs that 32 does not divide
    assert not fits_q4(meta_int4((64, 256), 32, torch.float16, bits=8, zeros=True))
    unevenly = replace(meta_int4((64, 256), 32, torch.float16, zeros=False), table=tuple(map(float, range(16))))
    assert not fits_q4(unevenly)
