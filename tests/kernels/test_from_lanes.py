"""Experts unpacked from the bytes that a CPU multiplies: the same bits as where they came from."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.kernels.cpu.half import blocked
from localllm.kernels.cpu.matrix import HeldMatrix, matrix_of, parts_of
from localllm.kernels.cpu.native.structures import KIND_STORED, OUTPUTS, Kind, Stored
from localllm.kernels.cpu.q4 import pack_q4
from localllm.kernels.gguf_blocks import BLOCK_TYPES
from localllm.kernels.gguf_linear import repack_gguf
from localllm.kernels.launch import INTERPRETED
from localllm.kernels.moe import from_lanes as from_lanes_module
from localllm.kernels.moe.experts import ArrivingExperts, experts
from localllm.kernels.moe.from_lanes import bias_of, can_unpack, from_lanes
from localllm.kernels.moe.weights import PlanarExperts, ScaledExperts, stack_experts
from localllm.kernels.planar.layout import pack_words
from localllm.kernels.planar.linear import PlanarWeight
from tests.kernels.harness import gguf_linear

TRIPLE = 3  # experts in a group
SHAPES = [(64, 128), (100, 160), (130, 96)]


def nvfp4(rows: int, columns: int) -> PlanarWeight:
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    scales = torch.rand(-(-columns // 64) * 4, rows).half()
    scales[columns // 16 :] = 0
    table = gguf_linear("MXFP4", 1, 32).table
    return PlanarWeight(pack_words(codes, 4, 16), scales, columns, lanes=16, group=16, zero=0, table=table)


def planar(kind: Kind, rows: int, columns: int) -> PlanarWeight:
    if kind == Kind.NVFP4:
        return nvfp4(rows, columns)
    return gguf_linear(
        {Kind.Q4: "Q4_0", Kind.Q4_MIN: "Q4_1", Kind.MXFP4: "MXFP4", Kind.IQ4: "IQ4_NL"}[kind], rows, columns
    )


def record_of(pieces: dict[str, Tensor]) -> tuple[Tensor, dict[str, tuple[int, int]]]:
    """A record with these fields behind 64 other bytes, each at a multiple of 64."""
    places, parts, end = dict[str, tuple[int, int]](), [torch.full((64,), 0xAB, dtype=torch.uint8)], 64
    for name, values in pieces.items():
        held = values.contiguous().view(-1).view(torch.uint8)
        places[name] = end, len(held)
        parts += [held, torch.full((-len(held) % 64,), 0xCD, dtype=torch.uint8)]
        end += len(held) + -len(held) % 64
    return torch.cat(parts), places


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("kind", [Kind.Q4, Kind.Q4_MIN, Kind.MXFP4, Kind.NVFP4, Kind.IQ4])
def test_four_bits_are_what_was_packed(kind: Kind, rows: int, columns: int, device: torch.device) -> None:
    torch.manual_seed(int(kind) + rows)
    weights, records, places = [], [], {}
    for _ in range(TRIPLE):
        weights.append(planar(kind, rows, columns))
        if kind == Kind.MXFP4:  # all powers, the subnormal ones too
            exponents = torch.randint(0, 255, (columns // 32, rows))
            bits = torch.where(exponents > 1, (exponents - 1) << 7, torch.where(exponents == 1, 64, 32)).short()
            weights[-1].scales[: columns // 32] = bits.view(torch.bfloat16)
        packed = pack_q4(weights[-1])
        assert packed.kind == kind
        record, places = record_of({"weights": packed.blocks})
        records.append(record)
    assert can_unpack(kind, places)
    got = from_lanes(torch.stack(records).to(device), kind, (rows, columns), places, torch.float32)
    assert isinstance(got, PlanarExperts)
    assert got.shape == (TRIPLE, rows, columns)
    for expert, wanted in enumerate(weights):
        own = got[expert]
        assert (own.bits, own.lanes, own.group, own.zero, own.zeros, own.table) == (
            4, wanted.lanes, wanted.group, wanted.zero, None, wanted.table,
        )  # fmt: skip
        assert torch.equal(own.words.cpu(), wanted.words)
        for name in ("scales", "mins"):
            mine, theirs = getattr(own, name), getattr(wanted, name)
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert mine.dtype == theirs.dtype
                assert torch.equal(mine.cpu().float(), theirs.float())


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("kind", [Kind.F32, Kind.BF16, Kind.BF16_ROUNDED, Kind.F16, Kind.I8])
def test_whole_weights_are_what_was_packed(kind: Kind, rows: int, columns: int, device: torch.device) -> None:
    torch.manual_seed(0)
    pieces, wanted, biases = [], [], []
    for _ in range(TRIPLE):
        padded, bias = -(-rows // OUTPUTS) * OUTPUTS, torch.randn(rows)
        if kind == Kind.I8:
            matrix = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
            wide = torch.zeros(padded, columns, dtype=torch.int8)
            wide[:rows] = matrix
            lanes = wide.view(-1, OUTPUTS, columns // 4, 4).transpose(1, 2)
            scales = torch.nn.functional.pad(torch.rand(rows), (0, padded - rows))
            wanted.append(matrix.float() * scales[:rows, None])
            fields = {"weights": lanes, "scales": scales}
        elif kind == Kind.F32:
            matrix = torch.randn(rows, columns)
            wide = torch.nn.functional.pad(matrix, (0, 0, 0, padded - rows))
            fields = {"weights": wide.view(-1, OUTPUTS, columns).transpose(1, 2)}
            wanted.append(matrix)
        else:
            matrix = torch.randn(rows, columns).to(torch.float16 if kind == Kind.F16 else torch.bfloat16)
            fields = {"weights": blocked(matrix)}
            wanted.append(matrix.float())
        biases.append(bias)
        pieces.append(record_of({**fields, "bias": torch.nn.functional.pad(bias, (0, padded - rows))}))
    records, places = torch.stack([record for record, _ in pieces]).to(device), pieces[0][1]
    got = from_lanes(records, kind, (rows, columns), places, torch.float32)
    assert isinstance(got, ScaledExperts if kind == Kind.I8 else Tensor)
    for expert, exact in enumerate(wanted):
        assert torch.equal(got[expert].cpu(), exact)
    found = bias_of(records, rows, places, torch.float32)
    assert found is not None
    assert torch.equal(found.cpu(), torch.stack(biases))
    assert bias_of(records, rows, {"weights": places["weights"]}, torch.float32) is None


@pytest.mark.parametrize("name", ["Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q5_K", "Q6_K", "Q4_0", "IQ4_XS"])
def test_rows_of_a_file_are_repacked_as_a_device_holds_them(name: str, device: torch.device) -> None:
    """Any bits but of NaN; types that a CPU has a layout of its own for, too. Blocks of 32 end within a chunk."""
    kind = BLOCK_TYPES[name]
    rows, columns = 70, 160 if kind.size == 32 else 512
    torch.manual_seed(0)
    shape = (rows, columns // kind.size * kind.num_bytes)
    stored = [torch.randint(0, 256, shape, dtype=torch.uint8) for _ in range(TRIPLE)]
    records, places = zip(*(record_of({"weights": each}) for each in stored), strict=True)
    number = KIND_STORED + Stored[name]
    got = from_lanes(torch.stack(records).to(device), number, (rows, columns), places[0], torch.float32)
    assert isinstance(got, PlanarExperts)
    for expert, each in enumerate(stored):
        wanted, own = repack_gguf(each, name, columns), got[expert]
        assert sorted(own.tensors()) == sorted(wanted.tensors())
        for field in ("columns", "bits", "lanes", "group", "zero", "table", "block_type"):
            assert getattr(own, field) == getattr(wanted, field), field
        for field, values in own.tensors().items():
            whole = getattr(wanted, field)
            assert values.dtype == whole.dtype
            mine, theirs = (each.cpu().contiguous() for each in (values, whole))
            assert torch.equal(mine.isnan(), theirs.isnan()), field
            mine, theirs = (each.masked_fill(each.isnan(), 0).view(torch.uint8) for each in (mine, theirs))
            assert torch.equal(mine, theirs), field


@pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="plain torch repacks in parts")
@pytest.mark.parametrize("name", ["Q2_K", "Q6_K"])
def test_all_experts_are_unpacked_in_one_launch(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = BLOCK_TYPES[name]
    records, places = record_of({"weights": torch.zeros(5, kind.num_bytes, dtype=torch.uint8)})
    monkeypatch.setattr(from_lanes_module, "repack_gguf", lambda *given: pytest.fail("some rows at a time"))
    held = records[None].expand(TRIPLE, -1).contiguous().to(device)
    from_lanes(held, KIND_STORED + Stored[name], (5, 256), places, torch.float32)


def test_what_no_kernel_reads_is_known_before() -> None:
    assert not can_unpack(KIND_STORED + Stored.IQ2_XXS, {"weights": (0, 64)})
    assert not can_unpack(Kind.Q4, {"weights": (0, 64), "input_order": (64, 64)})
    assert not can_unpack(Kind.Q8, {"weights": (0, 64)})


def test_a_matrix_is_made_of_its_parts_and_its_bias() -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(70, 48), torch.randn(70)
    held = matrix_of(weight, bias)
    assert isinstance(held, HeldMatrix)
    assert [(part.field, part.num_bytes) for part in parts_of(held.matrix)] == [
        ("weights", 128 * 48 * 4), ("bias", 128 * 4),
    ]  # fmt: skip
    bare = matrix_of(weight)
    assert bare is not None
    assert [part.field for part in parts_of(bare.matrix)] == ["weights"]


@pytest.mark.parametrize("kind", [Kind.Q4, Kind.MXFP4, Kind.F32])
def test_experts_that_arrive_in_groups_have_the_bits_of_all_at_once(kind: Kind, device: torch.device) -> None:
    """Unpacked from records, whatever the size of a group, with biases, and beside ids that are left out."""
    torch.manual_seed(0)
    count, hidden, width, rows = (3 if INTERPRETED else 5), 64, 32, 6
    pairs = []
    for _ in range(count):
        if kind == Kind.F32:
            pair = [torch.randn(shape) * 0.1 for shape in ((2 * width, hidden), (hidden, width))]
            blocks = [each.view(-1, OUTPUTS, each.shape[1]).transpose(1, 2) for each in pair]
        else:
            pair = [planar(kind, 2 * width, hidden), planar(kind, hidden, width)]
            blocks = [pack_q4(each).blocks for each in pair]
        biases = [torch.randn(2 * width), torch.randn(hidden)]
        first, places = record_of({"weights": blocks[0], "bias": biases[0]})
        second, down_places = record_of({"weights": blocks[1], "bias": biases[1]})
        pairs.append((torch.cat((first, second)), pair, biases))
    down_places = {name: (start + len(first), size) for name, (start, size) in down_places.items()}
    records = torch.stack([record for record, _, _ in pairs]).to(device)
    forms = ((2 * width, hidden), places), ((hidden, width), down_places)

    def unpacked(held: Tensor) -> list[Any]:
        matrices = [from_lanes(held, kind, shape, own, torch.float32) for shape, own in forms]
        return matrices + [bias_of(held, shape[0], own, torch.float32) for shape, own in forms]

    near = [stack_experts([pair[place].to(device) if kind == Kind.F32 else on(pair[place], device)
                           for _, pair, _ in pairs], count) for place in (0, 1)]  # fmt: skip
    x, weights = torch.randn(rows, hidden, device=device), torch.rand(rows, 2, device=device)
    ids = torch.stack([torch.randperm(count)[:2] for _ in range(rows)]).int().to(device)
    ids[4] = -1
    biases = [torch.stack([each[place] for _, _, each in pairs]).to(device) for place in (0, 1)]
    wanted = experts(x, ids, weights, *near, "silu", gate_up_bias=biases[0], down_bias=biases[1])
    for size in (2,) if INTERPRETED else (1, 2, 5):
        arriving = ArrivingExperts(x, ids, weights, count, "silu")
        for first_expert in range(0, count, size):
            gate_up, down, gate_up_bias, down_bias = unpacked(records[first_expert : first_expert + size])
            arriving.add(first_expert, gate_up, down, gate_up_bias, down_bias)
        assert torch.equal(arriving.sum(), wanted), size


def on(weight: PlanarWeight, device: torch.device) -> PlanarWeight:
    return dataclasses.replace(weight, **{name: values.to(device) for name, values in weight.tensors().items()})
