"""A shard's share of a layer's matrices: rows of those that are split by outputs, columns of those split by inputs.

Does not know: files, formats, layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.models.layers.group import Group
from localllm.models.layers.split import GatheredInput, PaddedInput, Projection
from localllm.models.spec.shard import Shard, even
from localllm.models.weights.source import TensorSource


@dataclass(frozen=True, slots=True)
class ShardWeights:
    """A source of tensors, and the shard that takes its share of them."""

    source: TensorSource
    shard: Shard
    group: Group

    def row_parallel(
        self, stem: str, shape: tuple[int, int], own: range, counts: tuple[int, ...], *, bias: bool = False
    ) -> Projection:
        """Return the layer that maps the shard's inputs `own` to its part of the sum over all shards.

        shape: of the whole matrix. counts: inputs of each shard. The bias is in the part of the first shard that has
        inputs.
        """
        if len(own) == shape[1]:
            return self.source.linear([stem], shape, bias=bias)
        held = self.source.widened(stem, own, shape[1])
        if held is None:
            return self._by_rows(stem, shape, counts, bias=bias)
        linear = self.source.linear([stem], shape, bias=bias and own.start == 0, columns=held)
        return linear if held == own else PaddedInput(linear, own.start - held.start, held.stop - own.stop)

    def _by_rows(self, stem: str, shape: tuple[int, int], counts: tuple[int, ...], *, bias: bool) -> Projection:
        rows = even(shape[0], self.shard.size)
        first = sum(rows[: self.shard.index])
        order = torch.arange(first, first + rows[self.shard.index], device="cpu")
        return GatheredInput(
            self.source.linear([stem], shape, bias=bias, order=order), self.group, counts, first, shape[0]
        )


def stacked_rows(own: range, size: int, copies: int = 1) -> Tensor | None:
    """Return the rows `own` of each of `copies` matrices of `size` rows that are stacked; None: all of them."""
    if len(own) == size:
        return None
    return torch.cat([torch.arange(own.start, own.stop, device="cpu") + size * copy for copy in range(copies)])
