"""Converts weights of one byte, float8_e4m3fn or int8, to 16 bits in registers, exactly: for products with 16-bit x.

Does not know: scales, zeros.
"""

from __future__ import annotations

from localllm.kernels.launch import tl, triton

# PTX for two 16-bit words of two weights each: $0 receives the weights in the low bytes, $1 those in the high ones.
# e4m3: the seven bits below the sign are moved to the low exponent bits and the mantissa of the 16-bit type;
# multiplying by a power of two then corrects the exponent's bias, subnormals included.
# int8: bytes become mantissas with a known exponent, which avoids the slow conversion from integers.
E4M3_TO_BF16 = tl.constexpr(
    """{ .reg .b32 t, u, bias, none;
    mov.b32 bias, 0x7b807b80; mov.b32 none, 0x80008000;
    shl.b32 t, $2, 4; and.b32 t, t, 0x07f007f0; shl.b32 u, $2, 8;
    lop3.b32 t, u, 0x80008000, t, 0xEA; fma.rn.bf16x2 $0, t, bias, none;
    shr.u32 t, $2, 4; and.b32 t, t, 0x07f007f0;
    lop3.b32 t, $2, 0x80008000, t, 0xEA; fma.rn.bf16x2 $1, t, bias, none; }"""
)
E4M3_TO_FP16 = tl.constexpr(
    """{ .reg .b32 t, u, bias;
    mov.b32 bias, 0x5c005c00;
    shl.b32 t, $2, 7; and.b32 t, t, 0x3f803f80; shl.b32 u, $2, 8;
    lop3.b32 t, u, 0x80008000, t, 0xEA; mul.f16x2 $0, t, bias;
    shr.u32 t, $2, 1; and.b32 t, t, 0x3f803f80;
    lop3.b32 t, $2, 0x80008000, t, 0xEA; mul.f16x2 $1, t, bias; }"""
)
INT8_TO_BF16 = tl.constexpr(  # 128 + q's low seven bits, minus 128, or minus 256 if q < 0
    """{ .reg .b32 t, u, v, one;
    mov.b32 one, 0x3f803f80;
    lop3.b32 u, $2, 0x007f007f, 0x43004300, 0xEA; lop3.b32 v, $2, 0x00800080, 0xc300c300, 0xEA;
    shr.u32 t, $2, 8; fma.rn.bf16x2 $0, u, one, v;
    lop3.b32 u, t, 0x007f007f, 0x43004300, 0xEA; lop3.b32 v, t, 0x00800080, 0xc300c300, 0xEA;
    fma.rn.bf16x2 $1, u, one, v; }"""
)
INT8_TO_FP16 = tl.constexpr(  # 1024 + (q + 128), minus 1152
    """{ .reg .b32 t, u, offset;
    mov.b32 offset, 0x64806480;
    xor.b32 t, $2, 0x80808080;
    lop3.b32 u, t, 0x00ff00ff, 0x64006400, 0xEA; sub.f16x2 $0, u, offset;
    shr.u32 t, t, 8;
    lop3.b32 u, t, 0x00ff00ff, 0x64006400, 0xEA; sub.f16x2 $1, u, offset; }"""
)


@triton.jit
def unpack_pairs(pairs, KIND: tl.constexpr, dtype: tl.constexpr, PTX: tl.constexpr):
    """Convert 16-bit words of two weights to (weights in the low bytes, weights in the high bytes),
    in dtype, exactly."""
    if PTX and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            E4M3_TO_BF16 if KIND == "e4m3" else INT8_TO_BF16,
            "=&r,=r,r", [pairs], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    elif PTX and dtype == tl.float16:
        return tl.inline_asm_elementwise(
            E4M3_TO_FP16 if KIND == "e4m3" else INT8_TO_FP16,
            "=&r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif KIND == "e4m3":
        return _e4m3_bits(pairs & 0xFF).to(dtype), _e4m3_bits((pairs >> 8) & 0xFF).to(dtype)
    else:
        low, high = (pairs & 0xFF).to(tl.int8), ((pairs >> 8) & 0xFF).to(tl.int8)
        return low.to(tl.float32).to(dtype), high.to(tl.float32).to(dtype)


@triton.jit
def _e4m3_bits(byte):
    """Convert a byte with a finite float8_e4m3fn to fp16, exactly."""
    half = ((byte & 0x80) << 8) | ((byte & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def scaled_groups(values, exponents):
    """Multiply values [R, C] of every other column by powers of two, one for 16 neighbours, which are 32 of all
    columns. exponents [R, C / 16] uint8, plus 127. Exact in bf16 and fp32; in fp16 as exact as the type."""
    parts = tl.reshape(values, [values.shape[0], exponents.shape[1], values.shape[1] // exponents.shape[1]])
    if values.dtype == tl.bfloat16:
        powers = (exponents.to(tl.int16) << 7).to(tl.bfloat16, bitcast=True)
    else:
        powers = (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return tl.reshape((parts * powers[:, :, None]).to(values.dtype), values.shape)
