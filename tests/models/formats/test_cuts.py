"""Some rows and columns of a matrix in every stored format: their values, their predicted bytes, what is read for them.

Matrices come from the tools' formats as the other tests here write them, without files: a checkpoint in memory, whose
tensors count as the file.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.torch import save_file
from torch import Tensor

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.kernels.cpu.stored_blocks import GGUFBlocks
from localllm.kernels.fp8_linear import Fp8Weight
from localllm.kernels.gguf_blocks import BLOCK_TYPES
from localllm.kernels.linear import StackedWeight
from localllm.kernels.quantized_weight import QuantizedWeight
from localllm.models.formats.at_load import AT_LOAD
from localllm.models.formats.blocks import MOST_SPANS, along, row_spans, whole_blocks
from localllm.models.formats.checkpoint import TensorInfo
from localllm.models.formats.gguf.matrices import DEQUANTISED
from localllm.models.formats.linear_format import LinearFormat, StoredPart
from localllm.models.formats.registry import linear_format
from localllm.models.formats.safetensors import SafetensorsCheckpoint
from tests.gguf_files import blocks_of
from tests.models.formats.held import Held, ReadBytes, described
from tests.models.formats.quantised import Store, Stored
from tests.models.formats.stores import (
    AWQ,
    BLOCKS,
    DYNAMIC,
    GPTQ,
    MXFP8,
    NF4,
    STATIC,
    awq,
    ct_config,
    ct_fp8,
    ct_mxfp4,
    ct_nvfp4,
    eight_bits,
    four_bits,
    gptq,
    ints,
    modelopt_fp8,
    modelopt_nvfp4,
    mxfp8,
    packed,
    per_block,
    per_output,
    per_tensor,
    plain,
)
from tests.models.harness import CPU
from tests.models.stored_experts import mxfp4

STEM = "model.layers.0.mlp.down_proj"


@dataclass(frozen=True)
class Case:
    """A matrix in a format, and the blocks in which it can be read."""

    config: Mapping[str, Any]
    store: Store
    shape: tuple[int, int]
    columns: int  # of a block
    rows: int = 1  # of a block
    ranges_only: bool = False  # a few ranges of rows, but not any order of them

    def open(self, shape: tuple[int, int] | None = None) -> tuple[LinearFormat, Held]:
        format = linear_format(self.config)
        assert format is not None
        return format, self.held(self.stored(shape or self.shape)[0], shape or self.shape)

    def stored(self, shape: tuple[int, int]) -> Stored:
        """The tensors of a matrix, and what they stand for."""
        stored = self.store(STEM, torch.randn(shape, generator=torch.Generator().manual_seed(3)).half().float())
        assert stored is not None
        return stored

    def held(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Held:
        return Held({f"{STEM}.{ending}": tensor for ending, tensor in tensors.items()})


class Experts(Case):
    """MXFP4 as gpt-oss stores it: two experts in a tensor."""

    def held(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Held:
        return Held({f"{STEM}_{ending}": tensor for ending, tensor in tensors.items()})


class Blocks(Case):
    """A tensor of a GGUF file, of two experts; `config` names its type."""

    def held(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Held:
        (blocks,) = tensors.values()
        described = TensorInfo(Held.path, self.config["block_type"], (2, shape[0] // 2, shape[1]), blocks.nbytes)
        return Held({f"{STEM}.weight": blocks.view(2, shape[0] // 2, -1)}, {f"{STEM}.weight": described})


def gguf(block_type: str, shape: tuple[int, int]) -> Case:
    def store(stem: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        stored, meant = blocks_of(weight, block_type)
        return {"weight": torch.from_numpy(stored)}, meant

    config = {"quant_method": "gguf", "block_type": block_type}
    return Blocks(config, store, shape, GGML_QUANT_SIZES[GGMLQuantizationType[block_type]][0])


def experts(stem: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    blocks, scales, meant = mxfp4(weight.view(2, -1, weight.shape[1]))
    return {"blocks": blocks, "scales": scales}, meant


def gptq_config(bits: int, group: int, **more: Any) -> Any:
    return {**GPTQ, "bits": bits, "group_size": group, **more}


def ct(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> Any:
    return ct_config(layout, weights, inputs)


def ct_floats(**weights: Any) -> dict[str, Any]:
    return {"type": "float", "symmetric": True, "block_structure": [128, 128], **weights}


BNB8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}
NO_DOUBLE = {**NF4, "bnb_4bit_use_double_quant": False}
LARGE = {**BLOCKS, "weight_block_size": [256, 256]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
ASYMMETRIC_8 = ints(8, 128, symmetric=False)
TENSOR_8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor"}
CASES = {
    "awq": Case({**AWQ, "group_size": 32}, awq(32), (72, 7 * 32), 32, 8),
    "awq 231 groups": Case({**AWQ, "group_size": 128}, awq(128), (16, 231 * 128), 128, 8),
    "awq rows": Case({**AWQ, "group_size": -1}, awq(-1), (48, 96), 1, 8),
    "awq no zeros": Case({**AWQ, "zero_point": False}, awq(32, zeros=False), (40, 96), 32, 8),
    "gptq 4": Case(gptq_config(4, 64), gptq(4, 64), (56, 5 * 64), 64, 8),
    "gptq 3": Case(gptq_config(3, 32, checkpoint_format="gptq_v2"), gptq(3, 32, v2=True), (96, 160), 32, 32),
    "gptq 3 rows": Case(gptq_config(3, -1), gptq(3, -1), (64, 96), 32, 32),
    "gptq 2": Case(gptq_config(2, 16), gptq(2, 16), (64, 112), 16, 16),
    "gptq 8": Case(gptq_config(8, 128, sym=True), gptq(8, 128, sym=True), (40, 640), 128, 4),
    "gptq rows": Case(gptq_config(4, -1), gptq(4, -1), (48, 104), 8, 8),
    "gptq desc_act in order": Case(gptq_config(4, 32, desc_act=True), gptq(4, 32), (48, 128), 32, 8),
    "fp8 tensor": Case(DYNAMIC, per_tensor(), (50, 70), 1),
    "fp8 static": Case(STATIC, per_tensor(static="input_scale"), (50, 70), 1),
    "fp8 channel": Case(DYNAMIC, per_output, (50, 70), 1),
    "fp8 blocks": Case(BLOCKS, per_block(), (4 * 192, 300), 128, 128, ranges_only=True),
    "fp8 blocks of 256": Case(LARGE, per_block(256), (600, 700), 256, 256, ranges_only=True),
    "mxfp8": Case(MXFP8, mxfp8(), (50, 7 * 32 + 8), 32),
    "fbgemm": Case({"quant_method": "fbgemm_fp8"}, per_output, (50, 70), 1),
    "modelopt fp8": Case(MODELOPT, modelopt_fp8, (50, 70), 1),
    "modelopt nvfp4": Case({**MODELOPT, "quant_algo": "NVFP4"}, modelopt_nvfp4, (40, 7 * 16), 16),
    "ct packed": Case(ct("pack-quantized", ints(4, 32)), packed(4, 32), (50, 160), 32),
    "ct packed zeros": Case(
        ct("pack-quantized", ASYMMETRIC_8), packed(8, 128, symmetric=False), (52, 384), 128, 4),
    "ct packed rows": Case(ct("pack-quantized", ints(4, -1)), packed(4, -1), (50, 72), 8),
    "ct unused order": Case(
        ct("pack-quantized", ints(4, 32)), packed(4, 32, order="unused"), (50, 96), 32),
    "ct int8": Case(
        ct("int-quantized", ints(8, -1, symmetric=False)), plain(8, symmetric=False), (50, 70), 1),
    "ct int8 tensor": Case(ct("naive-quantized", TENSOR_8), plain(8, tensor=True), (50, 70), 1),
    "ct int8 groups": Case(ct("int-quantized", ints(8, 32)), plain(8, 32), (50, 96), 32),
    "ct fp8 tensor": Case(
        ct("float-quantized", ct_floats(num_bits=8, strategy="tensor")), ct_fp8("tensor"), (50, 70), 1),
    "ct fp8 channel": Case(
        ct("float-quantized", ct_floats(num_bits=8, strategy="channel")), ct_fp8("channel"), (50, 70), 1),
    "ct fp8 blocks": Case(
        ct("float-quantized", ct_floats(num_bits=8, strategy="block")), ct_fp8("block"),
        (400, 300), 128, 128, ranges_only=True),
    "ct nvfp4": Case(
        ct("nvfp4-pack-quantized", ct_floats(num_bits=4, strategy="tensor_group", group_size=16)),
        ct_nvfp4, (50, 112), 16),
    "ct mxfp4": Case(
        ct("mxfp4-pack-quantized", ct_floats(num_bits=4, strategy="group", group_size=32)),
        ct_mxfp4, (50, 96), 32),
    "bnb nf4": Case(NO_DOUBLE, four_bits("nf4", double=False), (50, 320), 64),
    "bnb nested": Case(NF4, four_bits("nf4", double=True), (90, 448), 64),
    "bnb 128": Case(NO_DOUBLE, four_bits("nf4", double=False, block=128), (50, 384), 128),
    "bnb int8": Case(BNB8, eight_bits, (50, 70), 1),
    "mxfp4 experts": Experts({"quant_method": "mxfp4"}, experts, (60, 160), 32),
    "gguf Q4_K": gguf("Q4_K", (30, 5 * 256)),
}  # fmt: skip
CASES |= {f"gguf {name}": gguf(name, (20, 3 * kind.size)) for name, kind in BLOCK_TYPES.items() if name != "Q4_K"}
CASES |= {f"gguf {name}": gguf(name, (20, 3 * 256)) for name in DEQUANTISED}


def dense(weight: Tensor | QuantizedWeight) -> Tensor:
    return weight.float() if isinstance(weight, Tensor) else weight.dequantize(torch.float32)


def check(format: LinearFormat, held: Held, parts: Sequence[StoredPart]) -> Tensor:
    """Read parts, of which the prediction agrees with the result."""
    weight, meta = format.read(held, parts, CPU, torch.float32), format.read_meta(held, parts, CPU, torch.float32)
    if isinstance(weight, GGUFBlocks):
        on_gpu = format.read_meta(held, parts, torch.device("cuda"), torch.float32)
        elsewhere = weight.repacked() if weight.block_type in BLOCK_TYPES else weight.dequantize(torch.float32)
        assert described(on_gpu) == described(elsewhere)
        weight = weight.copied()  # one piece, as predicted
    assert described(meta) == described(weight)
    assert meta.nbytes == weight.nbytes
    return dense(weight)


def ranges(total: int, count: int, random: random.Random) -> list[range]:
    return [range(a, b) for a, b in pairwise([0, *sorted(random.sample(range(1, total), count - 1)), total])]


def in_blocks(own: range, block: int, total: int) -> bool:
    return own.start % block == 0 and (own.stop % block == 0 or own.stop == total)


@pytest.mark.parametrize("name", CASES)
def test_shards_of_the_columns_add_up_to_the_matrix(name: str) -> None:
    """Each is read in whole blocks, and counts only with its own columns."""
    format, held = CASES[name].open()
    n, k = format.shape(held, STEM)
    whole, rng = check(format, held, [StoredPart(STEM)]), random.Random(name)
    torch.testing.assert_close(whole, CASES[name].stored((n, k))[1].view(n, k), rtol=1e-3, atol=1e-5)
    for shards in (2, 3, 4):
        total = torch.zeros(n, k)
        for own in ranges(k, shards, rng):
            wide = format.widened(held, STEM, own)
            assert wide is not None
            assert in_blocks(wide, CASES[name].columns, k)
            assert wide.start <= own.start < wide.start + CASES[name].columns
            assert wide.stop - CASES[name].columns < own.stop <= wide.stop
            part = check(format, held, [StoredPart(STEM, columns=wide)])
            total[:, own.start : own.stop] += part[:, own.start - wide.start : own.stop - wide.start]
        assert torch.equal(total, whole)


@pytest.mark.parametrize(
    ("name", "own", "wide"),
    [
        ("gguf Q4_K", range(640), range(768)),  # 2.5 superblocks a shard
        ("gguf Q4_K", range(640, 1280), range(512, 1280)),
        ("awq 231 groups", range(116 * 128), range(116 * 128)),
        ("awq 231 groups", range(116 * 128, 231 * 128), range(116 * 128, 231 * 128)),
        ("fp8 blocks", range(150, 300), range(128, 300)),  # the last block is short
        ("gptq rows", range(3, 50), range(56)),  # one group a row: words of eight inputs
        ("bnb nf4", range(100, 101), range(64, 128)),
    ],
)
def test_columns_are_widened_to_whole_blocks(name: str, own: range, wide: range) -> None:
    format, held = CASES[name].open()
    assert format.widened(held, STEM, own) == wide


@pytest.mark.parametrize("name", CASES)
def test_rows_of_the_matrix(name: str) -> None:
    """Ranges, several of them, rows in any order; also of some columns."""
    format, held = CASES[name].open()
    n, k = format.shape(held, STEM)
    whole, rng = dense(format.read(held, [StoredPart(STEM)], CPU, torch.float32)), random.Random(name)
    columns = format.widened(held, STEM, range(k // 3, k // 2))
    assert columns is not None
    shards = [torch.arange(own.start, own.stop) for own in ranges(n, 4, rng)]
    orders = [*shards, torch.cat(shards[::2]), torch.cat(shards[::-1])]
    if not CASES[name].ranges_only:
        orders += [torch.tensor(rng.sample(range(n), n // 3)), torch.arange(1, n, 2)]
    for order in orders:
        assert torch.equal(check(format, held, [StoredPart(STEM, order)]), whole[order])
        part = check(format, held, [StoredPart(STEM, order, columns=columns)])
        assert torch.equal(part, whole[order][:, columns.start : columns.stop])
    stack = check(format, held, [StoredPart(STEM, order) for order in shards])
    assert torch.equal(stack, whole)


SMALL_BYTES = 3000  # what belongs to the matrix as a whole: tables, scales of scales, a state in JSON


@pytest.mark.parametrize("name", [name for name in CASES if name != "awq 231 groups"])
def test_only_the_share_is_read(name: str) -> None:
    case = CASES[name]
    rows, columns = 256, 1024
    format, held = case.open((rows, columns))
    size = sum(tensor.nbytes for tensor in held.held.values())
    columns_read = format.widened(held, STEM, range(300, 500))
    assert columns_read is not None
    wide = max(len(columns_read), case.columns) / columns
    tall = len(whole_blocks(range(70, 110), case.rows, rows)) / rows
    own = torch.arange(70, 110)
    shares = {
        wide: StoredPart(STEM, columns=columns_read),
        tall: StoredPart(STEM, own),
        wide * tall: StoredPart(STEM, own, columns=columns_read),
        2 * tall: StoredPart(STEM, torch.cat((own + 128, own))),
    }
    whole_bytes = SMALL_BYTES + sum(t.nbytes for name, t in held.held.items() if name.endswith("g_idx"))
    for share, part in shares.items():
        with ReadBytes(held) as read:
            weight = format.read(held, [part], CPU, torch.float32)
            if isinstance(weight, GGUFBlocks) and not read.count:
                weight.copied()  # it was a view of the file
        assert min(1, share) * size * 0.9 - whole_bytes < read.count <= share * size * 1.05 + whole_bytes, part


def resident_kib(file: Path) -> int:
    """KiB of a mapped file that this process has touched, in the kernel's steps of up to 2 MiB."""
    found, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        found = str(file) in line if "-" in line.split(" ")[0] else found
        total += int(line.split()[1]) if found and line.startswith("Rss:") else 0
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the kernel does not list mapped pages")
def test_other_rows_of_a_file_stay_on_the_disk(tmp_path: Path) -> None:
    rows = 1 << 15
    file = tmp_path / "model.safetensors"
    save_file({f"{STEM}.weight": torch.ones(rows, 1024, dtype=torch.int8), f"{STEM}.SCB": torch.ones(rows)}, file)
    format = linear_format(BNB8)
    assert format is not None
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        format.read(checkpoint, [StoredPart(STEM, torch.arange(rows // 2, rows // 2 + rows // 8))], CPU, torch.float32)
        assert rows // 8 <= resident_kib(file) <= rows // 8 + 3 * 2048


class TestInputsOutOfOrder:
    STORES: Mapping[str, tuple[Any, Store]] = {
        "gptq": (gptq_config(4, 32, desc_act=True), gptq(4, 32, order="layer")),
        "compressed-tensors": (ct("pack-quantized", ints(4, 32)), packed(4, 32, order="layer")),
    }

    @pytest.mark.parametrize("name", STORES)
    def test_they_cannot_be_cut_and_rows_can(self, name: str) -> None:
        format, held = Case(*self.STORES[name], (64, 128), 32).open()
        assert format.widened(held, STEM, range(32)) is None
        whole = check(format, held, [StoredPart(STEM)])
        for order in (torch.arange(8, 24), torch.arange(13, 50), torch.randperm(64)[:20]):
            assert torch.equal(check(format, held, [StoredPart(STEM, order)]), whole[order])

    def test_a_config_that_does_not_tell_of_them(self) -> None:
        """A cut takes no notice of g_idx, so it first has to see that the inputs are in order."""
        format, held = Case(gptq_config(4, 32), gptq(4, 32, order="layer"), (64, 128), 32).open()
        with pytest.raises(CorruptModel, match=r"g_idx is not in order.*desc_act is false"):
            format.read(held, [StoredPart(STEM, columns=range(32, 64))], CPU, torch.float32)


def test_the_stored_shape_is_that_of_the_whole_matrix() -> None:
    format, held = CASES["ct packed"].open()
    held.held[f"{STEM}.weight_shape"] = torch.tensor([50, 32])
    with pytest.raises(CorruptModel, match=r"weight_shape says \[50, 32\].*\[50, 160\]"):
        format.read(held, [StoredPart(STEM, columns=range(32))], CPU, torch.float32)


class TestRowsInsideFp8Blocks:
    def open(self) -> tuple[LinearFormat, Held]:
        format, held = CASES["fp8 blocks"].open()
        names = {
            f"{stem}.{name.removeprefix(f'{STEM}.')}": t for stem in ("gate", "up") for name, t in held.held.items()
        }
        names["up.weight_scale_inv"] = names["up.weight_scale_inv"] * 3
        return format, Held(names)

    @pytest.mark.parametrize(
        ("rank", "heights"), [(0, [192, 192]), (1, [64, 192, 128]), (2, [192, 192]), (3, [64, 192, 128])]
    )
    def test_192_of_gate_and_up(self, rank: int, heights: list[int]) -> None:
        """Parts are joined where a block ends."""
        format, held = self.open()
        own = torch.arange(192 * rank, 192 * (rank + 1))
        parts = [StoredPart("gate", own), StoredPart("up", own)]
        weight = format.read(held, parts, CPU, torch.float32)
        assert isinstance(weight, StackedWeight)
        assert [part.shape[0] for part in weight.parts] == heights
        whole = [dense(format.read(held, [StoredPart(stem)], CPU, torch.float32)) for stem in ("gate", "up")]
        assert torch.equal(check(format, held, parts), torch.cat([matrix[own] for matrix in whole]))

    def test_a_block_of_its_own_is_one_matrix(self) -> None:
        format, held = CASES["fp8 blocks"].open()
        for own in (range(128, 192), range(256, 512), range(130, 250)):
            weight = format.read(held, [StoredPart(STEM, torch.arange(own.start, own.stop))], CPU, torch.float32)
            assert isinstance(weight, Fp8Weight)

    @pytest.mark.parametrize("read", ["read", "read_meta"])
    def test_any_order_is_refused(self, read: str) -> None:
        format, held = CASES["fp8 blocks"].open()
        parts = [StoredPart(STEM, torch.arange(0, 64, 2))]
        with pytest.raises(UnsupportedModel, match=f"rows of {STEM} would have to be reordered.*blocks of 128"):
            format.read(held, parts, CPU, torch.float32) if read == "read" else format.read_meta(
                held, parts, CPU, torch.float32
            )


class TestAtLoad:
    @pytest.mark.parametrize("columns", [96, 384, 460])
    def test_groups_keep_their_values(self, columns: int) -> None:
        way, weight = AT_LOAD["int4"], torch.randn(24, columns)
        whole, rng = dense(way(weight)), random.Random(columns)
        for own in (each for count in (2, 3, 4) for each in ranges(columns, count, rng)):
            wide = way.widened(own, columns)
            assert set(own) <= set(wide)
            assert in_blocks(wide, 128, columns)
            assert torch.equal(dense(way(weight[:, wide.start : wide.stop])), whole[:, wide.start : wide.stop])

    @pytest.mark.parametrize("name", ["int8", "fp8"])
    def test_a_scale_for_each_output_is_never_coarser(self, name: str) -> None:
        way, weight = AT_LOAD[name], torch.randn(24, 200)
        assert way.widened(range(70, 130), 200) == range(70, 130)
        whole: Any = way(weight.clone())  # `quantize_int8` works in place on fp32
        part: Any = way(weight[:, 70:130].clone())
        assert bool((part.scales <= whole.scales).all())


def test_rows_in_many_ranges_are_chosen_from_one() -> None:
    order = torch.arange(0, 100 * (MOST_SPANS + 1), 100)
    assert row_spans(order, 8, 1000) == [range(808)]
    assert row_spans(order[1:], 8, 1000) == [range(each // 8 * 8, each // 8 * 8 + 8) for each in order[1:].tolist()]
    assert row_spans(torch.tensor([999, 3]), 16, 1000) == [range(16), range(992, 1000)]


@pytest.mark.parametrize("total", [1, 127, 128, 129, 300, 384])
def test_blocks_along_a_dimension_of_scales(total: int) -> None:
    """Whatever the last block's length, a range of blocks has the indices of its blocks."""
    size = -(-total // 128)
    for first in range(size):
        for last in range(first + 1, size + 1):
            assert along(range(first * 128, min(total, last * 128)), total, size) == range(first, last)
