"""How a checkpoint stores the matrices of its linear layers: the joint between weights.py and each format's file.

A format finds the tensors that make up a matrix, puts several matrices that one layer reads together above one
another, and gives back the matrix as it will lie in memory. What it does not hold is plain and weights.py reads it.
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
class Part:
    """A stored matrix [n, K]."""

    stem: str  # the stored name without its ending: model.layers.0.mlp.up_proj
    order: Tensor | None = None  # [n] int64: row i of what is wanted is the stored row order[i]; None: as stored
    transposed: bool = False  # stored as [K, n]


class LinearFormat(Protocol):
    """One way to store matrices, with what the checkpoint's config says of it."""

    @property
    def name(self) -> str:
        """For people, with the numbers that matter: AWQ, 4 bits, groups of 128."""
        ...

    @property
    def runs_as(self) -> str:
        """What the matrices are in memory, for people: packed int4."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What runs in another way than the checkpoint says, a sentence each."""
        ...

    def ignores(self, name: str) -> bool:
        """A stored tensor that is left out on purpose; `notes` say so where it would mean something."""
        ...

    def kind(self, checkpoint: Checkpoint, stem: str) -> Hashable | None:
        """How this matrix is stored; None: plainly. Parts of equal kind, side by side, are read as one matrix."""
        ...

    def read(
        self, checkpoint: Checkpoint, parts: Sequence[Part], device: torch.device, dtype: torch.dtype
    ) -> Tensor | QuantizedWeight:
        """The parts, all of one kind, above one another. dtype: of activations. `CorruptModel` where they disagree."""
        ...

    def promise(self, checkpoint: Checkpoint, parts: Sequence[Part], dtype: torch.dtype) -> Tensor | QuantizedWeight:
        """What `read` returns, on the `meta` device, from headers alone."""
        ...

    def shape(self, checkpoint: Checkpoint, stem: str) -> tuple[int, int]:
        """(n, K) of a matrix that this format holds, from headers alone."""
        ...

    def tensors(self, checkpoint: Checkpoint, stem: str) -> Sequence[str]:
        """Names of the stored tensors that make up the matrix, biases apart."""
        ...

    def dequantize(self, checkpoint: Checkpoint, stem: str) -> Tensor:
        """[n, K] fp32 on the CPU: for the few matrices that are no linear layer, an embedding for one."""
        ...


@runtime_checkable
class TableFormat(LinearFormat, Protocol):
    """One whose matrices can be embeddings too: `read` gives what single rows can be taken from."""

    def is_table(self, checkpoint: Checkpoint, stem: str) -> bool:
        """Whether `read` of this matrix alone gives a `QuantizedTable`."""
        ...
