"""A checkpoint in safetensors files: a single one, or several with an index.

A file is an 8-byte length, JSON with the place of each tensor, and the tensors, which are memory-mapped, so reading one
only costs the copy that its user makes. The header is untrusted. Checked before any tensor is read: sizes are whole
numbers, tensors lie inside the file without overlap, and each shape matches the tensor's bytes. So an incomplete
download gives an error with its numbers instead of a failure later.
Does not know: what the tensors mean.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeGuard

import msgspec

from localllm.errors import CorruptModel, ModelNotFound, UnsupportedModel
from localllm.files.json_file import read_json
from localllm.machine.memory import paused_collection
from localllm.models.formats.checkpoint import TensorInfo
from localllm.units import format_bytes

if TYPE_CHECKING:
    from torch import Tensor

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
    tensors: dict[str, TensorInfo] = {}
    last, are_sorted = 0, True
    for name, entry in _entries(raw, file).items():
        start, end = entry.data_offsets
        width, stored = DTYPES.get(entry.dtype), end - start
        if stored < 0:
            raise _damaged(file, f"{name!r} ends at {end:,}, before it begins at {start:,}.")
        if width is not None and (needed := prod(entry.shape) * width) != stored:
            raise CorruptModel(
                f"{name} in {file} has the wrong size.",
                f"Shape {[*entry.shape]} in {entry.dtype} needs {needed:,} bytes, but the header says {stored:,}.",
            )
        are_sorted, last = are_sorted and start >= last, end
        tensors[name] = TensorInfo(file, entry.dtype, entry.shape, stored, 8 + len(raw) + start)
    _check_places(file, tensors, data_bytes, 8 + len(raw), are_sorted=are_sorted)
    return tensors


_Size = Annotated[int, msgspec.Meta(ge=0)]


class _HeaderEntry(msgspec.Struct, gc=False):
    """The description of one tensor in a header. Its fields have defaults since `__metadata__`, which is another
    object, is decoded as an entry, too."""

    dtype: str = ""
    shape: tuple[_Size, ...] = (-1,)
    data_offsets: tuple[_Size, _Size] = (-1, -1)

    def is_whole(self) -> bool:
        return self.dtype != "" and self.shape != (-1,) and self.data_offsets[0] >= 0


_decode = msgspec.json.Decoder(dict[str, _HeaderEntry]).decode


def _entries(raw: bytes, file: Path) -> dict[str, _HeaderEntry]:
    """Return the entries of the tensors. A checkpoint may have 40,000, so an ordinary header is decoded at once: it has
    no escapes, one object for each name, and each field once in each. Others are checked part by part."""
    try:
        entries = _decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _checked_entries(raw, file)
    objects = 1 + len(entries)
    entries.pop("__metadata__", None)
    counts = {raw.count(b'"%s"' % field.encode()) for field in _HeaderEntry.__struct_fields__}
    is_ordinary = b"\\" not in raw and raw.count(b"{") == objects and counts <= {len(entries)}
    if is_ordinary and all(entry.is_whole() for entry in entries.values()):
        return entries
    return _checked_entries(raw, file)


def _checked_entries(raw: bytes, file: Path) -> dict[str, _HeaderEntry]:
    try:
        header = json.loads(raw, object_pairs_hook=_without_twins)
    except (ValueError, RecursionError) as error:
        raise _damaged(file, f"{type(error).__name__}: {error}.") from error
    if not isinstance(header, dict):
        raise _damaged(file, f"It is a JSON {type(header).__name__}, not an object.")
    return {name: _entry(file, name, entry) for name, entry in header.items() if name != "__metadata__"}


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return values


def _entry(file: Path, name: str, entry: object) -> _HeaderEntry:
    if not isinstance(entry, Mapping):
        raise _damaged(file, f"The entry of {name!r} is a {type(entry).__name__}, not an object.")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise _damaged(file, f"{name!r} has dtype {dtype!r}, shape {shape!r} and data_offsets {offsets!r}."[:300])
    return _HeaderEntry(dtype, tuple(shape), (offsets[0], offsets[1]))


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and set(map(type, value)) <= {int} and min(value, default=0) >= 0


def _check_places(
    file: Path, tensors: Mapping[str, TensorInfo], data_bytes: int, header_bytes: int, *, are_sorted: bool
) -> None:
    """are_sorted: each tensor begins at or after the end of the one before it."""
    spans = [(info.start or 0, (info.start or 0) + info.num_bytes) for info in tensors.values()]
    wanted = max((end for _, end in spans), default=0)
    if wanted > header_bytes + data_bytes:
        raise _truncated(file, header_bytes + data_bytes, wanted)
    if are_sorted:
        return
    by_place = sorted((span, name) for span, name in zip(spans, tensors, strict=True) if span[0] < span[1])
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


INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


class SafetensorsCheckpoint:
    """The named tensors of a folder; a `Checkpoint`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: Mapping[str, TensorInfo] = read_headers(path)
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.clear()

    def tensor(self, name: str) -> Tensor:
        """Return a view into the map; copy it to keep it."""
        info = self.tensors[name]
        if info.dtype not in DTYPES:
            raise UnsupportedModel(
                f"{name} in {info.file.name} is stored as {info.dtype}.", f"Supported: {', '.join(DTYPES)}."
            )
        tensor: Tensor = self._file(info.file).get_tensor(name)
        return tensor

    def _file(self, file: Path) -> Any:
        if file not in self._open:
            from safetensors import SafetensorError, safe_open

            try:
                self._open[file] = safe_open(str(file), framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise CorruptModel(f"Cannot read {file}.", str(error), "Download the file again.") from error
        return self._open[file]


@paused_collection()
def read_headers(path: Path) -> dict[str, TensorInfo]:
    """Return every tensor of the folder by name. Raises `CorruptModel` with the file and the numbers that disagree."""
    tensors: dict[str, TensorInfo] = {}
    for file in _files(path):
        found = read_header(file)
        for name in tensors.keys() & found.keys():
            raise CorruptModel(f"{name} is stored twice, in {tensors[name].file.name} and in {file.name}.")
        tensors |= found
    return tensors


def _files(path: Path) -> list[Path]:
    if (path / INDEX).is_file():
        return _indexed_files(path)
    files = sorted(path.glob("*.safetensors"))
    if (path / "model.safetensors") in files:
        return [path / "model.safetensors"]  # some repositories also have a consolidated copy
    if not files:
        _refuse(path)
    return files


def _indexed_files(path: Path) -> list[Path]:
    try:
        names = sorted(set(read_json(path / INDEX)["weight_map"].values()))
        files = [path / name for name in names]
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptModel(f"Cannot read {path / INDEX}.", f"{type(error).__name__}: {error}.") from error
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CorruptModel(
            f"{len(missing)} of the checkpoint's {len(files)} files are missing from {path}.",
            f"Missing: {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}.",
            "Download the model again; the download is not complete.",
        )
    return files


def _refuse(path: Path) -> None:
    names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    if any(name.endswith(".gguf") for name in names):
        raise UnsupportedModel(f"{path} holds GGUF files.", "Pass the path of one GGUF file.")
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles:
        raise UnsupportedModel(
            f"{path} holds weights only as pickles ({', '.join(pickles[:3])}).",
            "Opening a pickle can run code, so only safetensors are supported.",
            "Convert it with transformers: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)",
        )
    raise ModelNotFound(
        f"{path} holds no weights.",
        "There is no .safetensors file in it.",
        "Download the model again; the download is not complete.",
    )
