"""The newest token of a decode row, from its projection: the decode kernel rotates and stores it, and attends to it.

    RawHeads           heads of a projection that nothing has rotated or stored yet
    rotated_heads      some of them, normed and rotated
    store_newest       one of them in the cache

So a decode step needs no kernel between the projection and attention. Every part of a row rotates the queries itself;
the part that ends the row rotates the key, stores key and value, and takes both from its registers: what a program has
just written to the cache may not be in its sight yet. The arithmetic is that of rotary_store_kv.py.
Does not know: the other keys.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from localllm.kernels.launch import tl, triton
from localllm.kernels.quantize import encode, inverse_of, magnitude, scale_for
from localllm.kernels.rotary_store_kv import Rotation


class RawHeads(NamedTuple):
    """Queries, keys and values of a step, one token a row, as `rotary_store_kv` takes them."""

    qkv: Tensor  # [T, (num_heads + 2 * num_kv_heads) * head_dim]
    slot_mapping: Tensor  # [T] int64, -1: not stored
    rotation: Rotation | None
    norm_weight: Tensor | None  # [num_heads + num_kv_heads, head_dim] fp32
    norm_eps: float


@triton.jit
def rotated_heads(
    heads, norms, angles, eps,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Return the heads at `heads` [ROWS], pointers, as fp32 [ROWS, BLOCK_D]; 0 from HEAD_DIM on.

    norms [ROWS]: pointers to the weights of their norm, or None. angles: of the token's position; read if ROTARY_DIM.
    """
    TURNING: tl.constexpr = ROTARY_DIM // 2
    # One address per element, so that all is loaded in one layout; a single row would need a layout change.
    dims = tl.arange(0, BLOCK_D)[None, :] + tl.zeros([heads.shape[0], 1], dtype=tl.int32)
    inside = dims < HEAD_DIM
    x = tl.load(heads[:, None] + dims, mask=inside, other=0.0).to(tl.float32)
    if norms is not None:
        inverse = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        x = x * inverse * tl.load(norms[:, None] + dims, mask=inside, other=0.0)
    if ROTARY_DIM > 0:
        turns = dims < ROTARY_DIM
        if INTERLEAVED:
            is_first, pair = dims % 2 == 0, dims // 2
            other = dims ^ 1
        else:
            is_first = dims < TURNING
            pair = tl.where(is_first, dims, dims - TURNING)
            other = tl.where(is_first, dims + TURNING, dims - TURNING)
        y = tl.load(heads[:, None] + other, mask=turns, other=0.0).to(tl.float32)
        if norms is not None:
            y = y * inverse * tl.load(norms[:, None] + other, mask=turns, other=0.0)
        cos = tl.load(angles + pair, mask=turns, other=1.0)
        sin = tl.load(angles + TURNING + pair, mask=turns, other=0.0)
        x = x * cos + tl.where(is_first, -y, y) * sin
    return x


@triton.jit
def store_newest(
    x, cache, scale_ptr, kv_head, place, is_stored,
    HEAD_DIM: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Store x [1, BLOCK_D] fp32 at the `place` of a token and head, in the cache's type, if `is_stored`.

    Return what was stored, and the scale of an int8 cache, which is stored too; else 1.
    """
    dims = tl.arange(0, x.shape[1])[None, :]
    own_scale = 1.0
    if FORMAT == "plain":
        stored = x.to(cache.dtype.element_ty)
    elif FORMAT == "int8" or FORMAT == "int8_ptx":
        own_scale = scale_for(tl.max(magnitude(x)), "int8")
        tl.store(scale_ptr + place, own_scale, mask=is_stored)
        stored = encode(x, inverse_of(own_scale), "int8", False)
    else:
        stored = encode(x, inverse_of(tl.load(scale_ptr + kv_head)), "fp8", FORMAT == "fp8")
    tl.store(cache + place * HEAD_DIM + dims, stored, mask=dims < tl.where(is_stored, HEAD_DIM, 0))
    return stored, own_scale
