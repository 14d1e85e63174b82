"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464), one token after the other.

For each value head, with the state S [dk, dv] in fp32, and k, q scaled to length 1:

    S *= exp(g)        g = rate * softplus(a + dt_bias)
    S += k u^T         u = beta * (v - S^T k)          beta = beta_scale * sigmoid(b)
    o = S^T q / sqrt(dk)

One kernel serves decode rows, chunks of prompts and verification: a token's sums have the same order however its
request is cut into rows. Single tokens are limited by memory bandwidth: a state element is read and written once per
row. Long rows are limited by the chain of tokens; columns of S are independent of each other. With a beta_scale of 2,
S may turn around: its transition has eigenvalues from -1 to 1 (Grazzi et al. 2024, arXiv:2411.12537).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.cpu.native.library import native
from localllm.kernels.cpu.recurrent import gated_delta as native_gated_delta
from localllm.kernels.launch import cdiv, early_launch, next_power_of_2, runs_triton, tl, triton, wait_for_inputs
from localllm.kernels.layer_cache import StateStep

EPS = 1e-6  # added to the squared length of q and k


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, rate: Tensor, dt_bias: Tensor, matrix: Tensor,
    step: StateStep, *, tiled: bool = False, beta_scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """Return o [T, Hv, dv] in v's type; writes the states of the step's rows.

    q, k [T, Hk, dk], v [T, Hv, dv], a, b [T, Hv]: views whose last two dimensions are contiguous. rate (negative) and
    dt_bias [Hv] fp32. matrix [places, Hv, dk, dv] fp32 as in a LayerState. Key head h serves the value heads
    h * Hv / Hk onwards, or with `tiled` those that are h modulo Hk.
    """
    assert matrix.is_contiguous()
    assert matrix.dtype == torch.float32
    assert matrix.shape[1:] == (v.shape[1], k.shape[2], v.shape[2]), (matrix.shape, k.shape, v.shape)
    assert v.shape[1] % k.shape[1] == 0, (v.shape, k.shape)
    if runs_triton(v, "recurrent"):
        return _launch(q, k, v, a, b, rate, dt_bias, matrix, step, tiled, beta_scale)
    if not v.is_cuda and (library := native()) is not None:
        return native_gated_delta(library, q, k, v, a, b, rate, dt_bias, matrix, step, tiled, beta_scale)
    return gated_delta_reference(
        q, k, v, a, b, rate, dt_bias, matrix, step, tiled=tiled, beta_scale=beta_scale
    )  # fmt: skip


def gated_delta_reference(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, rate: Tensor, dt_bias: Tensor, matrix: Tensor,
    step: StateStep, *, tiled: bool = False, beta_scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """The plain-torch twin."""
    heads, key_heads = v.shape[1], k.shape[1]
    key_head = torch.arange(heads, device=v.device)
    key_head = key_head % key_heads if tiled else key_head // (heads // key_heads)
    q, k = (_unit(x.float())[:, key_head, :, None] for x in (q, k))
    q = q * k.shape[2] ** -0.5
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    for row in step.host_rows():
        state = row.load(matrix)
        for t in range(row.first, row.end):  # fixed shapes: torch rounds some functions by an element's place
            beta = torch.sigmoid(b[t].float()) * beta_scale
            out[t] = _token(q[t], k[t], v[t].float(), a[t].float(), beta, rate, dt_bias, state)
        row.store(matrix, state)
    return out


def _token(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, beta: Tensor, rate: Tensor, dt_bias: Tensor, state: Tensor
) -> Tensor:
    """Return the output [Hv, dv] of a token; changes the state [Hv, dk, dv]. q, k [Hv, dk, 1]."""
    state *= torch.exp(rate * F.softplus(a + dt_bias))[:, None, None]
    change = (v - (state * k).sum(1)) * beta[:, None]
    state += k * change[:, None, :]
    return (state * q).sum(1)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)


def _launch(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, rate: Tensor, dt_bias: Tensor, matrix: Tensor,
    step: StateStep, tiled: bool, beta_scale: float,
) -> Tensor:  # fmt: skip
    (_, heads, dv), (_, key_heads, dk) = v.shape, k.shape
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    columns = min(16, next_power_of_2(dv))  # of S [128, 16] a thread of one warp holds 64 elements
    _gated_delta_kernel[(cdiv(dv, columns), heads, step.read.shape[0])](
        q, k, v, a, b, rate, dt_bias, matrix, out, step.cu_seqlens, step.read, step.write, step.save,
        q.stride(0), k.stride(0), v.stride(0), a.stride(0), b.stride(0), dk**-0.5, beta_scale,
        HEADS=heads, KEY_HEADS=key_heads, DK=dk, DV=dv, TILED=tiled, EPS=EPS, ROWS=next_power_of_2(dk),
        COLUMNS=columns, num_warps=1, **early_launch(q.device),
    )  # fmt: skip
    return out


@triton.jit
def _gated_delta_kernel(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, rate_ptr, dt_bias_ptr, state_ptr, out_ptr, cu_seqlens_ptr, read_ptr, write_ptr,
    save_ptr, q_stride, k_stride, v_stride, a_stride, b_stride, scale, beta_scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, TILED: tl.constexpr,
    EPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for COLUMNS columns of the state of one value head of a row."""
    wait_for_inputs(PDL)
    head, row = tl.program_id(1), tl.program_id(2)
    i, column = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    key_head = head % KEY_HEADS if TILED else head // (HEADS // KEY_HEADS)
    first = tl.load(cu_seqlens_ptr + row).to(tl.int64)
    end = tl.load(cu_seqlens_ptr + row + 1).to(tl.int64)
    read = tl.load(read_ptr + row).to(tl.int64)
    tile = head * (DK * DV) + i[:, None] * DV + column[None, :]
    inside = (i < tl.where(read > 0, DK, 0))[:, None] & (column < DV)[None, :]
    state = tl.load(state_ptr + read * (HEADS * DK * DV) + tile, mask=inside, other=0.0)
    rate, dt_bias = tl.load(rate_ptr + head), tl.load(dt_bias_ptr + head)
    for t in range(first, end):
        k = _unit_row(k_ptr + t * k_stride + key_head * DK, i, DK, EPS)
        q = _unit_row(q_ptr + t * q_stride + key_head * DK, i, DK, EPS) * scale
        v = tl.load(v_ptr + t * v_stride + head * DV + column, mask=column < DV, other=0.0).to(tl.float32)
        a = tl.load(a_ptr + t * a_stride + head).to(tl.float32) + dt_bias
        b = tl.load(b_ptr + t * b_stride + head).to(tl.float32)
        state *= tl.exp(rate * (tl.maximum(a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(a)))))
        change = (v - tl.sum(state * k[:, None], axis=0)) * beta_scale / (1.0 + tl.exp(-b))
        state += k[:, None] * change[None, :]
        o = tl.sum(state * q[:, None], axis=0)
        tl.store(out_ptr + t * (HEADS * DV) + head * DV + column, o.to(out_ptr.dtype.element_ty), mask=column < DV)
    write, save = tl.load(write_ptr + row).to(tl.int64), tl.load(save_ptr + row).to(tl.int64)
    inside = (i < tl.where(write > 0, DK, 0))[:, None] & (column < DV)[None, :]
    tl.store(state_ptr + write * (HEADS * DK * DV) + tile, state, mask=inside)
    inside = (i < tl.where(save > 0, DK, 0))[:, None] & (column < DV)[None, :]
    tl.store(state_ptr + save * (HEADS * DK * DV) + tile, state, mask=inside)


@triton.jit
def _unit_row(row_ptr, i, WIDTH: tl.constexpr, EPS: tl.constexpr):
    """Return the row in fp32, scaled to length 1."""
    x = tl.load(row_ptr + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + EPS)
