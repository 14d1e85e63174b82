"""Matrices whose tensors can be read in part: some rows and columns, in whole blocks.

A block is what cannot be read in part: a group of weights with one scale, a word of packed weights.
Does not know: any format.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from localllm.kernels.quantized_weight import QuantizedWeight
from localllm.models.formats.checkpoint import Checkpoint, CutCheckpoint
from localllm.models.formats.linear_format import StoredPart
from localllm.models.formats.matrices import MatrixFormat, naming_matrix, stacked, take_rows

MOST_SPANS = 8
"""Separate ranges of rows that are read one by one; rows in more ranges are chosen from one that holds all."""


class BlockFormat(MatrixFormat):
    """A `MatrixFormat` whose tensors have the matrix's rows and columns as dimensions."""

    @property
    @abstractmethod
    def _axes(self) -> Mapping[str, str]:
        """The dimensions of each tensor by its ending: N for outputs, K for inputs, as in "NK".

        A dimension may count words or groups, or be 1 if all share a value. Tensors that are left out are read whole.
        "K" alone is each input's group, which is not needed where inputs are in order.
        """

    @abstractmethod
    def _block(self, checkpoint: Checkpoint, stem: str) -> tuple[int, int]:
        """Return the rows and the columns of a block."""

    @abstractmethod
    def _matrix(self, checkpoint: Checkpoint, stem: str, device: torch.device) -> QuantizedWeight:
        """Return the whole matrix, already checked. checkpoint: may hold only a part of it."""

    def widened(self, checkpoint: Checkpoint, stem: str, columns: range) -> range | None:
        return whole_blocks(columns, self._block(checkpoint, stem)[1], self.shape(checkpoint, stem)[1])

    def _part(self, checkpoint: Checkpoint, part: StoredPart, device: torch.device) -> QuantizedWeight:
        stem, (rows, columns) = part.stem, self.shape(checkpoint, part.stem)
        own = range(columns) if part.columns is None else part.columns
        spans = [range(rows)]
        if part.order is not None:
            spans = row_spans(part.order, self._block(checkpoint, stem)[0], rows)
        cuts = [self._cut(checkpoint, stem, span, own) for span in spans]
        read = naming_matrix(stem, lambda: stacked([self._matrix(cut, stem, device) for cut in cuts], [part]))
        if part.order is None:
            return read
        places = places_in(spans, part.order)
        as_read = torch.equal(places, torch.arange(read.shape[0], device="cpu"))
        return read if as_read else take_rows(read, places.to(device), stem)

    def _cut(self, checkpoint: Checkpoint, stem: str, rows: range, columns: range) -> Checkpoint:
        """Return the tensors of whole blocks of the matrix."""
        n, k = self.shape(checkpoint, stem)
        ranges, cuts = {"N": (rows, n), "K": (columns, k)}, {}
        for name in self.tensors(checkpoint, stem):
            axes = self._axes.get(name.removeprefix(f"{stem}."), "")
            if axes != "K" or len(columns) == k:
                shape = checkpoint.tensors[name].shape
                cuts[name] = [along(*ranges[axis], size) for axis, size in zip(axes, shape, strict=False)]
        return CutCheckpoint(checkpoint, cuts)


def whole_blocks(wanted: range, block: int, total: int) -> range:
    """Return the smallest range of whole blocks that holds `wanted`. The last block may end at `total`."""
    return range(wanted.start // block * block, min(total, -(-wanted.stop // block) * block))


def along(wanted: range, total: int, size: int) -> range:
    """Return a range of 0 .. total - 1, of whole blocks, in a dimension whose `size` indices are words or groups."""
    if size == 1:
        return range(1)
    return range(wanted.start * size // total, wanted.stop * size // total)


def row_spans(order: Tensor, block: int, rows: int) -> list[range]:
    """Return ascending ranges of whole blocks of rows that hold the rows in `order`; at least one."""
    blocks = torch.unique(order.cpu() // block).tolist() or [0]
    edges = [at for at in range(1, len(blocks)) if blocks[at] > blocks[at - 1] + 1]
    edges = edges if len(edges) < MOST_SPANS else []
    firsts, lasts = [0, *edges], [*edges, len(blocks)]
    return [
        range(blocks[first] * block, min(rows, (blocks[last - 1] + 1) * block))
        for first, last in zip(firsts, lasts, strict=True)
    ]


def places_in(spans: Sequence[range], order: Tensor) -> Tensor:
    """Return the row of each stored row in the stack of `spans`: int64 [n] on the CPU."""
    order = order.cpu()
    starts = torch.tensor([span.start for span in spans], device="cpu")
    above = torch.tensor([0, *accumulate(len(span) for span in spans)][:-1], device="cpu")
    span = torch.searchsorted(starts, order, right=True) - 1
    return order - starts[span] + above[span]
