"""Low-precision weights on a CPU: against float64, for every kind of weight, at odd shapes, and where torch has less.

Bounds: a byte has 127 steps up to a row's largest magnitude, so a row whose largest is p times its rms is off by
p / (127 * sqrt(12)) = p / 440 (rms), weights and activations alike; bf16 by 2^-9. In a sum of products the relative
error is the root of the sum of their squares; twice that is what a test allows for the luck of the draw.
"""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from localllm.kernels.cpu import activations, blocks, int8, pack
from localllm.kernels.cpu.activations import MAX_PEAK, decode, encode
from localllm.kernels.cpu.int8 import CpuInt8Weight, int8_nbytes, pack_int8
from localllm.kernels.cpu.native.library import native
from localllm.kernels.cpu.native.structures import FEW_ROWS
from localllm.kernels.cpu.pack import CpuPacker, cpu_layout, packed_nbytes
from localllm.kernels.cpu.q4 import CpuQ4Weight
from localllm.kernels.fp8_linear import quantize_fp8
from localllm.kernels.gguf_blocks import BLOCK_TYPES
from localllm.kernels.int4_linear import pack_int4, quantize_int4
from localllm.kernels.int8_linear import quantize_int8
from localllm.kernels.launch import INTERPRETED
from localllm.kernels.linear import StackedWeight
from localllm.kernels.quantized_weight import QuantizedWeight
from localllm.models.layers.linear import Linear, device_layout_bytes, to_device_layout
from localllm.models.weights.parameters import held_bytes
from tests.kernels.harness import gguf_linear

pytestmark = pytest.mark.skipif(
    INTERPRETED or not int8.has_int8(), reason="this torch on this processor has no such product"
)
CPU = torch.device("cpu")
BF16, FP16 = 2.0**-9, 2.0**-12
MODES = ("fast", "small", "exact")


@pytest.fixture(autouse=True)
def _mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "PACK_MIN_ELEMENTS", 0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))


def peak(rows: Tensor) -> float:
    return float((rows.abs().amax(1) / rows.square().mean(1).sqrt().clamp(min=1e-30)).max())


def product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    y = x.double() @ w.double().t()
    return y if bias is None else y + bias.double()


KINDS: dict[str, Callable[[], QuantizedWeight]] = {
    "int4 group 128": lambda: quantize_int4(normal(48, 256), 128),
    "int4 group 32": lambda: quantize_int4(normal(48, 160), 32),
    "int4 one group per row": lambda: quantize_int4(normal(48, 256), -1),
    "int8": lambda: quantize_int8(normal(50, 70)),
    "int8 with zeros": lambda: quantize_int8(normal(50, 70) + 1, symmetric=False),
    "fp8 per tensor": lambda: quantize_fp8(normal(50, 70), "tensor"),
    "fp8 in blocks": lambda: quantize_fp8(normal(200, 300), "block"),
    **{name: lambda name=name: gguf_linear(name, 48, 512) for name in BLOCK_TYPES},  # type: ignore[misc]
}


# ---- rows of activations ---------------------------------------------------------------------------------------------


def decoded(x: Tensor) -> Tensor:
    """What `encode` keeps of x, through a product with the identity in exact arithmetic."""
    codes = encode(x)
    return decode(codes.bytes.float() - 128, codes, None, torch.float32)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 70),
    outlier=st.sampled_from([1.0, 30.0, 1e4]),
    seed=st.integers(0, 99),
)
def test_no_row_loses_more_than_its_share(rows: int, columns: int, outlier: float, seed: int) -> None:
    x = normal(rows, columns, seed=seed)
    x[seed % rows, seed % columns] *= outlier
    coarse = MAX_PEAK / 127 / 2  # no value is off by more than half a step of a row's largest magnitude
    worst = (decoded(x).double() - x).abs().amax(1)
    rms = x.double().square().mean(1).sqrt()
    largest = x.abs().amax(1)
    assert bool((worst <= torch.maximum(largest / 65024, torch.minimum(largest / 254, rms * coarse)) * 1.001).all())


@pytest.mark.parametrize("rows", [1, 2, 3, 40])
def test_rows_with_outliers_get_two_bytes(rows: int) -> None:
    x = normal(rows, 200)
    plain = encode(x)
    expected = {1: 4, 2: 4}  # few rows have two bytes whatever they hold
    assert len(plain.bytes) == expected.get(rows, rows)
    x[rows // 2, 3] = 500
    two_bytes = 1.1 * math.sqrt(200) / activations.TWO_BYTES / math.sqrt(12)  # a step, evenly spread, over the rms
    assert error(decoded(x)[rows // 2], x[rows // 2]) < two_bytes
    assert len(encode(x).bytes) == expected.get(rows, rows + 1)
    x[:, 3] = 500
    assert error(decoded(x), x) < two_bytes
    assert len(encode(x).bytes) == expected.get(rows, 2 * rows)


@pytest.mark.parametrize("size", [1e-38, 1e-25, 1e25, 3e38])
def test_magnitudes_at_the_ends_of_fp32(size: float) -> None:
    """What is too small to count becomes 0; what is too large for a sum of squares nothing finite. Neither warns."""
    x = normal(3, 50).clamp(-1, 1) * size
    for rows in (x[:1], x[:2], x):
        y = decoded(rows)
        assert bool(((y - rows).abs() <= rows.abs().amax() / 200 + 1e-24).all()) or not bool(y.isfinite().any())


def test_zeros_stay_zeros_and_what_is_not_finite_stays_so() -> None:
    x = normal(5, 64)
    x[1], x[2, 3], x[3, 4] = 0, math.nan, math.inf
    for rows in (x, x[1:2], x[2:3], x[3:4]):
        y = to_device_layout(quantize_int8(normal(16, 64)), CpuPacker()).linear(rows)  # type: ignore[union-attr]
        finite = rows.isfinite().all(1)
        assert bool((y.isfinite().all(1) == finite).all())
        assert bool((y[(rows == 0).all(1)] == 0).all())


# ---- the product -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fast", "small"])
@pytest.mark.parametrize("name", KINDS)
def test_each_kind_against_float64(name: str, mode: str) -> None:
    weight = KINDS[name]()
    exact = weight.dequantize(torch.float32)
    packed = CpuPacker(mode).pack(weight)
    assert packed is not weight
    assert tuple(packed.shape) == tuple(weight.shape)
    is_q4 = isinstance(packed, CpuQ4Weight)
    in_bytes, in_bf16 = peak(exact) / 440, BF16 * math.sqrt(3)
    # With minima, scale and zero are rounded apart, and what they differ by counts.
    groups = exact.abs().max() / exact.square().mean().sqrt()
    weights = float(groups) * FP16 if is_q4 else in_bytes
    assert error(packed.dequantize(torch.float32), exact) <= weights
    bias = normal(exact.shape[0], seed=2)
    for rows in (0, 1, 2, 3, 17):
        x = normal(rows, exact.shape[1], seed=3)
        y = packed.linear(x, bias)
        assert y.shape == (rows, exact.shape[0])
        assert y.dtype == x.dtype
        if rows == 0:
            continue
        in_x = 1e-4 if is_q4 and rows <= FEW_ROWS else peak(x) / 440
        allowed = math.hypot(weights, in_x)
        assert error(y, product(x, exact, bias)) <= 2 * allowed
        narrow = packed.linear(x.bfloat16(), bias.bfloat16())
        assert narrow.dtype == torch.bfloat16
        assert error(narrow, product(x, exact, bias)) <= 2 * math.hypot(allowed, in_bf16)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 200), k=st.integers(1, 200), rows=st.integers(0, 6), seed=st.integers(0, 99))
def test_int8_at_any_shape(n: int, k: int, rows: int, seed: int) -> None:
    """Weights that are int8 already lose nothing, so what is left is the rounding of x: of 16 bits for a few rows."""
    values = torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=torch.Generator().manual_seed(seed))
    scales = torch.rand(n, generator=torch.Generator().manual_seed(seed)) + 0.5
    weight, x = pack_int8(values, scales), normal(rows, k, seed=seed)
    exact = values.double() * scales.double()[:, None]
    assert weight.nbytes == int8_nbytes(n, k) == held_bytes(weight)
    assert torch.equal(weight.dequantize(torch.float32).double(), exact.float().double())
    got, wanted = weight.linear(x), product(x, exact)
    steps = 65024 if rows <= activations.FINE_ROWS else 254
    if rows:
        largest = x.norm() if rows == 1 else x.abs().amax(1, keepdim=True)  # a lone row's steps count from its norm
        worst = largest.double() / steps * exact.abs().sum(1) + 1e-5 * wanted.abs() + 1e-3
        assert bool(((got - wanted).abs() <= worst).all())


def bytes_matrix(n: int, k: int, seed: int) -> Tensor:
    return torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("n", "k"), [(64, 64), (192, 128), (640, 896), (100, 128), (128, 100)])
def test_the_second_of_a_shape_lies_as_onednn_would_lay_it(n: int, k: int) -> None:
    first, second = bytes_matrix(n, k, 1), bytes_matrix(n, k, 2)
    examples = blocks.Examples()
    example = blocks.reorder(first, examples)
    is_known = n % 64 == 0 and k % 64 == 0
    assert ((n, k) in examples) == is_known
    packed = blocks.reorder(second, examples)
    wanted = torch.ops.onednn.qlinear_prepack(second, None)
    assert torch.equal(blocks.memory_of(packed), blocks.memory_of(wanted)) or not is_known  # what fills up is anything
    x, ones = normal(5, k), torch.ones(n)
    assert torch.equal(CpuInt8Weight(packed, ones).linear(x), CpuInt8Weight(wanted, ones).linear(x))
    assert torch.equal(CpuInt8Weight(example, ones).dequantize(torch.float32), first.float())  # and stayed itself
    del example
    assert (n, k) not in examples  # no memory is held for what may come


@pytest.mark.parametrize(("attribute", "other"), [("BLOCK", 32), ("_TOGETHER", 8)])
def test_a_layout_that_is_another_is_left_to_onednn(
    attribute: str, other: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "native", lambda: None)
    monkeypatch.setattr(blocks, attribute, other)
    values = bytes_matrix(256, 128, 3)
    examples = blocks.Examples()
    packed = [blocks.reorder(values, examples) for _ in range(2)]
    assert not examples
    assert torch.equal(CpuInt8Weight(packed[1], torch.ones(256)).dequantize(torch.float32), values.float())


def test_inputs_in_an_order_of_their_own() -> None:
    """GPTQ's desc_act: in 4 bits x is brought into order, in int8 the weights are."""
    groups = torch.arange(256) % 2
    codes = torch.randint(0, 16, (32, 256), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    weight = pack_int4(codes, torch.rand(2, 32).half() + 0.5, None, 128, g_idx=groups)
    assert weight.input_order is not None
    packed = CpuPacker().pack(weight)
    exact = weight.dequantize(torch.float32)
    assert packed.nbytes == packed_nbytes(weight, "fast") == held_bytes(packed)
    assert error(packed.dequantize(torch.float32), exact) < (2 * FP16 if native() else 0.02)
    for rows in (1, 5, 20):
        x = normal(rows, 256)
        assert error(packed.linear(x), product(x, exact)) < 0.03


def test_single_rows_of_a_table() -> None:
    weight = gguf_linear("Q8_0", 100, 64)
    rows = torch.tensor([3, 99, 3, 0])
    assert torch.equal(weight.dequantize_rows(rows, torch.float32), weight.dequantize(torch.float32)[rows])
    assert weight.dequantize_rows(rows[:0], torch.float32).shape == (0, 64)


# ---- which layout, how many bytes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", KINDS)
def test_bytes_are_known_before(name: str, mode: str) -> None:
    weight = KINDS[name]()
    assert device_layout_bytes(weight, CPU, mode) == held_bytes(to_device_layout(weight, CpuPacker(mode)))
    assert device_layout_bytes(weight, torch.device("cuda"), mode) == weight.nbytes
    assert (to_device_layout(weight, CpuPacker(mode)) is weight) == (mode == "exact")


def test_layouts_by_mode() -> None:
    four, eight, table = (
        quantize_int4(normal(48, 256), 128),
        quantize_int8(normal(48, 256)),
        gguf_linear("IQ4_NL", 48, 256),
    )
    odd = quantize_int4(normal(50, 100), 128)  # 32 does not divide the inputs
    fast = ["q4" if native() else "int8", "int8", "q4" if native() else "int8", "int8"]
    layouts = {mode: [cpu_layout(weight, mode) for weight in (four, eight, table, odd)] for mode in MODES}
    assert layouts == {
        "fast": fast,
        "small": fast,
        "exact": [None] * 4,
    }


def test_a_small_weight_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "PACK_MIN_ELEMENTS", 48 * 256 + 1)
    weight = quantize_int8(normal(48, 256))
    assert to_device_layout(weight, CpuPacker()) is weight
    monkeypatch.setattr(pack, "PACK_MIN_ELEMENTS", 48 * 256)
    assert isinstance(to_device_layout(weight, CpuPacker()), CpuInt8Weight)


def test_parts_become_one_matrix_where_that_takes_no_more() -> None:
    parts = [gguf_linear("Q6_K", 64, 256), gguf_linear("Q8_0", 20, 256)]
    whole = StackedWeight(parts)
    packed = to_device_layout(whole, CpuPacker())
    assert isinstance(packed, CpuInt8Weight)
    assert packed.nbytes == device_layout_bytes(whole, CPU, "fast")
    assert packed.nbytes == sum(device_layout_bytes(part, CPU, "fast") for part in parts)
    x = normal(3, 256)
    assert error(packed.linear(x), product(x, whole.dequantize(torch.float32))) < 0.03
    mixed = StackedWeight([gguf_linear("Q4_K", 64, 256), normal(64, 256), gguf_linear("Q8_0", 20, 256)])
    apart = to_device_layout(mixed, CpuPacker())
    assert isinstance(apart, StackedWeight)
    assert [type(part).__name__ for part in apart.parts] == [
        "CpuQ4Weight" if native() else "CpuInt8Weight",
        "Tensor",
        "CpuInt8Weight",
    ]
    assert device_layout_bytes(mixed, CPU, "fast") == held_bytes(apart)
    assert error(apart.linear(x), product(x, mixed.dequantize(torch.float32))) < 0.03


@pytest.mark.parametrize("missing", ["int8", "library", "both"])
def test_runs_as_stored_where_a_product_is_missing(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's names for these products are not public and may be gone in another version."""
    if missing != "library":
        monkeypatch.setattr(pack, "has_int8", lambda: False)
    if missing != "int8":
        monkeypatch.setattr(pack, "native", lambda: None)
    four, eight = quantize_int4(normal(48, 256), 128), quantize_int8(normal(48, 256))
    layouts = {"int8": ["q4" if native() else None, None], "library": ["int8", "int8"], "both": [None, None]}
    assert [cpu_layout(four, "fast"), cpu_layout(eight, "fast")] == layouts[missing]
    x = normal(3, 256)
    for weight in (four, eight):
        linear = Linear(weight)
        assert device_layout_bytes(weight, CPU, "fast") == held_bytes(linear)
        assert error(linear(x), product(x, weight.dequantize(torch.float32))) < 0.03
    assert ("no fast int8 product" in pack.describe_layout("fast")) == (missing != "library")
    assert ("4-bit weights as stored" in pack.describe_layout("fast")) == (missing == "int8" and native() is not None)


@pytest.mark.parametrize("fault", [AttributeError("gone"), RuntimeError("unsupported"), None])
def test_a_product_that_fails_or_is_wrong_is_not_used(fault: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def multiply(*args: object) -> Tensor:
        if fault is not None:
            raise fault
        return torch.zeros(4, 1024)  # as where products saturate: a number, and not the right one

    monkeypatch.setattr(int8, "_multiply", multiply)
    assert int8.has_int8.__wrapped__() is False


def test_a_reference_loop_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 0.05])  # the product, then fp32 of the same shape
    monkeypatch.setattr(int8, "_best_time", lambda call: next(times))
    assert int8.has_int8.__wrapped__() is False
