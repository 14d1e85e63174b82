"""4-bit weights on a CPU in blocks of 64 outputs and 32 inputs, in one layout for one row and for many.

    CpuQ4Weight    W as one of the 4-bit kinds of native/matrix.h
    pack_q4        from a planar weight

    KIND_Q4        w = (code - 8) * scale            0.56 bytes a weight: GGUF's Q4_0, GPTQ and AWQ without zero points
    KIND_Q4_MIN    w = code * scale - minimum        0.63 bytes a weight: Q4_1, Q4_K, zero points, --quantization int4
    KIND_MXFP4     w = e2m1(code) * 2^exponent       0.53 bytes a weight: MXFP4 of GGUF and of gpt-oss
    KIND_NVFP4     w = e2m1(code) * scale            0.63 bytes a weight: NVFP4, a scale for each 16 inputs
    KIND_IQ4       w = table[code] * scale           0.56 bytes a weight: IQ4_NL, IQ4_XS

Codes are the checkpoint's. Scales and minima are fp16: a checkpoint's fp16 scales are unchanged, groups of 64 and more
repeat theirs, and products (the scales of scales of Q4_K and IQ4_XS, a zero point times its scale) are rounded once, by
2^-12 at most. Exponents are unchanged.
Needs the native library. Does not know: which weights take this layout (pack.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.cpu.bf16 import has_fast_bf16, unpacked_linear
from localllm.kernels.cpu.native.structures import FEW_ROWS, GROUP, OUTPUTS, Kind, NativeMatrix
from localllm.kernels.cpu.native_product import native_linear, native_unpack
from localllm.kernels.gguf_blocks import E2M1_DOUBLED, IQ4_VALUES
from localllm.kernels.int4_linear import Int4Weight
from localllm.kernels.planar.layout import unpack_words
from localllm.kernels.planar.linear import SUPER_GROUP, PlanarWeight

CODE_BYTES = OUTPUTS * GROUP // 2
TABLES: dict[Kind, tuple[float, ...]] = {Kind.MXFP4: E2M1_DOUBLED, Kind.NVFP4: E2M1_DOUBLED, Kind.IQ4: IQ4_VALUES}
PER_GROUP = {Kind.Q4: 2, Kind.Q4_MIN: 4, Kind.MXFP4: 1, Kind.NVFP4: 4, Kind.IQ4: 2}
"""Bytes of the scales and minima of an output and 32 inputs."""
UNPACK_ROWS = 128  # from here on torch saves more than unpacking to bf16 costs
PACKED_AT_A_TIME = 1 << 20  # weights, so that intermediate tensors stay in the cache


@dataclass(frozen=True, slots=True, eq=False)
class CpuQ4Weight:
    """A 4-bit `QuantizedTable` for a CPU with the native library."""

    blocks: Tensor  # [padded N / 64, K / 32, bytes of 64 outputs and 32 inputs] uint8
    outputs: int
    kind: Kind
    input_order: Tensor | None = None  # [K] int32: column k multiplies x[:, input_order[k]] (GPTQ)

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs, self.blocks.shape[1] * GROUP

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes + (0 if self.input_order is None else self.input_order.nbytes)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] fp16, bf16 or fp32, bias [N] -> [T, N] in x's dtype"""
        y = bf16_linear(self.matrix(), x, self.input_order)
        if y is None:
            y = native_linear(self.matrix(), x.float(), is_fine=len(x) <= FEW_ROWS)
        return (y if bias is None else y.add_(bias)).to(x.dtype)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return [N, K] in the original order of the inputs."""
        return self._in_order(native_unpack(self.matrix(), dtype))

    def dequantize_rows(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return [T, K], the given rows [T] int64 of `dequantize`."""
        block, lane = rows // OUTPUTS, rows % OUTPUTS
        codes = self._codes()[block, :, :, lane].flatten(2)  # [T, K / 32, 16]
        codes = torch.cat((codes & 15, codes >> 4), dim=2)
        scales = self._per_group()[block, :, :, lane]  # [T, K / 32, one or two]
        if self.kind in TABLES:
            table = torch.tensor(TABLES[self.kind], dtype=torch.float32, device="cpu")
            values = table[codes.int()].unflatten(2, (scales.shape[2], -1)) * scales[..., None]
        elif self.kind == Kind.Q4:
            values = (codes.float() - 8) * scales
        else:
            values = codes * scales[:, :, :1] - scales[:, :, 1:]
        return self._in_order(values.flatten(1).to(dtype))

    def _in_order(self, wide: Tensor) -> Tensor:
        """Return [n, K] in the original order of the inputs."""
        return (
            wide if self.input_order is None else torch.empty_like(wide).index_copy_(1, self.input_order.long(), wide)
        )

    def matrix(self) -> NativeMatrix:
        """Return the matrix for the native library. Valid as long as this weight."""
        return NativeMatrix(
            kind=self.kind, outputs=self.outputs, inputs=self.shape[1], weights=self.blocks.data_ptr(),
            input_order=None if self.input_order is None else self.input_order.data_ptr(),
        )  # fmt: skip

    def _codes(self) -> Tensor:
        """Return a view [blocks, K / 32, 4, 64, 4] uint8 of the pairs of codes."""
        codes: Tensor = self.blocks[:, :, :CODE_BYTES].unflatten(2, (-1, OUTPUTS, 4))
        return codes

    def _per_group(self) -> Tensor:
        """Return fp32 [blocks, K / 32, one or two, 64]: scales, or scales and minima."""
        if self.kind == Kind.MXFP4:  # half of 2^(e - 127), which is subnormal for e below 2
            exponents = self.blocks[:, :, None, CODE_BYTES:].int()
            powers: Tensor = (exponents << 23 | (exponents == 0).int() << 22).view(torch.float32)
            return powers / 2
        halves = self.blocks.view(torch.float16)[:, :, CODE_BYTES // 2 :]
        return halves.float().view(*halves.shape[:2], -1, OUTPUTS)


def bf16_linear(matrix: NativeMatrix, x: Tensor, input_order: Tensor | None = None) -> Tensor | None:
    """x [T, K] -> [T, N] fp32 through bf16, which rounds x less than the codes of 8 bits do. None: few rows, or a
    processor without such a product."""
    if len(x) < UNPACK_ROWS or not has_fast_bf16():
        return None
    narrow = x.to(torch.bfloat16)
    return unpacked_linear(matrix, narrow if input_order is None else narrow.index_select(1, input_order))


def fits_q4(weight: PlanarWeight) -> bool:
    """Return whether a kind holds the weight: 4 bits, inputs that 32 divides, groups that 32 divides unless they are
    NVFP4's, and codes that are evenly spaced or of one of TABLES. Reads only shapes and types."""
    if weight.bits != 4 or weight.columns % GROUP:
        return False
    if weight.table is None:
        return min(weight.group, weight.columns) % GROUP == 0
    return weight.table in TABLES.values() and weight.group == (GROUP // 2 if _kind(weight) == Kind.NVFP4 else GROUP)


def pack_q4(weight: PlanarWeight) -> CpuQ4Weight:
    """Pack a weight for which `fits_q4` is True."""
    packed = empty_q4(*weight.shape, _kind(weight), _order(weight))
    for start, part in PlanarWeight.parts(weight, PACKED_AT_A_TIME):
        _write(packed.blocks[start // OUTPUTS :][: -(-part.shape[0] // OUTPUTS)], part)
    return packed


def q4_nbytes(weight: PlanarWeight) -> int:
    """Return the bytes of the result of `pack_q4`; the weight may be on `meta`."""
    order = 0 if _order(weight) is None else weight.columns * 4
    return blocks_nbytes(*weight.shape, _kind(weight)) + order


def blocks_nbytes(rows: int, columns: int, kind: Kind) -> int:
    """Return the bytes of a matrix's blocks."""
    return -(-rows // OUTPUTS) * (columns // GROUP) * _block_bytes(kind)


def empty_q4(rows: int, columns: int, kind: Kind, input_order: Tensor | None = None) -> CpuQ4Weight:
    """Return a weight whose blocks are not written yet."""
    blocks = torch.empty((-(-rows // OUTPUTS), columns // GROUP, _block_bytes(kind)), dtype=torch.uint8, device="cpu")
    return CpuQ4Weight(blocks, rows, kind, None if input_order is None else input_order.int())


def _write(blocks: Tensor, part: PlanarWeight) -> None:
    """Write whole blocks [b, K / 32, bytes] of up to 64 b outputs."""
    rows, columns = part.shape
    padding = blocks.shape[0] * OUTPUTS - rows
    codes = F.pad(unpack_words(part.words, 4, part.lanes)[:, :columns], (0, 0, 0, padding))
    low, high = codes.view(-1, OUTPUTS, columns // GROUP, 2, 4, 4).unbind(3)  # [b, 64, K / 32, 4, 4]
    into = blocks[:, :, :CODE_BYTES].unflatten(2, (4, OUTPUTS, 4))
    into.copy_((low | high << 4).permute(0, 2, 3, 1, 4))
    repeats = max(1, min(part.group, part.columns) // GROUP)
    per_block = [F.pad(values, (0, padding)).unflatten(1, (-1, OUTPUTS)).transpose(0, 1)
                 for values in _scales_and_minima(part)]  # [b, G, 64] each  # fmt: skip
    if _kind(part) == Kind.MXFP4:
        powers = per_block[0][:, : columns // GROUP]
        blocks[:, :, CODE_BYTES:] = torch.where(powers > 0, torch.frexp(powers).exponent + 127, 0)
        return
    halves = blocks.view(torch.float16)[:, :, CODE_BYTES // 2 :].unflatten(2, (-1, OUTPUTS))
    if _kind(part) == Kind.NVFP4:
        halves.copy_(per_block[0][:, : columns // GROUP * 2].unflatten(1, (-1, 2)))
        return
    for index, values in enumerate(per_block):
        halves[:, :, index] = values.repeat_interleave(repeats, dim=1)[:, : columns // GROUP]


def _scales_and_minima(weight: PlanarWeight) -> list[Tensor]:
    """Return the scales [G, N] and, for KIND_Q4_MIN, the minima. Products are computed in fp32 and rounded to fp16."""
    size = min(weight.group, weight.columns)
    scales = _in_fp32(weight.scales, weight.super_scales, size)
    if _kind(weight) != Kind.Q4_MIN:
        return [scales]
    zeros = float(weight.zero) if weight.zeros is None else weight.zeros.float()
    minima = scales * zeros
    return [scales, minima if weight.mins is None else minima - _in_fp32(weight.mins, weight.super_mins, size)]


def _in_fp32(scales: Tensor, super_scales: Tensor | None, group: int) -> Tensor:
    """Return stored scales or minima as fp32 [G, N]."""
    if super_scales is None:
        return scales.float()
    return scales.float() * super_scales.float().repeat_interleave(SUPER_GROUP // group, dim=0)[: scales.shape[0]]


def _kind(weight: PlanarWeight) -> Kind:
    if weight.table == TABLES[Kind.IQ4]:
        return Kind.IQ4
    if weight.table is not None:
        return Kind.MXFP4 if weight.scales.dtype == torch.bfloat16 else Kind.NVFP4  # only powers of two are bf16
    is_plain = weight.zeros is None and weight.zero == 8 and weight.mins is None
    return Kind.Q4 if is_plain else Kind.Q4_MIN


def _block_bytes(kind: Kind) -> int:
    """Return the bytes of 64 outputs and 32 inputs."""
    return CODE_BYTES + OUTPUTS * PER_GROUP[kind]


def _order(weight: PlanarWeight) -> Tensor | None:
    return weight.input_order if isinstance(weight, Int4Weight) else None
