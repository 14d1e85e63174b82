"""Quantises rows of activations to unsigned bytes around 128, the left operand of a product with int8 weights on a CPU.

    x[t, k] is about (code[t, k] - 128) * step[t]

One byte has 127 steps up to a row's largest magnitude. That suffices for a row without outliers: normally distributed
values have an error of 0.8 % (rms). A few values far above the others, which are known in trained models (Dettmers et
al. 2022, arXiv:2208.07339), make the steps too coarse for the rest. Such a row gets a second byte: it is multiplied
twice, as its high and its low bytes, and then has 32512 steps. No row then loses more than MAX_PEAK / 440 = 2.7 %. If
there are only a few rows, all of them get it, because a product limited by reading the weights has time for it.
Does not know: the weights.
"""

from __future__ import annotations

import math
import threading
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

FINE_ROWS = 2  # up to here all rows get two bytes: four rows take oneDNN as long as one
LEAST_ROWS = 4  # one row is padded to so many: four rows take 0.85 of the time of one or two
MAX_PEAK = 12.0  # largest magnitude, relative to the rms of its row, for which one byte suffices
ONE_BYTE, TWO_BYTES = 127.0, 127.0 * 256
MIDDLE = 128 * 256 + 128  # of two bytes
TINY = 1e-30  # smaller steps count as 0


class Codes(NamedTuple):
    bytes: Tensor  # [T + fine or more, K] uint8: one for each row, then the low bytes of rows with two
    step: Tensor | float  # [T, 1] fp32, or the step of the only row: the unit of the lowest byte
    fine: Tensor | None  # rows with two bytes [fine] int64; None: all of them, or none


def encode(x: Tensor) -> Codes:
    """Encode x [T, K]. The codes are valid until the thread's next call.
    A row with NaN or infinity is decoded to non-finite values."""
    wide = x.float()
    if x.shape[0] == 1:
        return _one_row(wide)
    if x.shape[0] <= FINE_ROWS:
        return _two_bytes(wide, wide.abs().amax(dim=1, keepdim=True), None)
    peak = wide.abs().amax(dim=1, keepdim=True)
    fine = (peak.square().mul_(x.shape[1]) > wide.square().sum(dim=1, keepdim=True).mul_(MAX_PEAK**2)).squeeze(1)
    count = int(fine.sum())
    if count == 0:
        return Codes(_rounded(wide, peak, ONE_BYTE, 128).to(torch.uint8), peak / ONE_BYTE, None)
    return _two_bytes(wide, peak, None if count == x.shape[0] else fine.nonzero().squeeze(1))


def decode(products: Tensor, codes: Codes, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Decode products [T + fine or more, N] fp32, sums over (code - 128) * w, overwritten -> x W^T + bias [T, N]."""
    if isinstance(codes.step, float):
        out = torch.add(products[1:2], products[0:1], alpha=256)
        out = out.mul_(codes.step) if bias is None else torch.add(bias.float(), out, alpha=codes.step)
        return out.to(dtype)
    rows = codes.step.shape[0]
    if codes.fine is not None:
        out = products[:rows].mul_(codes.step * 256)
        out.index_add_(0, codes.fine, products[rows:].mul_(codes.step[codes.fine]))
        out = out if bias is None else out.add_(bias)
    else:
        if products.shape[0] > rows:
            products = torch.add(products[rows : 2 * rows], products[:rows], alpha=256)
        out = products.mul_(codes.step) if bias is None else torch.addcmul(bias.float(), products, codes.step)
    return out.to(dtype)


def _one_row(wide: Tensor) -> Codes:
    """Encode one row. When decoding one stream, the cost of so few numbers is that of the calls,
    and numpy's cost half of torch's.

    The steps are relative to the row's norm, which is never less than its largest magnitude. The error is therefore
    sqrt(K) / 112600 of the rms, a thousandth at K = 12 thousand.
    """
    values = wide.numpy()[0]
    buffers = _buffers.for_columns(values.shape[0])
    with np.errstate(over="ignore", under="ignore"):
        np.multiply(values, values, out=buffers.scaled)
        step = math.sqrt(buffers.scaled.sum()) / TWO_BYTES
        if not math.isfinite(step):
            return Codes(buffers.bytes, math.nan, None)
        np.multiply(values, 1 / step if step > TINY else 0.0, out=buffers.scaled)
    np.add(buffers.scaled, MIDDLE + 0.5, out=buffers.scaled)
    np.copyto(buffers.codes, buffers.scaled, casting="unsafe")
    np.copyto(buffers.high, buffers.codes_high)
    np.copyto(buffers.low, buffers.codes_low)
    return Codes(buffers.bytes, step, None)


def _two_bytes(wide: Tensor, peak: Tensor, fine: Tensor | None) -> Codes:
    """Encode code = 256 * high + low, both bytes around 128, so that either is a row of the same product."""
    codes, rows = _rounded(wide, peak, TWO_BYTES, MIDDLE), wide.shape[0]
    low = codes if fine is None else codes[fine]
    out = torch.empty((rows + low.shape[0], wide.shape[1]), dtype=torch.uint8)
    torch.bitwise_right_shift(codes, 8, out=out[:rows])
    out[rows:] = low  # only the lower 8 bits are kept
    return Codes(out, peak / TWO_BYTES, fine)


def _rounded(wide: Tensor, peak: Tensor, limit: float, middle: int) -> Tensor:
    """Return x * limit / peak + middle as int32, rounded to nearest:
    all values are positive, so truncation rounds down.

    In a row of zeros 0 / 0 gives arbitrary codes, and the step of 0 makes them 0.
    """
    return torch.addcmul(_constant(middle + 0.5), wide, _constant(limit) / peak).to(torch.int32)


class _RowBuffers:
    """Buffers of `_one_row`, allocated once for each thread and K."""

    def __init__(self, columns: int) -> None:
        with torch.inference_mode(False):  # inference tensors cannot be written to outside of inference mode
            self.bytes = torch.zeros((LEAST_ROWS, columns), dtype=torch.uint8, device="cpu")
        self.high, self.low = self.bytes.numpy()[:2]
        self.scaled, self.codes = np.empty(columns, np.float32), np.empty(columns, np.int32)
        each = self.codes.astype("<i4", copy=False).view(np.uint8)
        self.codes_low, self.codes_high = each[::4], each[1::4]


class _ThreadBuffers(threading.local):
    def __init__(self) -> None:
        self.by_columns: dict[int, _RowBuffers] = {}

    def for_columns(self, columns: int) -> _RowBuffers:
        if columns not in self.by_columns:
            self.by_columns[columns] = _RowBuffers(columns)
        return self.by_columns[columns]


_buffers = _ThreadBuffers()


@cache
def _constant(value: float) -> Tensor:
    return torch.tensor(value, device="cpu")
