"""grouped_gemm with experts of 4 or 8 bits (planar/layout.py; AWQ, GPTQ, GGUF). The experts of a layer are one planar
weight of E * N outputs, and each block uses its own expert's outputs.

The loop is that of planar/kernels.py: integers are exact in x's type, groups are scaled in fp32 after the MMA. A tile
has 128 outputs, because only then do unpacked weights go from registers into the MMA. In the gated product these are 64
of the gate and the 64 corresponding ones of `up`, separated again before the activation.
At few rows the limit is memory or instructions, see planar/linear.py. An expert's share of a prompt is too short for
converting its matrix to 16 bits first to pay.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from localllm.kernels.gated import limit_of
from localllm.kernels.launch import cdiv, early_launch, runs_triton, tl, triton, wait_for_inputs
from localllm.kernels.moe.align import Alignment
from localllm.kernels.moe.grouped_gemm import (
    activate,
    gpu_of,
    grouped_gemm_reference,
    has_tensor_cores,
    is_gated,
    rows_of_block,
    squared_relu,
    tile_of_program,
)
from localllm.kernels.moe.weights import PlanarExperts
from localllm.kernels.planar.kernels import load_groups, scale_to_fp32, zero_point
from localllm.kernels.planar.layout import unpack_planes
from localllm.kernels.planar.linear import code_table_on, constants


def planar_gemm(
    x: Tensor,
    weight: PlanarExperts,
    blocks: Alignment,
    weights: Tensor,
    activation: str | None = None,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Do grouped_gemm with planar experts."""
    gated, (name, limit) = is_gated(activation), limit_of(activation or "")
    num_outputs = weight.shape[1] // (2 if gated else 1)
    num_rows = blocks.num_rows if activation else weights.numel()
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device) if out is None else out
    if not runs_triton(x, "experts"):
        return grouped_gemm_reference(
            out, x, lambda expert: weight[expert].dequantize(torch.float32), blocks, weights, activation, bias
        )
    num_blocks = blocks.experts.numel()
    if num_blocks == 0:
        return out
    planes = weight.weight
    tensor_cores = has_tensor_cores(x.dtype.itemsize, gpu_of(x.device))
    tile = planar_gemm_tile(blocks.block_m, planes.bits, planes.mins is not None, tensor_cores)
    tiles = cdiv(num_outputs, tile.block_n // (2 if gated else 1))
    _planar_gemm_kernel[(num_blocks * tiles,)](
        x,
        planes.words,
        planes.scales,
        planes.zeros,
        planes.mins,
        planes.super_scales,
        planes.super_mins,
        None if planes.table is None else code_table_on(planes.table, x.device),
        bias,
        weights,
        out,
        blocks.experts if blocks.rows is None else blocks.rows,
        blocks.experts,
        x.stride(0),
        planes.words.stride(0),
        planes.scales.stride(0),
        num_outputs,
        planes.columns,
        **constants(planes, x.dtype),
        TOP_K=weights.shape[1],
        ACTIVATION=name,
        LIMIT=limit,
        SINGLE=blocks.is_single,
        BLOCK_M=blocks.block_m,
        BLOCK_N=tile.block_n,
        GROUP_M=tile.group_m,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **early_launch(x.device),
    )
    return out


class PlanarGemmTile(NamedTuple):
    block_n: int
    group_m: int
    num_warps: int
    num_stages: int


def planar_gemm_tile(block_m: int, bits: int, has_mins: bool, tensor_cores: bool) -> PlanarGemmTile:
    """Return settings with as few warps as do not spill: each of four warps reads the weights of two MMA tiles."""
    four_spill = block_m >= 64 or (block_m == 32 and has_mins and bits == 4) or not tensor_cores
    return PlanarGemmTile(128, 1 if block_m <= 32 else 8, 8 if four_spill else 4, 3 if block_m >= 64 else 4)


def planar_block_rows(weight: PlanarExperts) -> int:
    """Return the most rows of a block:
    sums over short groups or for minima need registers, and so do products on GPUs without wgmma."""
    planes = weight.weight
    if planes.mins is not None:
        return 32
    return 128 if planes.group >= 128 and gpu_of(planes.words.device) // 10 == 9 else 64


@triton.jit
def _planar_gemm_kernel(
    x_ptr,  # [T, K], or [rows of the alignment, K]
    words_ptr,  # [E * N or E * 2 * N, padded K * BITS / 16]
    scales_ptr,  # [groups, E * N or E * 2 * N], as are the next two
    zeros_ptr,
    mins_ptr,
    super_scales_ptr,
    super_mins_ptr,
    table_ptr,
    bias_ptr,  # [E, N or 2 * N] or None
    weights_ptr,  # [T, TOP_K], of the router
    out_ptr,  # [rows of the alignment, N], or [T * TOP_K, N]
    rows_ptr,
    experts_ptr,
    x_stride,
    words_stride,
    scales_stride,
    N,
    K,
    BITS: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    SUPER_GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    EVEN_K: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,  # "": the second product
    LIMIT: tl.constexpr,  # of the activation and of up; 0: there is none
    SINGLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per block of rows and BLOCK_N outputs, weights as the first operand."""
    FIRST: tl.constexpr = ACTIVATION != ""
    GATED: tl.constexpr = FIRST and ACTIVATION != "relu2"
    TILE_N: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    PLANES: tl.constexpr = 16 // BITS
    CHUNK: tl.constexpr = LANES * PLANES
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    MAGIC: tl.constexpr = 0.0 if BITS == 8 or dtype == tl.float32 else (1024.0 if dtype == tl.float16 else 128.0)
    block, n_tile = tile_of_program(tl.cdiv(N, TILE_N), GROUP_M)
    wait_for_inputs(PDL)
    expert = tl.load(experts_ptr + block)
    if expert < 0:
        return
    rows = rows_of_block(rows_ptr, block, BLOCK_M, SINGLE)
    valid = rows >= 0
    places = block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    sources = rows.to(tl.int64) // TOP_K if FIRST else places

    at = tl.arange(0, BLOCK_N)
    n = n_tile * TILE_N + at % TILE_N
    in_n = n < N
    outputs = expert * N * (2 if GATED else 1) + (at // TILE_N) * N + n  # of the gate, then the same of `up`
    lanes = tl.arange(0, LANES)
    word_ptrs = words_ptr + outputs.to(tl.int64)[:, None] * words_stride + lanes[None, :]
    x_ptrs = x_ptr + sources[None, :] * x_stride + lanes[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    ones = tl.full([BLOCK_N, LANES], 1.0, dtype)
    chunks = tl.cdiv(K, CHUNK)
    # Scales are loaded one iteration ahead: loaded when needed, they would make each iteration wait for memory again.
    ahead = load_groups(
        0,
        zeros_ptr,
        scales_ptr,
        mins_ptr,
        super_scales_ptr,
        super_mins_ptr,
        scales_stride,
        outputs,
        in_n,
        GROUP,
        SUPER_GROUP,
        CHUNK,
    )
    for chunk in range(chunks):
        groups = ahead
        ahead = load_groups(
            (chunk + 1) * CHUNK,
            zeros_ptr,
            scales_ptr,
            mins_ptr,
            super_scales_ptr,
            super_mins_ptr,
            scales_stride,
            outputs,
            n < tl.where(chunk + 1 < chunks, N, 0),
            GROUP,
            SUPER_GROUP,
            CHUNK,
        )
        words = tl.load(word_ptrs + chunk * LANES, mask=in_n[:, None], other=0)
        planes = unpack_planes(words, dtype, table_ptr, BITS, ASSEMBLY)
        for p in tl.static_range(PLANES):
            k = chunk * CHUNK + p * LANES
            x_mask = valid[None, :] if EVEN_K else valid[None, :] & (k + lanes < K)[:, None]
            xt = tl.load(x_ptrs + k, mask=x_mask, other=0.0)
            if (p * LANES) % GROUP == 0:
                part = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            w = planes[p]
            if zeros_ptr is not None:
                w = w - zero_point(groups[2 + 3 * (p * LANES // GROUP)], dtype, BITS)[:, None]
            elif table_ptr is None and MAGIC + ZERO != 0.0:
                w = w - (MAGIC + ZERO)
            part = tl.dot(w, xt, part, input_precision="ieee")
            if mins_ptr is not None:
                sums = tl.dot(ones, xt, sums, input_precision="ieee")
            if ((p + 1) * LANES) % GROUP == 0 or p + 1 == PLANES:
                scale = groups[3 + 3 * (p * LANES // GROUP)]
                acc += part * scale_to_fp32(scale, groups[0], super_scales_ptr is not None)[:, None]
                if mins_ptr is not None:
                    minimum = groups[4 + 3 * (p * LANES // GROUP)]
                    acc += sums * scale_to_fp32(minimum, groups[1], super_mins_ptr is not None)[:, None]

    if bias_ptr is not None:
        acc += tl.load(bias_ptr + outputs, mask=in_n, other=0.0).to(tl.float32)[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, TILE_N, BLOCK_M)), (1, 2, 0)))
        y = tl.trans(activate(gate, up, ACTIVATION, LIMIT))
        targets = places
    elif FIRST:
        y = tl.trans(squared_relu(acc))
        targets = places
    else:
        y = tl.trans(acc) * tl.load(weights_ptr + rows, mask=valid, other=0.0)[:, None]
        targets = rows.to(tl.int64)
    n = n_tile * TILE_N + tl.arange(0, TILE_N)
    out_ptrs = out_ptr + targets[:, None] * N + n[None, :]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (n < N)[None, :])
