"""Collective operations between the shards of a tensor-parallel model.

Does not know: processes, devices (ranks/ connects real ones), which matrices are split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Group(Protocol):
    """The shards of one pipeline stage. Every shard makes the same calls in the same order with the same shapes."""

    @property
    def size(self) -> int: ...

    @property
    def index(self) -> int: ...

    def sum_(self, x: Tensor) -> Tensor:
        """Add up x over all shards, in place. Every shard gets the same bits."""
        ...

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return all shards' x [..., own size] side by side along the last dimension, on every shard."""
        ...

    def gather_to_first(self, x: Tensor, sizes: Sequence[int]) -> Tensor | None:
        """Do the same on the first shard alone; the others get None."""
        ...

    def broadcast_(self, x: Tensor) -> Tensor:
        """Replace x by the first shard's x, in place."""
        ...


class Alone:
    """The group of a shard that shares its layers with no other: every call returns at once."""

    size, index = 1, 0

    def sum_(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        return x

    def gather_to_first(self, x: Tensor, sizes: Sequence[int]) -> Tensor | None:
        return x

    def broadcast_(self, x: Tensor) -> Tensor:
        return x
