"""How a checkpoint stores the matrices of its linear layers: the joint between weights.py and each format's file.

A format finds the tensors that make up a matrix, puts several matrices that one layer reads together above one
another, and gives back the matrix as it will lie in memory. What it does not hold is plain and weights.py reads it.
Does not know: architectures, layers, where the file is.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

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

    def kind(self, checkpoint: Checkpoint, stem: str) -> Hashable | None:
        """How this matrix is stored; None: plainly. Parts of equal kind, side by side, are read as one matrix."""
        ...

    def read(
        self, checkpoint: Checkpoint, parts: Sequence[Part], device: torch.device, dtype: torch.dtype
    ) -> Tensor | QuantizedWeight:
        """The parts, all of one kind, above one another. dtype: of activations. `CorruptModel` where they disagree."""
        ...

    def held_bytes(
        self, checkpoint: Checkpoint, parts: Sequence[Part], device: torch.device, dtype: torch.dtype
    ) -> int:
        """Bytes of what `read` returns, from headers alone."""
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
