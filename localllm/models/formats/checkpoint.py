"""Named tensors on disk, whatever file they are in. safetensors.py has one for folders, gguf.py one for GGUF files.

Headers are checked before anything is allocated: shapes, offsets and sizes agree, and lie inside the file.
Does not know: what the tensors mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from torch import Tensor

FLOATS = {"F32": 4, "BF16": 2, "F16": 2}
"""Types that hold plain weights, and their bytes."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a header says of one tensor."""

    file: Path
    dtype: str  # as the file's format spells it: F32, BF16, I32, Q4_K, ...
    shape: tuple[int, ...]  # [rows, columns] of the matrix that is meant, also where it is stored in blocks
    num_bytes: int


class Checkpoint(Protocol):
    """A context manager: what it has mapped is dropped at the end."""

    @property
    def path(self) -> Path: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def tensor(self, name: str) -> Tensor:
        """A view into the file: copy what must outlive this object. Blocks come as [rows, bytes of a row] uint8."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


def is_gguf(path: Path) -> bool:
    """By its name, or by its first bytes: where other programs keep such files, they need not end in .gguf."""
    if path.suffix == ".gguf" or not path.is_file():
        return path.suffix == ".gguf"
    with path.open("rb") as stream:
        return stream.read(4) == b"GGUF"


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in folder or GGUF file `path`. Raises `CorruptModel`, `UnsupportedModel`, `ModelNotFound`."""
    if is_gguf(path):
        from localllm.models.formats.gguf import open_gguf

        return open_gguf(path)
    from localllm.models.formats.safetensors import SafetensorsCheckpoint

    return SafetensorsCheckpoint(path)
