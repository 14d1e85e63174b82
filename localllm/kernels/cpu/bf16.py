"""torch's product of bf16 on a CPU, for weights in the layout of KIND_BF16 in native/matrix.h.

    has_fast_bf16      whether this processor has instructions for it (AMX, AVX512-BF16)
    has_amx            whether these are AMX
    pack_bf16          weights for it
    multiply_bf16      x W^T
    unpacked_linear    x W^T for a matrix of another layout, of which some outputs at a time are unpacked to bf16

oneDNN chooses its layout by the shape and the number of threads. Each matrix is therefore compared with KIND_BF16
before it is used, at its first and its last block.
Does not know: when this product is faster than others.
"""

from __future__ import annotations

import threading
from functools import cache

import torch
from torch import Tensor

from localllm.kernels.cpu.blocks import memory_of
from localllm.kernels.cpu.native.structures import OUTPUTS, NativeMatrix
from localllm.kernels.cpu.native_product import native_unpack_bf16

INPUTS_MULTIPLE = 32  # of K, so that oneDNN pads nothing
UNPACKED_AT_A_TIME = 1 << 22  # weights
KEPT_BUFFERS = 6  # of a thread: as many shapes as the layers of most models have


@cache
def has_amx() -> bool:
    """Return whether this processor multiplies tiles, as far as torch can tell."""
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())


@cache
def has_fast_bf16() -> bool:
    """Return whether this processor multiplies bf16 by instructions of its own, as far as torch can tell."""
    return has_amx() or bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())


def pack_bf16(weight: Tensor) -> Tensor | None:
    """Return weight [N, K] bf16 as a tensor for `multiply_bf16`, opaque to torch, in memory [N / 64, K / 2, 64, 2].
    None: this processor or this torch has no such product, or another layout for it."""
    rows, columns = weight.shape
    if weight.dtype != torch.bfloat16 or rows % OUTPUTS or columns % INPUTS_MULTIPLE or not has_fast_bf16():
        return None
    try:
        packed = _reordered(weight)
        blocks = blocks_in(packed)
    except (AttributeError, RuntimeError):
        return None
    ends = ((blocks[:1], weight[:OUTPUTS]), (blocks[-1:], weight[-OUTPUTS:]))
    return packed if all(torch.equal(found, blocked(rows)) for found, rows in ends) else None


def blocks_in(packed: Tensor) -> Tensor:
    """Return a view [N / 64, K / 2, 64, 2] bf16 of the memory of `pack_bf16`'s result, valid as long as the result.
    Raises RuntimeError if its size is another."""
    rows, columns = packed.shape
    return memory_of(packed).view(torch.bfloat16).view(rows // OUTPUTS, columns // 2, OUTPUTS, 2)


def blocked(weight: Tensor) -> Tensor:
    """Return weight [N, K] of 16 bits, K even, as [padded N / 64, K / 2, 64, 2]."""
    rows, columns = weight.shape
    blocks = torch.zeros((-(-rows // OUTPUTS), columns // 2, OUTPUTS, 2), dtype=weight.dtype, device="cpu")
    whole = rows // OUTPUTS
    blocks[:whole] = weight[: whole * OUTPUTS].view(whole, OUTPUTS, columns // 2, 2).transpose(1, 2)
    if whole < len(blocks):
        blocks[whole, :, : rows % OUTPUTS] = (
            weight[whole * OUTPUTS :].view(rows % OUTPUTS, columns // 2, 2).transpose(0, 1)
        )
    return blocks


def multiply_bf16(x: Tensor, packed: Tensor) -> Tensor:
    """x [T, K] bf16 -> [T, N] bf16"""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return y


def unpacked_linear(matrix: NativeMatrix, x: Tensor) -> Tensor | None:
    """x [T, K] bf16, in the order of the matrix's columns -> [T, N] fp32, without the matrix's bias. The product of the
    weights, rounded to bf16, is rounded to bf16 itself. None where `pack_bf16` returns None for such a matrix."""
    count = -(-matrix.outputs // OUTPUTS)
    parts = -(-count * OUTPUTS * matrix.inputs // UNPACKED_AT_A_TIME)
    step = -(-count // parts)  # blocks
    if not _packs(step * OUTPUTS, matrix.inputs, torch.get_num_threads()):
        return None
    buffer = _buffers.of_shape(step * OUTPUTS, matrix.inputs)
    blocks = blocks_in(buffer)
    y = torch.empty((len(x), matrix.outputs), dtype=torch.float32, device="cpu")
    for first in range(0, count, step):
        native_unpack_bf16(matrix, blocks[: count - first], first * OUTPUTS)
        into = y[:, first * OUTPUTS : (first + step) * OUTPUTS]
        into.copy_(multiply_bf16(x, buffer)[:, : into.shape[1]])
    return y


class _Buffers(threading.local):
    """The matrices that a thread unpacks into: making one takes longer than unpacking and multiplying."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, int], Tensor] = {}  # by rows, columns and threads, the last used one last

    def of_shape(self, rows: int, columns: int) -> Tensor:
        """Return a matrix [rows, columns] of any values, valid until the thread's next call."""
        key = rows, columns, torch.get_num_threads()
        buffer = self._kept.pop(key, None)
        if buffer is None:
            buffer = _reordered(torch.zeros((rows, columns), dtype=torch.bfloat16, device="cpu"))
            self._kept = dict(list(self._kept.items())[1 - KEPT_BUFFERS :])
        self._kept[key] = buffer
        return buffer


_buffers = _Buffers()


@cache
def _packs(rows: int, columns: int, threads: int) -> bool:
    """Return whether `pack_bf16` has the layout for this shape and this number of threads."""
    numbers = torch.arange(rows * columns, device="cpu").remainder_(251)
    return pack_bf16(numbers.to(torch.bfloat16).view(rows, columns)) is not None


def _reordered(weight: Tensor) -> Tensor:
    """Return weight [N, K] as oneDNN packs it for a product with one row."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)
    return packed
