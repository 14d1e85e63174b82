"""A picture ready for the tower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Processed:
    """One picture as tensors, with the text that stands for it in a prompt. It is the `inputs` of an engine's
    `MediaSpan` (engine/media.py)."""

    tensors: Mapping[str, Any]  # by the keywords of the tower; on the host
    prompt: str  # the text that replaces the picture's mark: `rows` placeholders, and the marks around and between
    rows: int  # placeholder tokens in `prompt`
    grid: tuple[int, int] | None  # rows and columns of tokens; None: positions are those of text
    both_ways: bool
    size: tuple[int, int]  # width and height of the upright picture
    shown: tuple[int, int]  # width and height after scaling
    digest: bytes  # 16: of the file's bytes, the processor and what was asked of it

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(int(tensor.nbytes) for tensor in self.tensors.values() if hasattr(tensor, "nbytes"))

    def pixels(self) -> Mapping[str, Any]:
        return self.tensors
