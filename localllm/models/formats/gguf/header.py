"""The header of a GGUF file: metadata and the place of each tensor. All of it is untrusted.

    magic, version          GGUF, 2 or 3, little endian
    counts                  tensors, entries of metadata
    entries                 key, type, value; arrays of anything but arrays
    tensors                 name, sizes (fastest first), block type, offset
    padding, data           each tensor at a multiple of general.alignment

Every length and count is compared with the remaining bytes before it is used, and with the limits below, so a damaged
or hostile header takes no more than `MAX_KEPT_BYTES`. Long arrays are kept as stored, and only the
vocabulary's: this program reads no long array under another key. The result is consistent: tensors lie inside the file,
are aligned, and do not overlap. Does not know: what tensors mean, other parts of a split file.
"""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.units import format_bytes

VERSIONS = (2, 3)
ALIGNMENT = 32  # default of general.alignment
MAX_DIMENSIONS = 4

MAX_METADATA_BYTES = 256 * 2**20
"""All metadata of a file. Large vocabularies, with their merges, take some 20 MiB."""
MAX_KEPT_BYTES = 64 * 2**20
"""Metadata that stays in memory: texts, short arrays, the vocabulary."""
MAX_ENTRIES = 65_536
"""Entries of metadata; files have fewer than a hundred."""
MAX_ARRAY_ENTRIES = 4_000_000
"""Entries of all arrays together; vocabularies have up to 1.5 million, with their merges, scores and types."""
MAX_TENSORS = 262_144
"""Files that store each expert apart have some 60,000."""
SHORT_ARRAY = 4096
"""Entries of an array that is kept whatever its key is: one value for each layer, or a few names."""
VOCABULARY = frozenset(f"tokenizer.ggml.{name}" for name in ("tokens", "merges", "scores", "token_type"))
"""Keys whose arrays are kept at any length."""

BLOCKS: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
"""Type number -> name, weights per block, bytes per block."""
_WITHDRAWN = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8",
    36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
}  # fmt: skip
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_OLDER_MAGICS = {b"lmgg": "GGML", b"fmgg": "GGMF", b"tjgg": "GGJT", b"algg": "GGLA"}


class Strings(Sequence[str]):
    """An array of strings, kept as raw bytes until it is read: a vocabulary has a hundred thousand entries."""

    def __init__(self, raw: bytes, stops: Sequence[int], where: str) -> None:
        """raw: each string preceded by its length in 8 bytes; stops: the end of each string."""
        self._raw, self._stops, self._where = raw, stops, where

    def __len__(self) -> int:
        return len(self._stops)

    def __getitem__(self, index: int | slice) -> str | list[str]:  # type: ignore[override]
        if isinstance(index, slice):
            return self.decode()[index]
        return self._text(range(len(self))[index])

    def decode(self) -> list[str]:
        """Return all strings. Raises `CorruptModel` for invalid UTF-8."""
        raw = self._raw
        try:
            return [raw[start + 8 : stop].decode("utf-8") for start, stop in pairwise((0, *self._stops))]
        except UnicodeDecodeError:
            return [self._text(index) for index in range(len(self))]  # slower, but names the entry

    def _text(self, index: int) -> str:
        start = self._stops[index - 1] if index else 0
        try:
            return self._raw[start + 8 : self._stops[index]].decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorruptModel(f"{self._where} holds text that is not UTF-8.", f"Entry {index}: {error}.") from error


@dataclass(frozen=True, slots=True)
class LongArray:
    """An array that was not kept, because no reader needs an array of this length under its key."""

    num_entries: int

    def __repr__(self) -> str:
        return f"an array of {self.num_entries:,} entries"


Numbers = np.ndarray[Any, np.dtype[Any]]
"""The numbers of a vocabulary, as stored; a list of them would take up to ten times the memory."""
Value = int | float | bool | str | Strings | Numbers | list[int] | list[float] | list[bool] | LongArray


def plain(value: Value) -> Any:
    """Return a value with arrays as lists, which needs several times the memory of what is stored."""
    if isinstance(value, Strings):
        return value.decode()
    return value.tolist() if isinstance(value, np.ndarray) else value


@dataclass(frozen=True, slots=True)
class StoredTensor:
    block_type: str  # one of BLOCKS
    shape: tuple[int, ...]  # slowest first, as in torch: [rows, columns]
    start: int  # offset in the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    file: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, StoredTensor]


def read_header(file: Path) -> GGUFHeader:
    """Read a header; cached until the file changes. Raises `CorruptModel` or `UnsupportedModel` with the place."""
    try:
        state = file.stat()
    except OSError as error:
        raise CorruptModel(f"{file} cannot be read.", f"{error}.") from error
    return _read_header(file, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=4)
def _read_header(file: Path, size: int, mtime_ns: int) -> GGUFHeader:
    if size == 0:
        raise CorruptModel(f"{file} is empty.", hint="Download the file again; the download did not complete.")
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return parse_header(mapped, file)
    except OSError as error:
        raise CorruptModel(f"{file} cannot be read.", f"{error}.") from error


def parse_header(data: bytes | mmap.mmap, file: Path) -> GGUFHeader:
    """Parse a header. data: the whole file; file: only for errors."""
    reader = _Reader(data, file)
    reader.check_magic()
    num_tensors, num_entries = reader.number("Q", "the number of tensors"), reader.number("Q", "the number of entries")
    metadata = _read_metadata(reader, num_entries)
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        reader.fail("general.alignment", f"It is {_shown(alignment)}, which is not a power of two.")
    tensors = _read_tensors(reader, num_tensors, alignment)
    return GGUFHeader(file, metadata, tensors)


class _Reader:
    """A position in the file. Reads past the end raise `CorruptModel`."""

    def __init__(self, data: bytes | mmap.mmap, file: Path) -> None:
        self.data, self.file, self.size, self.at = data, file, len(data), 0
        self.kept_bytes = self.num_array_entries = 0

    @property
    def left(self) -> int:
        return self.size - self.at

    def fail(self, what: str, why: str) -> NoReturn:
        raise CorruptModel(f"{self.file} is damaged at byte {self.at:,}: {what}.", why, "Download the file again.")

    def keep(self, count: int, what: str) -> None:
        """Count bytes of metadata that stay in memory."""
        self.kept_bytes += count
        if self.kept_bytes > MAX_KEPT_BYTES:
            self.fail(what, f"The metadata up to here takes more than {format_bytes(MAX_KEPT_BYTES)} of memory.")

    def take(self, count: int, what: str) -> bytes:
        if count > self.left:
            self.fail(what, f"It has {count:,} bytes and {self.left:,} are left in the file.")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, code: str, what: str) -> int:
        """Return one integer of struct's type `code`."""
        value: int = self.scalar(code, what)  # type: ignore[assignment]
        return value

    def scalar(self, code: str, what: str) -> int | float | bool:
        value: int | float | bool = struct.unpack("<" + code, self.take(struct.calcsize(code), what))[0]
        return value

    def text(self, what: str) -> str:
        length = self.number("Q", what)
        self.keep(min(length, self.left) + 64, what)
        raw = self.take(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self.fail(what, f"{error}.")

    def check_magic(self) -> None:
        magic = self.take(min(4, self.left), "the magic")
        if magic != b"GGUF":
            self._refuse_magic(magic)
        version = self.number("I", "the version")
        if version not in VERSIONS:
            self._refuse_version(version)

    def _refuse_magic(self, magic: bytes) -> NoReturn:
        if magic in _OLDER_MAGICS:
            raise UnsupportedModel(
                f"{self.file} is in {_OLDER_MAGICS[magic]}, a format from before GGUF.",
                "It has been replaced by GGUF since 2023.",
                "Use a GGUF file of the same model.",
            )
        if self.data[:40].startswith(b"version https://git-lfs"):
            raise CorruptModel(
                f"{self.file} is a Git LFS pointer, not the file itself.", f"It has {self.size} bytes.", "git lfs pull"
            )
        raise CorruptModel(f"{self.file} is not a GGUF file.", f"It begins with {magic!r}.", "Download the file again.")

    def _refuse_version(self, version: int) -> NoReturn:
        known = " and ".join(map(str, VERSIONS))
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if 0 < swapped < 100:
            raise UnsupportedModel(
                f"{self.file} is a big-endian GGUF file.",
                "Only little-endian files are supported.",
                "Use a little-endian file.",
            )
        raise UnsupportedModel(f"{self.file} is GGUF version {version}.", f"Supported versions: {known}.")


def _read_metadata(reader: _Reader, count: int) -> dict[str, Value]:
    if count > reader.left // 13:  # the smallest entry: a key's length, a type, one byte
        reader.fail("the number of entries", f"It says {count:,}; {reader.left:,} bytes are left.")
    if count > MAX_ENTRIES:
        reader.fail("the number of entries", f"It says {count:,}; at most {MAX_ENTRIES:,} are read.")
    metadata: dict[str, Value] = {}
    for index in range(count):
        key = reader.text(f"the key of entry {index}")
        if key in metadata:
            reader.fail("the metadata", f"The key {_shown(key)} occurs twice.")
        metadata[key] = _read_value(reader, reader.number("I", f"the type of {_shown(key)}"), key)
        if reader.at > MAX_METADATA_BYTES:
            reader.fail(_shown(key), f"At most {format_bytes(MAX_METADATA_BYTES)} of metadata are read.")
    return metadata


def _read_value(reader: _Reader, kind: int, key: str) -> Value:
    if kind in _SCALARS:
        return reader.scalar(_SCALARS[kind], _shown(key))
    if kind == _STRING:
        return reader.text(_shown(key))
    if kind == _ARRAY:
        return _read_array(reader, _shown(key), is_long=key in VOCABULARY)
    raise UnsupportedModel(
        f"{reader.file} has a value of unknown type {kind}, {_shown(key)}.", "GGUF knows types 0 to 12."
    )


def _read_array(reader: _Reader, key: str, *, is_long: bool) -> Value:
    """Read an array. `is_long`: it is kept at any length."""
    kind, count = reader.number("I", key), reader.number("Q", key)
    keeps = is_long or count <= SHORT_ARRAY
    if kind in _SCALARS or kind == _STRING:
        least_bytes = 8 if kind == _STRING else struct.calcsize(_SCALARS[kind])
        if count > reader.left // least_bytes:
            reader.fail(key, f"It says {count:,} entries; {reader.left:,} bytes are left.")
        reader.num_array_entries += count
        if reader.num_array_entries > MAX_ARRAY_ENTRIES:
            reader.fail(key, f"It has {count:,} entries; the arrays of a file may have {MAX_ARRAY_ENTRIES:,} together.")
    if kind in _SCALARS:
        return _read_numbers(reader, _SCALARS[kind], count, key, keeps=keeps)
    if kind == _STRING:
        return _read_strings(reader, count, key, keeps=keeps)
    if kind == _ARRAY:
        raise UnsupportedModel(f"{reader.file} holds an array of arrays, {key}.", "No known GGUF key has such a value.")
    raise UnsupportedModel(f"{reader.file} has an array of unknown type {kind}, {key}.", "GGUF knows types 0 to 12.")


def _read_numbers(reader: _Reader, code: str, count: int, key: str, *, keeps: bool) -> Value:
    if not keeps:
        reader.at += count * struct.calcsize(code)
        return LongArray(count)
    raw = reader.take(count * struct.calcsize(code), key)
    numbers: Numbers = np.frombuffer(raw, dtype=f"<{_numpy(code)}")
    is_short = count <= SHORT_ARRAY
    reader.keep(40 * count if is_short else len(raw), key)
    return numbers.tolist() if is_short else numbers


def _read_strings(reader: _Reader, count: int, key: str, *, keeps: bool) -> Strings | LongArray:
    start = at = reader.at
    stops = array("Q")
    data, size, unpack = reader.data, reader.size, struct.Struct("<Q").unpack_from
    for index in range(count):
        stop = at + 8 + unpack(data, at)[0] if at + 8 <= size else size + 1
        if stop > size:
            reader.at = at
            reader.fail(key, f"String {index} of {count:,} extends past the end of the file.")
        at = stop
        if keeps:
            stops.append(at - start)
    reader.at = at
    if not keeps:
        return LongArray(count)
    reader.keep(at - start + 8 * count, key)
    return Strings(data[start:at], stops, f"{reader.file}: {key}")


def _numpy(code: str) -> str:
    return {"?": "b1", "f": "f4", "d": "f8"}.get(code) or ("i" if code.islower() else "u") + str(struct.calcsize(code))


def _read_tensors(reader: _Reader, count: int, alignment: int) -> dict[str, StoredTensor]:
    if count > reader.left // 33:  # the smallest entry: a name's length and a letter, one size, type, offset
        reader.fail("the number of tensors", f"It says {count:,}; {reader.left:,} bytes are left.")
    if count > MAX_TENSORS:
        reader.fail("the number of tensors", f"It says {count:,}; at most {MAX_TENSORS:,} are read.")
    entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    for index in range(count):
        name = reader.text(f"the name of tensor {index}")
        if name in entries:
            reader.fail("the tensors", f"{_shown(name)} occurs twice.")
        entries[name] = _read_entry(reader, _shown(name))
    data_start = -(-reader.at // alignment) * alignment
    tensors = {
        name: StoredTensor(block_type, shape, data_start + offset, num_bytes)
        for name, (block_type, shape, offset, num_bytes) in entries.items()
    }
    _check_places(reader, tensors, data_start, alignment)
    return tensors


def _read_entry(reader: _Reader, name: str) -> tuple[str, tuple[int, ...], int, int]:
    """Return (block type, shape, offset, bytes)."""
    num_dimensions = reader.number("I", name)
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        reader.fail(name, f"It has {num_dimensions:,} dimensions; a tensor has 1 to {MAX_DIMENSIONS}.")
    sizes = [reader.number("Q", name) for _ in range(num_dimensions)]
    number, offset = reader.number("I", name), reader.number("Q", name)
    if number in _WITHDRAWN:
        raise UnsupportedModel(
            f"{name} in {reader.file} is stored as {_WITHDRAWN[number]}.",
            "That layout was for one kind of processor and has been withdrawn.",
            "Use a file of another type: Q4_0, Q4_K_M, ...",
        )
    if number not in BLOCKS:
        raise UnsupportedModel(
            f"{name} in {reader.file} is stored in an unknown type, {number}.",
            f"Supported: {', '.join(kind for kind, _, _ in BLOCKS.values())}.",
        )
    block_type, per_block, block_bytes = BLOCKS[number]
    if min(sizes) < 1 or sizes[0] % per_block:
        reader.fail(name, f"Sizes {sizes} do not divide into blocks of {per_block} ({block_type}).")
    return block_type, tuple(sizes[::-1]), offset, prod(sizes) // per_block * block_bytes


def _check_places(reader: _Reader, tensors: Mapping[str, StoredTensor], data_start: int, alignment: int) -> None:
    by_place = sorted(tensors.items(), key=lambda item: item[1].start)
    for name, tensor in by_place:
        if (tensor.start - data_start) % alignment:
            reader.fail(_shown(name), f"Its offset {tensor.start - data_start:,} is not a multiple of {alignment}.")
    for (name, tensor), (after, following) in pairwise(by_place):
        if tensor.start + tensor.num_bytes > following.start:
            inside = tensor.start + tensor.num_bytes - following.start
            reader.fail(_shown(after), f"It begins {inside:,} bytes before {_shown(name)} ends.")
    end = max((tensor.start + tensor.num_bytes for tensor in tensors.values()), default=0)
    if end > reader.size:
        raise CorruptModel(
            f"{reader.file} is cut short.",
            f"It has {reader.size:,} bytes and its header asks for {end:,} ({format_bytes(end - reader.size)} are "
            f"missing).",
            "Download the file again; the download did not complete.",
        )


def _shown(value: object) -> str:
    """Return a name or value of the file, shortened for a message."""
    text = str(value)
    return text if len(text) <= 80 and text.isprintable() else repr(text[:80])
