"""16-bit weights on a CPU that computes in fp32: they stay 16 bits wide in memory.

    CpuHalfWeight    W as KIND_BF16, KIND_BF16_ROUNDED or KIND_F16 of native/matrix.h
    pack_half        from a tensor in bf16 or fp16
    HalfRows         W as a checkpoint stores it, to be packed into memory that its owner has

Where the native library multiplies pairs of bf16 (AVX512-BF16 without AMX), bf16 is KIND_BF16_ROUNDED: x is rounded to
bf16, as in a bf16 model of torch, sums are fp32, and the library multiplies any number of rows. `is_exact` weights and
all other processors have KIND_BF16 or KIND_F16 instead, of which up to FEW_ROWS rows are multiplied by the native
library, with x and sums in fp32. More rows:

    bf16, on a processor with a product of bf16 (AMX, AVX512-BF16): torch's, for which x is rounded to bf16
    otherwise: by the native library too, and above TILED_ROWS with W widened to fp32, some outputs at a time

torch's product rounds its results to bf16. A head's logits need more digits: up to TILED_ROWS rows of a head are
multiplied by the native library, whose sums are fp32. For more rows, or with AMX, whose products are much faster,
what rounding took away is computed by a second product and added.

bf16 in one layout serves both: oneDNN's for one row is that of KIND_BF16, and as fast for many rows as its others.
Needs the native library. Does not know: which weights take this layout (models/weights/weights.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.cpu.bf16 import (
    INPUTS_MULTIPLE,
    blocked,
    blocks_in,
    has_amx,
    has_fast_bf16,
    multiply_bf16,
    pack_bf16,
    unpacked_linear,
)
from localllm.kernels.cpu.native.library import native
from localllm.kernels.cpu.native.structures import (
    FEW_ROWS,
    OUTPUTS,
    Activation,
    Kind,
    NativeMatrix,
    NativeStoredRows,
)
from localllm.kernels.cpu.native_product import native_gated, native_linear, native_unpack, unpacked_parts
from localllm.kernels.fused_epilogue import PendingNorm, Product, Unfinished
from localllm.kernels.linear import PACK_MIN_ELEMENTS
from localllm.kernels.quantized_weight import MetaWeight
from localllm.kernels.rms_norm import normed

HALVES = (torch.bfloat16, torch.float16)
HALF_MIN_ELEMENTS = PACK_MIN_ELEMENTS  # smaller weights are widened
TILED_ROWS = 64  # for more, widening to fp32 for torch's product is faster


@dataclass(frozen=True, slots=True, eq=False)
class CpuHalfWeight:
    """A 16-bit `QuantizedTable` for a CPU with the native library."""

    packed: Tensor  # [N, K] bf16, opaque to torch, or [padded N / 64, K / 2, 64, 2] bf16 or fp16; the bytes are alike
    outputs: int
    is_head: bool = False
    is_exact: bool = False  # whether a few rows of x are not rounded to bf16

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs, self.packed.shape[1] * (1 if self.packed.is_mkldnn else 2)

    @property
    def nbytes(self) -> int:
        return self.packed.numel() * self.packed.dtype.itemsize

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] fp16, bf16 or fp32, bias [N] -> [T, N] in x's dtype"""
        matrix = self.matrix()
        if len(x) <= FEW_ROWS or matrix.kind == Kind.BF16_ROUNDED:
            y = native_linear(matrix, x.float(), is_fine=True)
        else:
            y = self._many_rows(x)
        return (y if bias is None else y.add_(bias)).to(x.dtype)

    def unfinished(self, x: Tensor | PendingNorm, bias: Tensor | None = None) -> Unfinished:
        """Do `linear`, but leave a gate to the product's reader where the library multiplies all rows."""
        if bias is None and self.matrix().kind == Kind.BF16_ROUNDED:
            return HalfProduct(normed(x), self)
        return self.linear(normed(x), bias)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return [N, K]."""
        return native_unpack(self.matrix(), dtype)

    def dequantize_rows(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return [T, K], the given rows [T] int64 of `dequantize`."""
        pairs = self._pairs()[rows // OUTPUTS, :, rows % OUTPUTS]  # [T, K / 2] int32
        return pairs.view(self.packed.dtype).to(dtype)

    def matrix(self) -> NativeMatrix:
        """Return the matrix for the native library. Valid as long as this weight."""
        kind = half_kind(self.packed.dtype, is_exact=self.is_exact)
        return NativeMatrix(kind=kind, outputs=self.outputs, inputs=self.shape[1], weights=_address(self.packed))

    def _pairs(self) -> Tensor:
        """Return a view [padded N / 64, K / 2, 64] int32 of pairs of weights."""
        blocks = blocks_in(self.packed) if self.packed.is_mkldnn else self.packed
        return blocks.view(torch.int32).squeeze(-1)

    def _many_rows(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N] fp32"""
        if self.packed.is_mkldnn and not (self.is_head and len(x) <= TILED_ROWS and not has_amx()):
            return self._in_bf16(x.to(torch.bfloat16))
        if self.packed.dtype == torch.bfloat16 and has_fast_bf16() and not self.is_head:
            y = unpacked_linear(self.matrix(), x.to(torch.bfloat16))
            if y is not None:
                return y
        if len(x) <= TILED_ROWS:
            return native_linear(self.matrix(), x.float(), is_fine=True)
        return self._widened(x.float())

    def _in_bf16(self, x: Tensor) -> Tensor:
        """x [T, K] bf16 -> [T, N] fp32"""
        y = multiply_bf16(x, self.packed)
        if not self.is_head:
            return y.float()
        rest: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, y.neg(), self.packed, None, "add")
        return y.float().add_(rest)

    def _widened(self, x: Tensor) -> Tensor:
        """x [T, K] fp32 -> [T, N] fp32"""
        y = x.new_empty((len(x), self.outputs))
        for start, part in unpacked_parts(self.matrix()):
            y[:, start : start + len(part)] = F.linear(x, part)
        return y


@dataclass(frozen=True, slots=True, eq=False)
class HalfProduct(Product):
    """The product of a weight of KIND_BF16_ROUNDED, without a bias, before it is computed."""

    x: Tensor
    weight: CpuHalfWeight

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.x), self.weight.outputs

    def whole(self, out: Tensor | None = None) -> Tensor:
        y = self.weight.linear(self.x)
        return y if out is None else out.copy_(y)

    def gated(self, activation: str) -> Tensor:
        """Compute gate and up of some outputs together, so that neither is written to memory."""
        found = Activation[activation.upper()]
        return native_gated(self.weight.matrix(), self.x.float(), found).to(self.x.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class HalfRows:
    """A 16-bit matrix that is not packed yet: a `QuantizedWeight` to read, views of a mapped file for example."""

    parts: tuple[Tensor, ...]  # [n, K] bf16 or fp16 each, one above the other; a row is in one piece
    is_exact: bool = False  # of the `CpuHalfWeight`

    @property
    def shape(self) -> tuple[int, int]:
        return sum(map(len, self.parts)), self.parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] fp16, bf16 or fp32, bias [N] -> [T, N] in x's dtype"""
        y = F.linear(x.float(), self.dequantize(torch.float32))
        return (y if bias is None else y.add_(bias)).to(x.dtype)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return [N, K]."""
        return torch.cat([part.to(dtype) for part in self.parts])

    def matrix(self) -> NativeMatrix:
        """Return the matrix that `write` makes, without the address of its weights."""
        kind = half_kind(self.parts[0].dtype, is_exact=self.is_exact)
        return NativeMatrix(kind=kind, outputs=self.shape[0], inputs=self.shape[1])

    def write(self, address: int) -> None:
        """Write the matrix's weights to memory of `half_nbytes` at an address."""
        library, (rows, columns) = native(), self.shape
        assert library is not None, "`fits_half` asks for the library"
        assert all(part.stride(1) == 1 for part in self.parts)
        each = [np.arange(len(part)) * part.stride(0) * part.itemsize + part.data_ptr() for part in self.parts]
        addresses = np.concatenate(each)
        stored = NativeStoredRows(count=rows, inputs=columns, rows=addresses.ctypes.data)
        library.packing_pool().pack_halves(stored, address)

    def packed(self) -> CpuHalfWeight:
        """Return the weight in memory of its own."""
        rows, columns = self.shape
        shape = -(-rows // OUTPUTS), columns // 2, OUTPUTS, 2
        blocks = torch.empty(shape, dtype=self.parts[0].dtype, device="cpu")
        self.write(blocks.data_ptr())
        return CpuHalfWeight(blocks, rows, is_exact=self.is_exact)


def fits_half(weight_dtype: torch.dtype, rows: int, columns: int) -> bool:
    """Return whether 16-bit matrices of this shape stay so. Never without the native library."""
    is_large = rows * columns >= HALF_MIN_ELEMENTS and columns % INPUTS_MULTIPLE == 0
    return weight_dtype in HALVES and is_large and native() is not None


def half_kind(dtype: torch.dtype, *, is_exact: bool) -> Kind:
    """Return the kind of matrices of bf16 or fp16."""
    if dtype == torch.float16:
        return Kind.F16
    library = native()
    rounds = not is_exact and library is not None and library.multiplies_pairs and not has_amx()
    return Kind.BF16_ROUNDED if rounds else Kind.BF16


def pack_half(weight: Tensor, *, is_head: bool = False, is_exact: bool = False) -> CpuHalfWeight | MetaWeight:
    """Pack weight [N, K] bf16 or fp16, for which `fits_half` is True; on `meta` return its size only."""
    if weight.is_meta:
        size = half_nbytes(*weight.shape)
        return MetaWeight((weight.shape[0], weight.shape[1]), size, size)
    is_torchs = half_kind(weight.dtype, is_exact=is_exact) == Kind.BF16
    packed = pack_bf16(weight) if is_torchs else None
    packed = blocked(weight) if packed is None else packed
    return CpuHalfWeight(packed, weight.shape[0], is_head, is_exact)


def half_nbytes(rows: int, columns: int) -> int:
    """Return the bytes of the result of `pack_half`."""
    return -(-rows // OUTPUTS) * OUTPUTS * columns * 2


def _address(packed: Tensor) -> int:
    return int(torch.ops.mkldnn.data_ptr(packed)) if packed.is_mkldnn else packed.data_ptr()
