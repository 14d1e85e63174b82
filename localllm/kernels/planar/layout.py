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
Kernels unpack planes of 4 or 8 bits to tiles for an MMA, two weights per instruction.

In plain Triton a plane costs a shift, a mask, an `or` and a cast per weight, and each of them works on one 16-bit value
in a 32-bit register. The assembly does the same on two values at once: an input word is two neighbouring int16 words,
`lop3` masks and sets the bits of the magic number in one instruction, and the result is a pair of fp16 or bf16. Codes
that index a table are looked up with `prmt`, which picks four bytes out of eight by four selectors at once: a word's
four nibbles are four selectors without any change.

    4 bits        `_NIBBLES`
    8 bits        `_BYTES_FP16`, `_BYTES_BF16`
    table         `_LOOKUP`
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.launch import INTERPRETED, tl, triton

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


_NIBBLES = """{{
    .reg .b32 t1, t2, t3;
    shr.u32 t1, $4, 4;
    shr.u32 t2, $4, 8;
    shr.u32 t3, $4, 12;
    lop3.b32 $0, $4, 0x000F000F, {magic}, 0xEA;
    lop3.b32 $1, t1, 0x000F000F, {magic}, 0xEA;
    lop3.b32 $2, t2, 0x000F000F, {magic}, 0xEA;
    lop3.b32 $3, t3, 0x000F000F, {magic}, 0xEA;
}}"""

# fp16 represents 1024 + (q + 128): flipping the sign bit of q adds 128.
_BYTES_FP16 = """{
    .reg .b32 t;
    shr.u32 t, $2, 8;
    lop3.b32 $0, $2, 0x00FF00FF, 0x64806480, 0x6A;
    lop3.b32 $1, t, 0x00FF00FF, 0x64806480, 0x6A;
}"""

# bf16 has 8 significant bits: 128 + (q's low seven bits), and separately the value to subtract: 128, or 256 if q < 0.
_BYTES_BF16 = """{
    .reg .b32 t;
    shr.u32 t, $4, 8;
    lop3.b32 $0, $4, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 $1, $4, 0x00800080, 0x43004300, 0xEA;
    lop3.b32 $2, t, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 $3, t, 0x00800080, 0x43004300, 0xEA;
}"""

# The four nibbles of word a (and of b, 16 bits higher) pick four bytes of the table: among the first eight entries,
# among the last eight, then one of both by bit 3. Planes 0 and 2 of both words then share a register, 1 and 3 another,
# and bytes become numbers as above.
_LOOKUP = """{{
    .reg .b32 s, h, t0, t1, a, b, even, odd, even8, odd8;
    shr.u32 h, ${words}, 1;
    and.b32 s, ${words}, 0x77777777;
    lop3.b32 h, h, 0x44444444, 0x32103210, 0xEA;
    prmt.b32 t0, {first}, {second}, s;
    prmt.b32 t1, {third}, {fourth}, s;
    prmt.b32 a, t0, t1, h;
    shr.u32 s, s, 16;
    shr.u32 h, h, 16;
    prmt.b32 t0, {first}, {second}, s;
    prmt.b32 t1, {third}, {fourth}, s;
    prmt.b32 b, t0, t1, h;
    prmt.b32 even, a, b, 0x6420;
    prmt.b32 odd, a, b, 0x7531;
    shr.u32 even8, even, 8;
    shr.u32 odd8, odd, 8;
    {to_numbers}
}}"""
_LOOKUP_FP16 = """lop3.b32 $0, even, 0x00FF00FF, 0x64806480, 0x6A;
    lop3.b32 $1, odd, 0x00FF00FF, 0x64806480, 0x6A;
    lop3.b32 $2, even8, 0x00FF00FF, 0x64806480, 0x6A;
    lop3.b32 $3, odd8, 0x00FF00FF, 0x64806480, 0x6A;"""
_LOOKUP_BF16 = """lop3.b32 $0, even, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 $1, odd, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 $2, even8, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 $3, odd8, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 $4, even, 0x00800080, 0x43004300, 0xEA;
    lop3.b32 $5, odd, 0x00800080, 0x43004300, 0xEA;
    lop3.b32 $6, even8, 0x00800080, 0x43004300, 0xEA;
    lop3.b32 $7, odd8, 0x00800080, 0x43004300, 0xEA;"""


def unpack_assembly(bits: int, dtype: torch.dtype, table: tuple[float, ...] | None) -> str:
    """Return the PTX of `unpack_planes`; empty if Triton does it without: in the interpreter, on AMD, in fp32, and if a
    table's values are not bytes (NF4)."""
    if INTERPRETED or torch.version.hip is not None:
        return ""
    if table is None:
        return ptx(bits, dtype, None)
    values = tuple(int(value) for value in table)
    return ptx(bits, dtype, values) if values == table and all(-128 <= value <= 127 for value in values) else ""


@cache
def ptx(bits: int, dtype: torch.dtype, table: tuple[int, ...] | None) -> str:
    """Return the assembly for one kind of word; empty for fp32, whose tiles have no pairs."""
    if dtype == torch.float32:
        return ""
    half = dtype == torch.float16
    if table is not None:
        names = ("first", "second", "third", "fourth")
        registers = {name: _register(table[4 * i : 4 * i + 4]) for i, name in enumerate(names)}
        return _LOOKUP.format(words=4 if half else 8, to_numbers=_LOOKUP_FP16 if half else _LOOKUP_BF16, **registers)
    if bits == 4:
        return _NIBBLES.format(magic="0x64006400" if half else "0x43004300")
    return _BYTES_FP16 if half else _BYTES_BF16


def _register(values: Sequence[int]) -> str:
    """Return four 8-bit integers in one register, the first in its lowest byte."""
    return f"0x{int.from_bytes(bytes(value & 255 for value in values), 'little'):08X}"


@triton.jit
def unpack_planes(words, dtype: tl.constexpr, table_ptr, BITS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Unpack words int16 [n, lanes] -> a tuple of planes [n, lanes] in dtype.

    4 bits: codes plus the type's magic number (1024 in fp16, 128 in bf16, 0 in fp32), or the table's values.
    8 bits: the integers themselves.
    """
    if table_ptr is not None:
        if ASSEMBLY == "":
            return (
                tl.load(table_ptr + (words & 15).to(tl.int32)).to(dtype),
                tl.load(table_ptr + ((words >> 4) & 15).to(tl.int32)).to(dtype),
                tl.load(table_ptr + ((words >> 8) & 15).to(tl.int32)).to(dtype),
                tl.load(table_ptr + ((words >> 12) & 15).to(tl.int32)).to(dtype),
            )
        elif dtype == tl.float16:
            v0, v1, v2, v3 = _four(words, dtype, ASSEMBLY)
            return v0 - 1152.0, v1 - 1152.0, v2 - 1152.0, v3 - 1152.0
        else:
            v0, v1, v2, v3, b0, b1, b2, b3 = _eight(words, ASSEMBLY)
            return v0 - b0, v1 - b1, v2 - b2, v3 - b3
    elif BITS == 4:
        if ASSEMBLY == "":
            return (
                _code(words & 15, dtype),
                _code((words >> 4) & 15, dtype),
                _code((words >> 8) & 15, dtype),
                _code((words >> 12) & 15, dtype),
            )
        else:
            return _four(words, dtype, ASSEMBLY)
    elif ASSEMBLY == "":
        return _byte(words & 255, dtype), _byte((words >> 8) & 255, dtype)
    elif dtype == tl.float16:
        low, high = tl.inline_asm_elementwise(
            ASSEMBLY, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
        return low - 1152.0, high - 1152.0
    else:
        low, low_base, high, high_base = _four(words, dtype, ASSEMBLY)
        return low - low_base, high - high_base


@triton.jit
def _eight(words, ASSEMBLY: tl.constexpr):
    """Unpack four bf16 tiles from one by assembly, each as two tiles whose difference is the value."""
    return tl.inline_asm_elementwise(
        ASSEMBLY,
        "=r,=r,=r,=r,=r,=r,=r,=r,r",
        [words],
        dtype=(
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
        ),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _four(words, dtype: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Unpack four tiles from one by assembly.
    The types are written out because a tuple's constexprs are not unwrapped."""
    if dtype == tl.float16:
        return tl.inline_asm_elementwise(
            ASSEMBLY,
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        return tl.inline_asm_elementwise(
            ASSEMBLY,
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def _code(code, dtype: tl.constexpr):
    if dtype == tl.float32:
        return code.to(tl.float32)
    elif dtype == tl.float16:
        return (code | 0x6400).to(tl.float16, bitcast=True)
    else:
        return (code | 0x4300).to(tl.bfloat16, bitcast=True)


@triton.jit
def _byte(byte, dtype: tl.constexpr):
    """Convert 0..255 in int16, two's complement in its low byte, to the integer it represents."""
    if dtype == tl.float32:
        return (byte ^ 128).to(tl.float32) - 128.0
    elif dtype == tl.float16:
        return (byte ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0
    else:
        low = ((byte & 127) | 0x4300).to(tl.bfloat16, bitcast=True)
        return low - ((byte & 128) | 0x4300).to(tl.bfloat16, bitcast=True)
