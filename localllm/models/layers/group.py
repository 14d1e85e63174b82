"""Collective operations between the shards of a tensor-parallel model, and layers whose result is a part of a sum.

A matrix split by columns (row-parallel, arXiv:1909.08053) gives each shard a part of every output. Such parts pass
through whatever is linear, a factor or the sum with another part, and are added up once.
Does not know: processes, devices (ranks/ connects real ones), which matrices are split, how (weights/source.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch.nn.functional as F
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


class Projection(Protocol):
    """A matrix, or the part of it that a shard holds."""

    def __call__(self, x: Tensor, first_row: int = 0) -> Tensor:
        """Map [T, K] to [T, N], K being the shard's inputs. first_row: index of x's first row in the step."""
        ...


class PaddedInput:
    """A matrix that begins and ends at its format's blocks, so that it has inputs of other shards: those are zeros."""

    __slots__ = ("after", "before", "linear")

    def __init__(self, linear: Projection, before: int, after: int) -> None:
        """before, after: inputs of the matrix that belong to the shards before and after this one."""
        self.linear, self.before, self.after = linear, before, after

    def __call__(self, x: Tensor, first_row: int = 0) -> Tensor:
        return self.linear(F.pad(x, (self.before, self.after)), first_row)


class GatheredInput:
    """A matrix that cannot be split by columns, and so is split by rows: it needs the inputs of all shards."""

    __slots__ = ("first", "group", "linear", "num_rows", "order", "sizes")

    def __init__(
        self, linear: Projection, group: Group, sizes: Sequence[int], first: int, num_rows: int,
        order: Tensor | None = None,
    ) -> None:  # fmt: skip
        """sizes: inputs of each shard. first: this shard's first row of the num_rows rows of the whole matrix. order:
        where each of the matrix's inputs is among the shards'; None: in the same order."""
        self.linear, self.group, self.sizes = linear, group, tuple(sizes)
        self.first, self.num_rows, self.order = first, num_rows, order

    def __call__(self, x: Tensor, first_row: int = 0) -> Tensor:
        """Return [T, num_rows]: zeros in the rows of other shards."""
        gathered = self.group.gather(x, self.sizes)
        y = self.linear(gathered if self.order is None else gathered[:, self.order], first_row)
        return F.pad(y, (self.first, self.num_rows - self.first - y.shape[1]))


class SplitHead:
    """The rows of a head that a shard holds. The first shard gets the logits of all shards, the others None."""

    __slots__ = ("group", "linear", "sizes")

    def __init__(self, linear: Projection, group: Group, sizes: Sequence[int]) -> None:
        """sizes: rows of each shard."""
        self.linear, self.group, self.sizes = linear, group, tuple(sizes)

    def __call__(self, x: Tensor) -> Tensor | None:
        return self.group.gather_to_first(self.linear(x), self.sizes)


class Summed:
    """A part of a layer, attention or feed-forward, whose results are added up over all shards."""

    __slots__ = ("group", "part")

    def __init__(self, part: Callable[..., Tensor], group: Group) -> None:
        self.part, self.group = part, group

    def __call__(self, *inputs: Any) -> Tensor:
        return self.group.sum_(self.part(*inputs))
