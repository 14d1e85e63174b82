"""Named tensors on disk, whatever the file format: safetensors.py reads folders, gguf.py GGUF files.

Headers are checked before any allocation: shapes, offsets and sizes must agree and lie inside the file.
Does not know: the formats (opening.py chooses one), what the tensors mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from torch import Tensor

FLOATS = {"F32": 4, "BF16": 2, "F16": 2}
"""Types of unquantised weights, and their bytes."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as described by a header."""

    file: Path
    dtype: str  # as spelled by the file format: F32, BF16, I32, Q4_K, ...
    shape: tuple[int, ...]  # [rows, columns] of the logical matrix, even if it is stored in blocks
    num_bytes: int


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


def _cut_info(whole: TensorInfo, ranges: Sequence[range]) -> TensorInfo:
    shape = (*map(len, ranges), *whole.shape[len(ranges) :])
    return replace(whole, shape=shape, num_bytes=whole.num_bytes * prod(shape) // max(1, prod(whole.shape)))


def is_gguf(path: Path) -> bool:
    """Return whether a path is a GGUF file, by its suffix or first bytes: other programs may leave the suffix out."""
    if path.suffix == ".gguf" or not path.is_file():
        return path.suffix == ".gguf"
    with path.open("rb") as stream:
        return stream.read(4) == b"GGUF"
