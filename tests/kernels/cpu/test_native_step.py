"""Each operation of the native step against the torch twin that batches use, in every library that this processor
runs."""

import ctypes
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.cpu.attention import attend_decodes
from localllm.kernels.cpu.native.choice import usable_sets
from localllm.kernels.cpu.native.library import Library, Pool, open_library, why_none
from localllm.kernels.cpu.native.structures import (
    MAX_ROWS,
    Activation,
    HeadNorm,
    HeadsMade,
    NativeExperts,
    NativeHeadProducts,
    NativeMatrix,
    NativeMixing,
    NativeOperation,
    NormKind,
    Op,
)
from localllm.kernels.cpu.recurrent import STATE_TYPES
from localllm.kernels.gated import ACTIVATIONS as GATED
from localllm.kernels.gated import gated_reference
from localllm.kernels.layer_cache import LayerKV
from localllm.kernels.layer_norm import layer_norm_reference
from localllm.kernels.moe.grouped_gemm import act_reference
from localllm.kernels.moe.route import route
from localllm.kernels.paged_attention import paged_attention_reference, plan_attention
from localllm.kernels.paged_attention.twin import HostPlan, plan_on_host
from localllm.kernels.quantize import Nibbles, quantize_nibbles
from localllm.kernels.rms_norm import rms_norm_reference
from localllm.kernels.rotary_store_kv import hadamard, plan_rotation, rotary_store_kv, rotation_size
from localllm.models.layers.attention import Clip, HeadLayerNorm, WidenedValues
from localllm.models.layers.mlp import UNGATED
from tests.kernels.cpu.native_steps import Builder, listed, no_rows

ACTIVATIONS = {
    "silu": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "relu2": Activation.RELU2,
    "quick_gelu": Activation.QUICK_GELU,
}


def compiled() -> list[str]:
    """Return the sets that are compiled and that this processor runs."""
    return [name for name in usable_sets() if open_library(name)[0] is not None]


@pytest.fixture(scope="module", params=compiled() or [None])
def library(request: pytest.FixtureRequest) -> Library:
    if request.param is None:
        pytest.skip(f"there is no native library: {why_none()}")
    opened, reason = open_library(request.param)
    assert opened is not None, reason
    return opened


@pytest.fixture
def pool(library: Library) -> Iterator[Pool]:
    pool = library.open_pool(2)
    yield pool
    pool.close()


def close(actual: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# Products with what belongs to them.


@pytest.mark.parametrize("shape", [(64, 32), (200, 96), (896, 130)])
@pytest.mark.parametrize("rows", [1, 3, MAX_ROWS])
@pytest.mark.parametrize("norm", NormKind)
def test_linear(pool: Pool, shape: tuple[int, int], rows: int, norm: NormKind) -> None:
    torch.manual_seed(0)
    outputs, inputs = shape
    build, x, y = Builder(), torch.randn(MAX_ROWS, inputs) + 0.3, torch.randn(MAX_ROWS, outputs + 5)
    weight, bias, norm_weight, norm_bias = (
        torch.randn(outputs, inputs) / math.sqrt(inputs), torch.randn(outputs), torch.rand(inputs), torch.randn(inputs)
    )  # fmt: skip
    normed = {
        NormKind.NONE: x,
        NormKind.RMS: rms_norm_reference(x, norm_weight, 1e-5),
        NormKind.LAYER: layer_norm_reference(x, norm_weight, norm_bias, 1e-5),
        NormKind.SCALE: x * norm_weight,
    }[norm]
    before = y.clone()
    expected = before.clone()
    expected[:rows, :outputs] += 0.5 * F.linear(normed[:rows], weight, bias)
    operation = build.operation(
        Op.LINEAR, x, y, matrix=build.matrix(weight, bias), norm=build.norm(norm, norm_weight, norm_bias),
        adds=1, factor=0.5,
    )  # fmt: skip
    pool.run_step(listed(operation), no_rows(), rows)
    close(y, expected)
    assert torch.equal(y[rows:], before[rows:])
    assert torch.equal(y[:, outputs:], before[:, outputs:]), "wrote beyond the outputs"


@pytest.mark.parametrize("name", UNGATED)
def test_ungated_activation(pool: Pool, name: str) -> None:
    torch.manual_seed(1)
    build, x, y = Builder(), torch.randn(MAX_ROWS, 40) * 3, torch.zeros(MAX_ROWS, 72)
    weight, bias = torch.randn(72, 40) / 2, torch.randn(72)
    operation = build.operation(
        Op.LINEAR, x, y, matrix=build.matrix(weight, bias), activation=ACTIVATIONS[name]
    )  # fmt: skip
    pool.run_step(listed(operation), no_rows(), 5)
    close(y[:5], UNGATED[name](F.linear(x[:5], weight, bias)))


@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("width", [64, 192, 40, 100, 130])
def test_gated(pool: Pool, name: str, width: int) -> None:
    torch.manual_seed(2)
    build, x, y = Builder(), torch.randn(MAX_ROWS, 48) * 3, torch.zeros(MAX_ROWS, width + 3)
    weight, bias, norm_weight = torch.randn(2 * width, 48) / 2, torch.randn(2 * width), torch.rand(48)
    operation = build.operation(
        Op.GATED, x, y, matrix=build.matrix(weight, bias), norm=build.norm(NormKind.RMS, norm_weight),
        activation=ACTIVATIONS[name],
    )  # fmt: skip
    pool.run_step(listed(operation), no_rows(), 3)
    close(y[:3, :width], gated_reference(F.linear(rms_norm_reference(x[:3], norm_weight, 1e-5), weight, bias), name))
    assert not y[3:].any()
    assert not y[:, width:].any()


@pytest.mark.parametrize("width", [64, 40, 130])
def test_factors_of_outputs(pool: Pool, width: int) -> None:
    """They multiply a product, and both halves of a gated one, before the activation."""
    torch.manual_seed(2)
    build, x, both, y = Builder(), torch.randn(MAX_ROWS, 48), *(torch.zeros(MAX_ROWS, n * width + 3) for n in (2, 1))
    weight, bias, factors = torch.randn(2 * width, 48) / 2, torch.randn(2 * width), torch.rand(2 * width) + 0.5
    given = {"matrix": build.matrix(weight, bias), "output_factors": build.address(factors)}
    pool.run_step(
        listed(
            build.operation(Op.LINEAR, x, both, activation=Activation.RELU2, **given),
            build.operation(Op.GATED, x, y, activation=Activation.SILU, **given),
        ), no_rows(), 5,
    )  # fmt: skip
    scaled = F.linear(x[:5], weight, bias) * factors
    close(both[:5, : 2 * width], scaled.relu().square())
    close(y[:5, :width], gated_reference(scaled, "silu"))
    assert not both[:, 2 * width :].any()
    assert not y[:, width:].any()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_over_their_whole_range(pool: Pool, activation: str) -> None:
    """The weight is a unit matrix, so that the results are the activation of chosen numbers."""
    values = torch.cat([torch.linspace(-110, 110, 4000), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e4, -1e4])])
    build, count = Builder(), len(values)
    x, y = torch.ones(MAX_ROWS, 1), torch.zeros(MAX_ROWS, count)
    operation = build.operation(
        Op.LINEAR, x, y, matrix=build.matrix(values[:, None].clone()), activation=ACTIVATIONS[activation]
    )  # fmt: skip
    pool.run_step(listed(operation), no_rows(), 1)
    expected = UNGATED[activation](values.double())
    size = torch.maximum(values.abs(), expected.abs()).clamp(min=1)
    assert ((y[0] - expected).abs() <= 4e-7 * size).all()


def test_a_row_with_nan_leaves_the_others_alone(pool: Pool) -> None:
    torch.manual_seed(3)
    build, x, y = Builder(), torch.randn(MAX_ROWS, 64), torch.zeros(MAX_ROWS, 64)
    weight, norm_weight = torch.randn(128, 64) / 8, torch.rand(64)
    operation = build.operation(
        Op.GATED, x, y, matrix=build.matrix(weight), norm=build.norm(NormKind.RMS, norm_weight),
        activation=Activation.SILU,
    )  # fmt: skip
    pool.run_step(listed(operation), no_rows(), MAX_ROWS)
    clean = y.clone()
    x[3, 5] = math.nan
    pool.run_step(listed(operation), no_rows(), MAX_ROWS)
    assert y[3].isnan().all()
    assert torch.equal(torch.cat([y[:3], y[4:]]), torch.cat([clean[:3], clean[4:]]))


@pytest.mark.parametrize("norm", NormKind)
def test_add(pool: Pool, norm: NormKind) -> None:
    torch.manual_seed(4)
    build, x, y = Builder(), torch.randn(MAX_ROWS, 70), torch.randn(MAX_ROWS, 70)
    weight = torch.rand(70)
    normed = {
        NormKind.NONE: x,
        NormKind.RMS: rms_norm_reference(x, weight, 1e-5),
        NormKind.LAYER: layer_norm_reference(x, weight, None, 1e-5),
        NormKind.SCALE: x * weight,
    }[norm]
    expected = torch.cat([y[:2] + 0.25 * normed[:2], y[2:]])
    fields = {"matrix": NativeMatrix(outputs=70), "norm": build.norm(norm, weight), "factor": 0.25}
    pool.run_step(listed(build.operation(Op.ADD, x, y, adds=1, **fields)), no_rows(), 2)
    close(y, expected)
    pool.run_step(listed(build.operation(Op.ADD, x, y, **fields)), no_rows(), 2)
    close(y, torch.cat([0.25 * normed[:2], y[2:]]))
    matrix = NativeMatrix(outputs=70, inputs=70)
    pool.run_step(listed(build.operation(Op.MULTIPLY, x, y, matrix=matrix)), no_rows(), 2)
    close(y, torch.cat([0.25 * normed[:2] * x[:2], y[2:]]))


@pytest.mark.parametrize("activation", ["sigmoid", "softplus"])
@pytest.mark.parametrize("factors", [1, 7, 70])
def test_few_factors_multiply_many_columns(pool: Pool, factors: int, activation: str) -> None:
    build = Builder()
    x, y = torch.randn(3, factors) * 12, torch.randn(3, 70)
    open_ = {"sigmoid": torch.sigmoid, "softplus": F.softplus}[activation](x)
    expected = torch.cat([y[:2] * open_[:2].repeat_interleave(70 // factors, 1), y[2:]])
    fields = {"matrix": NativeMatrix(outputs=70, inputs=factors), "activation": Activation[activation.upper()]}
    pool.run_step(listed(build.operation(Op.MULTIPLY, x, y, **fields)), no_rows(), 2)
    close(y, expected)


# Attention.


class Case:
    """One attention, through the native step and through the twins."""

    def __init__(
        self, positions: list[int], *, heads: int = 6, kv_heads: int = 2, head_dim: int = 64, block_size: int = 16,
        value_dim: int | None = None, rotary_dim: int | None = None, dtype: torch.dtype = torch.float32,
        four_bits: str = "", **fields: Any,
    ) -> None:  # fmt: skip
        """four_bits: the format of the cache, k8v4 or int4. value_dim: of a head of v; None: head_dim."""
        torch.manual_seed(sum(positions) + head_dim)
        self.positions, self.heads, self.fields = positions, heads, fields
        self.block_size, self.rotary_dim = block_size, head_dim if rotary_dim is None else rotary_dim
        self.value_dim = head_dim if value_dim is None else value_dim
        width = (heads + kv_heads) * head_dim + kv_heads * self.value_dim
        rows = max(MAX_ROWS, len(positions))
        self.x, self.y = torch.randn(rows, width), torch.zeros(rows, heads * self.value_dim)
        blocks_each = max(positions) // block_size + 1
        num_blocks = blocks_each * len(positions) + 3
        order = torch.randperm(num_blocks)[: blocks_each * len(positions)]
        self.tables = order.view(len(positions), blocks_each).int()
        shape = (kv_heads, num_blocks, block_size, head_dim)
        self.kv = LayerKV(self._filled(shape, dtype), self._filled(shape, dtype))
        if dtype == torch.int8:
            scales = [torch.rand(shape[:3]) / 50 for _ in range(2)]
            self.kv = LayerKV(self.kv.k, self.kv.v, scales[0], scales[1])
        if four_bits:
            values = quantize_nibbles(torch.randn(shape), head_dim // 32)
            keys = quantize_nibbles(torch.randn(shape), 1)
            if four_bits == "k8v4":
                keys = Nibbles(self._filled(shape, torch.int8), torch.rand(shape[:3]) / 50)
            self.kv = LayerKV(keys.codes, values.codes, keys.scales, values.scales)
        self.table = torch.rand(max(positions) + 1, self.rotary_dim) * 2 - 1

    @staticmethod
    def _filled(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if dtype == torch.int8:
            return torch.randint(-127, 128, shape, dtype=dtype)
        return torch.randn(shape).to(dtype)

    @property
    def slots(self) -> list[int]:
        size = self.block_size
        return [int(self.tables[i, p // size]) * size + p % size for i, p in enumerate(self.positions)]

    def native(self, pool: Pool, **fields: Any) -> Tensor:
        """Return the result [rows, heads * value_dim]; writes the cache."""
        build = Builder()
        angles = {"angles": self.table, "rotary_dim": self.rotary_dim} if self.rotary_dim else {}
        turned = {"hadamard_size": rotation_size(self.kv.head_dim)} if self.kv.rotates_keys else {}
        given = {"scale": 0.2, "value_dim": self.value_dim, **angles, **turned, **self.fields, **fields}
        attention = build.attention(self.kv, self.heads, **given)
        operation = build.operation(Op.ATTEND, self.x, self.y, attention=attention)
        rows = build.rows(self.tables, self.positions, self.block_size)
        pool.run_step(listed(operation), rows, len(self.positions))
        return self.y[: len(self.positions)]

    def twin(
        self,
        *,
        qk_norm: Tensor | None = None,
        norm_last: bool = False,
        before: Any = None,
        query_scale: Tensor | None = None,
        **scoring: Any,
    ) -> Tensor:
        """Return the same through the twins, in fp32; writes the cache."""
        rows = len(self.positions)
        qkv, positions = self.x[:rows].clone(), torch.tensor(self.positions)
        qkv = WidenedValues(self.kv.k.shape[0], self.value_dim, self.kv.head_dim)(qkv)
        if before is not None:
            qkv = before(qkv)
        rotation = plan_rotation(self.table, positions) if self.rotary_dim else None
        q = rotary_store_kv(qkv, self.kv, torch.tensor(self.slots), rotation, qk_norm, 1e-6, norm_last=norm_last)
        if query_scale is not None:
            q = q * query_scale
        window = scoring.pop("window", None)
        lengths = [position + 1 for position in self.positions]
        plan = plan_attention(
            self.tables, torch.tensor(lengths), torch.arange(rows + 1), num_decodes=rows, query_lens=[1] * rows,
            context_lens_host=lengths, num_heads=self.heads, cache_shape=self.kv.k.shape, cache_dtype=self.kv.k.dtype,
            window=window,
        )  # fmt: skip
        k, v = self.kv.k, self.kv.v
        if k.dtype in (torch.bfloat16, torch.float16):  # the twin would round queries and weights as well
            k, v = k.float(), v.float()
        assert isinstance(plan, HostPlan)
        attended = paged_attention_reference(
            q, k, v, plan, **{"scale": 0.2, **scoring}, k_scale=self.kv.k_scale, v_scale=self.kv.v_scale
        )  # fmt: skip
        return attended.unflatten(1, (self.heads, -1))[:, :, : self.value_dim].flatten(1)

    def attended(
        self, pool: Pool, rows: slice = slice(None), *, window: int | None = None, softcap: float | None = None,
        sinks: Tensor | None = None, alibi_slopes: Tensor | None = None, distance_bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return attention of some rows, whose keys and values are in the cache, by a call of its own. Without a
        rotation the queries are those of x."""
        lengths = tuple(position + 1 for position in self.positions[rows])
        plan = plan_on_host(self.tables[rows], [1] * len(lengths), lengths, len(lengths), self.kv.k.shape)
        assert plan.decodes.native_rows is not None
        queries, out = self.x[: len(self.positions), : self.y.shape[1]][rows], torch.full_like(self.y[rows], math.nan)
        q = queries.unflatten(1, (self.heads, -1))
        attend_decodes(
            pool, q, self.kv, plan.decodes.native_rows, window, 0.2, softcap, sinks, alibi_slopes, distance_bias,
            out[: len(lengths)],
        )  # fmt: skip
        return out[: len(lengths)]

    def compare(self, pool: Pool, native_fields: dict[str, Any], twin_fields: dict[str, Any]) -> None:
        """Compare results and caches: bit by bit where a cache has more than 8 bits, and rounds alike."""
        before = [tensor.clone() for tensor in self.kv.tensors()]
        actual = self.native(pool, **native_fields).clone()
        written = [tensor.clone() for tensor in self.kv.tensors()]
        for tensor, old in zip(self.kv.tensors(), before, strict=True):
            tensor.copy_(old)
        expected = self.twin(**twin_fields)
        close(actual, expected, 5e-5)
        for new, twins in zip(written, self.kv.tensors(), strict=True):
            self._compare_cache(new, twins)

    @staticmethod
    def _compare_cache(new: Tensor, twins: Tensor) -> None:
        if new.dtype == torch.uint8:
            new, twins = (torch.stack((each & 15, each >> 4)).to(torch.int8) for each in (new, twins))
        step = {torch.int8: 1.0, torch.bfloat16: 0.04, torch.float16: 0.004}.get(new.dtype, 2e-5)
        difference = (new.float() - twins.float()).abs()
        assert difference.max() <= step
        if new.dtype in (torch.int8, torch.bfloat16, torch.float16):  # a rounding may tip over where the twins' sums do
            assert (difference > 0).float().mean() < 1e-3


CONTEXTS = [[0], [15, 16, 17], [511, 512, 513], [1500, 3, 700]]


@pytest.mark.parametrize("positions", CONTEXTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_attend(pool: Pool, positions: list[int], dtype: torch.dtype) -> None:
    Case(positions, dtype=dtype).compare(pool, {}, {})


@pytest.mark.parametrize("positions", CONTEXTS)
@pytest.mark.parametrize(("four_bits", "head_dim"), [("k8v4", 64), ("int4", 64), ("int4", 96), ("int4", 128)])
def test_attend_to_four_bits(pool: Pool, positions: list[int], four_bits: str, head_dim: int) -> None:
    Case(positions, four_bits=four_bits, head_dim=head_dim).compare(pool, {}, {})


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (7, 1), (14, 2), (9, 3)])
@pytest.mark.parametrize("head_dim", [2, 18, 80, 128])
def test_attend_shapes(pool: Pool, heads: int, kv_heads: int, head_dim: int) -> None:
    Case([70, 5], heads=heads, kv_heads=kv_heads, head_dim=head_dim).compare(pool, {}, {})


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (7, 1), (14, 2)])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(2, 1), (24, 16), (80, 18), (192, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
def test_attend_to_values_narrower_than_keys(
    pool: Pool, heads: int, kv_heads: int, head_dim: int, value_dim: int, dtype: torch.dtype
) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim}
    Case([530, 5], **shape, dtype=dtype).compare(pool, {}, {})


@pytest.mark.parametrize("four_bits", ["k8v4", "int4"])
def test_attend_to_values_of_four_bits_narrower_than_keys(pool: Pool, four_bits: str) -> None:
    Case([530, 5], four_bits=four_bits, value_dim=40).compare(pool, {}, {})


@pytest.mark.parametrize("block_size", [1, 8, 32, 24])
def test_attend_block_sizes(pool: Pool, block_size: int) -> None:
    Case([530, 5], block_size=block_size).compare(pool, {}, {})


@pytest.mark.parametrize("rotary_dim", [0, 16, 32])
def test_partial_rotation_and_none(pool: Pool, rotary_dim: int) -> None:
    Case([33, 12], rotary_dim=rotary_dim).compare(pool, {}, {})


@pytest.mark.parametrize("window", [1, 7, 100, 512, 600, 5000, -7, -512, -600])
def test_window(pool: Pool, window: int) -> None:
    Case([1100, 3, 40]).compare(pool, {"window": window}, {"window": window})


def test_blocks_before_the_window_are_not_read(pool: Pool) -> None:
    case = Case([1100])
    expected = case.native(pool, window=100).clone()
    case.tables[0, : (1100 - 99) // 16] = 1 << 30  # their addresses are not mapped
    assert torch.equal(case.native(pool, window=100), expected)


MANY = [(7919 * row) % 700 for row in range(130)]
SCORINGS: list[dict[str, Any]] = [{}, {"window": 99}, {"softcap": 3.0}, {"sinks": torch.tensor([0.5] * 6)}]
BIASES = torch.linspace(-3, 3, 6 * 40).view(6, 40)  # of distances 0 to 39; larger ones have the last


@pytest.mark.parametrize(
    "scoring", [*SCORINGS, {"alibi_slopes": torch.linspace(0.001, 0.01, 6)}, {"distance_bias": BIASES}], ids=" ".join
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_attention_of_any_number_of_rows(pool: Pool, dtype: torch.dtype, scoring: dict[str, Any]) -> None:
    case = Case(MANY, dtype=dtype, rotary_dim=0)
    expected = case.twin(**scoring)
    close(case.attended(pool, **scoring), expected, 5e-5)


@pytest.mark.parametrize("four_bits", ["k8v4", "int4"])
def test_attention_of_any_number_of_rows_to_four_bits(pool: Pool, four_bits: str) -> None:
    case = Case(MANY, four_bits=four_bits, rotary_dim=0)
    expected = case.twin()
    if four_bits == "int4":  # the queries that `attended` reads are rotated by what stores the keys
        width = case.y.shape[1]
        case.x[: len(MANY), :width] = hadamard(case.x[: len(MANY), :width].unflatten(1, (6, 64))).flatten(1)
    close(case.attended(pool), expected, 5e-5)


@pytest.mark.parametrize("four_bits", ["", "k8v4"])
def test_a_row_has_the_bits_that_it_has_alone_and_in_a_step(pool: Pool, four_bits: str) -> None:
    case = Case([1500, 3, 700, 0, 511, 512, 90, 31], rotary_dim=0, four_bits=four_bits)
    steps = case.native(pool).clone()
    assert torch.equal(case.attended(pool), steps)
    for row in range(len(case.positions)):
        assert torch.equal(case.attended(pool, slice(row, row + 1)), steps[row : row + 1])


def test_rows_whose_results_are_larger_than_what_is_computed_at_a_time(pool: Pool) -> None:
    """16 rows of about 8,000 tokens, 16 pieces of 4 KV heads each, with 8 x 514 floats: four million floats, of which a
    million are kept at a time. All rows read the same two blocks."""
    case = Case([30] * 16, heads=32, kv_heads=4, head_dim=512, rotary_dim=0)
    case.tables = case.tables[:, torch.arange(512) % 2].contiguous()
    case.positions = [8191 - 16 * row for row in range(16)]
    expected = case.twin()
    whole = case.attended(pool)
    close(whole, expected, 5e-5)
    assert torch.equal(case.attended(pool, slice(5, 6)), whole[5:6])


def test_softcap_sinks_slopes_and_biases(pool: Pool) -> None:
    sinks, slopes = torch.randn(6), torch.rand(6) / 100
    Case([600, 20]).compare(pool, {"softcap": 3.0}, {"softcap": 3.0})
    Case([600, 20]).compare(pool, {"sinks": sinks}, {"sinks": sinks})
    Case([600, 20], rotary_dim=0).compare(pool, {"slopes": slopes}, {"alibi_slopes": slopes})
    given = {"distance_bias": BIASES, "distances": BIASES.shape[1]}
    Case([600, 20, 39, 40], rotary_dim=0).compare(pool, given, {"distance_bias": BIASES})
    Case([600, 20]).compare(
        pool, {"softcap": 3.0, "sinks": sinks, "window": 99}, {"softcap": 3.0, "sinks": sinks, "window": 99}
    )


def test_head_norms(pool: Pool) -> None:
    weight = torch.rand(8, 64) + 0.5
    native = {"head_norm_weight": weight, "head_norm_eps": 1e-6}
    Case([40, 3]).compare(pool, {**native, "head_norm": HeadNorm.RMS}, {"qk_norm": weight})
    last = {"qk_norm": weight, "norm_last": True}
    Case([40, 3]).compare(pool, {**native, "head_norm": HeadNorm.RMS_LAST}, last)
    Case([40, 3]).compare(pool, {**native, "head_norm": HeadNorm.LAYER}, {"before": HeadLayerNorm(weight, 1e-6)})

    def whole(qkv: Tensor) -> Tensor:
        q, k = weight[:6].flatten(), weight[6:].flatten()
        qkv[:, : 6 * 64] = rms_norm_reference(qkv[:, : 6 * 64], q, 1e-6)
        qkv[:, 6 * 64 : 8 * 64] = rms_norm_reference(qkv[:, 6 * 64 : 8 * 64], k, 1e-6)
        return qkv

    Case([40, 3]).compare(pool, {**native, "head_norm": HeadNorm.WHOLE}, {"before": whole})
    Case([40, 3]).compare(
        pool, {**native, "head_norm": HeadNorm.WHOLE, "clip": 0.7}, {"before": lambda qkv: whole(Clip(0.7)(qkv))}
    )


def test_clip_and_growth_of_queries(pool: Pool) -> None:
    Case([40, 3]).compare(pool, {"clip": 0.8}, {"before": Clip(0.8)})
    scale = (torch.tensor([600, 20]) // 100).add(1).log().mul(0.3).add(1)[:, None, None]
    Case([600, 20]).compare(pool, {"query_growth": 0.3, "growth_period": 100}, {"query_scale": scale})


@pytest.mark.parametrize("given", [{"dtype": torch.int8}, {"four_bits": "k8v4"}, {"four_bits": "int4"}])
def test_values_that_are_not_finite_in_a_narrow_cache(pool: Pool, given: dict[str, Any]) -> None:
    case = Case([10, 11], **given)
    case.x[0, -3] = math.inf
    result = case.native(pool)
    assert not result[0].isfinite().all()
    assert result[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_row_alone_and_among_others_is_equal_bit_by_bit(pool: Pool, dtype: torch.dtype) -> None:
    positions = [700, 3, 512, 511, 40, 1023, 90, 17]
    together = Case(positions, dtype=dtype)
    caches = [tensor.clone() for tensor in together.kv.tensors()]
    expected = together.native(pool).clone()
    for row, position in enumerate(positions):
        alone = Case(positions, dtype=dtype)
        for tensor, cache in zip(alone.kv.tensors(), caches, strict=True):
            tensor.copy_(cache)
        alone.x[0], alone.table = together.x[row], together.table
        alone.positions, alone.tables = [position], together.tables[row : row + 1]
        assert torch.equal(alone.native(pool)[0], expected[row])


class Latents(Case):
    """One key for all heads, which is their value too."""

    def __init__(self, positions: list[int], heads: int, head_dim: int, dtype: torch.dtype, parts: int) -> None:
        super().__init__(
            positions, heads=heads, kv_heads=1, head_dim=head_dim, rotary_dim=head_dim // 4 * 2, dtype=dtype
        )
        self.kv = LayerKV(self.kv.k, self.kv.k, self.kv.k_scale, self.kv.k_scale)
        self.fields = {"made": HeadsMade.LATENT, "kv_heads": parts}

    def twin(self, **given: Any) -> Tensor:
        whole, width = self.x, (self.heads + 1) * self.kv.head_dim
        self.x = whole[:, :width]
        try:
            return super().twin(**given)
        finally:
            self.x = whole


@pytest.mark.parametrize("positions", CONTEXTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize(("heads", "head_dim", "parts"), [(6, 72, 1), (6, 72, 2), (16, 48, 4), (5, 18, 5)])
def test_latents(
    pool: Pool, positions: list[int], dtype: torch.dtype, heads: int, head_dim: int, parts: int
) -> None:  # fmt: skip
    Latents(positions, heads, head_dim, dtype, parts).compare(pool, {}, {})


def test_all_parts_of_the_heads_see_the_key_of_the_step(pool: Pool) -> None:
    """A thread may attend from the last heads before another one attends from the first ones."""
    case = Latents([0], 8, 576, torch.float32, 8)  # its only key is the one that is written
    expected = case.twin()
    for _ in range(400):
        case.kv.k.masked_fill_(_written(case), math.nan)
        close(case.native(pool), expected, 5e-5)


def _written(case: Case) -> Tensor:
    """Return where the cache holds the keys of the step's rows."""
    mask = torch.zeros(case.kv.k.shape[1:3], dtype=torch.bool)
    mask.view(-1)[case.slots] = True
    return mask[None, :, :, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, MAX_ROWS])
@pytest.mark.parametrize(("outputs", "inputs", "copied"), [(32, 128, 16), (37, 18, 0), (1, 1, 3), (130, 48, 5)])
def test_matrices_of_heads(
    pool: Pool, dtype: torch.dtype, rows: int, outputs: int, inputs: int, copied: int
) -> None:  # fmt: skip
    heads, build = 5, Builder()
    weights = torch.randn(heads, outputs, inputs).to(dtype)
    x, y = torch.randn(MAX_ROWS, heads, copied + inputs + 2), torch.full((MAX_ROWS, heads, copied + outputs + 3), 7.0)
    products = NativeHeadProducts(
        weights=weights.data_ptr(), type=STATE_TYPES[dtype], heads=heads, outputs=outputs, inputs=inputs, copied=copied,
        x_head_stride=x.shape[2], y_head_stride=y.shape[2],
    )  # fmt: skip
    operation = build.operation(Op.HEADS, x.flatten(1), y.flatten(1), heads=ctypes.addressof(products))
    pool.run_step(listed(operation), no_rows(), rows)
    product = torch.einsum("rhk,hnk->rhn", x[:rows, :, copied : copied + inputs].double(), weights.double())
    close(y[:rows, :, copied : copied + outputs], product.float(), 2e-5)
    assert torch.equal(y[:rows, :, :copied], x[:rows, :, :copied])
    assert bool((y[:, :, copied + outputs :] == 7).all())
    assert bool((y[rows:] == 7).all()), "rows that are not of the step are left alone"
    alone = torch.zeros_like(y)
    operation = build.operation(Op.HEADS, x[rows - 1 :].flatten(1), alone.flatten(1), heads=ctypes.addressof(products))
    pool.run_step(listed(operation), no_rows(), 1)
    assert torch.equal(alone[0, :, : copied + outputs], y[rows - 1, :, : copied + outputs])


def test_pieces_of_later_steps_wait_for_each_other(pool: Pool) -> None:
    """The results of a step are joined when its own last piece is done, not that of an earlier step."""
    case = Case([1500, 3, 700])
    first = case.native(pool).clone()
    case.x.mul_(-0.5)
    second = case.native(pool).clone()
    for _ in range(20):
        case.x.mul_(-2.0)
        assert torch.equal(case.native(pool), first)
        case.x.mul_(-0.5)
        assert torch.equal(case.native(pool), second)


# Products of many rows.


@pytest.mark.parametrize("rows", [1, 8, 9, 40, 600])
def test_product_of_many_rows(pool: Pool, rows: int) -> None:
    torch.manual_seed(5)
    build, x = Builder(), torch.randn(rows, 150)[:, :100]
    weight, bias = torch.randn(200, 100) / 10, torch.randn(200)
    matrix = build.matrix(weight, bias)
    actual = pool.linear(matrix, x)
    close(actual, F.linear(x, weight, bias))
    assert torch.equal(pool.linear(matrix, x[-1:])[0], actual[-1])


def test_unpack(pool: Pool) -> None:
    weight, build = torch.randn(200, 36), Builder()
    matrix, out = build.matrix(weight), torch.zeros(201, 36)
    pool.unpack(matrix, 0, out[:200])
    assert torch.equal(out[:200], weight)
    assert not out[200:].any()
    pool.unpack(matrix, 64, out[:70])
    assert torch.equal(out[:70], weight[64:134])
    assert torch.equal(out[70:200], weight[70:])


# Operations without weights, and mixtures of experts.


@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("width", [64, 37])
def test_gate(pool: Pool, name: str, width: int) -> None:
    torch.manual_seed(6)
    build, x, y = Builder(), torch.randn(MAX_ROWS, 2 * width), torch.zeros(MAX_ROWS, width)
    operation = build.operation(Op.GATE, x, y, matrix=NativeMatrix(outputs=width), activation=ACTIVATIONS[name])
    pool.run_step(listed(operation), no_rows(), 6)
    close(y[:6], gated_reference(x[:6], name))
    assert not y[6:].any()


@pytest.mark.parametrize("width", [64, 37])
def test_gate_with_a_limit(pool: Pool, width: int) -> None:
    torch.manual_seed(6)
    build, x, y = Builder(), torch.randn(MAX_ROWS, 2 * width) * 3, torch.zeros(MAX_ROWS, width)
    fields = {"activation": Activation.SILU, "limit": 1.25}
    pool.run_step(listed(build.operation(Op.GATE, x, y, matrix=NativeMatrix(outputs=width), **fields)), no_rows(), 6)
    close(y[:6], gated_reference(x[:6], "silu<=1.25"))


def test_scale(pool: Pool) -> None:
    torch.manual_seed(7)
    build, x, y = Builder(), torch.randn(MAX_ROWS, 1), torch.randn(MAX_ROWS, 50)
    expected = torch.cat([y[:4] * torch.sigmoid(x[:4]), y[4:]])
    operation = build.operation(
        Op.SCALE, x, y, matrix=NativeMatrix(outputs=50), activation=Activation.SIGMOID
    )  # fmt: skip
    pool.run_step(listed(operation), no_rows(), 4)
    close(y, expected)


ROUTINGS = [
    {"top_k": 2},
    {"top_k": 4, "renormalize": False, "scale": 2.5},
    {"top_k": 3, "scoring": "sigmoid", "corrects": True, "num_groups": 4, "top_groups": 2},
    {"top_k": 3, "num_groups": 4, "top_groups": 1, "renormalize": False},
    {"top_k": 12, "scoring": "sigmoid"},
    {"top_k": 5, "corrects": True},
    {"top_k": 5, "corrects": True, "least_sum": 2.0},
    {"top_k": 2, "scoring": "sparsemixer", "renormalize": False, "tolerance": 0.5},
]


@pytest.mark.parametrize("width", [24, 100])
@pytest.mark.parametrize(("outputs", "inputs", "adds"), [(3, 3, True), (4, 1, True), (2, 4, False)])
def test_mixtures_of_vectors(pool: Pool, outputs: int, inputs: int, adds: bool, width: int) -> None:
    """Columns behind the last output are not written."""
    torch.manual_seed(4)
    x, factors = torch.randn(MAX_ROWS, inputs * width), torch.randn(MAX_ROWS, outputs * inputs)
    y = torch.randn(MAX_ROWS, outputs * width + 5)
    mixing = NativeMixing(
        x=x.data_ptr(), factors=factors.data_ptr(), y=y.data_ptr(), x_stride=x.stride(0),
        factors_stride=factors.stride(0), y_stride=y.stride(0), outputs=outputs, inputs=inputs, width=width, adds=adds,
    )  # fmt: skip
    expected = y.clone()
    sums = torch.bmm(factors.view(-1, outputs, inputs), x.view(-1, inputs, width)).flatten(1)
    expected[:5, :-5] = sums[:5] + (y[:5, :-5] if adds else 0)
    operation = Builder().operation(Op.MIX, x, y, recurrent=ctypes.addressof(mixing))
    pool.run_step(listed(operation), no_rows(), 5)
    close(y, expected)


def test_vectors_as_long_as_others(pool: Pool) -> None:
    """One that is nearly 0 is not divided by less than the limit."""
    torch.manual_seed(5)
    x, y = torch.randn(MAX_ROWS, 50) * 3, torch.randn(MAX_ROWS, 50)
    y[1] *= 1e-6
    size, own = (each.square().mean(1, keepdim=True).sqrt() for each in (x, y))
    expected = torch.where(torch.arange(MAX_ROWS)[:, None] < 3, y * size / own.clamp(min=0.01), y)
    operation = Builder().operation(Op.RESIZE, x, y, matrix=NativeMatrix(outputs=50), limit=0.01)
    pool.run_step(listed(operation), no_rows(), 3)
    close(y, expected)


@pytest.mark.parametrize("deviations", [1.28, 0.0, -0.5])
def test_a_row_that_is_cut_off(pool: Pool, deviations: float) -> None:
    torch.manual_seed(6)
    y = torch.randn(MAX_ROWS, 90) * 2 + 0.7
    std, mean = torch.std_mean(y[:, :80], dim=1, keepdim=True, correction=0)
    expected = y.clone()
    expected[:4, :80] = (y[:, :80] - mean - deviations * std).relu()[:4]
    operation = Builder().operation(Op.CUT, y, y, matrix=NativeMatrix(outputs=80), limit=deviations)
    pool.run_step(listed(operation), no_rows(), 4)
    close(y, expected)


def test_tanh(pool: Pool) -> None:
    torch.manual_seed(7)
    build, x, y = Builder(), torch.randn(MAX_ROWS, 40) * 5, torch.zeros(MAX_ROWS, 64)
    weight = torch.randn(64, 40)
    operation = build.operation(Op.LINEAR, x, y, matrix=build.matrix(weight), activation=Activation.TANH)
    pool.run_step(listed(operation), no_rows(), 3)
    close(y[:3], F.linear(x[:3], weight).tanh())


class Mixture:
    """Twelve experts of 96 features, and a router's logits, with several that are equal."""

    count, hidden, features = 12, 80, 96

    def __init__(
        self, top_k: int, corrects: bool = False, *, is_gated: bool = True, scales_inputs: bool = False, **routing: Any
    ) -> None:
        torch.manual_seed(8)
        self.build, self.top_k, self.routing = Builder(), top_k, routing
        self.op, self.scales_inputs = Op.EXPERTS_GATED if is_gated else Op.EXPERTS_UP, scales_inputs
        first = (1 + is_gated) * self.features
        self.logits = (torch.randn(MAX_ROWS, self.count) * 2).round() / 2
        self.correction = torch.rand(self.count) if corrects else None
        self.gate_up = torch.randn(self.count, first, self.hidden) / 9
        self.down = torch.randn(self.count, self.hidden, self.features) / 9
        self.gate_bias, self.down_bias = torch.randn(self.count, first), torch.randn(self.count, 80)
        self.ids = torch.full((MAX_ROWS, top_k), -1, dtype=torch.int32)
        self.weights = torch.zeros(MAX_ROWS, top_k)
        self.x, self.y = torch.randn(MAX_ROWS, self.hidden), torch.randn(MAX_ROWS, self.hidden)
        self.gated = torch.zeros(MAX_ROWS, top_k * self.features)
        self.norm = torch.rand(self.hidden)

    def experts(self) -> NativeExperts:
        options = {
            "scoring": "softmax",
            "renormalize": True,
            "least_sum": 1e-20,
            "num_groups": 1,
            "top_groups": 1,
            "scale": 1.0,
            "tolerance": 0.0,
        }
        options |= self.routing
        return NativeExperts(
            count=self.count, top_k=self.top_k, gate_up=self._matrices(self.gate_up, self.gate_bias),
            down=self._matrices(self.down, self.down_bias), correction=self.build.address(self.correction),
            is_sigmoid=options["scoring"] == "sigmoid", renormalizes=options["renormalize"],
            least_sum=options["least_sum"], num_groups=options["num_groups"], top_groups=options["top_groups"],
            scale=options["scale"], is_sparse_mixer=options["scoring"] == "sparsemixer", tolerance=options["tolerance"],
            scales_inputs=self.scales_inputs,
            ids=self.build.address(self.ids), weights=self.build.address(self.weights),
        )  # fmt: skip

    def _matrices(self, weights: Tensor, biases: Tensor) -> int:
        matrices = [self.build.matrix(weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        array = (NativeMatrix * len(matrices))(*matrices)
        self.build.kept.append(array)
        return ctypes.addressof(array)

    def operations(self, activation: Activation, limit: float = 0.0) -> ctypes.Array[NativeOperation]:
        experts = self.experts()
        self.build.kept.append(experts)
        at, build = ctypes.addressof(experts), self.build
        return listed(
            build.operation(Op.ROUTE, self.logits, self.logits, experts=at),
            build.operation(
                self.op, self.x, self.gated, experts=at, activation=activation, limit=limit,
                matrix=NativeMatrix(outputs=self.features), norm=build.norm(NormKind.RMS, self.norm),
            ),
            build.operation(
                Op.EXPERTS_DOWN, self.gated, self.y, experts=at, matrix=NativeMatrix(outputs=self.hidden), adds=1,
                factor=0.5,
            ),
        )  # fmt: skip

    def expected(self, activate: Callable[[Tensor], Tensor], rows: int) -> Tensor:
        x = rms_norm_reference(self.x, self.norm, 1e-5)
        out = self.y.clone()
        for row in range(rows):
            for place, expert in enumerate(self.ids[row].tolist()):
                before, after = (self.weights[row, place], 1) if self.scales_inputs else (1, self.weights[row, place])
                gated = activate(F.linear(x[row : row + 1] * before, self.gate_up[expert], self.gate_bias[expert]))
                out[row] += 0.5 * after * F.linear(gated, self.down[expert], self.down_bias[expert])[0]
        return out


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("rows", [1, 5])
def test_mixture_of_experts(pool: Pool, routing: dict[str, Any], rows: int) -> None:
    case = Mixture(**routing)
    before = case.y.clone()
    pool.run_step(case.operations(Activation.SILU), no_rows(), rows)
    ids, weights = route(case.logits[:rows], case.top_k, bias=case.correction, **case.routing)
    assert torch.equal(case.ids[:rows], ids)
    close(case.weights[:rows], weights)
    result, case.y = case.y, before
    close(result, case.expected(lambda gate_up: gated_reference(gate_up, "silu"), rows))


@pytest.mark.parametrize("rows", [1, 5, MAX_ROWS])
@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("top_k", [1, 3])
def test_experts_without_a_gate_and_with_weights_on_their_inputs(
    pool: Pool, top_k: int, is_gated: bool, rows: int
) -> None:
    case = Mixture(top_k, is_gated=is_gated, scales_inputs=is_gated, scoring="sigmoid", renormalize=False)
    before = case.y.clone()
    pool.run_step(case.operations(Activation.SILU if is_gated else Activation.RELU2), no_rows(), rows)
    result, case.y = case.y, before
    close(result, case.expected(lambda gate_up: act_reference(gate_up, "silu" if is_gated else "relu2"), rows))


def test_clamped_swiglu(pool: Pool) -> None:
    case = Mixture(2)
    case.gate_up *= 20
    before = case.y.clone()
    pool.run_step(case.operations(Activation.SWIGLU_CLAMPED), no_rows(), 3)
    result, case.y = case.y, before
    close(result, case.expected(lambda gate_up: act_reference(gate_up, "swiglu_clamped"), 3), 2e-4)


def test_experts_with_a_limit(pool: Pool) -> None:
    case = Mixture(2)
    case.gate_up *= 20
    before = case.y.clone()
    pool.run_step(case.operations(Activation.SILU, limit=2.0), no_rows(), 3)
    result, case.y = case.y, before
    close(result, case.expected(lambda gate_up: gated_reference(gate_up, "silu<=2.0"), 3), 2e-4)


@pytest.mark.parametrize("way", [{}, {"is_gated": False}, {"scales_inputs": True}])
def test_experts_of_a_row_do_not_depend_on_the_others(pool: Pool, way: dict[str, bool]) -> None:
    together = Mixture(4, **way)
    alone = Mixture(4, **way)
    pool.run_step(together.operations(Activation.SILU), no_rows(), MAX_ROWS)
    for tensor in (alone.logits, alone.x, alone.y):
        tensor[0] = tensor[6].clone()
    pool.run_step(alone.operations(Activation.SILU), no_rows(), 1)
    assert torch.equal(alone.y[0], together.y[6])


def test_a_router_with_nan_chooses_experts_that_exist(pool: Pool) -> None:
    case = Mixture(3)
    case.logits[1] = math.nan
    pool.run_step(case.operations(Activation.SILU), no_rows(), 3)
    assert 0 <= case.ids[:3].min() <= case.ids[:3].max() < case.count
    assert case.y[1].isnan().all()
    assert case.y[[0, 2]].isfinite().all()
