"""The values of one-byte weights: W [N, K] float8_e4m3fn or int8, converted to other types some rows at a time.

Scales are fp32, per channel [N] or per block [ceil(N/128), ceil(K/128)]; int8 may have zeros int8 [N].
"""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.kernels.launch import cdiv

SCALE_BLOCK = 128  # rows and columns of W per scale, if scales are per block
ROW_BLOCK = 4096  # rows of W that are converted to fp32 at a time; a multiple of SCALE_BLOCK


def dequantized(weight: Tensor, scales: Tensor, zeros: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return [N, K] in dtype, the dequantised one-byte weights; see the module's header."""
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    for first in range(0, weight.shape[0], ROW_BLOCK):
        rows = slice(first, first + ROW_BLOCK)
        out[rows] = rows_in_fp32(weight, scales, zeros, rows)
    return out


def rows_in_fp32(weight: Tensor, scales: Tensor, zeros: Tensor | None, rows: slice) -> Tensor:
    """Return these rows [n, K] in fp32, the first of which is a multiple of SCALE_BLOCK."""
    wide = weight[rows].float()  # ROW_BLOCK is a multiple of SCALE_BLOCK: blocks begin where a slice does
    if scales.ndim == 2:
        blocks = scales[rows.start // SCALE_BLOCK : cdiv(rows.stop, SCALE_BLOCK)]
        per_column = blocks.repeat_interleave(SCALE_BLOCK, dim=1)[:, : wide.shape[1]]
        return wide.mul_(per_column.repeat_interleave(SCALE_BLOCK, dim=0)[: wide.shape[0]])
    if zeros is not None:
        wide.sub_(zeros[rows].float()[:, None])
    return wide.mul_(scales[rows][:, None])
