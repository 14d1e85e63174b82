"""Layers of a tensor-parallel model whose result is a part of a sum over all shards, and the sum.

A matrix split by columns (row-parallel, arXiv:1909.08053) gives each shard a part of every output. Such parts pass
through whatever is linear, a factor or the sum with another part, and are added up once.
Does not know: which matrices are split, how (architectures/shard_weights.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor

from localllm.models.layers.group import Group


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

    __slots__ = ("first", "group", "linear", "num_rows", "sizes")

    def __init__(self, linear: Projection, group: Group, sizes: Sequence[int], first: int, num_rows: int) -> None:
        """sizes: inputs of each shard. first: this shard's first row of the num_rows rows of the whole matrix."""
        self.linear, self.group, self.sizes = linear, group, tuple(sizes)
        self.first, self.num_rows = first, num_rows

    def __call__(self, x: Tensor, first_row: int = 0) -> Tensor:
        """Return [T, num_rows]: zeros in the rows of other shards."""
        y = self.linear(self.group.gather(x, self.sizes), first_row)
        return F.pad(y, (self.first, self.num_rows - self.first - y.shape[1]))


class Summed:
    """A part of a layer, attention or feed-forward, whose results are added up over all shards."""

    __slots__ = ("group", "part")

    def __init__(self, part: Callable[..., Tensor], group: Group) -> None:
        self.part, self.group = part, group

    def __call__(self, *inputs: Any) -> Tensor:
        return self.group.sum_(self.part(*inputs))
