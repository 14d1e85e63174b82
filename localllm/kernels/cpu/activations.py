"""Rows of activations as unsigned bytes around 128, the left side of a product with int8 weights on a CPU.

    x[t, k] is about (code[t, k] - 128) * step[t]

One byte has 127 steps up to a row's largest magnitude. That is enough for a row without outliers: normally
distributed values are off by 0.8 % (rms). A few values that tower over the others, which trained models are known for
(Dettmers et al. 2022, arXiv:2208.07339), make the steps coarse for all others. Such a row gets a second byte: it goes
through the product twice, as its high and its low bytes, and then has 32512 steps. With it no row loses more than
MAX_PEAK / 440 = 2.7 %, and a few rows all get it, because a product limited by reading the weights has room for it.
Does not know: the weights.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FINE_ROWS = 2  # up to here all rows get two bytes: oneDNN takes as long for four rows as for one, or less
LEAST_ROWS = 4  # as many are multiplied at least, some of them for nothing: one or two take up to 1.2 times as long
MAX_PEAK = 12.0  # largest magnitude, over the rms of its row, that one byte is good enough for
ONE_BYTE, TWO_BYTES = 127.0, 127.0 * 256


class Codes(NamedTuple):
    bytes: Tensor  # [T + fine or more, K] uint8: one for each row, then the low ones of rows that have two
    step: Tensor  # [T, 1] fp32: what the lowest byte counts
    fine: Tensor | None  # rows that have two bytes [fine] int64; None: all of them, or none


def encode(x: Tensor) -> Codes:
    """x [T, K] -> codes. A row that holds NaN or an infinity comes back from `decode` as nothing finite."""
    wide = x.float()
    peak = wide.abs().amax(dim=1, keepdim=True)
    if x.shape[0] <= FINE_ROWS:
        return _two_bytes(wide, peak, None)
    fine = (peak.square().mul_(x.shape[1]) > wide.square().sum(dim=1, keepdim=True).mul_(MAX_PEAK**2)).squeeze(1)
    count = int(fine.sum())
    if count == 0:
        return _one_byte(wide, peak)
    return _two_bytes(wide, peak, None if count == x.shape[0] else fine.nonzero().squeeze(1))


def decode(products: Tensor, codes: Codes, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """products [T + fine, N] fp32, sums over (code - 128) * w, written over -> x W^T + bias [T, N]"""
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


def _one_byte(wide: Tensor, peak: Tensor) -> Codes:
    return Codes(_rounded(wide, peak, ONE_BYTE, 128).to(torch.uint8), peak / _constant(ONE_BYTE), None)


def _two_bytes(wide: Tensor, peak: Tensor, fine: Tensor | None) -> Codes:
    """code = 256 * high + low, both bytes around 128, so that either is a row of the same product."""
    codes, rows = _rounded(wide, peak, TWO_BYTES, 128 * 256 + 128), wide.shape[0]
    low = codes if fine is None else codes[fine]
    total = rows + low.shape[0]
    out = torch.empty((max(LEAST_ROWS, total), wide.shape[1]), dtype=torch.uint8)
    out[:rows] = codes >> 8
    out[rows:total] = low  # of 16 bits only the lower 8 are kept
    return Codes(out, peak / _constant(TWO_BYTES), fine)


def _rounded(wide: Tensor, peak: Tensor, limit: float, middle: int) -> Tensor:
    """x * limit / peak + middle as int32, to nearest: all is positive, so cutting off rounds down.

    In a row of zeros 0 / 0 makes some code or other, and the step of 0 makes 0 of that.
    """
    return torch.addcmul(_constant(middle + 0.5), wide, _constant(limit) / peak).to(torch.int32)


_constants: dict[float, Tensor] = {}


def _constant(value: float) -> Tensor:
    if value not in _constants:
        _constants[value] = torch.tensor(value, device="cpu")
    return _constants[value]
