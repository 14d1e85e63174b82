"""GGUF headers that lie: each is refused by name, with numbers, before anything of that size is allocated."""

import struct
import time
import tracemalloc
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.errors import CorruptModel, LocalLLMError, UnsupportedModel
from localllm.models.formats.gguf.header import BLOCKS, GGUFHeader, Strings, parse_header, plain, read_header
from localllm.models.formats.registry import open_checkpoint
from tests.draws import draws
from tests.models.formats.fuzz import damaged, survives

FILE = Path("model.gguf")
U32, U64, F32, BOOL, STRING, ARRAY = 4, 10, 6, 7, 8, 9
HUGE = (1 << 63) - 1
INPUTS = 20_000  # damaged headers in each run


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, sizes: Sequence[int], block_type: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, block_type, offset)


def header(
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    *,
    data: int = 0,
    counts: tuple[int, int] | None = None,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    num_tensors, num_entries = counts or (len(tensors), len(entries))
    raw = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries) + b"".join((*entries, *tensors))
    return raw + bytes(-len(raw) % alignment) + bytes(data)


def parse(data: bytes) -> GGUFHeader:
    return parse_header(data, FILE)


GOOD = header(
    [
        entry("general.architecture", STRING, text("llama")),
        entry("a.number", U32, struct.pack("<I", 7)),
        entry("a.float", F32, struct.pack("<f", 0.5)),
        entry("a.flag", BOOL, b"\1"),
        entry("some.texts", ARRAY, struct.pack("<IQ", STRING, 2) + text("ein") + text("ß")),
        entry("some.numbers", ARRAY, struct.pack("<IQ3I", U32, 3, 1, 2, 3)),
    ],
    [tensor("one", [32, 4], 8), tensor("two", [3], 0, 160)],
    data=192,
)


def test_what_a_header_says() -> None:
    found = parse(GOOD)
    texts = found.metadata["some.texts"]
    assert isinstance(texts, Strings)
    assert (list(texts), texts[1], len(texts)) == (["ein", "ß"], "ß", 2)
    plain = {key: value for key, value in found.metadata.items() if key != "some.texts"}
    assert plain == {
        "general.architecture": "llama", "a.number": 7, "a.float": 0.5, "a.flag": True, "some.numbers": [1, 2, 3],
    }  # fmt: skip
    one, two = found.tensors["one"], found.tensors["two"]
    assert (one.block_type, one.shape, one.num_bytes) == ("Q8_0", (4, 32), 136)
    assert two.start - one.start == 160
    assert two.start + two.num_bytes <= len(GOOD)


@pytest.mark.parametrize("version", [2, 3])
def test_versions(version: int) -> None:
    assert parse(header(version=version)).tensors == {}


def test_the_table_of_types_is_the_formats_own() -> None:
    known = {(int(kind), kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    ours = {(number, *block) for number, block in BLOCKS.items()}
    assert known <= ours


def tensors(*made: bytes, data: int = 64) -> bytes:
    return header((), made, data=data)


BAD: list[tuple[str, bytes, type[LocalLLMError], str]] = [
    ("empty", b"", CorruptModel, "begins with b''"),
    ("another file", b"PK\3\4" + bytes(60), CorruptModel, "not a GGUF file"),
    ("an lfs pointer", b"version https://git-lfs.github.com/spec/v1\noid", CorruptModel, "Git LFS pointer"),
    ("from before gguf", b"tjgg" + bytes(60), UnsupportedModel, "GGJT, a format from before"),
    ("version 1", header(version=1), UnsupportedModel, "version 1"),
    ("version 4", header(version=4), UnsupportedModel, "version 4"),
    ("big endian", b"GGUF" + struct.pack(">IQQ", 3, 0, 0), UnsupportedModel, "big-endian"),
    ("ends in its counts", GOOD[:12], CorruptModel, "number of tensors.*8 bytes and 4 are left"),
    ("ends in its entries", GOOD[:60], CorruptModel, "damaged at byte"),
    ("absurdly many entries", header(counts=(0, HUGE)), CorruptModel, f"says {HUGE:,}"),
    ("absurdly many tensors", header(counts=(HUGE, 0)), CorruptModel, f"says {HUGE:,}"),
    ("a key of absurd length", header([struct.pack("<Q", HUGE) + bytes(99)]), CorruptModel, f"{HUGE:,} bytes"),
    (
        "a text of absurd length",
        header([entry("k", STRING, struct.pack("<Q", 1 << 40))]),
        CorruptModel,
        "1,099,511,627,776 bytes",
    ),
    ("a key that is not UTF-8", header([text(b"\xff\xfe") + bytes(99)]), CorruptModel, "utf-8"),
    (
        "a key twice",
        header([entry("k", BOOL, b"\1"), entry("k", BOOL, b"\0")]),
        CorruptModel,
        "The key k occurs twice",
    ),
    ("a value of unknown type", header([entry("k", 13, bytes(99))]), UnsupportedModel, "unknown type 13, k"),
    (
        "an array of arrays",
        header([entry("k", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(99))]),
        UnsupportedModel,
        "array of arrays",
    ),
    (
        "an array of unknown type",
        header([entry("k", ARRAY, struct.pack("<IQ", 99, 1) + bytes(99))]),
        UnsupportedModel,
        "unknown type 99",
    ),
    (
        "an array of absurd length",
        header([entry("k", ARRAY, struct.pack("<IQ", U64, HUGE) + bytes(99))]),
        CorruptModel,
        "bytes are left",
    ),
    (
        "absurdly many strings",
        header([entry("k", ARRAY, struct.pack("<IQ", STRING, HUGE) + bytes(99))]),
        CorruptModel,
        f"{HUGE:,} entries",
    ),
    (
        "a string over the end",
        header([entry("k", ARRAY, struct.pack("<IQQ", STRING, 2, 500) + bytes(30))]),
        CorruptModel,
        "String 0 of 2 extends past the end",
    ),
    (
        "an alignment that is none",
        header([entry("general.alignment", U32, struct.pack("<I", 24))]),
        CorruptModel,
        "24, which is not a power of two",
    ),
    (
        "an alignment in words",
        header([entry("general.alignment", STRING, text("x"))]),
        CorruptModel,
        "not a power of two",
    ),
    ("no dimensions", tensors(tensor("t", [])), CorruptModel, "t. It has 0 dimensions"),
    ("too many dimensions", tensors(tensor("t", [1] * 5)), CorruptModel, "5 dimensions"),
    ("absurdly many dimensions", tensors(text("t") + struct.pack("<I", 0xFFFFFFFF)), CorruptModel, "4,294,967,295 dim"),
    ("nothing in it", tensors(tensor("t", [0, 4])), CorruptModel, r"\[0, 4\]"),
    ("half a block", tensors(tensor("t", [33], 8)), CorruptModel, "blocks of 32"),
    ("an unknown type", tensors(tensor("t", [32], 99)), UnsupportedModel, "t in model.gguf.*unknown type, 99"),
    ("a withdrawn type", tensors(tensor("t", [32], 31)), UnsupportedModel, "Q4_0_4_4"),
    ("absurd sizes", tensors(tensor("t", [1 << 62, 1 << 62, 1 << 62, 1 << 62])), CorruptModel, "cut short"),
    ("beyond the end", tensors(tensor("t", [32], 0, 1 << 62)), CorruptModel, "cut short"),
    ("cut short", GOOD[:-100], CorruptModel, "cut short.*bytes and its header asks for"),
    ("not aligned", tensors(tensor("t", [4], 0, 8)), CorruptModel, "t. Its offset 8 is not a multiple of 32"),
    (
        "over one another",
        tensors(tensor("t", [16]), tensor("u", [4], 0, 32)),
        CorruptModel,
        "u. It begins 32 bytes before t ends",
    ),
    ("a tensor twice", tensors(tensor("t", [4]), tensor("t", [4], 0, 32)), CorruptModel, "t occurs twice"),
    ("a name of absurd length", tensors(struct.pack("<Q", HUGE) + bytes(99)), CorruptModel, f"{HUGE:,} bytes"),
]


@pytest.mark.parametrize(("data", "error", "message"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_headers(data: bytes, error: type[LocalLLMError], message: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(error, match=message):
            parse(data)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def numbers(key: str, count: int, kind: int = F32) -> bytes:
    """An array whose data is not written: the file that it ends is sparse."""
    return entry(key, ARRAY, struct.pack("<IQ", kind, count))


def read_sparse(file: Path, *entries: bytes, data: int) -> GGUFHeader:
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + b"".join(entries))
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size + data)
    return read_header(file)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([numbers("x.y", 100_000_000)], "It has 100,000,000 entries; the arrays of a file may have 4,000,000 together"),
        ([numbers("tokenizer.ggml.scores", 100_000_000)], "It has 100,000,000 entries"),
        ([entry("general.description", STRING, struct.pack("<Q", 300 * 2**20))], "takes more than 64.0 MiB of memory"),
    ],
    ids=["an unread array", "a vocabulary", "a text"],
)
def test_a_metadata_bomb_is_refused_before_it_is_read(tmp_path: Path, entries: list[bytes], message: str) -> None:
    started_s = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(CorruptModel, match=message):
            read_sparse(tmp_path / "m.gguf", *entries, data=400_000_000)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert time.process_time() - started_s < 0.3


def test_many_entries_are_refused_at_their_count() -> None:
    with pytest.raises(CorruptModel, match="It says 70,000; at most 65,536 are read"):
        parse(header([text(f"{number}") + struct.pack("<I", BOOL) + b"\1" for number in range(70_000)]))


def test_a_long_array_that_no_reader_needs_is_not_kept(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        found = read_sparse(tmp_path / "m.gguf", numbers("x.y", 3_900_000), data=4 * 3_900_000)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert str(found.metadata["x.y"]) == "an array of 3,900,000 entries"


def test_the_numbers_of_a_vocabulary_take_the_memory_that_they_take_in_the_file(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        found = read_sparse(tmp_path / "m.gguf", numbers("tokenizer.ggml.scores", 1_000_000), data=4_000_000)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()
    scores = plain(found.metadata["tokenizer.ggml.scores"])
    assert (len(scores), scores[-1]) == (1_000_000, 0.0)


def test_text_that_is_no_utf8_is_found_when_it_is_read() -> None:
    found = parse(header([entry("k", ARRAY, struct.pack("<IQ", STRING, 1) + text(b"\xff"))]))
    with pytest.raises(CorruptModel, match="k holds text that is not UTF-8"):
        list(found.metadata["k"])  # type: ignore[arg-type]


def assert_consistent(found: GGUFHeader | None, size: int) -> bool:
    if found is None:
        return False
    spans = sorted((tensor.start, tensor.start + tensor.num_bytes) for tensor in found.tensors.values())
    assert all(0 <= start <= end <= size for start, end in spans)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    return True


def written_by_the_package(path: Path) -> bytes:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list([f"t{index}" for index in range(20)])
    writer.add_token_scores([float(index) for index in range(20)])
    writer.add_tensor("a", np.zeros((4, 8), np.float32))
    writer.add_tensor("b", np.zeros((4, 34), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_damaged_headers_are_refused_or_consistent(tmp_path: Path, record_property: Any) -> None:
    originals = [GOOD, written_by_the_package(tmp_path / "x.gguf")]
    read = 0
    for data in damaged(originals, INPUTS, seed=1):
        read += assert_consistent(survives(parse, data), len(data))
    record_property("inputs", INPUTS)
    assert 0.05 * INPUTS < read < 0.95 * INPUTS  # the damage is neither harmless nor all alike


@given(st.binary(max_size=400), st.integers(0, 40), st.integers(0, 40))
@draws(300)
def test_random_bytes_behind_good_counts(tail: bytes, num_tensors: int, num_entries: int) -> None:
    data = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_entries) + tail
    assert_consistent(survives(parse, data), len(data))


class TestFiles:
    def test_an_empty_file(self, tmp_path: Path) -> None:
        (tmp_path / "m.gguf").touch()
        with pytest.raises(CorruptModel, match="is empty"):
            read_header(tmp_path / "m.gguf")

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(CorruptModel, match="cannot be read"):
            open_checkpoint(tmp_path / "m.gguf")

    def test_a_file_without_an_architecture(self, tmp_path: Path) -> None:
        (tmp_path / "m.gguf").write_bytes(header())
        with pytest.raises(UnsupportedModel, match="names no architecture"):
            open_checkpoint(tmp_path / "m.gguf")

    def test_a_changed_file_is_read_again(self, tmp_path: Path) -> None:
        file = tmp_path / "m.gguf"
        file.write_bytes(GOOD)
        assert read_header(file).metadata["a.number"] == 7
        file.write_bytes(GOOD.replace(struct.pack("<II", U32, 7), struct.pack("<II", U32, 9)) + b"\0")
        assert read_header(file).metadata["a.number"] == 9
