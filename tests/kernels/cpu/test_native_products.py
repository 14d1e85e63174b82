"""Products of the native library with one block of outputs at a time, against their definition in float64.

Every library is tested that this processor can run. Bounds: 15-bit codes are off by at most 1.5 steps, and by half a
step nearly always, where the largest magnitude p of a row has 32512 steps; fp32 sums of K products by some 1e-6.
"""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from localllm.kernels.cpu.native.choice import usable_sets
from localllm.kernels.cpu.native.library import Pool, open_library
from localllm.kernels.cpu.native.sources import FOLDER, library_name
from localllm.kernels.cpu.native.structures import MAX_ROWS, Activation, Kind
from tests.kernels.cpu.layouts import FLOATS, SMALLEST_K, Packed, bias_of, draw

CODED = tuple(kind for kind in Kind if kind not in FLOATS)
each_kind = pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
each_coded = pytest.mark.parametrize("kind", CODED, ids=lambda kind: kind.name)


@pytest.fixture(scope="module", params=usable_sets() or [None])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    if request.param is None:
        pytest.skip("this processor has no native library")
    if not (FOLDER / library_name(request.param)).exists():
        pytest.skip(f"not compiled: {request.param}")
    library, reason = open_library(request.param)
    assert library is not None, reason  # its own check of its products may have failed
    pool = library.open_pool(2)
    yield pool
    pool.close()


def rows_of(count: int, inputs: int, seed: int = 1) -> Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(seed))


def expect(packed: Packed, x: Tensor) -> Tensor:
    read = x.bfloat16() if packed.native.kind == Kind.BF16_ROUNDED else x
    return read.double() @ packed.values.T + bias_of(packed)


def bound(packed: Packed, x: Tensor, steps: int | None) -> Tensor:
    """Return the largest error [T, N] of a result with codes of so many steps: three quarters of a step on the average,
    all of one sign, and the rounding of fp32 sums. None: no codes."""
    weights = packed.values.abs()
    rounding = 6e-8 * (4 + 2 * x.shape[1] ** 0.5) * (x.abs().double() @ weights.T + bias_of(packed).abs())
    if steps is None:
        return rounding
    return rounding + 0.75 * x.abs().amax(dim=1, keepdim=True).double() / steps * weights.sum(dim=1)


def check(pool: Pool, packed: Packed, x: Tensor) -> None:
    got, wanted = pool.linear(packed.native, x), expect(packed, x)
    allowed = bound(packed, x, None if packed.native.kind in FLOATS else 32512)
    assert bool(((got - wanted).abs() <= allowed).all()), float(((got - wanted).abs() / allowed).max())


@each_kind
@given(
    outputs=st.integers(1, 200), inputs=st.integers(1, 150), rows=st.integers(1, MAX_ROWS), bias=st.booleans(),
    order=st.booleans(), extreme=st.booleans(), seed=st.integers(0, 1000),
)  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_a_product_is_its_definition(
    pool: Pool,
    kind: Kind,
    outputs: int,
    inputs: int,
    rows: int,
    bias: bool,
    order: bool,
    extreme: bool,
    seed: int,
) -> None:
    inputs = -(-inputs // SMALLEST_K[kind]) * SMALLEST_K[kind]
    packed = draw(kind, outputs, inputs, bias=bias, order=order, extreme=extreme, seed=seed)
    check(pool, packed, rows_of(rows, inputs, seed + 5000))


@each_kind
def test_a_long_product_is_its_definition(pool: Pool, kind: Kind) -> None:
    check(pool, draw(kind, 64, 4864), rows_of(3, 4864))


def unpacked(pool: Pool, packed: Packed) -> torch.Tensor:
    out = torch.empty(packed.native.outputs, packed.native.inputs)
    pool.unpack(packed.native, 0, out)
    return out


@each_kind
def test_a_row_does_not_depend_on_its_neighbours(pool: Pool, kind: Kind) -> None:
    packed, x = draw(kind, 150, 928, bias=True), rows_of(MAX_ROWS, 928)
    x[2] *= 1000
    x[4, 5] = float("nan")
    x[6] = 0
    for fine in (True, False):
        alone = torch.cat([pool.linear(packed.native, x[i : i + 1], is_fine=fine) for i in range(MAX_ROWS)])
        for count in range(2, MAX_ROWS + 1):
            together = pool.linear(packed.native, x[:count], is_fine=fine)
            assert torch.equal(together.nan_to_num(1.5), alone[:count].nan_to_num(1.5)), count


@pytest.mark.parametrize("kind", [Kind.BF16_ROUNDED, Kind.F32], ids=lambda kind: kind.name)
@pytest.mark.parametrize("outputs", [64, 100, 278])
@pytest.mark.parametrize("rows", [1, 13, MAX_ROWS + 1])
def test_a_gated_product_is_the_gate_of_the_products(pool: Pool, kind: Kind, outputs: int, rows: int) -> None:
    """Gate and up begin anywhere in a block of 64. Each is a product's bits."""
    packed, x = draw(kind, outputs, 98, bias=True), rows_of(rows, 98)
    gate, up = pool.linear(packed.native, x).double().chunk(2, dim=1)
    for activation, wanted in (
        (Activation.NONE, gate * up), (Activation.SILU, torch.nn.functional.silu(gate) * up),
        (Activation.GELU, torch.nn.functional.gelu(gate) * up),
    ):  # fmt: skip
        got = pool.gated(packed.native, x, activation)
        assert got.shape == wanted.shape
        torch.testing.assert_close(got.double(), wanted, rtol=2e-6, atol=2e-6 * float(up.abs().max()))


@each_coded
def test_the_largest_codes_of_both_operands_do_not_overflow(pool: Pool, kind: Kind) -> None:
    """The largest sums of 15-bit codes: a row of largest magnitudes with signs that make all products positive."""
    inputs = 65536 if kind == Kind.I8 else 1024
    packed = draw(kind, 64, inputs, extreme=True)
    x = torch.cat([packed.values[:2].sign(), -packed.values[:2].sign(), torch.ones(1, inputs)]).float()
    x[4, 0] = 256.0  # the codes of the others are 127: no high byte, the largest low byte
    x[4, 1::2] *= -1.0
    check(pool, packed, x)


@each_coded
def test_low_bytes_around_128_are_no_further_off_than_a_step_and_a_half(pool: Pool, kind: Kind) -> None:
    packed = draw(kind, 64, 256, extreme=True)
    x = torch.full((1, 256), 1.0)
    x[0, 1:] = torch.tensor([-129.0, -128.0, -127.0, 127.0, 128.0, 129.0]).repeat(43)[:255] / 32512
    got, wanted = pool.linear(packed.native, x), expect(packed, x)
    assert bool(((got - wanted).abs() <= 2 * bound(packed, x, 32512)).all())


@each_kind
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_with_nan_or_infinity_spoils_only_itself(pool: Pool, kind: Kind, bad: float) -> None:
    packed, x = draw(kind, 70, 96, bias=True), rows_of(3, 96)
    x[1, 33] = bad
    got = pool.linear(packed.native, x)
    assert not bool(got[1].isfinite().any())
    check(pool, packed, x[[0, 2]])
    assert bool(got[[0, 2]].isfinite().all())


@each_kind
def test_a_row_of_zeros_or_nearly_zeros_gives_the_bias(pool: Pool, kind: Kind) -> None:
    packed = draw(kind, 70, 96, bias=True)
    assert torch.equal(pool.linear(packed.native, torch.zeros(2, 96)).double(), bias_of(packed).expand(2, -1))
    tiny = torch.full((1, 96), 1e-42)
    assert torch.allclose(pool.linear(packed.native, tiny).double(), bias_of(packed), atol=1e-20, rtol=1e-6)


@each_kind
def test_rows_may_be_apart(pool: Pool, kind: Kind) -> None:
    packed, wide = draw(kind, 64, 96), rows_of(5, 300)
    assert torch.equal(
        pool.linear(packed.native, wide[:, 100:196]), pool.linear(packed.native, wide[:, 100:196].contiguous())
    )


@each_coded
def test_only_rows_with_outliers_have_15_bits_in_a_long_batch(pool: Pool, kind: Kind) -> None:
    packed, x = draw(kind, 64, 512), rows_of(4, 512)
    x[1, 7] = 100.0
    x[3, 9] = 1e30  # whose square is infinite
    coarse, fine, wanted = (
        pool.linear(packed.native, x, is_fine=False),
        pool.linear(packed.native, x),
        expect(packed, x),
    )
    assert torch.equal(coarse[[1, 3]], fine[[1, 3]])
    assert bool(((coarse - wanted).abs() <= bound(packed, x, 127)).all())
    assert bool(((coarse - wanted)[[0, 2]].abs().mean() > 20 * (fine - wanted)[[0, 2]].abs().mean()).all())


@each_kind
@given(outputs=st.integers(1, 150), inputs=st.integers(1, 100), seed=st.integers(0, 1000))
@settings(max_examples=10, deadline=None)
def test_unpacking_returns_the_values(pool: Pool, kind: Kind, outputs: int, inputs: int, seed: int) -> None:
    inputs = -(-inputs // SMALLEST_K[kind]) * SMALLEST_K[kind]
    packed = draw(kind, outputs, inputs, seed=seed)
    assert torch.allclose(unpacked(pool, packed).double(), packed.values, rtol=1e-6, atol=1e-6)


@each_coded
def test_libraries_agree_bit_for_bit(kind: Kind) -> None:
    """Sums of codes are integers, and everything after them is computed in one order."""
    packed, x = draw(kind, 130, 1024, bias=True), rows_of(3, 1024)
    libraries = [library for library, _ in map(open_library, usable_sets()) if library is not None]
    pools = [library.open_pool(1) for library in libraries]
    results = [pool.linear(packed.native, x) for pool in pools]
    for pool in pools:
        pool.close()
    assert all(torch.equal(results[0], result) for result in results)


@each_kind
def test_a_row_is_the_same_among_any_number_of_rows(pool: Pool, kind: Kind) -> None:
    packed, x = draw(kind, 200, 416, bias=True), rows_of(64, 416)
    together = pool.linear(packed.native, x)
    for count in (1, 8, 9, 33):
        assert torch.equal(pool.linear(packed.native, x[:count]), together[:count]), count
    check(pool, packed, x)


@each_kind
@pytest.mark.parametrize("inputs", [32, 417, 96])
def test_bf16_values_are_those_in_fp32_rounded(pool: Pool, kind: Kind, inputs: int) -> None:
    packed = draw(kind, 200, inputs // SMALLEST_K[kind] * SMALLEST_K[kind])
    out = torch.empty(2, (packed.native.inputs + 1) // 2, 64, 2, dtype=torch.bfloat16)
    pool.unpack_bf16(packed.native, out, 64)
    wide = out.transpose(1, 2).reshape(128, -1)
    assert torch.equal(wide[:, : packed.native.inputs], unpacked(pool, packed)[64:192].bfloat16())
    assert bool((wide[:, packed.native.inputs :] == 0).all())
