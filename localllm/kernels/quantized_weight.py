"""What a weight matrix of low precision can do, whatever its bits look like.

    Fp8Weight      kernels/fp8_linear.py     e4m3 with scales per tensor, channel or block
    Int8Weight     kernels/int8_linear.py    int8 per channel
    Int4Weight     kernels/int4_linear.py    4 or 8 bits in groups: AWQ, GPTQ
    GGUFWeight     kernels/gguf_linear.py    a GGUF file's blocks
    StackedWeight  kernels/stacked_weight.py parts that are stored in different ways

`Linear` (models/layers/linear.py) holds one in place of a plain tensor. An instance lies on one device, in the layout
its kernels read; what turns a checkpoint's tensors into that layout is in models/formats/.
Does not know: which layer it belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class QuantizedWeight(Protocol):
    """W [N, K]: N outputs, K inputs."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the matrix that is meant, padding left out."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes held on the device: quantised values, scales, zeros, indices."""
        ...

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] fp16, bf16 or fp32, bias [N] -> x W^T + bias [T, N] in x's dtype; T may be 0."""
        ...

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[N, K]: what the quantised values stand for, computed in fp32 and rounded once to dtype."""
        ...


class QuantizedTable(QuantizedWeight, Protocol):
    """A quantised matrix that gives single rows back: an embedding, and the head tied to it."""

    def dequantize_rows(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """rows [T] int64 -> [T, K]: these rows of `dequantize`."""
        ...


@dataclass(frozen=True, slots=True)
class PromisedWeight:
    """A weight of which only the size is known: what a loader will hold, told from headers."""

    shape: tuple[int, int]
    nbytes: int

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        raise AssertionError("a promised weight has no values")

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        raise AssertionError("a promised weight has no values")

    def dequantize_rows(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        raise AssertionError("a promised weight has no values")
