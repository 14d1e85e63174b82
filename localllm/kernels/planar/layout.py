"""Memory layout of 4- and 8-bit weights: planes, which are unpacked by a mask and a shift within each lane.

A row of K weights is divided into chunks; a chunk is one int16 word per lane, and each word has one weight of every
plane. With planes of 32 lanes:

    4 bits: chunks of 128, word j holds k = j, j + 32, j + 64, j + 96 in nibbles 0, 1, 2, 3 (lowest bits first)
    8 bits: chunks of 64,  word j holds k = j, j + 32 in its low and high byte

Plane p of a chunk is therefore 32 consecutive weights: nibble p of 32 consecutive words. Groups of 32 are exactly the
planes, groups of 64 two of them, groups of 128 a whole chunk, longer groups several chunks. Scales per 16 weights (some
GGUF types) use planes of 16 lanes, chunks of half the length, and the same rules. A row that ends inside a chunk is
padded with zero bits; the kernel reads zeros for the inputs there.

4-bit words hold codes 0..15; 8-bit words hold two's complement. docs/concepts/int4-layout.md has the drawing.
Does not know: scales, zero points, kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

WORD_BITS = 16


def chunk_size(bits: int, lanes: int) -> int:
    """Return the weights in one chunk of `lanes` words."""
    return lanes * (WORD_BITS // bits)


def padded_columns(columns: int, bits: int, lanes: int) -> int:
    """Return K rounded up to whole chunks."""
    size = chunk_size(bits, lanes)
    return -(-columns // size) * size


def pack_words(values: Tensor, bits: int, lanes: int = 32) -> Tensor:
    """Pack values [N, K] (codes as uint8 for 4 bits, int8 for 8) -> words [N, padded K * bits / 16] int16."""
    rows, columns = values.shape
    missing = padded_columns(columns, bits, lanes) - columns
    codes = (F.pad(values, (0, missing)) if missing else values).view(torch.uint8)
    planes = codes.view(rows, -1, WORD_BITS // bits, lanes)
    if bits == 4:  # two planes per byte first: half as much to widen
        low, high = (planes[:, :, at] & 15 | planes[:, :, at + 1] << 4 for at in (0, 2))
    else:
        low, high = planes[:, :, 0], planes[:, :, 1]
    words = high.to(torch.int16).bitwise_left_shift_(8).bitwise_or_(low)
    return words.view(rows, -1)


def unpack_words(words: Tensor, bits: int, lanes: int = 32) -> Tensor:
    """Unpack words, including padding: [N, padded K], uint8 codes for 4 bits, int8 for 8."""
    rows = words.shape[0]
    chunks = words.view(rows, -1, lanes)
    low, high = chunks.to(torch.uint8), (chunks >> 8).to(torch.uint8)
    planes = (low, high) if bits == 8 else (low & 15, low >> 4, high & 15, high >> 4)
    return torch.stack(planes, dim=2).view(torch.int8 if bits == 8 else torch.uint8).view(rows, -1)
