"""Unpacks GGUF's block types: from bytes to integers, scales and minima, without rounding.

A row of a GGUF matrix is a row of blocks of 32 or 256 weights, each with its scales inside: 18, 34 or 210 bytes, which
cannot be read with wide loads. Here each field of all blocks is gathered into one tensor. The bit patterns are
ggml's `block_*` structs; tests compare every type with the `gguf` package, bit for bit.

    type                       codes           scale per             min per
    Q4_0                       q - 8           32: fp16
    Q4_1                       q               32: fp16              32: fp16
    Q5_0  Q8_0                 int8            32: fp16
    Q5_1                       int8            32: fp16              32: fp16
    Q2_K                       q               16: 4 bits x fp16     16: 4 bits x fp16
    Q3_K                       q - 4           16: 6 bits x fp16
    Q4_K                       q               32: 6 bits x fp16     32: 6 bits x fp16
    Q5_K                       int8            32: 6 bits x fp16     32: 6 bits x fp16
    Q6_K                       int8            16: int8 x fp16
    IQ4_NL  IQ4_XS  MXFP4      table of 16     32: fp16, 6 bits x fp16, power of two

"x fp16": one fp16 per 256 weights is the unit of the small scales.
Does not know: files, the planar layout, kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True, slots=True)
class Fields:
    """n blocks of B weights in groups of g. w = scale * (value - zero) + min, products of scales in fp32."""

    values: Tensor  # [n, B] uint8 codes, or int8
    scales: Tensor  # [n, B / g] fp16 or bf16, or int8 steps of super_scales
    mins: Tensor | None = None  # [n, B / g] like scales
    super_scales: Tensor | None = None  # [n, 1] fp16
    super_mins: Tensor | None = None  # [n, 1] fp16, sign included


@dataclass(frozen=True, slots=True)
class BlockType:
    size: int  # weights in a block
    num_bytes: int
    bits: int  # of the planar layout that stores it: 4 or 8 bits
    group: int  # weights per scale
    split: Callable[[Tensor], Fields]  # [n, num_bytes] uint8 -> fields
    zero: int = 0
    table: tuple[int, ...] | None = None


def _fp16(part: Tensor) -> Tensor:
    return part.contiguous().view(torch.float16)


def _nibbles(packed: Tensor) -> Tensor:
    """Unpack [..., b] -> [..., 2 b]: all low nibbles, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _bit_pairs(packed: Tensor) -> Tensor:
    """Unpack [n, b] -> [n, b / 32, 4, 32]: of each 32 bytes the lowest two bits, then the next two, and so on."""
    runs = packed.view(packed.shape[0], -1, 1, 32)
    return (runs >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=packed.device).view(1, 1, 4, 1)) & 3


def _bits(packed: Tensor) -> Tensor:
    """Unpack [n, b] -> [n, b, 8]: the bits of each byte, lowest first."""
    return (packed[..., None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1


def _int8(codes: Tensor, less: int = 0) -> Tensor:
    return codes.to(torch.int8) - less


def _q4_0(b: Tensor) -> Fields:
    return Fields(_nibbles(b[:, 2:]), _fp16(b[:, :2]))


def _q4_1(b: Tensor) -> Fields:
    return Fields(_nibbles(b[:, 4:]), _fp16(b[:, :2]), _fp16(b[:, 2:4]))


def _q5_0(b: Tensor) -> Fields:
    high = _bits(b[:, 2:6]).flatten(1)
    return Fields(_int8(_nibbles(b[:, 6:]) | (high << 4), 16), _fp16(b[:, :2]))


def _q5_1(b: Tensor) -> Fields:
    high = _bits(b[:, 4:8]).flatten(1)
    return Fields(_int8(_nibbles(b[:, 8:]) | (high << 4)), _fp16(b[:, :2]), _fp16(b[:, 2:4]))


def _q8_0(b: Tensor) -> Fields:
    return Fields(b[:, 2:].view(torch.int8), _fp16(b[:, :2]))


def _q2_k(b: Tensor) -> Fields:
    small, packed = b[:, :16], b[:, 16:80].contiguous()
    values = _bit_pairs(packed).flatten(1)
    return Fields(values, _int8(small & 15), _int8(small >> 4), _fp16(b[:, 80:82]), -_fp16(b[:, 82:84]))


def _q3_k(b: Tensor) -> Fields:
    mask, packed, small = b[:, :32], b[:, 32:96].contiguous(), b[:, 96:108]
    # Bit i of mask byte j is the third bit of weight 32 i + j.
    high = _bits(mask).transpose(1, 2).flatten(1)
    values = _bit_pairs(packed).flatten(1) | (high << 2)
    low_of_scale = _nibbles(small[:, :8])
    high_of_scale = torch.cat([(small[:, 8:] >> shift) & 3 for shift in (0, 2, 4, 6)], dim=1)
    return Fields(values, _int8(low_of_scale | (high_of_scale << 4), 32), super_scales=_fp16(b[:, 108:110]))


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack 12 bytes into eight 6-bit scales and eight 6-bit minima, as int8.
    The last four of each are split in two parts."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 2) & 48)), dim=1)
    mins = torch.cat((second & 63, (third >> 4) | ((second >> 2) & 48)), dim=1)
    return _int8(scales), _int8(mins)


def _q4_k(b: Tensor) -> Fields:
    scales, mins = _k_scales(b[:, 4:16])
    values = _nibbles(b[:, 16:].reshape(-1, 4, 32)).flatten(1)
    return Fields(values, scales, mins, _fp16(b[:, :2]), -_fp16(b[:, 2:4]))


def _q5_k(b: Tensor) -> Fields:
    scales, mins = _k_scales(b[:, 4:16])
    high = _bits(b[:, 16:48]).transpose(1, 2).flatten(1)
    low = _nibbles(b[:, 48:].reshape(-1, 4, 32)).flatten(1)
    return Fields(_int8(low | (high << 4)), scales, mins, _fp16(b[:, :2]), -_fp16(b[:, 2:4]))


def _q6_k(b: Tensor) -> Fields:
    low = _nibbles(b[:, :128].reshape(-1, 2, 64)).flatten(1)
    high = _bit_pairs(b[:, 128:192].contiguous()).flatten(1)
    small = b[:, 192:208].contiguous().view(torch.int8)
    return Fields(_int8(low | (high << 4), 32), small, super_scales=_fp16(b[:, 208:210]))


def _iq4_nl(b: Tensor) -> Fields:
    return Fields(_nibbles(b[:, 2:]), _fp16(b[:, :2]))


def _iq4_xs(b: Tensor) -> Fields:
    high = torch.stack([(b[:, 2 + i // 4] >> (2 * (i % 4))) & 3 for i in range(8)], dim=1)
    low = torch.stack([(b[:, 4 + i // 2] >> (4 * (i % 2))) & 15 for i in range(8)], dim=1)
    values = _nibbles(b[:, 8:].reshape(-1, 8, 16)).flatten(1)
    return Fields(values, _int8(low | (high << 4), 32), super_scales=_fp16(b[:, :2]))


def _mxfp4(b: Tensor) -> Fields:
    """Unpack MXFP4. Its scale byte is an exponent: 2^(e - 128),
    because the table has doubled values. bf16 can represent 2^-128."""
    exponent = b[:, :1].to(torch.int16)
    bits = torch.where(exponent < 2, torch.full_like(exponent, 0x20) << exponent, (exponent - 1) << 7)
    return Fields(_nibbles(b[:, 1:]), bits.view(torch.bfloat16))


BLOCK_TYPES: dict[str, BlockType] = {
    "Q4_0": BlockType(32, 18, 4, 32, _q4_0, zero=8),
    "Q4_1": BlockType(32, 20, 4, 32, _q4_1),
    "Q5_0": BlockType(32, 22, 8, 32, _q5_0),
    "Q5_1": BlockType(32, 24, 8, 32, _q5_1),
    "Q8_0": BlockType(32, 34, 8, 32, _q8_0),
    "Q2_K": BlockType(256, 84, 4, 16, _q2_k),
    "Q3_K": BlockType(256, 110, 4, 16, _q3_k, zero=4),
    "Q4_K": BlockType(256, 144, 4, 32, _q4_k),
    "Q5_K": BlockType(256, 176, 8, 32, _q5_k),
    "Q6_K": BlockType(256, 210, 8, 16, _q6_k),
    "IQ4_NL": BlockType(32, 18, 4, 32, _iq4_nl, table=IQ4_VALUES),
    "IQ4_XS": BlockType(256, 136, 4, 32, _iq4_xs, table=IQ4_VALUES),
    "MXFP4": BlockType(32, 17, 4, 32, _mxfp4, table=E2M1_DOUBLED),
}
"""Block types by GGUF's names."""
