"""The memory of experts in RAM: what is taken, page-locked and copied in pieces, and that records are the weights."""

import ctypes
import mmap
import sys
from collections.abc import Callable
from itertools import chain, repeat

import pytest
import torch
from torch import Tensor

from localllm.errors import DoesNotFit
from localllm.kernels.cpu.half import HalfRows, pack_half
from localllm.kernels.cpu.int8 import has_int8
from localllm.kernels.cpu.pack import CpuPacker, native_nbytes
from localllm.kernels.cpu.stored_blocks import GGUFBlocks
from localllm.kernels.int8_linear import quantize_int8
from localllm.kernels.linear import StackedWeight, pack_weight
from localllm.models.layers import arena as arena_module
from localllm.models.layers import disk as disk_module
from localllm.models.layers.arena import Arena, RecordMatrices
from localllm.models.layers.linear import Weight
from tests.kernels.harness import gguf_linear
from tests.marks import needs_library

pytestmark = needs_library
MIB = 2**20


def test_places_are_multiples_of_64_and_a_wrong_plan_shows() -> None:
    arena = Arena(1000, lambda: 2**40)
    first, second = arena.take(100), arena.take(10)
    assert (first.data_ptr() % 64, second.data_ptr() - first.data_ptr()) == (0, 128)
    assert arena.used_bytes == 192
    arena.give_back(second)
    assert arena.take(10).data_ptr() == second.data_ptr()
    with pytest.raises(AssertionError, match="the plan is wrong"):
        arena.take(900)
    Arena(0, lambda: 0)


def test_ram_that_others_took_ends_the_load_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "GROWTH", MIB)
    free = chain([5 * MIB, 4 * MIB], repeat(MIB // 2))
    arena = Arena(8 * MIB, lambda: next(free))
    arena.take(MIB + MIB // 2)
    with pytest.raises(DoesNotFit, match=r"8\.0 MiB were planned .* after 2\.0 MiB of them 512 KiB are free"):
        arena.take(MIB)


@pytest.mark.skipif(sys.platform != "linux", reason="pages are counted as Linux describes them")
@pytest.mark.parametrize("has_call", [True, False])
def test_pages_are_obtained_ahead_of_the_bytes_that_are_taken(has_call: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "GROWTH", MIB)
    if not has_call:
        monkeypatch.setattr(disk_module, "_POPULATE_WRITE", -1)
    arena = Arena(8 * MIB, lambda: 2**40)
    before = resident_pages(arena)
    arena.take(MIB + MIB // 2)
    arena._finish_obtaining()
    assert before == 0
    assert resident_pages(arena) * mmap.PAGESIZE >= 3 * MIB
    assert not arena._bytes.any()
    arena.take(6 * MIB)
    arena.close()
    assert resident_pages(arena) * mmap.PAGESIZE == 8 * MIB


def resident_pages(arena: Arena) -> int:
    states = (ctypes.c_ubyte * (arena.num_bytes // mmap.PAGESIZE))()
    place, size = ctypes.c_void_p(arena.address), ctypes.c_size_t(arena.num_bytes)
    assert ctypes.CDLL(None).mincore(place, size, states) == 0
    return sum(state & 1 for state in states)


def test_pieces_end_where_page_locking_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "PINNED_AT_A_TIME", 4096)
    arena = Arena(6 * 4096, lambda: 2**40)
    part = arena.take(5 * 4096 + 512)[1024:]
    assert [(len(piece), pinned) for piece, pinned in arena.pieces(part)] == [
        (3072, False), *[(4096, False)] * 4, (512, False),
    ]  # fmt: skip
    locked: list[tuple[int, int]] = []

    def register(address: int, size: int) -> bool:
        locked.append((address - arena.address, size))
        return len(locked) < 4

    assert arena.pin(register, lambda address: locked.clear(), most_bytes=2 * 4096 + 4095) == 2 * 4096
    assert arena.pin(register, lambda address: locked.clear(), most_bytes=10 * 4096) == 3 * 4096
    assert locked == [(0, 4096), (4096, 4096), (8192, 4096), (3 * 4096, 4096)]  # the last one was refused
    found = list(arena.pieces(part))
    assert [(len(piece), pinned) for piece, pinned in found] == [
        (3072, True), (4096, True), (4096, True), (4096, False), (4096, False), (512, False),
    ]  # fmt: skip
    assert torch.equal(torch.cat([piece for piece, _ in found]), part)
    arena.close()
    assert (locked, arena.pinned_bytes) == ([], 0)


def fp32(rows: int, columns: int) -> Weight:
    return pack_weight(torch.randn(rows, columns) * 0.1)


def stored(rows: int, columns: int) -> Weight:
    data = torch.randint(0, 256, (rows, columns // 256, 210), dtype=torch.uint8)
    data[:, :, 208:] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    return CpuPacker().pack(GGUFBlocks((data.view(rows, -1),), "Q6_K", columns))


KINDS: dict[str, Callable[[int, int], Weight]] = {
    "fp32": fp32,
    "bf16": lambda rows, columns: pack_half((torch.randn(rows, columns) * 0.1).bfloat16()),
    "rows of bf16": lambda rows, columns: HalfRows((torch.randn(rows, columns) * 0.1).bfloat16().split(rows - 70)),
    "fp16": lambda rows, columns: pack_half((torch.randn(rows, columns) * 0.1).half()),
    "int8": lambda rows, columns: CpuPacker().pack(quantize_int8(torch.randn(rows, columns) * 0.1)),
    "Q4_0": lambda rows, columns: CpuPacker().pack(gguf_linear("Q4_0", rows, columns)),
    "MXFP4": lambda rows, columns: CpuPacker().pack(gguf_linear("MXFP4", rows, columns)),
    "Q6_K": stored,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_multiplies_as_the_weight_that_it_was_made_from(kind: str) -> None:
    torch.manual_seed(0)
    pairs: list[tuple[Weight, Weight]] = [(KINDS[kind](640, 512), KINDS[kind](512, 768)) for _ in range(2)]
    biases: list[Tensor | None] = [torch.randn(2, 640), None]
    size = 2 * (sum(native_nbytes(weight, "fast") or 0 for weight in pairs[0]) + 640 * 4) if kind == "fp32" else 2**23
    arena = Arena(size, lambda: 2**40)
    records = arena.records(2, iter(pairs), biases)
    if kind == "int8" and not has_int8():
        assert records is None, "without products of bytes a weight of 8 bits stays as stored"
        return
    assert records is not None
    if kind == "fp32":
        assert arena.used_bytes == arena.num_bytes
    for name, place in (("gate_up", 0), ("down", 1)):
        matrices = RecordMatrices(records, name)
        for expert, pair in enumerate(pairs):
            outputs, inputs = matrices.shape
            assert matrices[expert].shape == (outputs, inputs)
            for rows in (1, 8, 40, 200):
                x, bias = torch.randn(rows, inputs), torch.randn(outputs)
                weight = pair[place]
                if isinstance(weight, Tensor):
                    wide = weight.to_dense() if weight.is_mkldnn else weight
                    exact = x @ wide.t() + bias
                else:
                    exact = weight.linear(x, bias)
                got = matrices[expert].linear(x, bias)
                assert (got - exact).abs().max() < 0.02 * exact.abs().max(), (kind, name, rows)
    first, second = records.biases()
    assert first is not None
    assert biases[0] is not None
    assert torch.equal(first, biases[0])
    assert second is None
    array = RecordMatrices(records, "gate_up").matrices()
    assert array[1].bias == first[1].data_ptr()


def test_experts_that_differ_or_have_no_layout_are_left_where_they_are() -> None:
    arena = Arena(2**23, lambda: 2**40)
    four = KINDS["Q4_0"](640, 512)
    one = (four, KINDS["fp32"](512, 320))
    assert arena.records(2, iter([one, (KINDS["Q6_K"](640, 512), one[1])]), [None, None]) is None
    assert arena.used_bytes == 0
    parts = StackedWeight([KINDS["Q4_0"](320, 512), KINDS["Q6_K"](320, 512)])
    assert native_nbytes(parts, "fast") is None
    assert arena.records(1, iter([(parts, one[1])]), [None, None]) is None
    assert arena.used_bytes == 0
