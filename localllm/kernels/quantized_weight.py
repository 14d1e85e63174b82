"""The interface of low-precision weight matrices of any format, and the values of one-byte weights.

    Fp8Weight      kernels/fp8_linear.py     e4m3 with scales per tensor, channel, block or group (MXFP8)
    Int8Weight     kernels/int8_linear.py    int8 per channel
    Int4Weight     kernels/int4_linear.py    4 or 8 bits in groups: AWQ, GPTQ
    GGUFWeight     kernels/gguf_linear.py    a GGUF file's blocks
    StackedWeight  kernels/linear.py         parts that are stored in different ways

`Linear` (models/layers/linear.py) holds one of these in place of a plain tensor. An instance is on one device, in the
layout that its kernels read; models/formats/ converts a checkpoint's tensors to that layout.
One-byte weights, W [N, K] float8_e4m3fn or int8, are converted to other types some rows at a time. Scales are fp32, per
channel [N] or per block [ceil(N/128), ceil(K/128)]; int8 may have zeros int8 [N]. Or they are powers of two for each 32
inputs: uint8 [N, ceil(K/32)], the exponent plus 127 (E8M0; OCP Microscaling Formats, 2023), of which 0 counts as 0.
Does not know: which layer it belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from localllm.kernels.launch import cdiv


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
    native_nbytes: int | None = None  # of its matrix for the CPU's native library; None: there is none

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        raise AssertionError("a meta weight has no values")

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        raise AssertionError("a meta weight has no values")

    def dequantize_rows(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        raise AssertionError("a meta weight has no values")


SCALE_BLOCK = 128  # rows and columns of W per scale, if scales are per block
SCALE_GROUP = 32  # columns of W per scale, if scales are powers of two
ROW_BLOCK = 4096  # rows of W that are converted to fp32 at a time; a multiple of SCALE_BLOCK


def dequantized(weight: Tensor, scales: Tensor, zeros: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return [N, K] in dtype, the dequantised one-byte weights; see the module's header."""
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    for first in range(0, weight.shape[0], ROW_BLOCK):
        rows = slice(first, first + ROW_BLOCK)
        out[rows] = rows_in_fp32(weight, scales, zeros, rows)
    return out


def rows_in_fp32(weight: Tensor, scales: Tensor, zeros: Tensor | None, rows: slice) -> Tensor:
    """Return rows [n, K] in fp32. rows: its start is a multiple of SCALE_BLOCK."""
    if scales.dtype == torch.uint8:
        powers = (scales[rows].int() << 23).view(torch.float32)
        return weight[rows].float().mul_(powers.repeat_interleave(SCALE_GROUP, dim=1)[:, : weight.shape[1]])
    wide = weight[rows].float()  # ROW_BLOCK is a multiple of SCALE_BLOCK: blocks begin where a slice does
    if scales.ndim == 2:
        blocks = scales[rows.start // SCALE_BLOCK : cdiv(rows.stop, SCALE_BLOCK)]
        per_column = blocks.repeat_interleave(SCALE_BLOCK, dim=1)[:, : wide.shape[1]]
        return wide.mul_(per_column.repeat_interleave(SCALE_BLOCK, dim=0)[: wide.shape[0]])
    if zeros is not None:
        wide.sub_(zeros[rows].float()[:, None])
    return wide.mul_(scales[rows][:, None])
