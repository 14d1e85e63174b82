"""Named tensors on disk, whatever the file format: safetensors.py reads folders, gguf.py GGUF files.

Headers are checked before any allocation: shapes, offsets and sizes must agree and lie inside the file.
Does not know: the formats (opening.py chooses one), what the tensors mean.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from localllm.machine.memory import paused_collection

if TYPE_CHECKING:
    from torch import Tensor

FLOATS = {"F32": 4, "BF16": 2, "F16": 2}
"""Types of unquantised weights, and their bytes."""


READ_AHEAD = 512 * 2**10
"""Bytes that the system reads ahead at a request, which it cuts to what the disk takes at once."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as described by a header."""

    file: Path
    dtype: str  # as spelled by the file format: F32, BF16, I32, Q4_K, ...
    shape: tuple[int, ...]  # [rows, columns] of the logical matrix, even if it is stored in blocks
    num_bytes: int
    start: int | None = None  # where its bytes begin in the file; None: they are not in one piece


class Checkpoint(Protocol):
    """A checkpoint's tensors, as a context manager: its memory maps are released at the end."""

    @property
    def path(self) -> Path: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def tensor(self, name: str) -> Tensor:
        """Return a view into the file; copy it to keep it. Block types come as uint8 [rows, bytes of a row]."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


class CutCheckpoint:
    """Some tensors of a checkpoint, each cut to a part; a `Checkpoint`. The rest of a tensor is never read."""

    def __init__(self, whole: Checkpoint, cuts: Mapping[str, Sequence[range]]) -> None:
        """cuts: for each tensor, the ranges of its first dimensions."""
        self.path, self._whole, self._cuts = whole.path, whole, cuts
        self.tensors: Mapping[str, TensorInfo] = {
            name: _cut_info(whole.tensors[name], ranges) for name, ranges in cuts.items()
        }

    def tensor(self, name: str) -> Tensor:
        """Return a view into the file; copy it to keep it."""
        return self._whole.tensor(name)[tuple(slice(each.start, each.stop) for each in self._cuts[name])]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None: ...


class RenamedCheckpoint:
    """A checkpoint some of whose tensors have other names; a `Checkpoint`."""

    def __init__(self, whole: Checkpoint, names: Mapping[str, str]) -> None:
        """names: new ones by the stored ones."""
        self.path, self._whole = whole.path, whole
        self._stored = {names.get(name, name): name for name in whole.tensors}
        self.tensors: Mapping[str, TensorInfo] = {new: whole.tensors[name] for new, name in self._stored.items()}

    def tensor(self, name: str) -> Tensor:
        """Return a view into the file; copy it to keep it."""
        return self._whole.tensor(self._stored[name])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None: ...


class ExpertCheckpoint:
    """Tensors of one expert from a checkpoint that stores the same ones of all experts as one; a `Checkpoint`."""

    def __init__(self, whole: Checkpoint, names: Iterable[str], expert: int) -> None:
        self.path, self._whole, self._expert = whole.path, whole, expert
        infos = {name: whole.tensors[name] for name in names}
        self.tensors: Mapping[str, TensorInfo] = {
            name: replace(info, shape=info.shape[1:], num_bytes=info.num_bytes // max(1, *info.shape[:1]), start=None)
            for name, info in infos.items()
        }

    def tensor(self, name: str) -> Tensor:
        """Return a view into the file; copy it to keep it."""
        return self._whole.tensor(name)[self._expert]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None: ...


def _cut_info(whole: TensorInfo, ranges: Sequence[range]) -> TensorInfo:
    shape = (*map(len, ranges), *whole.shape[len(ranges) :])
    num_bytes = whole.num_bytes * prod(shape) // max(1, prod(whole.shape))
    return replace(whole, shape=shape, num_bytes=num_bytes, start=None)


_around_number = re.compile(r"\.(\d+)\.").split


@paused_collection()
def layer_forms(tensors: Mapping[str, TensorInfo]) -> dict[int, Hashable]:
    """Return for each layer the names, types and shapes of its tensors: one object for all layers stored alike."""
    forms: dict[int, set[Hashable]] = {}
    for name, info in tensors.items():
        if len(parts := _around_number(name, 1)) == 3:
            forms.setdefault(int(parts[1]), set()).add((parts[0], parts[2], info.dtype, tuple(info.shape)))
    known: dict[Hashable, Hashable] = {}
    found = {layer: frozenset(each) for layer, each in forms.items()}
    return {layer: known.setdefault(each, each) for layer, each in found.items()}


def drop_pages(tensors: Iterable[TensorInfo]) -> None:
    """Drop the pages of tensors from this process and from the system's page cache, which would grow at the cost of
    other memory. A page that other tensors share stays. A dropped page is read again when it is used, so what was
    changed in place in a view of the file is lost.

    Linux only; nothing happens elsewhere, or for files that the system does not let go of.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    for path, spans in _spans(tensors).items():
        maps = list(_maps_of(os.path.realpath(path)))
        with suppress(OSError), open(path, "rb") as file:
            for start, end in _whole_pages(spans):
                for address, offset, size in maps:  # the page cache keeps what a process has mapped
                    first, stop = max(start, offset), min(end, offset + size)
                    if first < stop:
                        place = ctypes.c_void_p(address + first - offset)
                        libc.madvise(place, ctypes.c_size_t(stop - first), mmap.MADV_DONTNEED)
                os.posix_fadvise(file.fileno(), start, end - start, os.POSIX_FADV_DONTNEED)


def read_ahead(tensors: Iterable[TensorInfo]) -> None:
    """Let the system read tensors into its page cache. A page fault of a mapped file reads much less at a time.

    Linux only, as `drop_pages`. Blocks while the disk's queue is full.
    """
    if sys.platform != "linux":
        return
    for path, spans in _spans(tensors).items():
        with suppress(OSError), path.open("rb") as file:
            for start, end in sorted(spans):
                for place in range(start, end, READ_AHEAD):
                    size = min(READ_AHEAD, end - place)
                    os.posix_fadvise(file.fileno(), place, size, os.POSIX_FADV_WILLNEED)


def _spans(tensors: Iterable[TensorInfo]) -> dict[Path, list[tuple[int, int]]]:
    """Return the (start, end) of tensors in each file."""
    spans: dict[Path, list[tuple[int, int]]] = {}
    for info in tensors:
        if info.start is not None:
            spans.setdefault(info.file, []).append((info.start, info.start + info.num_bytes))
    return spans


def _maps_of(path: str) -> Iterator[tuple[int, int, int]]:
    """Yield (address, offset in the file, bytes) of each mapping of a file in this process."""
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and fields[5] == path:
                start, end = (int(each, 16) for each in fields[0].split("-"))
                yield start, int(fields[2], 16), end - start


def _whole_pages(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) of the pages that lie within neighbouring spans of a file."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((start, end))
    for start, end in joined:
        first, stop = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if first < stop:
            yield first, stop


def is_gguf(path: Path) -> bool:
    """Return whether a path is a GGUF file, by its suffix or first bytes: other programs may leave the suffix out."""
    if path.suffix == ".gguf" or not path.is_file():
        return path.suffix == ".gguf"
    with path.open("rb") as stream:
        return stream.read(4) == b"GGUF"
