"""Prepares attention's inputs from one projection: norm and rotate q and k, write k and v into the paged cache.

    rotation = plan_rotation(table, positions)                          once per step and rope
    q = rotary_store_kv(qkv, kv, slot_mapping, rotation, ...)           once per layer

RMSNorm over each head of q and k if the model has one (Qwen3, Gemma 3; Hunyuan after the rotation), and of v (Gemma 4),
rotary embedding of q and k (Su et al. 2021, arXiv:2104.09864) with the angles from an fp32 table (half-split or
interleaved; all dimensions of a head, some or none), then conversion to the cache's type: 16 or 32 bits, fp8 with a
scale per head, int8 with a scale per head and token, 4 bits with scales and zero points. Before keys of 4 bits are
stored, q and k rotate once more, by a Hadamard matrix. All computation between load and store is in fp32.

Dimension i of the leading rotary_dim rotates with i + rotary_dim / 2 (half-split, as in Llama), or with its neighbour
(interleaved, as in GPT-J). Dimensions past rotary_dim are unchanged.

A step of few tokens costs one launch and little more, which is why this is one kernel; a step of many tokens is limited
by memory bandwidth. A head is held as head_dim / 2 pairs (a, b). A pair is two dimensions that rotate together, so
partial rotation and both orders differ only in the columns of a pair. Interleaved pairs are read 2 bytes at a time,
which is slower for long prompts, but rare. Each head of each token is computed independently of the rest of the batch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from localllm.kernels.fused_epilogue import Unfinished, whole
from localllm.kernels.kv_format import UNIT
from localllm.kernels.launch import cdiv, early_launch, next_power_of_2, runs_triton, tl, triton, wait_for_inputs
from localllm.kernels.layer_cache import LayerKV
from localllm.kernels.quantize import (
    as_bytes,
    encode,
    encoding,
    inverse_of,
    magnitude,
    native_fp8,
    quantize_nibbles,
    quantize_reference,
    round_to,
    scale_for,
)
from localllm.kernels.rms_norm import rms_norm_reference
from localllm.kernels.tuned import settings_for

VALUE_GROUP = tl.constexpr(UNIT)


def rotary_angles(table: Tensor, positions: Tensor, *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Return the step's cosines and signed sines, each [T, 1, rotary_dim] fp32, shared by all layers.

    table [max_pos, rotary_dim] fp32: cosines, then sines, of rotary_dim / 2 frequencies. The sine of the first
    dimension of a pair is negated, so that the rotation is two multiplications and one exchange.
    """
    cos, sin = table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    if interleaved:
        return torch.stack((cos, cos), dim=-1).flatten(-2), torch.stack((-sin, sin), dim=-1).flatten(-2)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate x [T, heads, head_dim] -> the same shape and dtype, contiguous; computed in fp32."""
    rotary_dim = cos.shape[-1]
    if rotary_dim == x.shape[-1]:
        return _rotary_rotate(x, cos, sin, interleaved)
    return torch.cat((_rotary_rotate(x[..., :rotary_dim], cos, sin, interleaved), x[..., rotary_dim:]), dim=-1)


def _rotary_rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    turned = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if interleaved else x.roll(x.shape[-1] // 2, dims=-1)
    if x.dtype == torch.float32:
        return torch.mul(x, cos).addcmul_(turned, sin)
    return torch.mul(x, cos).addcmul_(turned.float(), sin).to(x.dtype)


def rotation_size(head_dim: int) -> int:
    """Return the dimensions that a Hadamard matrix rotates together: the largest power of two that divides head_dim."""
    return head_dim & -head_dim


def hadamard(x: Tensor) -> Tensor:
    """Rotate x [..., head_dim] by a Hadamard matrix -> the same shape, fp32. No channel is much larger than the others
    then (QuIP#, Tseng et al. 2024, arXiv:2402.04396; QuaRot, Ashkboos et al. 2024, arXiv:2404.00456).

    The matrix is symmetric and orthonormal: it leaves products of two heads unchanged, and is its own inverse. Its
    entries are +-1 / sqrt(n), with the sign of the parity of i & j (Sylvester's order). If head_dim is not a power of
    two, several such matrices are along the diagonal: 96 dimensions rotate as three times 32.
    """
    size, step = rotation_size(x.shape[-1]), 1
    turned: Tensor = x.float()
    while step < size:  # sums and differences, in an order that does not depend on the rows beside a row
        a, b = turned.unflatten(-1, (-1, 2, step)).unbind(-2)
        turned, step = torch.stack((a + b, a - b), -2).flatten(-3), 2 * step
    return turned * float(size**-0.5)


def store_kv(
    k: Tensor,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    all_valid: bool = False,
) -> None:
    """Write k and v [T, num_kv_heads, head_dim] to the slots [T] int64; v None if values are keys;
    caches and scales as in a LayerKV. k is rotated already where the cache's keys are.

    Slot -1 is not written. `all_valid` promises that there is none, which saves a check of the slots in each layer.
    """
    if not all_valid:
        keep = (slot_mapping >= 0).nonzero().squeeze(1)
        k, slot_mapping = k.index_select(0, keep), slot_mapping.index_select(0, keep)
        v = None if v is None else v.index_select(0, keep)
    for new, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        if new is None:
            continue
        rows = new.transpose(0, 1)
        if scale is not None:
            rows, cache = _quantized(rows, cache, scale, slot_mapping)
        slots = cache.view(cache.shape[0], -1, cache.shape[-1])  # [kv_heads, num_blocks * block_size, head_dim]
        slots.index_copy_(1, slot_mapping, rows if rows.dtype == cache.dtype else rows.to(cache.dtype))


def _quantized(rows: Tensor, cache: Tensor, scale: Tensor, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows [kv_heads, T, head_dim] in the cache's type, and the cache, both viewed as bytes: torch cannot copy
    fp8 by index. Writes per-token scales."""
    if cache.dtype == torch.uint8:
        codes, scales = quantize_nibbles(rows, scale.shape[-1])
        scale.flatten(1, 2).index_copy_(1, slot_mapping, scales)
        return codes, cache
    if cache.dtype == torch.int8:
        values, scales = quantize_reference(rows, torch.int8)
        scale.view(scale.shape[0], -1).index_copy_(1, slot_mapping, scales.squeeze(-1))
    else:
        values = round_to(rows.float() / scale[:, None, None], cache.dtype)
    return values.view(torch.uint8), cache.view(torch.uint8)


def has_no_skipped_slot(slot_mapping: Tensor) -> bool:
    """Return whether `all_valid` may be promised for this step.
    False on a GPU, where the check would wait for the device."""
    return slot_mapping.device.type == "cpu" and slot_mapping.numel() > 0 and bool(torch.min(slot_mapping) >= 0)


Heads = Literal["qkv", "qk", "q"]
"""The heads that a projection makes. qk: a value head is its key head before norm and rotation (Gemma 4's full layers).
q: another layer writes the cache."""


class Rotation(NamedTuple):
    """Rotation of a step's tokens, shared by layers with the same rope."""

    table: Tensor  # [max_pos, rotary_dim] fp32: cosines, then sines, of rotary_dim / 2 frequencies
    positions: Tensor  # [T] int64
    interleaved: bool
    angles: tuple[Tensor, Tensor] | None  # from rotary_angles, for the twin; kernels read the table


def plan_rotation(table: Tensor, positions: Tensor, *, interleaved: bool = False) -> Rotation:
    """Compute what layers share of the rotation: on a CPU the angles, once instead of in each layer."""
    angles = None if runs_triton(table, "rotation") else rotary_angles(table, positions, interleaved=interleaved)
    return Rotation(table, positions, interleaved, angles)


def rotary_store_kv(
    qkv: Unfinished,
    kv: LayerKV,
    slot_mapping: Tensor,
    rotation: Rotation | None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    *,
    norm_last: bool = False,
    made: Heads = "qkv",
    all_valid: bool = False,
) -> Tensor:
    """Return q [T, num_heads, head_dim] in qkv's dtype, rotated as the cache's keys are; write k and v.

    qkv [T, (num_heads + 2 * num_kv_heads) * head_dim], q's heads first, without v if the cache's values are its keys,
    and without the heads that `made` leaves out; slot_mapping [T] int64, -1: not written; rotation None: no positions
    (NoPE); norm_weight [num_heads + num_kv_heads, head_dim] fp32, q's heads first; with num_kv_heads more rows v is
    normed too; with made "q" only [num_heads, head_dim]; norm_last: q and k are normed after the rotation instead of
    before.
    `all_valid` promises that no slot is -1, which saves the twin a check.
    """
    qkv = whole(qkv)
    if not runs_triton(qkv, "rotation"):
        return rotary_store_kv_reference(
            qkv,
            kv,
            slot_mapping,
            rotation,
            norm_weight,
            norm_eps,
            norm_last=norm_last,
            made=made,
            all_valid=all_valid,
        )
    (num_kv_heads, num_blocks, block_size, _), head_dim = kv.k.shape, kv.head_dim
    num_heads = count_query_heads(qkv.shape[1] // head_dim, kv, made)
    stored = 0 if made == "q" else 1 if kv.values_are_keys else 2
    num_tokens, num_slots = qkv.shape[0], num_blocks * block_size
    assert qkv.stride(-1) == 1
    assert kv.k.is_contiguous()
    assert kv.v.is_contiguous()
    assert head_dim % 2 == 0, head_dim
    to, values_to = encoding(kv.k.dtype), encoding(kv.v.dtype)
    assert not to or (kv.k_scale is not None and kv.v_scale is not None), "a cache in 8 bits has scales"
    k, v = (as_bytes(kv.k), as_bytes(kv.v)) if to else (kv.k, kv.v)
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    launch = settings_for("rotary_store_kv", (num_heads, head_dim), rotary_launch)
    block_heads, block_pairs, num_warps = launch.for_products() if kv.rotates_keys else launch
    q_parts, kv_parts = cdiv(num_heads, block_heads), cdiv(num_kv_heads, block_heads)
    _rotary_store_kv_kernel[(num_tokens * (q_parts + stored * kv_parts),)](
        qkv, q, k if stored else None, v if stored == 2 else None, kv.k_scale, kv.v_scale, slot_mapping,
        None if rotation is None else rotation.table, None if rotation is None else rotation.positions,
        norm_weight, norm_eps, qkv.stride(-2), num_slots,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        ROTARY_DIM=0 if rotation is None else rotation.table.shape[1],
        INTERLEAVED=rotation is not None and rotation.interleaved,
        FIRST_VALUE=num_heads + (num_kv_heads if made == "qkv" else 0),
        NORMS_VALUES=norm_weight is not None and norm_weight.shape[0] > num_heads + num_kv_heads,
        NORM_LAST=norm_last, TO=to, VALUES_TO=values_to, NATIVE_FP8=bool(to) and native_fp8(qkv.device),
        TURN_SIZE=rotation_size(head_dim) if kv.rotates_keys else 0,
        BLOCK_HEADS=block_heads, BLOCK_PAIRS=block_pairs, num_warps=num_warps,
        **early_launch(qkv.device),
    )  # fmt: skip
    return q


def rotary_store_kv_reference(
    qkv: Tensor,
    kv: LayerKV,
    slot_mapping: Tensor,
    rotation: Rotation | None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    *,
    norm_last: bool = False,
    made: Heads = "qkv",
    all_valid: bool = False,
) -> Tensor:
    """The plain-torch twin: q and k are normed and rotated together, each in one call."""
    num_kv_heads, head_dim = kv.k.shape[0], kv.head_dim
    heads = qkv.view(qkv.shape[0], qkv.shape[1] // head_dim, head_dim)
    qk = heads[:, :-num_kv_heads] if made == "qkv" and not kv.values_are_keys else heads
    v = None if made == "q" or kv.values_are_keys else heads[:, -num_kv_heads:]
    turning = qk.shape[1]
    if v is not None and norm_weight is not None and norm_weight.shape[0] > turning:
        v = rms_norm_reference(v, norm_weight[turning:], norm_eps)
    if norm_weight is not None and not norm_last:
        qk = rms_norm_reference(qk, norm_weight[:turning], norm_eps)
    if rotation is not None:
        table, positions, interleaved, angles = rotation
        cos, sin = angles or rotary_angles(table, positions, interleaved=interleaved)
        qk = rotary(qk, cos, sin, interleaved=interleaved)
    if norm_weight is not None and norm_last:
        qk = rms_norm_reference(qk, norm_weight[:turning], norm_eps)
    if kv.rotates_keys:
        qk = hadamard(qk)
    if made == "q":
        return qk.to(qkv.dtype)
    q, k = qk[:, :-num_kv_heads], qk[:, -num_kv_heads:]
    store_kv(k, v, kv.k, kv.v, slot_mapping, kv.k_scale, kv.v_scale, all_valid=all_valid)
    return q.to(qkv.dtype)


def count_query_heads(total: int, kv: LayerKV, made: Heads) -> int:
    """Return how many of the `total` heads of a projection are queries."""
    kinds = {"qkv": 1 if kv.values_are_keys else 2, "qk": 1, "q": 0}[made]
    return total - kinds * kv.k.shape[0]


class RotaryLaunch(NamedTuple):
    block_heads: int
    block_pairs: int
    num_warps: int

    def for_products(self) -> RotaryLaunch:
        """Return the settings with enough heads for a matrix product, and few of its factors in a thread."""
        heads, pairs = max(16, self.block_heads), max(16, self.block_pairs)
        return RotaryLaunch(heads, pairs, 4 if pairs <= 32 else 8)


def rotary_launch(num_heads: int, head_dim: int) -> RotaryLaunch:
    """Return settings with about 1024 elements per program, 16 per thread: two 16-byte loads, many programs per SM."""
    pairs = next_power_of_2(head_dim // 2)
    heads = min(next_power_of_2(num_heads), max(1, 512 // pairs))
    return RotaryLaunch(heads, pairs, max(1, heads * pairs // 256))


@triton.jit
def _rotary_store_kv_kernel(
    qkv_ptr, q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, slots_ptr, table_ptr, positions_ptr, norm_ptr,
    eps, qkv_stride, num_slots,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr, FIRST_VALUE: tl.constexpr, NORMS_VALUES: tl.constexpr, NORM_LAST: tl.constexpr,
    TO: tl.constexpr, VALUES_TO: tl.constexpr, NATIVE_FP8: tl.constexpr, TURN_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_HEADS heads of a token, all of q, all of k or all of v. Pointers to an unused rotation or
    norm table are None, and so are v_ptr if no values are stored, and k_ptr if no keys are. FIRST_VALUE: the head of
    the projection that becomes the first value. TURN_SIZE: dimensions of q and k that a Hadamard matrix rotates
    together; 0: none."""
    Q_PARTS: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    KV_PARTS: tl.constexpr = (NUM_KV_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    PARTS: tl.constexpr = Q_PARTS + (0 if k_ptr is None else 1 if v_ptr is None else 2) * KV_PARTS
    token = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    row_ptr = qkv_ptr + token * qkv_stride
    wait_for_inputs(PDL)
    head = tl.arange(0, BLOCK_HEADS)
    if part < Q_PARTS:
        head += part * BLOCK_HEADS
        keep = head < NUM_HEADS
        a, b = _load_pairs(row_ptr, head, keep, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)
        if norm_ptr is not None and not NORM_LAST:
            a, b = _norm(a, b, norm_ptr, head, keep, eps, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)
        if ROTARY_DIM > 0:
            a, b = _rotary_store_kv_rotate(
                a, b, table_ptr + tl.load(positions_ptr + token).to(tl.int64) * ROTARY_DIM, ROTARY_DIM
            )
        if norm_ptr is not None and NORM_LAST:
            a, b = _norm(a, b, norm_ptr, head, keep, eps, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)
        base = q_ptr + (token * NUM_HEADS + head) * HEAD_DIM
        type: tl.constexpr = q_ptr.dtype.element_ty
        if TURN_SIZE > 0:
            from_a, from_b = _pairs(HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)
            to_a, to_b = _pairs(HEAD_DIM, 0, False, BLOCK_PAIRS)
            a, b = _hadamard_pairs(a, b, from_a, from_b, to_a, to_b, TURN_SIZE, type)
            _store_pairs(base, a.to(type), b.to(type), keep, HEAD_DIM, 0, False, BLOCK_PAIRS)
        else:
            _store_pairs(base, a.to(type), b.to(type), keep, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)
    elif part < Q_PARTS + KV_PARTS:
        if k_ptr is not None:
            head += (part - Q_PARTS) * BLOCK_HEADS
            keep = head < NUM_KV_HEADS
            a, b = _load_pairs(row_ptr, NUM_HEADS + head, keep, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)
            row = NUM_HEADS + head
            if norm_ptr is not None and not NORM_LAST:
                a, b = _norm(a, b, norm_ptr, row, keep, eps, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)
            if ROTARY_DIM > 0:
                a, b = _rotary_store_kv_rotate(
                    a, b, table_ptr + tl.load(positions_ptr + token).to(tl.int64) * ROTARY_DIM, ROTARY_DIM
                )
            if norm_ptr is not None and NORM_LAST:
                a, b = _norm(a, b, norm_ptr, row, keep, eps, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)
            slot = tl.load(slots_ptr + token).to(tl.int64)
            if TO == "int4":
                from_a, from_b = _pairs(HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)
                to_a, to_b = _pairs(HEAD_DIM, 0, True, BLOCK_PAIRS)
                a, b = _hadamard_pairs(a, b, from_a, from_b, to_a, to_b, TURN_SIZE, q_ptr.dtype.element_ty)
                _store_nibbles(a, b, k_ptr, k_scale_ptr, slot, num_slots, head, NUM_KV_HEADS, HEAD_DIM, 1, BLOCK_PAIRS)
            else:
                _store_in_cache(
                    a, b, k_ptr, k_scale_ptr, slot, num_slots, head,
                    NUM_KV_HEADS, HEAD_DIM, ROTARY_DIM, INTERLEAVED, TO, NATIVE_FP8, BLOCK_PAIRS,
                )  # fmt: skip
    else:
        if v_ptr is not None:
            head += (part - Q_PARTS - KV_PARTS) * BLOCK_HEADS
            keep = head < NUM_KV_HEADS
            # Values do not rotate: of 4 bits the pairs are the two numbers of a byte.
            VALUES_TURN: tl.constexpr = 0 if VALUES_TO == "int4" else ROTARY_DIM
            NEIGHBOURS: tl.constexpr = VALUES_TO == "int4" or INTERLEAVED
            a, b = _load_pairs(row_ptr, FIRST_VALUE + head, keep, HEAD_DIM, VALUES_TURN, NEIGHBOURS, BLOCK_PAIRS)
            if NORMS_VALUES:
                row = NUM_HEADS + NUM_KV_HEADS + head
                a, b = _norm(a, b, norm_ptr, row, keep, eps, HEAD_DIM, VALUES_TURN, NEIGHBOURS, BLOCK_PAIRS)
            slot = tl.load(slots_ptr + token).to(tl.int64)
            if VALUES_TO == "int4":
                _store_nibbles(
                    a, b, v_ptr, v_scale_ptr, slot, num_slots, head, NUM_KV_HEADS, HEAD_DIM, HEAD_DIM // VALUE_GROUP,
                    BLOCK_PAIRS,
                )  # fmt: skip
            else:
                _store_in_cache(
                    a, b, v_ptr, v_scale_ptr, slot, num_slots, head,
                    NUM_KV_HEADS, HEAD_DIM, ROTARY_DIM, INTERLEAVED, VALUES_TO, NATIVE_FP8, BLOCK_PAIRS,
                )  # fmt: skip


@triton.jit
def _pairs(
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_PAIRS: tl.constexpr
):  # fmt: skip
    """Return the columns of each pair's two dimensions, [1, BLOCK_PAIRS].
    Dimensions that do not rotate are paired, too."""
    HALF: tl.constexpr = HEAD_DIM // 2
    TURNING: tl.constexpr = ROTARY_DIM // 2
    i = tl.arange(0, BLOCK_PAIRS)[None, :]
    if INTERLEAVED:
        return 2 * i, 2 * i + 1
    if ROTARY_DIM == 0 or ROTARY_DIM == HEAD_DIM:
        return i, i + HALF
    return tl.where(i < TURNING, i, i + TURNING), tl.where(i < TURNING, i + TURNING, i + HALF)


@triton.jit
def _load_pairs(
    base, head, keep,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    """Load both dimensions of all pairs of some rows of HEAD_DIM, fp32 [BLOCK_HEADS, BLOCK_PAIRS] each; 0 outside."""
    column_a, column_b = _pairs(HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)
    inside = keep[:, None] & (tl.arange(0, BLOCK_PAIRS) < HEAD_DIM // 2)[None, :]
    row = base + head[:, None] * HEAD_DIM
    a = tl.load(row + column_a, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(row + column_b, mask=inside, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _store_pairs(
    base, a, b, keep,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    """Store pairs, the inverse of `_load_pairs`; base [BLOCK_HEADS] points to each head."""
    column_a, column_b = _pairs(HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)
    inside = keep[:, None] & (tl.arange(0, BLOCK_PAIRS) < HEAD_DIM // 2)[None, :]
    tl.store(base[:, None] + column_a, a, mask=inside)
    tl.store(base[:, None] + column_b, b, mask=inside)


@triton.jit
def _norm(
    a, b, weight_ptr, head, keep, eps,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    """RMSNorm of each head."""
    weight_a, weight_b = _load_pairs(weight_ptr, head, keep, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)
    inverse = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / HEAD_DIM + eps)[:, None]
    return a * inverse * weight_a, b * inverse * weight_b


@triton.jit
def _rotary_store_kv_rotate(a, b, angles_ptr, ROTARY_DIM: tl.constexpr):
    """Rotate pairs [heads, BLOCK_PAIRS] by the angles of one position; those past ROTARY_DIM / 2 are unchanged."""
    TURNING: tl.constexpr = ROTARY_DIM // 2
    # One address per element, so that angles are loaded in the pairs' layout; a single row would need a layout change.
    i = tl.arange(0, a.shape[1])[None, :] + tl.zeros([a.shape[0], 1], dtype=tl.int32)
    cos = tl.load(angles_ptr + i, mask=i < TURNING, other=1.0)
    sin = tl.load(angles_ptr + TURNING + i, mask=i < TURNING, other=0.0)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _store_in_cache(
    a, b, cache_ptr, scale_ptr, slot, num_slots, head,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    TO: tl.constexpr, NATIVE_FP8: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    """Store to one slot of each head in the cache, in the cache's type; nothing if the slot is negative."""
    keep = head < tl.where(slot < 0, 0, NUM_KV_HEADS)
    place = head.to(tl.int64) * num_slots + slot
    if TO == "":
        a, b = a.to(cache_ptr.dtype.element_ty), b.to(cache_ptr.dtype.element_ty)
    else:
        if TO == "int8":
            scale = scale_for(tl.maximum(tl.max(magnitude(a), axis=1), tl.max(magnitude(b), axis=1)), TO)
            tl.store(scale_ptr + place, scale, mask=keep)
        else:
            scale = tl.load(scale_ptr + head, mask=keep, other=1.0)
        inverse = inverse_of(scale)[:, None]
        a, b = encode(a, inverse, TO, NATIVE_FP8), encode(b, inverse, TO, NATIVE_FP8)
    _store_pairs(cache_ptr + place * HEAD_DIM, a, b, keep, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)


@triton.jit
def _store_nibbles(
    a, b, cache_ptr, scale_ptr, slot, num_slots, head,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    """Store heads whose dimensions 2 j and 2 j + 1 are a and b to one slot, in 4 bits with a scale and a zero point for
    each of GROUPS groups of dimensions; nothing if the slot is negative."""
    PAIRS: tl.constexpr = BLOCK_PAIRS if GROUPS == 1 else HEAD_DIM // 2 // GROUPS  # of a group, padding included
    PARTS: tl.constexpr = BLOCK_PAIRS // PAIRS
    HEADS: tl.constexpr = a.shape[0]
    keep = (head < tl.where(slot < 0, 0, NUM_KV_HEADS))[:, None]
    place = (head.to(tl.int64) * num_slots + slot)[:, None]
    pairs = tl.arange(0, BLOCK_PAIRS)[None, :]
    inside = pairs < HEAD_DIM // 2
    lower, upper = tl.where(inside, tl.minimum(a, b), float("inf")), tl.where(inside, tl.maximum(a, b), float("-inf"))
    low = tl.min(tl.reshape(lower, [HEADS, PARTS, PAIRS]), 2)
    high = tl.max(tl.reshape(upper, [HEADS, PARTS, PAIRS]), 2)
    # Infinity and NaN times zero are NaN, which a minimum would ignore.
    poison = tl.sum(tl.reshape((a + b) * 0.0, [HEADS, PARTS, PAIRS]), 2)
    scale = (tl.maximum(tl.div_rn(high - low, 15.0), 5.9604644775390625e-8) + poison).to(tl.float16)
    zero = (low + 8.0 * scale.to(tl.float32)).to(tl.float16)
    part = tl.arange(0, PARTS)[None, :]
    scales = scale_ptr + place * (2 * GROUPS) + part
    tl.store(scales, scale, mask=keep & (part < GROUPS))
    tl.store(scales + GROUPS, zero, mask=keep & (part < GROUPS))
    inverse = inverse_of(scale.to(tl.float32))[:, :, None]
    offset = zero.to(tl.float32)[:, :, None]
    first = _nibble((tl.reshape(a, [HEADS, PARTS, PAIRS]) - offset) * inverse)
    second = _nibble((tl.reshape(b, [HEADS, PARTS, PAIRS]) - offset) * inverse)
    codes = tl.reshape(first | second << 4, [HEADS, BLOCK_PAIRS])
    tl.store(cache_ptr + place * (HEAD_DIM // 2) + pairs, codes.to(tl.uint8), mask=keep & inside)


@triton.jit
def _nibble(steps):
    """Return the code of a number of steps from the zero point: nearest, ties to even, from 0 to 15."""
    limited = tl.minimum(tl.maximum(steps, -8.0), 7.0)
    return (limited + 12582920.0).to(tl.int32, bitcast=True) & 15  # 1.5 * 2^23 + 8: the sum is rounded


@triton.jit
def _signs(i, j, SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """Return the matrix's entries in rows i and columns j, +-1, or 0 for dimensions that do not rotate together."""
    parity = i & j & (SIZE - 1)
    parity ^= parity >> 8
    parity ^= parity >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    signs = tl.where((parity & 1) == 1, -1.0, 1.0)
    return tl.where(i // SIZE == j // SIZE, signs, 0.0).to(DTYPE)


@triton.jit
def _hadamard_pairs(
    a, b, from_a, from_b, to_a, to_b, SIZE: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Rotate heads whose dimensions from_a and from_b are in a and b, fp32 [heads, pairs], at least 16 heads. Return
    the dimensions to_a and to_b. All dimensions are [1, pairs]; a and b are 0 past the last pair of a head.

    DTYPE: of the factors, the model's, as a cache of its type would have rounded them; sums are fp32.
    """
    rows_a, rows_b = tl.trans(from_a), tl.trans(from_b)
    x, y = a.to(DTYPE), b.to(DTYPE)
    first = tl.dot(x, _signs(rows_a, to_a, SIZE, DTYPE), input_precision="ieee")
    first = tl.dot(y, _signs(rows_b, to_a, SIZE, DTYPE), first, input_precision="ieee")
    second = tl.dot(x, _signs(rows_a, to_b, SIZE, DTYPE), input_precision="ieee")
    second = tl.dot(y, _signs(rows_b, to_b, SIZE, DTYPE), second, input_precision="ieee")
    factor = 1.0 / tl.sqrt(SIZE + 0.0)
    return first * factor, second * factor
