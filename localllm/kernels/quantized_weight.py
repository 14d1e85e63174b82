"""The interface of low-precision weight matrices of any format.

    Fp8Weight      kernels/fp8_linear.py     e4m3 with scales per tensor, channel or block
    Int8Weight     kernels/int8_linear.py    int8 per channel
    Int4Weight     kernels/int4_linear.py    4 or 8 bits in groups: AWQ, GPTQ
    GGUFWeight     kernels/gguf_linear.py    a GGUF file's blocks
    StackedWeight  kernels/stacked_weight.py parts that are stored in different ways

`Linear` (models/layers/linear.py) holds one of these in place of a plain tensor. An instance is on one device, in the
layout that its kernels read; models/formats/ converts a checkpoint's tensors to that layout.
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
        """(N, K) of the matrix without padding."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes on the device: quantised values, scales, zeros, indices."""
        ...

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x W^T + bias [T, N] in x's dtype. x [T, K] fp16, bf16 or fp32, T may be 0; bias [N]."""
        ...

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return [N, K], the dequantised values, computed in fp32 and rounded once to dtype."""
        ...


class QuantizedTable(QuantizedWeight, Protocol):
    """A quantised matrix whose single rows can be read: an embedding, and the head tied to it."""

    def dequantize_rows(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return [T, K], the given rows [T] int64 of `dequantize`."""
        ...


@dataclass(frozen=True, slots=True)
class MetaWeight:
    """A weight of known size without data: read from a checkpoint's headers before loading."""

    shape: tuple[int, int]
    nbytes: int

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        raise AssertionError("a meta weight has no values")

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        raise AssertionError("a meta weight has no values")

    def dequantize_rows(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        raise AssertionError("a meta weight has no values")
