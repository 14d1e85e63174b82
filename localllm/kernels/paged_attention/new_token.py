"""The new token of a decode row inside attention: its query is rotated there, its key and value are written to the
cache, and they enter the softmax from registers. It saves the kernel that `rotary_store_kv` launches.

The program of a row's last part holds the new key, before it reads the older ones from the cache: no program reads from
memory what another program of the same kernel writes.
Does not know: tiles of older keys, parts of a row.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from localllm.kernels.launch import tl, triton
from localllm.kernels.layer_kv import LayerKV
from localllm.kernels.quantize import encode, inverse_of, magnitude, scale_for
from localllm.kernels.rotary_store_kv import Rotation


class NewTokens(NamedTuple):
    """The arguments of `rotary_store_kv` for rows of one token each, with q, k and v from one projection."""

    qkv: Tensor  # [T, (num_heads + 2 * num_kv_heads) * head_dim]
    kv: LayerKV
    slot_mapping: Tensor  # [T] int64
    rotation: Rotation | None
    norm_weight: Tensor | None
    norm_eps: float
    norm_last: bool


@triton.jit
def rotated_heads(
    heads_ptr, weight_ptr, angles_ptr, eps, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, NORM_LAST: tl.constexpr,
):  # fmt: skip
    """Return heads [M, BLOCK_D] fp32, normed and rotated. heads_ptr and weight_ptr [M]: each head's first element.
    NORM: whether there is a norm; ROTARY_DIM 0: no rotation."""
    TURNING: tl.constexpr = ROTARY_DIM // 2
    dims = tl.arange(0, BLOCK_D)[None, :]
    x = tl.load(heads_ptr[:, None] + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
    if INTERLEAVED:
        other, is_first, frequency = dims ^ 1, dims % 2 == 0, dims // 2
    else:
        is_first = dims < TURNING
        other, frequency = tl.where(is_first, dims + TURNING, dims - TURNING), tl.where(is_first, dims, dims - TURNING)
    turns = dims < ROTARY_DIM
    if NORM:
        weight = tl.load(weight_ptr[:, None] + dims, mask=dims < HEAD_DIM, other=0.0)
    if NORM and not NORM_LAST:
        inverse = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
    if ROTARY_DIM > 0:
        # The other dimension of each pair is loaded again: it is in L1, and in another thread's registers.
        y = tl.load(heads_ptr[:, None] + other, mask=turns, other=0.0).to(tl.float32)
        if NORM and not NORM_LAST:
            y = y * inverse * tl.load(weight_ptr[:, None] + other, mask=turns, other=0.0)
    if NORM and not NORM_LAST:
        x = x * inverse * weight
    if ROTARY_DIM > 0:
        cos = tl.load(angles_ptr + frequency, mask=turns, other=1.0)
        sin = tl.load(angles_ptr + TURNING + frequency, mask=turns, other=0.0)
        x = x * cos + y * tl.where(is_first, -sin, sin)
    if NORM and NORM_LAST:
        x = x * tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None] * weight
    return x


@triton.jit
def store_new(
    x, store_ptr, scale_ptr, kv_head, place, is_kept, HEAD_DIM: tl.constexpr, FORMAT: tl.constexpr, TO: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):  # fmt: skip
    """Write x [1, BLOCK_D] fp32 to row `place` of the cache, and return what attention would read there, fp32: values
    of an fp8 cache before their head's scale."""
    dims = tl.arange(0, x.shape[1])[None, :]
    inside = is_kept & (dims < HEAD_DIM)
    if TO == "":
        kept = x.to(store_ptr.dtype.element_ty)
        read = kept.to(tl.float32)
    else:
        if TO == "int8":
            scale = scale_for(tl.max(magnitude(x), 1), TO)
            tl.store(scale_ptr + place + tl.arange(0, 1), scale, mask=is_kept)
        else:
            scale = tl.load(scale_ptr + kv_head + tl.arange(0, 1))
        kept = encode(x, inverse_of(scale)[:, None], TO, NATIVE_FP8)
        if TO == "int8":
            read = kept.to(tl.int8, bitcast=True).to(tl.float32) * scale[:, None]
        elif FORMAT == "fp8_bits":
            bits = kept.to(tl.uint16)
            read = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32)
        else:
            read = kept.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    tl.store(store_ptr + place * HEAD_DIM + dims, kept, mask=inside)
    return read
