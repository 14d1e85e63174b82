"""Experts on disk: what is read is what was written, in a bounded part of RAM, and the model answers as from RAM.

The mutants that these tests catch: a slot that is given to another expert while the first one is in use, a slot that is
used before its read has ended, a failed read that leaves its expert in the table, sums of parts that are not compared,
a digest that is not compared, a matrix at the place of its neighbour, prompts that replace what tokens use.
"""

import ctypes
import gc
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from torch import Tensor

from localllm.errors import CorruptModel, DiskFull, DoesNotFit, UnsupportedOption
from localllm.files import record_file
from localllm.files.record_file import BLOCK, PART, RecordFile, padded, write_records
from localllm.kernels.cpu.half import pack_half
from localllm.kernels.cpu.matrix import parts_of
from localllm.kernels.cpu.native.structures import FEW_ROWS, KIND_STORED, Kind, NativeMatrix, Stored
from localllm.kernels.cpu.pack import CpuPacker
from localllm.kernels.cpu.stored_blocks import GGUFBlocks, block_size
from localllm.kernels.int8_linear import quantize_int8
from localllm.kernels.linear import StackedWeight
from localllm.machine.hardware import process_bytes
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.layers.disk import AHEAD, DiskMatrices, ExpertCache, write_experts
from localllm.models.layers.far import Crossing, FarExperts, RamLink
from localllm.models.layers.linear import to_device_layout
from localllm.models.layers.moe import Experts
from localllm.models.layers.native_writer import Writer
from localllm.models.loader import DiskExperts, load_model
from localllm.models.read_spec import read_spec
from localllm.models.spec.model_spec import FINAL_HIDDEN, ModelSpec
from localllm.models.weights.parameters import parts_of_kind
from tests.draws import draws
from tests.golden_engine import CPU, Engine
from tests.marks import needs_library
from tests.models.harness import LoneHarness, token
from tests.tiny import fill_biases, make_tiny_model

pytestmark = needs_library
FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe", "qwen2_moe", "llama4", "gemma4_moe", "nemotron_h")
PROMPTS = [[5 + 3 * i % 180 for i in range(length)] for length in (5, 40, 17)]
MUCH = 2**40


# ---- the file --------------------------------------------------------------------------------------------------------

SIZES = [1, BLOCK, PART + 5, 3 * PART, 77]
CONTENTS = [random.Random(size).randbytes(size) for size in SIZES]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "some.experts"
    records = ([content[: len(content) // 3], content[len(content) // 3 :]] for content in CONTENTS)
    write_records(path, "abc", {"of": "a test"}, SIZES, records)
    return path


def read(file: RecordFile, record: int) -> bytes:
    buffer = torch.full((padded(SIZES[record]) + BLOCK,), 7, dtype=torch.uint8)
    start = -buffer.data_ptr() % BLOCK
    for part in file.start(record, memoryview(buffer.numpy())[start : start + padded(SIZES[record])]):
        part.result()
    return buffer[start : start + SIZES[record]].numpy().tobytes()


@pytest.mark.parametrize("direct", [True, False])
def test_records_are_read_as_they_were_written(written: Path, direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not direct:
        monkeypatch.setattr(record_file, "_opened", lambda path: (False, os.open(path, os.O_RDONLY)))
    file = RecordFile(written, "abc")
    assert file.facts == {"of": "a test"}
    assert file.sizes == SIZES
    for _ in range(2):
        assert [read(file, record) for record in (4, 0, 3, 2, 1)] == [CONTENTS[record] for record in (4, 0, 3, 2, 1)]
    assert [path.name for path in written.parent.iterdir()] == [written.name]
    file.close()
    file.close()


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def rehashed(path: Path) -> None:
    header = bytearray(path.read_bytes()[:64])
    struct.pack_into("<I", header, 8, 2)
    path.write_bytes(header + path.read_bytes()[64:])


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda path: path.write_bytes(b"{}"), "does not begin as"),
        (lambda path: path.write_bytes(b"GGUF" + path.read_bytes()[4:]), "does not begin as"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"It has [\d,]+ of [\d,]+ bytes"),
        (lambda path: flip(path, path.stat().st_size - 1), "index is damaged"),
        (rehashed, "Its format is 2, and 1 is read"),
    ],
    ids=["empty", "foreign", "truncated", "index", "format"],
)
def test_a_damaged_file_is_refused_by_name(written: Path, damage: Callable[[Path], Any], why: str) -> None:
    damage(written)
    with pytest.raises(CorruptModel, match=why) as caught:
        RecordFile(written, "abc")
    assert str(written) in caught.value.hint


def test_a_file_of_another_digest_is_not_used(written: Path) -> None:
    with pytest.raises(CorruptModel, match="other weights or settings: abc, not abd"):
        RecordFile(written, "abd")


def test_each_record_is_compared_when_it_is_first_read(written: Path) -> None:
    place = BLOCK + sum(map(padded, SIZES[:2])) + PART + 3  # in the last part of record 2
    flip(written, place)
    file = RecordFile(written, "abc")
    assert read(file, 1) == CONTENTS[1]
    with pytest.raises(CorruptModel, match="are not what was written"):
        read(file, 2)


def test_short_reads_go_on_and_what_cannot_be_read_is_named(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, whole = RecordFile(written, "abc"), os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: whole(fd, [into[0][: max(BLOCK, len(into[0]) // 2)]], at))
    assert read(file, 3) == CONTENTS[3]

    def fails(descriptor: int, into: Any, at: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(CorruptModel, match=r"Byte [\d,]+ cannot be read: Input/output error"):
        read(file, 3)
    monkeypatch.setattr(os, "preadv", whole)
    with written.open("r+b") as shorter:
        shorter.truncate(BLOCK + padded(SIZES[0]) + padded(SIZES[1]) + PART)
    assert read(file, 1) == CONTENTS[1]
    with pytest.raises(CorruptModel, match=r"The file ends at byte [\d,]+ of"):
        read(file, 2)


def test_nothing_is_left_of_a_file_that_could_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def records() -> Iterator[list[bytes]]:
        yield [b"a"]
        raise CorruptModel("the second one")

    with pytest.raises(CorruptModel, match="the second one"):
        write_records(tmp_path / "a.experts", "abc", {}, [1, 1], records())
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(record_file, "LEAST_FREE", 1.0)
    with pytest.raises(DiskFull, match=r"4.0 KiB are needed; 0 B are free"):
        write_records(tmp_path / "a.experts", "abc", {}, [1], iter([[b"a"]]))
    assert not list(tmp_path.iterdir())


# ---- the matrices ----------------------------------------------------------------------------------------------------

COUNT, HIDDEN, WIDTH, TOP_K = 7, 256, 320, 3


def stored(name: str, outputs: int, inputs: int) -> GGUFBlocks:
    size, num_bytes = block_size(name)
    rows = torch.randint(0, 256, (outputs, inputs // size * num_bytes), dtype=torch.uint8)
    for at in range(0, rows.shape[1], num_bytes):  # scales that are neither infinite nor subnormal
        for place in {"Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82), "IQ2_XS": (0,)}.get(name) or (0, 2):
            rows[:, at + place], rows[:, at + place + 1] = 0, 0x2C
    return GGUFBlocks((rows,), name, inputs)


def weight_of(form: str, outputs: int, inputs: int) -> Any:
    if form in Stored.__members__:
        return stored(form, outputs, inputs)
    values = torch.randn(outputs, inputs) * 0.1
    if form == "int8":
        return quantize_int8(values)
    return pack_half(values.to(torch.bfloat16 if form == "bf16" else torch.float16)) if form != "fp32" else values


FORMS = ["fp32", "bf16", "fp16", "int8", "Q4_0", "Q4_K", "MXFP4", "IQ4_XS", "Q6_K", "Q3_K", "IQ2_XS", "Q8_0"]


def experts_of(form: str, packer: CpuPacker, seed: int = 0) -> list[tuple[Any, Any]]:
    torch.manual_seed(seed)
    inner = 256 if form.endswith(("_K", "_XS")) else WIDTH
    return [
        tuple(to_device_layout(weight_of(form, *shape), packer) for shape in ((2 * inner, HIDDEN), (HIDDEN, inner)))
        for _ in range(COUNT)
    ]  # type: ignore[misc]


def cache_of(
    path: Path, layers: dict[int, list[tuple[Any, Any]]], slots: int | None = None, top_k: int = TOP_K
) -> ExpertCache:
    if not path.exists():
        write_experts(path, "abc", list(layers), COUNT, lambda layer: iter(layers[layer]), lambda: ["a"])
    file = RecordFile(path, "abc")
    size = padded(max(file.sizes))
    return ExpertCache(file, MUCH if slots is None else slots * size, top_k, lambda: MUCH)


def rows_of(count: int, experts: int = COUNT) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.stack([torch.randperm(experts)[:TOP_K] for _ in range(count)]).int()
    return torch.randn(count, HIDDEN), ids, torch.rand(count, TOP_K)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return read_spec(make_tiny_model(tmp_path_factory.mktemp("spec"), "qwen3_moe"))


@pytest.mark.parametrize("form", FORMS)
def test_products_have_the_bits_of_experts_in_ram(form: str, tmp_path: Path, spec: ModelSpec) -> None:
    pairs = experts_of(form, CpuPacker())
    biases = torch.randn(COUNT, pairs[0][0].shape[0]), torch.randn(COUNT, HIDDEN)
    in_ram = FarExperts(Experts(*zip(*pairs, strict=True), "silu", *biases), Crossing(RamLink(CPU)), spec)  # type: ignore[arg-type]
    for slots in (COUNT, TOP_K):
        cache = cache_of(tmp_path / "a.experts", {3: pairs}, slots)
        matrices = DiskMatrices(cache, 3, "gate_up"), DiskMatrices(cache, 3, "down")
        on_disk = FarExperts(Experts(*matrices, "silu", *biases), Crossing(RamLink(CPU), cache), spec)
        for count in (1, FEW_ROWS):
            given = rows_of(count)
            assert torch.equal(in_ram(*given), on_disk(*given)), (slots, count)
        given = rows_of(5 * FEW_ROWS)
        wanted = in_ram(*given)
        assert (wanted - on_disk(*given)).abs().max() < (
            2e-6 if form in ("fp32", "fp16") else 2e-2
        ) * wanted.abs().max()
        assert cache.num_slots == slots


def test_the_parts_of_every_kind_are_the_bytes_that_the_library_reads() -> None:
    """The bytes of matrix.h's comment, counted by hand for 100 outputs and 256 inputs: two blocks of 64."""
    known = {
        Kind.F32: 2 * 256 * 64 * 4, Kind.BF16: 2 * 256 * 64 * 2, Kind.F16: 2 * 256 * 64 * 2, Kind.I8: 2 * 256 * 64,
        Kind.BF16_ROUNDED: 2 * 256 * 64 * 2,
        Kind.Q4: 2 * 8 * (1024 + 128), Kind.Q4_MIN: 2 * 8 * (1024 + 256), Kind.MXFP4: 2 * 8 * (1024 + 64),
        Kind.NVFP4: 2 * 8 * (1024 + 256), Kind.IQ4: 2 * 8 * (1024 + 128),
        KIND_STORED + Stored.Q6_K: 100 * 210, KIND_STORED + Stored.TQ1_0: 100 * 54,
    }  # fmt: skip
    for kind, num_bytes in known.items():
        (part,) = parts_of(NativeMatrix(kind=kind, outputs=100, inputs=256, weights=64))
        assert (part.field, part.num_bytes) == ("weights", num_bytes), kind
    parts = parts_of(NativeMatrix(kind=Kind.I8, outputs=100, inputs=256, weights=64, scales=64, input_order=64))
    assert [tuple(part) for part in parts[1:]] == [("scales", 128 * 4), ("input_order", 256 * 4)]


def test_experts_that_differ_in_layout_are_refused(tmp_path: Path) -> None:
    pairs = experts_of("bf16", CpuPacker())
    pairs[4] = experts_of("fp16", CpuPacker())[4]
    with pytest.raises(UnsupportedOption, match="layer 3 are stored in different ways"):
        cache_of(tmp_path / "a.experts", {3: pairs})
    both = StackedWeight([pairs[0][0], pairs[4][0]])
    with pytest.raises(UnsupportedOption, match="no layout that this processor multiplies"):
        cache_of(tmp_path / "b.experts", {3: [(both, pairs[0][1])] * COUNT})
    assert not list(tmp_path.iterdir())


# ---- the cache -------------------------------------------------------------------------------------------------------

LAYERS, TOP = 3, 2


def make_walk(path: Path) -> type[RuleBasedStateMachine]:
    torch.manual_seed(1)
    content = [os.urandom(BLOCK * 2 - 96 * layer) for layer in range(LAYERS) for _ in range(COUNT)]
    form = {"kind": 0, "outputs": 64, "inputs": 1, "places": {"weights": [0, 256]}}
    facts = {
        "count": COUNT,
        "forms": {str(10 + i): {"gate_up": form, "down": form, "num_bytes": BLOCK * 2 - 96 * i} for i in range(LAYERS)},
    }
    write_records(path, "abc", facts, [len(each) for each in content], ([each] for each in content))

    class CacheWalk(RuleBasedStateMachine):
        """Calls in any order, among them reads that fail; the reads of a prompt may be left when its step fails."""

        def __init__(self) -> None:
            super().__init__()
            self.slots = 0
            self.file = RecordFile(path, "abc")
            self.whole, self.failing, self.failed = self.file._read_part, set[int](), set[int]()
            self.file._read_part = self._read_part  # type: ignore[method-assign]
            self.cache: ExpertCache | None = None
            self.held: list[tuple[int, int, int]] = []  # layer, expert, address

        def _read_part(self, part: int, offset: int, into: memoryview) -> None:
            if part in self.failing:
                into[:] = bytes(len(into))
                raise CorruptModel("this part")
            self.whole(part, offset, into)

        @precondition(lambda self: self.cache is None)
        @rule(slots=st.integers(TOP, LAYERS * COUNT + 2))
        def open(self, slots: int) -> None:
            self.slots = min(slots, LAYERS * COUNT)
            self.cache = ExpertCache(self.file, slots * 2 * BLOCK + BLOCK, TOP, lambda: MUCH)
            assert self.cache.num_slots == self.slots

        @precondition(lambda self: self.cache is not None)
        @rule(layer=st.integers(0, LAYERS - 1), experts=st.sets(st.integers(0, COUNT - 1), min_size=1, max_size=4))
        def require(self, layer: int, experts: set[int]) -> None:
            assert self.cache is not None
            chosen = sorted(experts)[: self.slots]
            self.held = []
            if self.failing & {layer * COUNT + each for each in chosen if (10 + layer, each) not in self.cache._slots}:
                with pytest.raises(CorruptModel):
                    self.cache.require(10 + layer, chosen)
                return
            try:
                found = self.cache.require(10 + layer, chosen)
            except CorruptModel:  # an expert of this list that was read ahead, in vain
                assert self.failed & {layer * COUNT + each for each in chosen}
                return
            self.held = [(layer, *each) for each in zip(chosen, found, strict=True)]

        @precondition(lambda self: self.cache is not None)
        @rule(layer=st.integers(0, LAYERS - 1), experts=st.sets(st.integers(0, COUNT - 1)), stop=st.integers(0, COUNT))
        def prompt(self, layer: int, experts: set[int], stop: int) -> None:
            assert self.cache is not None
            self.held = []
            self.cache.expect(sorted(experts))
            for expert in sorted(experts)[:stop]:
                try:
                    first = self.cache.next_of(10 + layer, expert)
                except CorruptModel:
                    assert layer * COUNT + expert in self.failed
                    self.held = []
                    return
                self.held = [(layer, expert, first)]
                self.slots_hold_their_experts()
                assert self.cache.next_of(10 + layer, expert) == first

        @rule(part=st.integers(0, LAYERS * COUNT - 1))
        def fail(self, part: int) -> None:
            self.failing ^= {part}
            self.failed |= {part}

        @invariant()
        def slots_hold_their_experts(self) -> None:
            for layer, expert, address in self.held:
                wanted = content[layer * COUNT + expert]
                assert ctypes.string_at(address, len(wanted)) == wanted, (layer, expert)

        @invariant()
        def each_slot_is_free_or_has_one_expert(self) -> None:
            if self.cache is not None:
                assert sorted([*self.cache._free, *self.cache._slots.values()]) == list(range(self.slots))
                assert set(self.cache._pending) <= set(self.cache._slots)

        def teardown(self) -> None:
            self.file.close()

    return CacheWalk


def test_a_slot_has_the_bytes_of_its_expert_after_any_walk(tmp_path: Path) -> None:
    run_state_machine_as_test(make_walk(tmp_path / "a.experts"), settings=draws(30, stateful_step_count=25))


def test_the_latest_used_experts_stay_and_a_prompt_does_not_replace_them(tmp_path: Path) -> None:
    pairs = experts_of("bf16", CpuPacker())
    cache = cache_of(tmp_path / "a.experts", {0: pairs, 1: pairs, 2: pairs}, slots=6 + 1 + AHEAD)
    cache.require(0, [0, 1, 2])
    cache.require(1, [0, 1, 2])
    assert (cache.hits, cache.reads) == (0, 6)
    cache.require(0, [0, 1, 2])
    assert (cache.hits, cache.reads) == (3, 6)
    for _ in range(2):
        cache.expect(range(COUNT))
        for expert in range(COUNT):
            cache.next_of(2, expert)
    reads = cache.reads
    assert reads >= 6 + 7 + 2
    cache.require(0, [0, 1, 2])
    cache.require(1, [0, 1, 2])
    assert cache.reads == reads
    cache.require(2, [0, 1, 2, 3, 4])  # the experts of a token replace what the prompt has read
    cache.require(2, [5, 6])  # and then the oldest: of layer 0
    cache.require(1, [0, 1, 2])
    reads = cache.reads
    cache.require(0, [2])
    assert cache.reads == reads
    cache.require(0, [0])
    assert cache.reads == reads + 1


def test_a_cache_without_room_and_ram_that_was_taken_are_refused_with_numbers(tmp_path: Path) -> None:
    path, pairs = tmp_path / "a.experts", experts_of("bf16", CpuPacker())
    cache = cache_of(path, {0: pairs}, TOP_K)
    file = cache.file
    with pytest.raises(DoesNotFit, match=r"A token needs 3 experts .* MiB; .* are set or free"):
        ExpertCache(file, cache.ram_bytes - 1, TOP_K, lambda: MUCH)
    before = process_bytes()
    with pytest.raises(DoesNotFit, match=r"after 0 B of them 1\.0 MiB are left") as caught:
        ExpertCache(file, cache.ram_bytes, TOP_K, lambda: 2**20)
    assert "--expert-cache-gib" in caught.value.hint
    assert process_bytes() - before < cache.ram_bytes / 2


# ---- the model -------------------------------------------------------------------------------------------------------


def opened(path: Path, layers: list[int], folder: Path, slots: int | None, **options: Any) -> Engine:
    """An engine with its experts on disk. slots: of the cache; None: for all experts."""
    engine = Engine(path, far_layers=layers, disk=DiskExperts(MUCH, lambda: MUCH, folder), **options)
    if slots is None:
        return engine
    size = slots * engine.model.crossing.cache.slot_bytes
    return Engine(path, far_layers=layers, disk=DiskExperts(size, lambda: MUCH, folder), **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_the_whole_model(
    family: str, model_of: Callable[[str], tuple[Path, ModelSpec, list[int]]], tmp_path: Path
) -> None:
    """On a CPU with room for the experts of one token in one layer, and beside a device with room for a few more."""
    path, spec, layers = model_of(family)
    assert spec.mixture is not None
    for way in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 5}):
        wanted = Engine(path).generate(PROMPTS, 6, **way)
        for slots, staged in ((spec.mixture.top_k, False), (spec.mixture.top_k + 2, True)):
            engine = opened(path, layers, tmp_path, slots, staged=staged, depth=1 + staged)
            assert engine.generate(PROMPTS, 6, **way) == wanted, (way, slots)
            assert engine.model.crossing.cache.reads > engine.model.crossing.cache.num_slots


def on_disk(path: Path, layers: list[int], folder: Path, slots: int, **options: Any) -> DecoderModel:
    """A model whose experts are on disk, with a cache of so many slots."""
    spec, everything = read_spec(path), DiskExperts(MUCH, lambda: MUCH, folder)
    size = load_model(path, spec, CPU, torch.float32, far_layers=layers, disk=everything, **options).crossing.cache  # type: ignore[union-attr]
    assert size is not None
    disk = DiskExperts(slots * size.slot_bytes, lambda: MUCH, folder)
    model = load_model(path, spec, CPU, torch.float32, far_layers=layers, disk=disk, **options)
    assert isinstance(model, DecoderModel)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_of_a_model_with_experts_on_disk_run_natively(
    family: str, model_of: Callable[[str], tuple[Path, ModelSpec, list[int]]], tmp_path: Path
) -> None:
    """Eight rows that need more experts than there are slots, in one step and each alone, with the whole model's
    logits."""
    tiny, spec, layers = model_of(family)
    assert spec.mixture is not None
    path = tmp_path / "model"
    shutil.copytree(tiny, path)
    fill_biases(path)
    model = on_disk(path, layers, tmp_path / "experts", spec.mixture.top_k + 1)
    whole = load_model(path, spec, CPU, torch.float32)
    assert isinstance(whole, DecoderModel)
    together, wanted, alone = (LoneHarness(each, seed=seed) for seed, each in enumerate((model, whole, model)))
    assert together.lone.most_rows == FEW_ROWS, "of more rows the host's bits depend on all"
    rows, theirs, single = ([h.prefill([token(i, n) for i in range(3 + n)])[0] for n in range(FEW_ROWS)]
                            for h in (together, wanted, alone))  # fmt: skip
    crossing = model.crossing
    assert crossing is not None
    assert crossing.cache is not None
    for step in range(4):
        for row in (*rows, *theirs, *single):
            row.token_ids.append(token(len(row.token_ids), step))
        reads, seconds = crossing.cache.reads, crossing.seconds
        got, expected = together.natively(rows), wanted.natively(theirs)
        assert crossing.cache.reads > reads
        assert crossing.seconds > seconds
        assert (got - expected).abs().max() <= 2e-6 * expected.abs().max()
        assert torch.equal(got, torch.cat([alone.natively([row]) for row in single]))


def test_a_step_goes_on_while_experts_are_read(
    model_of: Callable[[str], tuple[Path, ModelSpec, list[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shared expert is computed between the first read of a layer and the wait for it."""
    path, _, layers = model_of("qwen2_moe")
    model = on_disk(path, layers, tmp_path, 3 * COUNT)
    harness, events = LoneHarness(model), list[str]()
    row = harness.prefill([token(i) for i in range(5)])[0]
    library = harness.lone._library
    for owner, name in ((ExpertCache, "begin"), (ExpertCache, "_finish"), (type(library), "run_step")):
        whole = getattr(owner, name)
        noted = lambda *given, name=name, whole=whole: (events.append(name), whole(*given))[1]  # noqa: E731
        monkeypatch.setattr(owner, name, noted)
    row.token_ids.append(7)
    harness.natively([row])
    order = [name for place, name in enumerate(events) if place == 0 or events[place - 1] != name]
    assert order == [*["run_step", "begin", "run_step", "begin", "_finish"] * len(layers), "run_step"]


@pytest.mark.parametrize("place", ["RAM", "disk"])
def test_features_and_kinds_of_experts_that_are_elsewhere(
    place: str, model_of: Callable[[str], tuple[Path, ModelSpec, list[int]]], tmp_path: Path
) -> None:
    """A drafter's features are the whole model's, and 16-bit experts alone let a step round otherwise than torch."""
    path, spec, layers = model_of("gpt_oss")
    model: Any = (
        on_disk(path, layers, tmp_path, 4) if place == "disk"
        else load_model(path, spec, CPU, torch.float32, far_layers=layers)
    )  # fmt: skip
    whole = load_model(path, spec, CPU, torch.float32)
    assert isinstance(whole, DecoderModel)
    taps, features = (0, layers[0], FINAL_HIDDEN, spec.num_layers - 1), list[Tensor]()
    for each in (model, whole):
        harness = LoneHarness(each)
        assert not harness.lone.rounds
        harness.lone.tap(taps)
        row = harness.prefill([token(i) for i in range(9)])[0]
        row.token_ids.append(3)
        harness.natively([row])
        features.append(harness.lone.features())
    assert (features[0] - features[1]).abs().max() <= 2e-6 * features[1].abs().max()

    (part, *_) = parts_of_kind(model, FarExperts)
    matrices: Any
    for matrices, kind in ((part.experts.gate_up, Kind.BF16), (part.experts.down, Kind.F16)):
        matrices.form = replace(matrices.form, kind=kind)
        writer = Writer(spec, (), lambda kind: None)
        part.described(writer, 2)
        assert kind in writer.kinds


def test_the_file_is_written_once_and_again_when_it_is_damaged_or_of_other_weights(
    model_of: Callable[[str], tuple[Path, ModelSpec, list[int]]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, spec, layers = model_of("qwen3_moe")
    disk = DiskExperts(MUCH, lambda: MUCH, tmp_path)

    def load(**options: Any) -> Any:
        return load_model(path, spec, CPU, torch.float32, far_layers=layers, disk=disk, **options)

    assert not load().unused_tensors
    (file,) = tmp_path.iterdir()
    made = file.stat().st_ino
    model = load()
    assert not model.unused_tensors  # names come from the file: nothing of the experts was read
    assert file.stat().st_ino == made
    file.write_bytes(file.read_bytes()[:-1])
    load()
    assert "is written again" in caplog.text
    assert file.stat().st_ino != made
    load(quantization="int4")
    assert len(list(tmp_path.iterdir())) == 2


def test_a_failing_read_ends_that_request_alone(
    model_of: Callable[[str], tuple[Path, ModelSpec, list[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _, layers = model_of("gpt_oss")
    engine = opened(path, layers, tmp_path, 4)
    wanted = engine.generate(PROMPTS[:1], 6)
    failed: list[BaseException] = []
    recover = type(engine.loop)._recover.__get__(engine.loop)
    engine.loop._recover = lambda error: (failed.append(error), recover(error))  # type: ignore[method-assign]
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", lambda *_: 0)
        with pytest.raises(AssertionError):  # an answer ended with an error
            engine.generate(PROMPTS[:1], 6)
    assert isinstance(failed[0], CorruptModel)
    assert "file ends at byte" in engine.endings[0].error.why
    assert engine.generate(PROMPTS[:1], 6) == wanted


def test_a_mixture_that_is_larger_than_its_ram_answers_within_it(tmp_path: Path) -> None:
    """48 MiB of experts in 16-bit, of which RAM keeps 6."""
    sizes = {"moe_intermediate_size": 512, "hidden_size": 256, "num_experts": 64, "mlp_only_layers": [0]}
    path = make_tiny_model(tmp_path, "qwen3_moe", dtype="bfloat16", **sizes)
    wanted = Engine(path, half_weights=True).generate(PROMPTS, 4)
    gc.collect()
    before = process_bytes()
    disk = DiskExperts(6 * 2**20, lambda: MUCH, tmp_path / "disk")
    engine = Engine(path, far_layers=[1], disk=disk, half_weights=True)
    assert engine.generate(PROMPTS, 4) == wanted
    cache = engine.model.crossing.cache
    assert sum(map(padded, cache.file.sizes)) > 7 * cache.ram_bytes
    assert process_bytes() - before < 40 * 2**20
