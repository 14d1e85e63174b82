"""A GGUF file's blocks in the layouts for a CPU, packed by the native library, against packing them through torch."""

import pytest
import torch
import torch.nn.functional as F
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from localllm.kernels.cpu import blocks, pack
from localllm.kernels.cpu.blocks import Examples, memory_of
from localllm.kernels.cpu.int8 import CpuInt8Weight, has_int8, int8_codes, table_nbytes
from localllm.kernels.cpu.native.choice import usable_sets
from localllm.kernels.cpu.native.library import native, open_library
from localllm.kernels.cpu.native.structures import FEW_ROWS, Stored
from localllm.kernels.cpu.pack import CpuPacker, cpu_layout, packed_nbytes
from localllm.kernels.cpu.q4 import UNPACK_ROWS, CpuQ4Weight, pack_q4
from localllm.kernels.cpu.stored_blocks import (
    KINDS,
    CpuStoredWeight,
    GGUFBlocks,
    blocks_codes,
    blocks_int8,
    blocks_q4,
    blocks_table,
    meta_blocks,
)
from localllm.kernels.gguf_blocks import BLOCK_TYPES
from localllm.kernels.gguf_linear import GGUFWeight, repack_gguf
from localllm.kernels.launch import INTERPRETED
from localllm.kernels.linear import StackedWeight
from localllm.models.weights.parameters import held_bytes

pytestmark = pytest.mark.skipif(native() is None or INTERPRETED, reason="there is no native library here")

TYPES = [name for name in Stored.__members__ if name in BLOCK_TYPES]
TABLES = [name for name in Stored.__members__ if name not in BLOCK_TYPES]
SHAPES = [(64, 256), (130, 512), (1, 768), (200, 1280)]
HALVES = (0.0, -0.0, 1.0, -1.5, 6e-8, 65504.0, 3.1e-3)


def stored(block_type: str, rows: int, columns: int, seed: int = 0) -> Tensor:
    """Return random blocks [rows, bytes], whose 16-bit scales are ordinary numbers, zeros, or extreme."""
    kind, rng = BLOCK_TYPES[block_type], torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (rows * columns // kind.size, kind.num_bytes), dtype=torch.uint8, generator=rng)
    places = {"Q6_K": (208,), "MXFP4": (), "Q2_K": (80, 82), "Q3_K": (108,)}.get(
        block_type, (0, 2) if block_type in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (0,)
    )
    if block_type == "MXFP4":  # an exponent of 255 is not a number
        data[:, 0] = torch.tensor([0, 1, 2, 120, 125, 130])[torch.randint(0, 6, (len(data),), generator=rng)]
    for place in places:
        scales = torch.randn(len(data), generator=rng) * 0.01
        odd = torch.randint(0, len(HALVES), (len(data),), generator=rng)
        chosen = torch.where(torch.rand(len(data), generator=rng) < 0.2, torch.tensor(HALVES)[odd], scales)
        data[:, place : place + 2] = chosen.half()[:, None].view(torch.uint8)
    return data.view(rows, -1)


def both(block_type: str, rows: int, columns: int, seed: int = 0) -> tuple[GGUFBlocks, GGUFWeight]:
    data = stored(block_type, rows, columns, seed)
    return GGUFBlocks((data,), block_type, columns), repack_gguf(data, block_type, columns)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block_type", TYPES)
def test_values_are_those_of_the_definition(block_type: str, shape: tuple[int, int]) -> None:
    found, repacked = both(block_type, *shape)
    exact = repacked.dequantize(torch.float32)
    assert found.shape == shape
    assert torch.equal(found.dequantize(torch.float32), exact)
    some = torch.tensor([shape[0] - 1, 0, shape[0] // 2, 0])
    assert torch.equal(found.dequantize_rows(some, torch.bfloat16), exact[some].bfloat16())
    bias = torch.randn(shape[0])
    for rows in (0, 1, 5):
        x = torch.randn(rows, shape[1])
        wanted = F.linear(x, exact, bias)
        assert torch.allclose(found.linear(x, bias), wanted, rtol=1e-4, atol=1e-4 * float(exact.abs().max()))
    assert found.linear(torch.zeros(2, shape[1], dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block_type", KINDS)
def test_four_bits_are_packed_bit_for_bit(block_type: str, shape: tuple[int, int]) -> None:
    found, repacked = both(block_type, *shape)
    packed, wanted = blocks_q4(found), pack_q4(repacked)
    assert torch.equal(packed.blocks, wanted.blocks)
    assert (packed.shape, packed.kind) == (wanted.shape, wanted.kind)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block_type", TYPES)
def test_bytes_are_rounded_bit_for_bit(block_type: str, shape: tuple[int, int]) -> None:
    found, repacked = both(block_type, *shape)
    for got, wanted in zip(blocks_codes(found), int8_codes(repacked), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.skipif(not has_int8(), reason="this processor has no product of bytes")
@pytest.mark.parametrize("shape", [*SHAPES, (4224, 256)])
def test_the_second_of_a_shape_is_packed_in_parts(shape: tuple[int, int]) -> None:
    examples, kept = Examples(), []
    for seed in (1, 2):
        found, repacked = both("Q8_0", *shape, seed)
        packed = blocks_int8(found, examples)
        wanted = torch.ops.onednn.qlinear_prepack(int8_codes(repacked)[0], None)
        is_whole = shape[0] % 64 == 0 and shape[1] % 64 == 0
        assert torch.equal(memory_of(packed.packed), memory_of(wanted)) or not is_whole  # what fills up is anything
        x = torch.randn(3, shape[1])
        assert torch.equal(packed.linear(x), CpuInt8Weight(wanted, int8_codes(repacked)[1]).linear(x))
        kept.append(packed)


@pytest.mark.parametrize("shape", [*SHAPES, (4225, 256)])
def test_a_table_has_the_rounded_bytes_and_its_rows(shape: tuple[int, int]) -> None:
    found, repacked = both("Q8_0", *shape)
    table, (codes, scales) = blocks_table(found), int8_codes(repacked)
    assert table.nbytes == table_nbytes(*shape) == held_bytes(table)
    wide = codes * scales[:, None]
    assert table.shape == shape
    assert torch.equal(table.dequantize(torch.float32), wide)
    rows = torch.tensor([shape[0] - 1, 0, min(64, shape[0] - 1), 0])
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(table.dequantize_rows(rows, dtype), wide[rows].to(dtype))
    assert table.dequantize_rows(rows[:0], torch.float32).shape == (0, shape[1])
    for count, allowed in ((1, 3e-4), (FEW_ROWS, 3e-4), (FEW_ROWS + 3, 0.02)):
        x, bias = (torch.randn(size, generator=torch.Generator().manual_seed(count))
                   for size in ((count, shape[1]), (shape[0],)))  # fmt: skip
        exact = x.double() @ wide.double().t() + bias
        assert float((table.linear(x, bias) - exact).norm() / exact.norm()) < allowed


@pytest.mark.parametrize("block_type", [name for name in TYPES if name not in KINDS])
def test_products_read_the_files_bytes(block_type: str) -> None:
    """Every library that this processor can run: near the definition, the same bits from all, and for a row alone."""
    found, repacked = both(block_type, 150, 1280, seed=2)
    weight, exact = CpuStoredWeight(found.copied()), repacked.dequantize(torch.float32)
    whole = exact.isfinite().all(dim=1)
    x = torch.randn(FEW_ROWS + 3, 1280, generator=torch.Generator().manual_seed(3))
    x[1, 7], x[4, 9], x[6] = 100.0, float("nan"), 0
    wanted, results = x.double() @ exact[whole].double().t(), []
    for name in usable_sets():
        library, reason = open_library(name)
        assert library is not None, reason
        pool = library.open_pool(2)
        for fine in (True, False):
            got = pool.linear(weight.matrix(), x, is_fine=fine)[:, whole]
            alone = pool.linear(weight.matrix(), x[2:3], is_fine=fine)[:, whole]
            assert torch.equal(got[2:3], alone)
            assert not got[4].isfinite().any()
            off = (got - wanted)[[0, 1, 2, 3, 5, 6]].norm(dim=1) / wanted[[0, 1, 2, 3, 5, 6]].norm(dim=1).clamp(1e-30)
            assert float(off.max()) < (1e-3 if fine else 0.02)
        results.append(got)
        pool.close()
    assert all(torch.equal(results[0].nan_to_num(), result.nan_to_num()) for result in results)
    for rows in (0, 3, FEW_ROWS + 1, UNPACK_ROWS):  # natively, widened, and in bf16 where that is fast
        x = torch.randn(rows, 1280)
        got, bias = weight.linear(x, torch.ones(150)), 1 + x.double() @ exact.double().t()
        assert float((got - bias)[:, whole].norm()) <= 0.02 * float(bias[:, whole].norm())


@pytest.mark.parametrize("block_type", TABLES)
def test_codes_of_large_tables(block_type: str) -> None:
    """IQ1 to IQ3 and TQ: the values of the gguf package, bit for bit, and products with them."""
    kind = GGMLQuantizationType[block_type]
    size, num_bytes = GGML_QUANT_SIZES[kind]
    rng = torch.Generator().manual_seed(4)
    data = torch.randint(0, 256, (70 * 2, num_bytes), dtype=torch.uint8, generator=rng)
    place = {"TQ1_0": 52, "TQ2_0": 64}.get(block_type, 0)
    if block_type == "IQ1_M":  # the unit is in the highest nibbles of four words
        data[:, 55] = data[:, 55] & 15 | 0x20
    else:
        data[:, place : place + 2] = (torch.randn(len(data), generator=rng) * 0.01).half()[:, None].view(torch.uint8)
    found = GGUFBlocks((data.view(70, -1),), block_type, 2 * size)
    exact = torch.from_numpy(dequantize(found.pieces[0].numpy(), kind))
    assert torch.equal(found.dequantize(torch.float32), exact)
    weight = CpuPacker().pack(GGUFBlocks(found.pieces * 2, block_type, 2 * size))
    assert isinstance(weight, CpuStoredWeight)
    assert weight.nbytes == 2 * found.nbytes
    for rows in (1, 5):
        x = torch.randn(rows, 2 * size)
        wanted = x.double() @ exact.double().t().repeat(1, 2)
        assert float((weight.linear(x) - wanted).norm() / wanted.norm()) < 1e-3


def test_rows_of_several_tensors_and_of_cuts() -> None:
    """q, k and v in one matrix; a shard's columns of a larger tensor."""
    data = stored("Q4_K", 150, 1024)
    cut = data[:, 144 : 3 * 144]
    pieces = (cut[:70], cut[70:71], cut[torch.arange(149, 70, -1)])
    found, repacked = GGUFBlocks(pieces, "Q4_K", 512), repack_gguf(torch.cat(pieces), "Q4_K", 512)
    assert torch.equal(blocks_q4(found).blocks, pack_q4(repacked).blocks)
    assert torch.equal(blocks_codes(found)[0], int8_codes(repacked)[0])
    rows = torch.tensor([149, 70, 3])
    assert torch.equal(found.dequantize_rows(rows, torch.float32), repacked.dequantize(torch.float32)[rows])
    whole = GGUFBlocks((cut,), "Q4_K", 512)
    exact = repack_gguf(cut, "Q4_K", 512).dequantize(torch.float32)
    assert torch.equal(whole.dequantize_rows(rows, torch.float32), exact[rows])


@pytest.mark.skipif(not has_int8(), reason="this processor has no product of bytes")
def test_q5_and_q6_become_bytes_unless_memory_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {kind: both(kind, 320, 512)[0] for kind in ("Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q3_K", "Q8_0", "Q4_K")}
    layouts = {mode: [cpu_layout(each, mode) for each in found.values()] for mode in ("fast", "small", "exact")}
    assert layouts == {
        "fast": [*["int8"] * 4, "stored", "int8", "q4"],
        "small": [*["stored"] * 5, "int8", "q4"],
        "exact": [None] * 7,
    }
    monkeypatch.setattr(pack, "has_int8", lambda: False)
    assert [cpu_layout(each, "fast") for each in found.values()] == [*["stored"] * 6, "q4"]


@pytest.mark.parametrize("mode", ["fast", "small", "exact"])
@pytest.mark.parametrize("block_type", TYPES)
def test_a_packer_takes_blocks_as_it_takes_the_repacked_weight(block_type: str, mode: str) -> None:
    found, repacked = both(block_type, 320, 512)
    packed, wanted = CpuPacker(mode).pack(found), CpuPacker(mode).pack(repacked)
    if cpu_layout(found, mode) == "stored":  # which keeps the values
        assert isinstance(packed, CpuStoredWeight)
        assert packed.nbytes == found.nbytes
        wanted = repacked
    else:
        assert type(packed) is (GGUFBlocks if wanted is repacked else type(wanted))
    got, exact = (each.dequantize(torch.float32) for each in (packed, wanted))
    assert torch.equal(got.nan_to_num(), exact.nan_to_num())
    assert torch.equal(got.isnan(), exact.isnan())  # an infinite scale minus an infinite minimum
    empty = meta_blocks(320, block_type, 512)
    assert (empty.shape, empty.nbytes) == (found.shape, found.nbytes)
    assert cpu_layout(empty, mode) == cpu_layout(found, mode)
    assert packed_nbytes(empty, mode) == held_bytes(packed)
    if isinstance(packed, GGUFBlocks):
        assert packed.copied() is packed
        assert packed.pieces[0].data_ptr() != found.pieces[0].data_ptr()


@pytest.mark.skipif(not has_int8(), reason="this processor has no product of bytes")
def test_parts_become_one_matrix_of_bytes() -> None:
    (one, first), (other, second) = both("Q8_0", 128, 512), both("Q8_0", 192, 512)
    packed = CpuPacker().pack(StackedWeight([one, other]))
    wanted = CpuPacker().pack(StackedWeight([first, second]))
    assert type(packed) is type(wanted)
    assert torch.equal(packed.dequantize(torch.float32), wanted.dequantize(torch.float32))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads(threads: int) -> None:
    found, repacked = both("Q4_0", 700, 256)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        packed = CpuPacker().pack(found)
    finally:
        torch.set_num_threads(before)
    assert isinstance(packed, CpuQ4Weight)
    assert torch.equal(packed.blocks, pack_q4(repacked).blocks)


def test_without_the_library_bytes_are_reordered_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randint(-127, 128, (256, 192), dtype=torch.int8)
    written = []
    for library in (native(), None):
        monkeypatch.setattr(blocks, "native", lambda library=library: library)
        codes, sums = torch.empty(256 * 192, dtype=torch.uint8), torch.empty(256, dtype=torch.int32)
        blocks._write(codes, sums, values)
        written.append(torch.cat((codes, sums.view(torch.uint8))))
    assert torch.equal(*written)
