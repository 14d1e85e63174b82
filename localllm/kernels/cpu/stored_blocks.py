"""Rows of a GGUF file's tensors as in the file, for a CPU with the native library.

    GGUFBlocks       W in blocks, in any number of pieces: views of the mapped file, or a copy
    CpuStoredWeight  W in the bytes of the file, multiplied by the native library
    blocks_q4        pack 4 bits for the native library
    blocks_int8      round to bytes with one scale an output
    blocks_table     likewise, as a table whose rows can be looked up

The packed weights equal what `pack_q4` and `pack_int8` make of the repacked weight, bit for bit, without the tensors in
between. A copy of the blocks serves tables, and weights that are not packed. Types that pack.c does not know have no
`GGUFBlocks`.
Does not know: files.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.cpu.blocks import Examples, new_packed, reorder, write_packed
from localllm.kernels.cpu.int8 import CpuInt8Table, CpuInt8Weight, empty_table
from localllm.kernels.cpu.native.library import Pool, native
from localllm.kernels.cpu.native.structures import (
    FEW_ROWS,
    KIND_STORED,
    OUTPUTS,
    Kind,
    NativeMatrix,
    NativeStoredRows,
    Stored,
)
from localllm.kernels.cpu.native_product import native_linear
from localllm.kernels.cpu.q4 import CpuQ4Weight, bf16_linear, empty_q4
from localllm.kernels.gguf_blocks import BLOCK_TYPES
from localllm.kernels.gguf_linear import GGUFWeight, repack_gguf
from localllm.kernels.launch import INTERPRETED
from localllm.kernels.quantize import SMALLEST

log = logging.getLogger(__name__)

KINDS = {
    "Q4_0": Kind.Q4, "Q4_1": Kind.Q4_MIN, "Q4_K": Kind.Q4_MIN,
    "MXFP4": Kind.MXFP4, "IQ4_NL": Kind.IQ4, "IQ4_XS": Kind.IQ4,
}  # fmt: skip
"""The kind of `blocks_q4`'s result, by block type."""
ROUNDED_AT_A_TIME = 1 << 20  # weights, so that their codes stay in the cache
WIDENED_AT_A_TIME = 1 << 19
_TOLERANCE = 1e-3  # of the largest result of an output; codes of 15 bits make errors of 1e-4


@dataclass(frozen=True, slots=True, eq=False)
class GGUFBlocks:
    """A `QuantizedTable`, whose products widen it to fp32, some outputs at a time."""

    pieces: tuple[Tensor, ...]  # [n, bytes of a row] uint8 each, rows of any distance
    block_type: str  # one of Stored
    columns: int
    is_copy: bool = False  # independent of the file

    @property
    def shape(self) -> tuple[int, int]:
        return sum(len(piece) for piece in self.pieces), self.columns

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] fp16, bf16 or fp32, bias [N] -> [T, N] in x's dtype"""
        wide, addresses = x.float(), self.addresses()
        y = wide.new_empty((len(x), self.shape[0]))
        step = max(OUTPUTS, WIDENED_AT_A_TIME // self.columns)
        for start in range(0, len(addresses), step):
            y[:, start : start + step] = F.linear(wide, _widened(self, addresses[start : start + step]))
        return (y if bias is None else y.add_(bias)).to(x.dtype)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return [N, K]."""
        return _widened(self, self.addresses()).to(dtype)

    def dequantize_rows(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return [T, K], the given rows [T] int64 of `dequantize`."""
        if len(self.pieces) == 1:  # also for the rows of a step, which are a few of many
            addresses = rows * self.pieces[0].stride(0) + self.pieces[0].data_ptr()
        else:
            addresses = self.addresses()[rows]
        return _widened(self, addresses).to(dtype)

    def repacked(self) -> GGUFWeight:
        """Return the weight in the planar layout."""
        whole = self.pieces[0] if len(self.pieces) == 1 else torch.cat(self.pieces)
        return repack_gguf(whole, self.block_type, self.columns)

    def copied(self) -> GGUFBlocks:
        """Return a copy, independent of the file, or the weight itself if it is one."""
        return self if self.is_copy else GGUFBlocks((torch.cat(self.pieces),), self.block_type, self.columns, True)

    def addresses(self) -> Tensor:
        """Return the address of each row [N] int64, valid as long as the pieces."""
        each = [torch.arange(len(piece), device="cpu") * piece.stride(0) + piece.data_ptr() for piece in self.pieces]
        return each[0] if len(each) == 1 else torch.cat(each)


@dataclass(frozen=True, slots=True, eq=False)
class CpuStoredWeight:
    """Rows of a file in one piece, a `QuantizedTable` whose products read the file's bytes."""

    rows: GGUFBlocks

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.shape

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] fp16, bf16 or fp32, bias [N] -> [T, N] in x's dtype"""
        few = len(x) <= FEW_ROWS
        y = native_linear(self.matrix(), x.float(), is_fine=True) if few else bf16_linear(self.matrix(), x)
        if y is None:
            return self.rows.linear(x, bias)  # as fast from eight rows on, and exact
        return (y if bias is None else y.add_(bias)).to(x.dtype)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return [N, K]."""
        return self.rows.dequantize(dtype)

    def dequantize_rows(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return [T, K], the given rows [T] int64 of `dequantize`."""
        return self.rows.dequantize_rows(rows, dtype)

    def matrix(self) -> NativeMatrix:
        """Return the matrix for the native library. Valid as long as this weight."""
        outputs, inputs = self.shape
        return NativeMatrix(
            kind=KIND_STORED + Stored[self.rows.block_type], outputs=outputs, inputs=inputs,
            weights=self.rows.pieces[0].data_ptr(), table=table_address(self.rows.block_type),
        )  # fmt: skip


def table_address(block_type: str) -> int | None:
    """Return where the magnitudes are that the codes of IQ1 to IQ3 name; None: a type without a table."""
    table = _table(block_type) if block_type.startswith(("IQ1", "IQ2", "IQ3")) else None
    return None if table is None else table.data_ptr()


@cache
def _table(block_type: str) -> Tensor:
    """Return rows of 4 or 8 bytes: magnitudes, of IQ1 eight times the values, whose offset is an eighth."""
    from gguf import quants

    source = getattr(quants, "IQ1_S" if block_type == "IQ1_M" else block_type)
    source.init_grid()
    values = torch.from_numpy(source.grid).squeeze()
    return (values * (8 if block_type.startswith("IQ1") else 1)).to(torch.int8)


def reads_blocks(block_type: str) -> bool:
    """Return whether the matrices of a type are kept as `GGUFBlocks` until they are packed for this CPU."""
    return block_type in Stored.__members__ and native() is not None and not INTERPRETED and is_right(block_type)


@cache
def is_right(block_type: str) -> bool:
    """Return whether the native library reads and multiplies random blocks of a type as the type is defined: by
    `repack_gguf`, else by the gguf package. A wrong type is logged once. Takes a few milliseconds."""
    rng, (size, num_bytes) = np.random.default_rng(7), block_size(block_type)
    with torch.device("cpu"):  # `meta` while a model is loaded
        stored = torch.from_numpy(rng.integers(0, 256, (8, 2 * num_bytes), np.uint8))
        x = torch.from_numpy(rng.standard_normal((FEW_ROWS - 1, 2 * size), np.float32))
        rows = GGUFBlocks((stored,), block_type, 2 * size)
        exact = rows.repacked().dequantize(torch.float32) if block_type in BLOCK_TYPES else dequantize_by_gguf(rows)
        pairs = [(rows.dequantize(torch.float32), exact)]
        if block_type not in KINDS:  # whose products are in another layout
            pairs.append((CpuStoredWeight(rows).linear(x).t(), exact @ x.t()))
        finite = exact.isfinite().all(dim=1)  # random scales may be infinite
        errors = [((got - wanted).abs() / wanted.abs().amax(1, keepdim=True))[finite] for got, wanted in pairs]
    found = all(bool((error <= _TOLERANCE).all()) for error in errors)
    if not found:
        log.warning(
            "The native library gave wrong results for blocks of %s: they are held in another layout.", block_type
        )
    return found


def dequantize_by_gguf(weight: GGUFBlocks) -> Tensor:
    """Return the values [N, K] fp32 of a weight in one piece by the gguf package, which is slow."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):
        return torch.from_numpy(dequantize(weight.pieces[0].numpy(), GGMLQuantizationType[weight.block_type]))


def block_size(block_type: str) -> tuple[int, int]:
    """Return the weights and the bytes of a block."""
    if block_type in BLOCK_TYPES:
        return BLOCK_TYPES[block_type].size, BLOCK_TYPES[block_type].num_bytes
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    size, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[block_type]]
    return int(size), int(num_bytes)


def joined_blocks(weights: Sequence[GGUFBlocks]) -> GGUFBlocks:
    """Return one matrix of the rows of several, of one type and as many columns, sharing their memory."""
    return replace(weights[0], pieces=tuple(piece for weight in weights for piece in weight.pieces), is_copy=False)


def meta_blocks(rows: int, block_type: str, columns: int) -> GGUFBlocks:
    """Return blocks without values, on `meta`."""
    size, num_bytes = block_size(block_type)
    piece = torch.empty((rows, columns // size * num_bytes), dtype=torch.uint8, device="meta")
    return GGUFBlocks((piece,), block_type, columns, is_copy=True)


def blocks_q4(weight: GGUFBlocks) -> CpuQ4Weight:
    """Pack a weight of one of KINDS."""
    rows, columns = weight.shape
    packed = empty_q4(rows, columns, KINDS[weight.block_type])
    addresses = weight.addresses()
    _pool().pack_q4(_stored(weight, addresses), packed.blocks)
    return packed


def blocks_int8(weight: GGUFBlocks, examples: Examples) -> CpuInt8Weight:
    """Round each output to bytes, as `int8_codes` does, and pack it."""
    packed = new_packed(weight.shape, examples)
    if packed is None:
        codes, scales = blocks_codes(weight)
        return CpuInt8Weight(reorder(codes, examples), scales)
    rows, columns = weight.shape
    addresses, scales = weight.addresses(), torch.empty(rows, device="cpu")
    step = _rows_at_a_time(columns)
    buffer = torch.empty((min(step, rows), columns), dtype=torch.int8, device="cpu")
    for start in range(0, rows, step):
        codes = buffer[: rows - start]
        own = slice(start, start + len(codes))
        _pool().round_rows(_stored(weight, addresses[own]), SMALLEST, codes, scales[own])
        write_packed(packed, start, codes)
    return CpuInt8Weight(packed, scales)


def blocks_table(weight: GGUFBlocks) -> CpuInt8Table:
    """Round each output to bytes, as `blocks_int8` does, as a table."""
    rows, columns = weight.shape
    table, addresses, step = empty_table(rows, columns), weight.addresses(), _rows_at_a_time(columns)
    buffer = torch.empty((min(step, len(table.scales)), columns), dtype=torch.int8, device="cpu")
    sums = torch.empty(len(buffer), dtype=torch.int32, device="cpu")
    for start in range(0, rows, step):
        count = min(step, rows - start)
        codes = buffer[: -(-count // OUTPUTS) * OUTPUTS]
        codes[count:] = 0
        own = slice(start, start + count)
        _pool().round_rows(_stored(weight, addresses[own]), SMALLEST, codes[:count], table.scales[own])
        written = table.codes[start // OUTPUTS : (start + len(codes)) // OUTPUTS]
        _pool().reorder_int8(codes, written.view(torch.uint8).view(-1), sums[: len(codes)])
    return table


def blocks_codes(weight: GGUFBlocks) -> tuple[Tensor, Tensor]:
    """Return `int8_codes`: values [N, K] int8, scales [N] fp32."""
    addresses, scales = weight.addresses(), torch.empty(weight.shape[0], device="cpu")
    codes = torch.empty(weight.shape, dtype=torch.int8, device="cpu")
    _pool().round_rows(_stored(weight, addresses), SMALLEST, codes, scales)
    return codes, scales


def _widened(weight: GGUFBlocks, addresses: Tensor) -> Tensor:
    return _pool().widen_rows(_stored(weight, addresses))


def _stored(weight: GGUFBlocks, addresses: Tensor) -> NativeStoredRows:
    """Return some rows for the native library. Valid as long as the addresses [n] int64 and the weight."""
    return NativeStoredRows(
        Stored[weight.block_type],
        len(addresses),
        weight.columns,
        addresses.data_ptr(),
        table_address(weight.block_type),
    )


def _rows_at_a_time(columns: int) -> int:
    """Return a multiple of 64 that every thread has a part of."""
    return max(4 * torch.get_num_threads(), ROUNDED_AT_A_TIME // columns // OUTPUTS) * OUTPUTS


def _pool() -> Pool:
    library = native()
    assert library is not None, "blocks are packed by the native library"
    return library.packing_pool()
