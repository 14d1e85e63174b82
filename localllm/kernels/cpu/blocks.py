"""Converts int8 weights to oneDNN's layout for a product, forty times as fast as oneDNN itself.

    reorder     [N, K] int8 -> an opaque tensor for `qlinear_pointwise`
    Examples    matrices of known layout, to copy

oneDNN's own reordering converts half a gigabyte per second, which took most of a load. With AVX512-VNNI the layout is

    values    [N / 64, K / 4, 64, 4] int8    64 outputs side by side, four inputs of each together
    sums      [N] int32                      minus the sum of each output's weights

but that is not guaranteed. The first matrix of each shape is therefore converted by oneDNN. Only if its bytes have
exactly this layout are later matrices of the shape copies of it whose bytes are then written here.
Does not know: scales, what is multiplied.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from weakref import WeakValueDictionary

import torch
from torch import Tensor

BLOCK = 64  # rows and columns are padded to multiples of this
_TOGETHER = 4  # inputs whose products one instruction adds
_SUMMED = 1 << 18  # weights widened at a time, so that they stay in the cache

Examples = WeakValueDictionary[tuple[int, int], Tensor]
"""Results of `reorder` with the layout above, by [N, K], as long as something else holds them."""


def reorder(values: Tensor, examples: Examples) -> Tensor:
    """Convert values [N, K] int8, contiguous. The first of a shape is added to `examples`, from which later ones copy.
    Raises RuntimeError or AttributeError if this torch has no such layout."""
    rows, columns = values.shape
    example = examples.get((rows, columns))
    if example is not None:
        packed: Tensor = example.clone()
        for there, here in _pieces(packed, values):
            there.copy_(here)
        return packed
    packed = torch.ops.onednn.qlinear_prepack(values, None)
    is_whole = rows % BLOCK == 0 and columns % BLOCK == 0 and memory_of(packed).numel() == (columns + 4) * rows
    if is_whole and all(torch.equal(there, here) for there, here in _pieces(packed, values)):
        examples[rows, columns] = packed
    return packed


def memory_of(packed: Tensor) -> Tensor:
    """Return the bytes of an opaque tensor, [n] uint8, valid as long as the tensor."""
    address, size = torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed)
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)


def _pieces(packed: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (a piece of the layout in memory, the values for it)."""
    rows, columns = values.shape
    memory = memory_of(packed)
    words = memory[: rows * columns].view(torch.int32).view(-1, columns // _TOGETHER, BLOCK)
    yield words, values.view(torch.int32).view(-1, BLOCK, columns // _TOGETHER).transpose(1, 2)
    sums, step = memory[rows * columns :].view(torch.int32), max(1, _SUMMED // columns)
    for start in range(0, rows, step):
        yield sums[start : start + step], -values[start : start + step].sum(dim=1, dtype=torch.int32)
