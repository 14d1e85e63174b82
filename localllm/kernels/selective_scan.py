"""The selective state space of Mamba-2 (Dao & Gu 2024, arXiv:2405.21060), one token after the other.

For each head, with the state S [P, N] in fp32, and B, C shared by the heads of a group:

    d = clamp(softplus(dt + dt_bias), limits)
    S = exp(d * rate) S + d * x B^T
    y = S C + skip * x

As gated_delta.py: one kernel for rows of any length, and the same order of sums for a token however its request is cut
into rows. Rows of S are independent of each other.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.cpu.native.library import native
from localllm.kernels.cpu.recurrent import selective_scan as native_selective_scan
from localllm.kernels.launch import cdiv, early_launch, next_power_of_2, runs_triton, tl, triton, wait_for_inputs
from localllm.kernels.layer_cache import StateStep

NO_LIMITS = (0.0, float("inf"))


def selective_scan(
    x: Tensor, dt: Tensor, B: Tensor, C: Tensor, rate: Tensor, dt_bias: Tensor, skip: Tensor, matrix: Tensor,
    step: StateStep, *, limits: tuple[float, float] = NO_LIMITS,
) -> Tensor:  # fmt: skip
    """Return y [T, H, P] in x's type; writes the states of the step's rows.

    x [T, H, P], dt [T, H], B, C [T, G, N]: views whose last two dimensions are contiguous. rate (A, negative), dt_bias
    and skip (D) [H] fp32. matrix [places, H, P, N] fp32 as in a LayerState. Group g serves the heads g * H / G onwards.
    """
    assert matrix.is_contiguous()
    assert matrix.dtype == torch.float32
    assert matrix.shape[1:] == (x.shape[1], x.shape[2], B.shape[2]), (matrix.shape, x.shape, B.shape)
    assert x.shape[1] % B.shape[1] == 0, (x.shape, B.shape)
    if runs_triton(x, "recurrent"):
        return _launch(x, dt, B, C, rate, dt_bias, skip, matrix, step, limits)
    if not x.is_cuda and (library := native()) is not None:
        return native_selective_scan(library, x, dt, B, C, rate, dt_bias, skip, matrix, step, limits)
    return selective_scan_reference(x, dt, B, C, rate, dt_bias, skip, matrix, step, limits=limits)


def selective_scan_reference(
    x: Tensor, dt: Tensor, B: Tensor, C: Tensor, rate: Tensor, dt_bias: Tensor, skip: Tensor, matrix: Tensor,
    step: StateStep, *, limits: tuple[float, float] = NO_LIMITS,
) -> Tensor:  # fmt: skip
    """The plain-torch twin."""
    heads, groups = x.shape[1], B.shape[1]
    group = torch.arange(heads, device=x.device) // (heads // groups)
    B, C = (each.float()[:, group, None, :] for each in (B, C))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for row in step.host_rows():
        state = row.load(matrix)
        for t in range(row.first, row.end):  # fixed shapes: torch rounds some functions by an element's place
            delta = F.softplus(dt[t].float() + dt_bias).clamp(*limits)[:, None, None]
            inputs = x[t].float()[..., None]
            state *= torch.exp(delta * rate[:, None, None])
            state += inputs * delta * B[t]
            out[t] = (state * C[t]).sum(-1) + skip[:, None] * inputs[..., 0]
        row.store(matrix, state)
    return out


def _launch(
    x: Tensor, dt: Tensor, B: Tensor, C: Tensor, rate: Tensor, dt_bias: Tensor, skip: Tensor, matrix: Tensor,
    step: StateStep, limits: tuple[float, float],
) -> Tensor:  # fmt: skip
    (_, heads, size), (_, groups, width) = x.shape, B.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = min(16, next_power_of_2(size))  # of S [16, 128] a thread of one warp holds 64 elements
    _selective_scan_kernel[(cdiv(size, rows), heads, step.read.shape[0])](
        x, dt, B, C, rate, dt_bias, skip, matrix, out, step.cu_seqlens, step.read, step.write, step.save,
        x.stride(0), dt.stride(0), B.stride(0), C.stride(0), *limits,
        HEADS=heads, GROUPS=groups, SIZE=size, WIDTH=width, ROWS=rows, COLUMNS=next_power_of_2(width), num_warps=1,
        **early_launch(x.device),
    )  # fmt: skip
    return out


@triton.jit
def _selective_scan_kernel(
    x_ptr, dt_ptr, b_ptr, c_ptr, rate_ptr, dt_bias_ptr, skip_ptr, state_ptr, out_ptr, cu_seqlens_ptr, read_ptr,
    write_ptr, save_ptr, x_stride, dt_stride, b_stride, c_stride, least, most,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for ROWS rows of the state of one head of a row of the step."""
    wait_for_inputs(PDL)
    head, row = tl.program_id(1), tl.program_id(2)
    i, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    group = head // (HEADS // GROUPS)
    first = tl.load(cu_seqlens_ptr + row).to(tl.int64)
    end = tl.load(cu_seqlens_ptr + row + 1).to(tl.int64)
    read = tl.load(read_ptr + row).to(tl.int64)
    tile = head * (SIZE * WIDTH) + i[:, None] * WIDTH + column[None, :]
    inside = (i < tl.where(read > 0, SIZE, 0))[:, None] & (column < WIDTH)[None, :]
    state = tl.load(state_ptr + read * (HEADS * SIZE * WIDTH) + tile, mask=inside, other=0.0)
    rate, dt_bias, skip = tl.load(rate_ptr + head), tl.load(dt_bias_ptr + head), tl.load(skip_ptr + head)
    for t in range(first, end):
        x = tl.load(x_ptr + t * x_stride + head * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + t * b_stride + group * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        c = tl.load(c_ptr + t * c_stride + group * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        dt = tl.load(dt_ptr + t * dt_stride + head).to(tl.float32) + dt_bias
        delta = tl.maximum(dt, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(dt)))
        delta = tl.minimum(tl.maximum(delta, least), most)
        state = state * tl.exp(delta * rate) + (x * delta)[:, None] * b[None, :]
        y = tl.sum(state * c[None, :], axis=1) + skip * x
        tl.store(out_ptr + t * (HEADS * SIZE) + head * SIZE + i, y.to(out_ptr.dtype.element_ty), mask=i < SIZE)
    write, save = tl.load(write_ptr + row).to(tl.int64), tl.load(save_ptr + row).to(tl.int64)
    inside = (i < tl.where(write > 0, SIZE, 0))[:, None] & (column < WIDTH)[None, :]
    tl.store(state_ptr + write * (HEADS * SIZE * WIDTH) + tile, state, mask=inside)
    inside = (i < tl.where(save > 0, SIZE, 0))[:, None] & (column < WIDTH)[None, :]
    tl.store(state_ptr + save * (HEADS * SIZE * WIDTH) + tile, state, mask=inside)
