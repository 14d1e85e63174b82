"""The interface between weights/ and a checkpoint format: how matrices of linear layers are stored.

A format finds the tensors of a matrix, stacks the matrices that one layer reads together, and returns the result in its
in-memory layout. Matrices that the format does not store are unquantised, and weights/ reads them.
Does not know: architectures, layers, where the file is.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from localllm.kernels.quantized_weight import QuantizedWeight
from localllm.models.formats.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A stored matrix [n, K], or some rows and columns of it."""

    stem: str  # the stored name without its suffix: model.layers.0.mlp.up_proj
    order: Tensor | None = None  # int64: row i of the result is the stored row order[i]; None: all rows, as stored
    transposed: bool = False  # stored as [K, n]
    columns: range | None = None  # inputs to take, as `LinearFormat.widened` returned them; None: all


class LinearFormat(Protocol):
    """One way to store matrices, with the parameters from the checkpoint's config."""

    @property
    def name(self) -> str:
        """Name for display, with the important numbers: AWQ, 4 bits, groups of 128."""
        ...

    @property
    def runs_as(self) -> str:
        """In-memory form for display: packed int4."""
        ...

    def notes_on(self, device: str) -> Sequence[str]:
        """Return sentences on what runs differently on a device (cpu, cuda) than the checkpoint says."""
        ...

    def ignores(self, name: str) -> bool:
        """Return whether a stored tensor is deliberately ignored; `notes_on` says so if that matters."""
        ...

    def kind(self, checkpoint: Checkpoint, stem: str) -> Hashable | None:
        """Return how this matrix is stored; None: unquantised. Adjacent parts of equal kind are read as one matrix."""
        ...

    def read(
        self, checkpoint: Checkpoint, parts: Sequence[StoredPart], device: torch.device, dtype: torch.dtype
    ) -> Tensor | QuantizedWeight:
        """Return parts of one kind stacked by rows. dtype: of activations. Raises `CorruptModel` if they disagree.

        Of the file, only the requested rows and columns are read, and what shares a block with them.
        """
        ...

    def read_meta(
        self, checkpoint: Checkpoint, parts: Sequence[StoredPart], device: torch.device, dtype: torch.dtype
    ) -> Tensor | QuantizedWeight:
        """Return the result of `read` for `device` with all tensors on `meta`, from headers alone."""
        ...

    def shape(self, checkpoint: Checkpoint, stem: str) -> tuple[int, int]:
        """Return (n, K) of the whole matrix in this format, from headers alone."""
        ...

    def widened(self, checkpoint: Checkpoint, stem: str, columns: range) -> range | None:
        """Return the smallest range of whole blocks that holds `columns`, which are not empty.

        A block is what cannot be read in part: a group of weights with one scale, a word of packed weights. None: the
        matrix can only be read with all of its columns, because they are not stored in order.
        """
        ...

    def tensors(self, checkpoint: Checkpoint, stem: str) -> Sequence[str]:
        """Return the names of the tensors that make up the matrix, without biases."""
        ...

    def dequantize(self, checkpoint: Checkpoint, stem: str) -> Tensor:
        """Return [n, K] fp32 on the CPU, for matrices outside linear layers, such as an embedding."""
        ...


@runtime_checkable
class TableFormat(LinearFormat, Protocol):
    """A format whose matrices can also be embeddings, which are looked up by row."""

    def is_table(self, checkpoint: Checkpoint, stem: str, device: torch.device) -> bool:
        """Return whether `read` returns a `QuantizedTable` on `device` for this matrix alone."""
        ...
