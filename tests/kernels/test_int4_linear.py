"""4-bit linear layers: what is packed comes back, and the product is that of the dequantised matrix in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from localllm.kernels import gated as file
from localllm.kernels.choice import Crossover
from localllm.kernels.gated import gated
from localllm.kernels.int4_linear import (
    AWQ_ORDER,
    Int4Weight,
    pack_int4,
    quantize_int4,
    repack_awq,
    repack_gptq,
)
from localllm.kernels.launch import INTERPRETED
from localllm.kernels.planar import linear as planar
from localllm.kernels.planar.kernels import PlanarTile
from localllm.kernels.planar.layout import pack_words, padded_columns, unpack_words
from localllm.kernels.planar.linear import dequantize_reference, planar_linear_reference, stack_rows
from tests.kernels.conftest import DTYPES, settings_with

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def random_weight(
    rows: int, columns: int, group: int, device: torch.device, *, zeros: bool = True, scale_type: torch.dtype
) -> tuple[Int4Weight, Tensor]:
    """A weight, and the matrix it stands for in float64 as the definition says."""
    size = columns if group == -1 else group
    groups = -(-columns // size)
    q = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, device=device)
    scales = (torch.rand(groups, rows, device=device) * 0.01 + 0.001).to(scale_type)
    z = torch.randint(0, 17, (groups, rows), dtype=torch.uint8, device=device) if zeros else None
    meant = (q.double() - (8 if z is None else spread(z, size, columns))) * spread(scales, size, columns)
    return pack_int4(q, scales, z, group), meant


def spread(per_group: Tensor, group: int, columns: int) -> Tensor:
    """[G, N] -> [N, K] float64"""
    return per_group.double().t().repeat_interleave(group, dim=1)[:, :columns]


def assert_close(y: Tensor, exact: Tensor) -> None:
    error = (y.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30)
    assert error < TOLERANCE[y.dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "outputs", "columns", "group", "zeros"),
    [
        (1, 64, 256, 128, True),
        (3, 72, 512, 128, False),  # outputs that do not fill a tile
        (17, 64, 256, 32, True),
        (1, 64, 512, 64, True),
        (3, 64, 512, 256, True),
        (3, 64, 320, 32, True),  # the last chunk is half full
        (1, 64, 200, -1, False),
        (2, 64, 96, 16, True),
    ],
)
def test_product_of_the_dequantised_matrix(
    rows: int, outputs: int, columns: int, group: int, zeros: bool, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(rows * columns)
    weight, meant = random_weight(outputs, columns, group, device, zeros=zeros, scale_type=torch.float16)
    x = torch.randn(rows, columns, dtype=dtype, device=device)
    bias = torch.randn(outputs, dtype=dtype, device=device)
    assert_close(weight.linear(x, bias), x.double() @ meant.t() + bias.double())


@pytest.mark.parametrize("split", [1, 2, 8])
@pytest.mark.parametrize("block_m", [8, 32])
def test_tiles_and_splits_agree(
    split: int, block_m: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More parts of K than there are chunks leave some with nothing to do."""
    chosen = PlanarTile(block_m, 64, split, 4, 3)
    monkeypatch.setattr(planar, "settings_for", settings_with("planar_linear", chosen))
    torch.manual_seed(0)
    weight, meant = random_weight(100, 640, 128, device, scale_type=torch.float16)
    x = torch.randn(11, 640, dtype=torch.float16, device=device)
    bias = torch.randn(100, dtype=torch.float16, device=device)
    assert_close(weight.linear(x, bias), x.double() @ meant.t() + bias.double())


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, when interpreted
@pytest.mark.parametrize("group", [128, 32])
def test_a_gated_activation_has_the_bits_of_its_own_kernel(
    group: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the rows of gate end within a tile, after which up's begin."""
    monkeypatch.setattr(planar, "settings_for", settings_with("planar_linear", PlanarTile(16, 64, 1, 4, 3)))
    torch.manual_seed(0)
    weight, _ = random_weight(2 * 75, 320, group, device, scale_type=torch.float16)
    x = torch.randn(3, 320, dtype=torch.float16, device=device)
    bias = torch.randn(2 * 75, dtype=torch.float16, device=device)
    wanted, product = gated(weight.linear(x, bias), "silu"), weight.unfinished(x, bias)
    if INTERPRETED or device.type == "cuda":
        assert isinstance(product, planar.PlanarProduct)
        monkeypatch.setattr(file, "_gated_kernel", None)  # not launched
    assert torch.equal(gated(product, "silu"), wanted)


def test_many_rows_go_through_the_dequantised_matrix(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of 64 outputs, each with its share of the bias."""
    monkeypatch.setattr(planar, "DEQUANTIZED_ELEMENTS", 1)
    monkeypatch.setattr(planar, "settings_for", settings_with("planar_crossover", Crossover(3)))
    torch.manual_seed(0)
    weight, meant = random_weight(80, 256, 128, device, scale_type=torch.float16)
    x = torch.randn(5, 256, device=device)
    bias = torch.randn(80, device=device)
    assert_close(weight.linear(x, bias), x.double() @ meant.t() + bias.double())


@pytest.mark.usefixtures("deterministic")
def test_a_row_does_not_depend_on_its_neighbours_when_deterministic(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on their number: a long prompt takes the same path as one token."""
    monkeypatch.setattr(planar, "settings_for", settings_with("planar_crossover", Crossover(3)))
    monkeypatch.setattr(planar, "PARTIAL_ROWS", 4)
    torch.manual_seed(0)
    weight, _ = random_weight(64, 1024, 128, device, scale_type=torch.float16)
    x = torch.randn(9, 1024, dtype=torch.float16, device=device)
    together = weight.linear(x)
    for rows in (x[:1], x[3:5]):
        alone = weight.linear(rows)
        first = 0 if len(rows) == 1 else 3
        if planar.runs_triton(x, "products"):
            assert torch.equal(together[first : first + len(rows)], alone)


def test_strided_and_empty_rows(device: torch.device) -> None:
    torch.manual_seed(0)
    weight, meant = random_weight(64, 256, 128, device, scale_type=torch.bfloat16)
    wide = torch.randn(3, 512, device=device)
    assert_close(weight.linear(wide[:, 256:]), wide[:, 256:].double() @ meant.t())
    assert_close(weight.linear(wide[:, ::2]), wide[:, ::2].double() @ meant.t())
    assert weight.linear(wide[:0, :256]).shape == (0, 64)


@pytest.mark.parametrize(("columns", "group"), [(256, 128), (320, 32), (192, 64), (200, -1), (80, 16)])
@pytest.mark.parametrize("zeros", [False, True])
def test_dequantize_is_the_definition(columns: int, group: int, zeros: bool, device: torch.device) -> None:
    torch.manual_seed(columns)
    weight, meant = random_weight(72, columns, group, device, zeros=zeros, scale_type=torch.float16)
    assert weight.shape == (72, columns)
    assert torch.equal(weight.dequantize(torch.float32).double(), meant)
    assert torch.equal(weight.dequantize(torch.float16), meant.half())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_table_of_fractions(dtype: torch.dtype, device: torch.device) -> None:
    """NF4's values are not integers: they are looked up and rounded to x's type, where integers would be exact."""
    torch.manual_seed(0)
    table = torch.linspace(-1, 1, 16, device=device).pow(3)
    codes = torch.randint(0, 16, (72, 256), dtype=torch.uint8, device=device)
    scales = torch.rand(4, 72, device=device).half()
    weight = planar.PlanarWeight(
        pack_words(codes, 4), scales, 256, lanes=32, group=64, zero=0, table=tuple(table.tolist())
    )
    meant = table[codes.int()].double() * spread(scales, 64, 256)
    assert torch.allclose(weight.dequantize(torch.float32).double(), meant, rtol=1e-6)
    x = torch.randn(5, 256, dtype=dtype, device=device)
    exact = x.double() @ meant.t()
    assert ((weight.linear(x).double() - exact).abs() / exact.abs().max()).max() < max(1e-6, torch.finfo(dtype).eps)


def test_parts_and_stacks_are_the_matrix(device: torch.device) -> None:
    weights = [random_weight(n, 256, 64, device, scale_type=torch.float16) for n in (64, 130, 8)]
    stacked = stack_rows([w for w, _ in weights])
    meant = torch.cat([m for _, m in weights])
    assert torch.equal(stacked.dequantize(torch.float32).double(), meant)
    parts = [part.dequantize(torch.float32) for _, part in stacked.parts(1)]
    assert [len(p) for p in parts] == [64, 64, 64, 10]
    assert torch.equal(torch.cat(parts).double(), meant)
    other, _ = random_weight(8, 256, 128, device, scale_type=torch.float16)
    with pytest.raises(ValueError, match="group"):
        stack_rows([weights[0][0], other])


def test_bytes_held() -> None:
    weight, _ = random_weight(256, 1024, 128, torch.device("cpu"), scale_type=torch.float16)
    assert weight.nbytes == 256 * 1024 // 2 + 256 * 8 * (2 + 1)


@settings(max_examples=15 if INTERPRETED else 60, deadline=None)
@given(
    rows=st.integers(1, 9), columns=st.integers(1, 400), bits=st.sampled_from([4, 8]), lanes=st.sampled_from([16, 32])
)
def test_words_come_apart_as_they_were_put_together(rows: int, columns: int, bits: int, lanes: int) -> None:
    kind, low, high = (torch.uint8, 0, 16) if bits == 4 else (torch.int8, -128, 128)
    values = torch.randint(low, high, (rows, columns), dtype=kind)
    words = pack_words(values, bits, lanes)
    assert words.shape == (rows, padded_columns(columns, bits, lanes) * bits // 16)
    unpacked = unpack_words(words, bits, lanes)
    assert unpacked.dtype == kind
    assert torch.equal(unpacked[:, :columns], values)
    assert not unpacked[:, columns:].any()


def test_the_layout_of_a_chunk() -> None:
    codes = torch.arange(256, dtype=torch.int32).view(2, 128).remainder(13).to(torch.uint8)
    words = pack_words(codes, 4).int() & 0xFFFF
    for j in (0, 5, 31):
        assert words[1, j] == sum(int(codes[1, j + 32 * i]) << (4 * i) for i in range(4))


# Checkpoints.


def awq_words(codes: Tensor) -> Tensor:
    """[r, c] -> [r, c / 8] int32 as AutoAWQ writes them."""
    eights = codes.long().view(codes.shape[0], -1, 8)
    return to_int32(sum(eights[..., AWQ_ORDER[i]] << (4 * i) for i in range(8)))


def gptq_words(codes: Tensor, bits: int) -> Tensor:
    """[r, c] -> [r, c * bits / 32] int32, low bits first."""
    stream = torch.stack([(codes.long() >> bit) & 1 for bit in range(bits)], dim=-1).view(codes.shape[0], -1, 32)
    return to_int32((stream << torch.arange(32, device=codes.device)).sum(-1))


def to_int32(words: Tensor) -> Tensor:
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def test_awq_checkpoint() -> None:
    torch.manual_seed(0)
    q = torch.randint(0, 16, (64, 256), dtype=torch.uint8)
    z = torch.randint(0, 16, (2, 64), dtype=torch.uint8)
    scales = torch.rand(2, 64).half()
    weight = repack_awq(awq_words(q.t()), awq_words(z), scales, 128)
    meant = (q.double() - spread(z, 128, 256)) * spread(scales, 128, 256)
    assert torch.equal(weight.dequantize(torch.float32).double(), meant)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("checkpoint_format", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("desc_act", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_gptq_checkpoint(
    bits: int, checkpoint_format: str, desc_act: bool, symmetric: bool, device: torch.device
) -> None:
    torch.manual_seed(bits)
    top = 1 << bits
    offset = 1 if checkpoint_format == "gptq" else 0
    q = torch.randint(0, top, (64, 256), dtype=torch.uint8, device=device)
    z = torch.randint(0, top - offset, (4, 64), device=device) + offset
    if symmetric:
        z.fill_(top // 2)
    scales = (torch.rand(4, 64, device=device) * 0.01).half()
    g_idx = torch.arange(256, device=device) // 64
    if desc_act:
        g_idx = g_idx[torch.randperm(256, device=device)]
    weight = repack_gptq(
        gptq_words(q, bits).t().contiguous(), gptq_words(z - offset, bits), scales, g_idx, checkpoint_format, bits
    )
    assert (weight.zeros is None) == symmetric
    assert (weight.input_order is not None) == desc_act
    meant = (q.double() - z.double()[g_idx].t()) * scales.double()[g_idx].t()
    assert torch.equal(weight.dequantize(torch.float32).double(), meant)
    x = torch.randn(3, 256, dtype=torch.float16, device=device)
    assert_close(weight.linear(x), x.double() @ meant.t())


def test_gptq_that_cannot_be_read() -> None:
    words, zeros, scales = (
        torch.zeros(16, 64, dtype=torch.int32),
        torch.zeros(1, 8, dtype=torch.int32),
        torch.ones(1, 64),
    )
    with pytest.raises(ValueError, match="5 bits"):
        repack_gptq(words, zeros, scales, None, bits=5)
    with pytest.raises(ValueError, match="marlin"):
        repack_gptq(words, zeros, scales, None, "marlin")
    with pytest.raises(ValueError, match="96"):
        pack_int4(torch.zeros(64, 192, dtype=torch.uint8), torch.ones(2, 64).half(), None, 96)


@pytest.mark.parametrize("group", [32, 128, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_weights_are_near_theirs(group: int, dtype: torch.dtype) -> None:
    torch.manual_seed(group)
    w = torch.randn(100, 320).to(dtype)
    w[3] = 0
    w[4] = w[4].abs() + 1
    weight = quantize_int4(w, group)
    size = 320 if group == -1 else group
    step = spread(weight.scales.float(), size, 320)[:, :320]
    rounded = dequantize_reference(weight)
    error = (rounded.double() - w.double()).abs()
    # A zero point is rounded, which may push an end of the range out by half a step; bf16 steps are off by 2^-9.
    assert (error <= step * 1.03 + 1e-9).all()
    assert (error <= step * 0.5 + 1e-6).float().mean() > 0.9
    assert not rounded[3].any()


def test_twin_takes_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planar, "TWIN_ELEMENTS", 1)
    weight, meant = random_weight(150, 256, 128, torch.device("cpu"), scale_type=torch.float16)
    x, bias = torch.randn(2, 256), torch.randn(150)
    assert_close(planar_linear_reference(x, weight, bias), x.double() @ meant.t() + bias.double())
