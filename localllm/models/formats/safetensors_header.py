"""The header of a safetensors file: an 8-byte length, then JSON with the place of each tensor.

It is untrusted. Checked are: sizes are whole numbers, tensors lie inside the file without overlap, and each shape
matches the tensor's bytes. Does not know: what tensors mean, other files of the checkpoint.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

from localllm.errors import CorruptModel
from localllm.models.formats.checkpoint import TensorInfo
from localllm.units import format_bytes

_WIDTHS = {1: "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0", 2: "F16 BF16 I16 U16", 4: "F32 I32 U32", 8: "F64 I64 U64"}
DTYPES = {name: width for width, names in _WIDTHS.items() for name in names.split()}
"""Bytes of the types that torch supports; the reader decides what a type is good for."""
LARGEST_HEADER = 100_000_000  # the limit in the format's specification


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Read a header. Raises `CorruptModel` with the file and the numbers that disagree."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            header_bytes = check_length(prefix, size, file)
            return parse_header(stream.read(header_bytes), size - 8 - header_bytes, file)
    except OSError as error:
        raise CorruptModel(f"Cannot read {file}.", f"{error}.") from error


def check_length(prefix: bytes, size: int, file: Path) -> int:
    """Return the length of the JSON. prefix: the first eight bytes of a file of `size` bytes."""
    header_bytes: int = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    if len(prefix) < 8 or 8 + header_bytes > size:
        raise _truncated(file, size, 8 + header_bytes)
    if header_bytes > LARGEST_HEADER:
        raise _damaged(file, f"It says that it has {header_bytes:,} bytes; {LARGEST_HEADER:,} are the format's limit.")
    return header_bytes


def parse_header(raw: bytes, data_bytes: int, file: Path) -> dict[str, TensorInfo]:
    """Parse a header. raw: the JSON; data_bytes: the length of the data behind it; file: only for errors."""
    try:
        header = json.loads(raw, object_pairs_hook=_without_twins)
    except (ValueError, RecursionError) as error:
        raise _damaged(file, f"{type(error).__name__}: {error}.") from error
    if not isinstance(header, dict):
        raise _damaged(file, f"It is a JSON {type(header).__name__}, not an object.")
    spans: dict[str, tuple[int, int]] = {}
    tensors: dict[str, TensorInfo] = {}
    for name, entry in header.items():
        if name != "__metadata__":
            dtype, shape, spans[name] = _entry(file, name, entry)
            tensors[name] = TensorInfo(file, dtype, shape, spans[name][1] - spans[name][0])
    _check_places(file, spans, data_bytes, 8 + len(raw))
    return tensors


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return values


def _entry(file: Path, name: str, entry: object) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    """Return (dtype, shape, (start, end)) of one tensor."""
    if not isinstance(entry, Mapping):
        raise _damaged(file, f"The entry of {name!r} is a {type(entry).__name__}, not an object.")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise _damaged(file, f"{name!r} has dtype {dtype!r}, shape {shape!r} and data_offsets {offsets!r}."[:300])
    start, end = offsets
    if end < start:
        raise _damaged(file, f"{name!r} ends at {end:,}, before it begins at {start:,}.")
    needed = prod(shape) * DTYPES.get(dtype, 0)
    if dtype in DTYPES and needed != end - start:
        raise CorruptModel(
            f"{name} in {file} has the wrong size.",
            f"Shape {shape} in {dtype} needs {needed:,} bytes, but the header says {end - start:,}.",
        )
    return dtype, tuple(shape), (start, end)


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)


def _check_places(file: Path, spans: Mapping[str, tuple[int, int]], data_bytes: int, header_bytes: int) -> None:
    wanted = max((end for _, end in spans.values()), default=0)
    if wanted > data_bytes:
        raise _truncated(file, header_bytes + data_bytes, header_bytes + wanted)
    by_place = sorted((span, name) for name, span in spans.items() if span[0] < span[1])
    for ((_, end), name), ((start, _), after) in pairwise(by_place):
        if start < end:
            raise _damaged(file, f"{after!r} begins {end - start:,} bytes before {name!r} ends.")


def _damaged(file: Path, why: str) -> CorruptModel:
    return CorruptModel(f"The header of {file} is damaged.", why, "Download the file again.")


def _truncated(file: Path, size: int, wanted: int) -> CorruptModel:
    return CorruptModel(
        f"{file} is cut short.",
        f"It has {size:,} bytes and its header asks for {wanted:,} ({format_bytes(wanted - size)} are missing).",
        "Download the file again; the download did not complete.",
    )
