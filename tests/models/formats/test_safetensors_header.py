"""safetensors headers that lie: each is refused by name, with numbers, before anything of that size is allocated."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from localllm.errors import CorruptModel
from localllm.models.formats.checkpoint import TensorInfo
from localllm.models.formats.safetensors import check_length, parse_header, read_header
from tests.draws import draws
from tests.models.formats.fuzz import damaged, survives

FILE = Path("model.safetensors")
HUGE = (1 << 63) - 1
INPUTS = 20_000  # damaged headers in each run
GOOD = save({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}, {"format": "pt"})


def parse(data: bytes) -> dict[str, TensorInfo]:
    """The whole file."""
    count = check_length(data[:8], len(data), FILE)
    return parse_header(data[8 : 8 + count], len(data) - 8 - count, FILE)


def made(header: Any, data_bytes: int = 64) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(data_bytes)


def entry(**changes: Any) -> dict[str, Any]:
    return {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


def test_what_a_header_says() -> None:
    found = parse(GOOD)
    assert {name: (info.dtype, info.shape, info.num_bytes) for name, info in found.items()} == {
        "a": ("F32", (2, 3), 24),
        "b": ("BF16", (4,), 8),
    }


WHOLE = json.dumps(entry()["t"]).encode()
BAD: list[tuple[str, bytes, str]] = [
    ("empty", b"", "cut short"),
    ("no length", b"\1\2\3", "cut short"),
    ("absurd length", struct.pack("<Q", HUGE) + bytes(64), f"asks for {HUGE + 8:,}"),
    ("no JSON", made(b"{nonsense"), "JSONDecodeError"),
    ("nested without end", made(b"[" * 100_000), "RecursionError"),
    ("no UTF-8", made(b'{"\xff": 1}'), "UnicodeDecodeError"),
    ("a list", made([]), "JSON list"),
    ("a tensor in words", made({"t": "F32"}), "entry of 't' is a str"),
    ("a name twice", made(b'{"t": {}, "t": {}}'), "'t' occurs twice"),
    ("a name twice, once empty", made(b'{"t": {}, "t": ' + WHOLE + b"}"), "'t' occurs twice"),
    ("a name twice, once escaped", made(b'{"t": ' + WHOLE + rb', "\u0074": ' + WHOLE + b"}"), "'t' occurs twice"),
    (
        "a field twice, missing elsewhere",
        made(b'{"t": {"dtype": "U8", ' + WHOLE[1:] + b', "u": {"shape": [2], "data_offsets": [8, 10]}}'),
        "'dtype' occurs twice",
    ),
    ("no dtype", made({"t": {"shape": [], "data_offsets": [0, 4]}}), "dtype None"),
    ("a dtype that is a list", made(entry(dtype=["F32"])), r"dtype \['F32'\]"),
    ("a shape in words", made(entry(shape="12")), "shape '12'"),
    ("a broken size", made(entry(shape=[2.0])), r"shape \[2.0\]"),
    ("a negative size", made(entry(shape=[-2])), r"shape \[-2\]"),
    ("a true size", made(entry(shape=[True])), r"shape \[True\]"),
    ("three offsets", made(entry(data_offsets=[0, 4, 8])), "data_offsets"),
    ("backwards", made(entry(data_offsets=[8, 0])), "ends at 0, before it begins at 8"),
    ("a wrong size", made(entry(shape=[3])), r"\[3\] in F32 needs 12 bytes, but the header says 8"),
    ("an absurd size", made(entry(shape=[HUGE, HUGE])), "wrong size"),
    ("beyond the end", made(entry(data_offsets=[100, 108])), "cut short"),
    ("absurdly far", made(entry(data_offsets=[HUGE, HUGE + 8])), "cut short"),
    (
        "over one another",
        made(entry() | {"u": {"dtype": "U8", "shape": [8], "data_offsets": [4, 12]}}),
        "'u' begins 4 bytes before 't' ends",
    ),
]


@pytest.mark.parametrize(("data", "message"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_headers(data: bytes, message: str) -> None:
    with pytest.raises(CorruptModel, match=message):
        parse(data)


@pytest.mark.parametrize("name", ["t", 'a "dtype" of {2}', "a\\b", "größe"])
def test_unusual_names_and_further_fields_are_accepted(name: str) -> None:
    header = {"__metadata__": {"shape": "[2]", "note": "{}"}, name: {**entry()["t"], "more": {"dtype": 1}}}
    assert parse(made(header)) == {name: TensorInfo(FILE, "F32", (2,), 8, 8 + len(json.dumps(header)))}


def test_a_header_beyond_the_formats_limit(tmp_path: Path) -> None:
    """A sparse file: it has the bytes that its header claims, and they are not read."""
    file = tmp_path / "m.safetensors"
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", 1 << 40))
        stream.truncate(1 << 41)
    with pytest.raises(CorruptModel, match=r"1,099,511,627,776 bytes; 100,000,000 are the format's limit"):
        read_header(file)


def assert_consistent(found: dict[str, TensorInfo] | None, size: int) -> bool:
    if found is None:
        return False
    assert sum(info.num_bytes for info in found.values()) <= size
    return True


def test_damaged_headers_are_refused_or_consistent(record_property: Any) -> None:
    read = 0
    for data in damaged([GOOD, made(entry())], INPUTS, seed=2):
        read += assert_consistent(survives(parse, data), len(data))
    record_property("inputs", INPUTS)
    assert 0.05 * INPUTS < read < 0.95 * INPUTS  # the damage is neither harmless nor all alike


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
ENTRIES = st.fixed_dictionaries({}, optional={"dtype": JSON, "shape": JSON, "data_offsets": JSON})


@given(st.dictionaries(st.text(max_size=5), ENTRIES | JSON, max_size=4), st.integers(0, 100))
@draws(300)
def test_any_json_at_all(header: dict[str, Any], data_bytes: int) -> None:
    data = made(header, data_bytes)
    assert_consistent(survives(parse, data), len(data))
