"""Converts int8 weights to oneDNN's layout for a product, forty times as fast as oneDNN itself.

    reorder     [N, K] int8 -> an opaque tensor for `qlinear_pointwise`
    Examples    matrices of known layout, to copy; `new_packed` and `write_packed` do that in parts

oneDNN's own reordering converts half a gigabyte per second, which took most of a load. With AVX512-VNNI the layout is

    values    [N / 64, K / 4, 64, 4] int8    64 outputs side by side, four inputs of each together
    sums      [N] int32                      minus the sum of each output's weights

but that is not guaranteed. The first matrix of each shape is therefore converted by oneDNN. Only if its bytes have
exactly this layout are later matrices of the shape copies of it whose bytes are then written here.
Does not know: scales, what is multiplied.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from localllm.kernels.cpu.native.library import native

BLOCK = 64  # rows and columns are padded to multiples of this
_TOGETHER = 4  # inputs whose products one instruction adds
_SUMMED = 1 << 18  # weights widened at a time, so that they stay in the cache

Examples = WeakValueDictionary[tuple[int, int], Tensor]
"""Results of `reorder` with the layout above, by [N, K], as long as something else holds them."""


def reorder(values: Tensor, examples: Examples) -> Tensor:
    """Convert values [N, K] int8, contiguous. The first of a shape is added to `examples`, from which later ones copy.
    Raises RuntimeError or AttributeError if this torch has no such layout."""
    packed = new_packed(values.shape, examples)
    if packed is not None:
        write_packed(packed, 0, values)
        return packed
    converted: Tensor = torch.ops.onednn.qlinear_prepack(values, None)
    if _has_layout(converted, values):
        examples[values.shape[0], values.shape[1]] = converted
    return converted


def new_packed(shape: Sequence[int], examples: Examples) -> Tensor | None:
    """Return a matrix [N, K] in the layout above, to be written; None: the layout for this shape is not known."""
    example = examples.get((shape[0], shape[1]))
    return None if example is None else example.clone()


def write_packed(packed: Tensor, start: int, values: Tensor) -> None:
    """Write values [n, K] int8 as outputs from `start` on, a multiple of 64. n is one too."""
    _write(*_places(memory_of(packed), packed.shape[1], start, values), values)


def memory_of(packed: Tensor) -> Tensor:
    """Return the bytes of an opaque tensor, [n] uint8, valid as long as the tensor."""
    address, size = torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed)
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)


def _has_layout(packed: Tensor, values: Tensor) -> bool:
    """Return whether oneDNN has written the first, the middle and the last block of outputs as `_write` does."""
    rows, columns = values.shape
    memory = memory_of(packed)
    if rows % BLOCK or columns % BLOCK or memory.numel() != (columns + 4) * rows:
        return False
    for start in (0, rows // BLOCK // 2 * BLOCK, rows - BLOCK):
        own = values[start : start + BLOCK]
        expected = (
            torch.empty(BLOCK * columns, dtype=torch.uint8, device="cpu"),
            torch.empty(BLOCK, dtype=torch.int32, device="cpu"),
        )
        _write(*expected, own)
        if not all(torch.equal(*each) for each in zip(_places(memory, rows, start, own), expected, strict=True)):
            return False
    return True


def _places(memory: Tensor, outputs: int, start: int, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return where values [n, K] are, bytes [n * K], and their sums [n] in the memory of `outputs` outputs."""
    rows, columns = values.shape
    sums = memory[outputs * columns :].view(torch.int32)
    return memory[start * columns : (start + rows) * columns], sums[start : start + rows]


def _write(codes: Tensor, sums: Tensor, values: Tensor) -> None:
    rows, columns = values.shape
    if (library := native()) is not None:
        library.packing_pool().reorder_int8(values, codes, sums)
        return
    words = codes.view(torch.int32).view(-1, columns // _TOGETHER, BLOCK)
    words.copy_(values.view(torch.int32).view(-1, BLOCK, columns // _TOGETHER).transpose(1, 2))
    step = max(1, _SUMMED // columns)
    for first in range(0, rows, step):
        sums[first : first + step] = -values[first : first + step].sum(dim=1, dtype=torch.int32)
