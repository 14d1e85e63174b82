"""One matrix product over blocks of rows, each block with the weights of its own expert.

A layer's two products share the kernel. The first gathers tokens, multiplies by the gate and up rows of one expert and
applies the gated activation before anything is written. The second multiplies by `down`, weights the row and writes it
at its id's position, for `combine` to add up.

While decoding, an expert has 1 to 4 rows and the weights of every used expert are read once: limited by memory, floor =
those bytes / bandwidth. Tensor cores need 64 rows of the first operand, so the weights are the first operand ("swap
AB": y^T = W x^T) and 16 rows of x suffice. From about 100 rows per expert, arithmetic is the limit.
On Hopper and on Blackwell's data-center GPUs weights are loaded by TMA, through one descriptor of [E * N, K]. sm_120
multiplies like Ampere and loads by pointers like Ampere: TMA's barriers would only make its loop longer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from localllm.kernels.gated import gated_reference, limit_of, limited_product
from localllm.kernels.launch import (
    INTERPRETED,
    TensorDescriptor,
    cdiv,
    early_launch,
    launch_options,
    runs_triton,
    tl,
    triton,
    uses,
    wait_for_inputs,
)
from localllm.kernels.moe.align import Alignment
from localllm.kernels.moe.weights import ScaledExperts
from localllm.kernels.unpack_bytes import scaled_groups, unpack_pairs

CLAMP_LIMIT, CLAMP_ALPHA = 7.0, 1.702  # of swiglu_clamped, as in gpt-oss's training


def grouped_gemm(
    x: Tensor,
    weight: Tensor | ScaledExperts,
    blocks: Alignment,
    weights: Tensor,
    activation: str | None = None,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply each block by its expert's matrix; weights [T, top_k] fp32 are the router's.

    With an activation: x [T, K], weight [E, 2 * I, K] with the gate's rows first; returns activation(gate) * up as
    [rows of the alignment, I], in the alignment's order. Without: x is that result, weight [E, N, K]; returns [T *
    top_k, N], each row times its routing weight, in the order of the ids. Rows of padding are not written.
    relu2 has no gate: weight [E, I, K], and the result is relu(y)^2.

    A plain weight has x's dtype. bias: [E, 2 * I] or [E, N]. out: where the result goes; None: into a new tensor.
    """
    name, limit = limit_of(activation or "")
    values, scales = (weight.values, weight.scales) if isinstance(weight, ScaledExperts) else (weight, None)
    gated = is_gated(activation)
    num_outputs = weight.shape[1] // (2 if gated else 1)
    num_rows = blocks.num_rows if activation else weights.numel()
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device) if out is None else out
    if not runs_triton(x, "experts"):
        return grouped_gemm_reference(out, x, lambda expert: weight[expert].float(), blocks, weights, activation, bias)
    if blocks.experts.numel() == 0:
        return out
    in_blocks = isinstance(weight, ScaledExperts) and weight.in_blocks
    tile = grouped_gemm_tile(blocks.block_m, gated, x.dtype.itemsize, gpu_of(x.device), in_blocks=in_blocks)
    block_n, block_k, depth, kind = tile.block_n, tile.block_k, values.shape[2], "float"
    if scales is not None:
        kind = "int8" if values.dtype == torch.int8 else "e4m3"
        values = values.view(torch.int16)  # two weights per element
    assert values.is_contiguous()
    assert x.stride(1) == 1
    aligned = values.data_ptr() % 16 == 0 and values.stride(1) * values.itemsize % 16 == 0
    tma = tile.tma and uses("expert TMA") and aligned
    _grouped_gemm_kernel[(blocks.experts.numel() * cdiv(num_outputs, block_n),)](
        x,
        values,
        _descriptor(values, block_n, block_k * values.shape[2] // depth) if tma else None,
        bias,
        scales,
        weights,
        out,
        blocks.experts if blocks.rows is None else blocks.rows,
        blocks.experts,
        x.stride(0),
        values.stride(1),
        num_outputs,
        depth,
        TOP_K=weights.shape[1],
        ACTIVATION=name,
        LIMIT=limit,
        KIND=kind,
        BLOCKS=in_blocks,
        GROUPS=isinstance(weight, ScaledExperts) and weight.in_groups,
        PTX=not INTERPRETED and torch.version.hip is None,
        SINGLE=blocks.is_single,
        BLOCK_M=blocks.block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GROUP_M=tile.group_m,
        SWAP=tile.swap,
        EVEN_K=depth % block_k == 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **early_launch(x.device),
    )
    return out


def is_gated(activation: str | None) -> bool:
    """Return whether an activation's input has a gate besides `up`."""
    return activation not in (None, "relu2")


class MoeGemmTile(NamedTuple):
    block_n: int
    block_k: int
    group_m: int  # consecutive blocks of rows that use the same columns while those weights are in L2
    swap: bool  # weights are the first operand
    tma: bool
    num_warps: int
    num_stages: int


def grouped_gemm_tile(block_m: int, gated: bool, itemsize: int, gpu: int, *, in_blocks: bool = False) -> MoeGemmTile:
    """Return settings. gpu: 90 for sm_90. A gated product needs two tiles of weights and two accumulators; with scales
    per block, it also needs registers for each tile's product."""
    if not has_tensor_cores(itemsize, gpu):
        return MoeGemmTile(32, 32, 1, False, False, 4, 2)
    if gpu == AMD:  # 64 KiB of shared memory
        return MoeGemmTile(64, 64, 4, block_m <= 32, False, 4, 2)
    tma = 90 <= gpu < 120
    if block_m <= 32:
        return MoeGemmTile(64, 128, 1, True, tma, 4, 3 if gated else 4)
    if block_m == 64 and in_blocks:
        return MoeGemmTile(64, 64, 4, False, tma, 4, 4)
    if block_m == 64:
        return MoeGemmTile(64 if gated else 128, 64, 4, False, tma, 4, 4)
    if gated and gpu // 10 != 9:  # only wgmma leaves registers for two accumulators of 128 columns
        return MoeGemmTile(64, 64, 8, False, tma, 8, 3)
    return MoeGemmTile(128, 64, 8, False, tma, 8, 3 if gated else 4)


def has_tensor_cores(itemsize: int, gpu: int) -> bool:
    """Return whether Triton has a tensor-core instruction for the type:
    none on Turing, none that keeps fp32's precision."""
    return itemsize < 4 and (gpu == AMD or gpu >= 80)


def block_rows(num_ids: int, num_experts: int, x: Tensor) -> int:
    """Return the rows of a block for `num_ids` ids: about an expert's share, so that there is little padding.

    Deterministic mode uses one size for all: the tile's size decides the order of its sums.
    """
    if not has_tensor_cores(x.dtype.itemsize, gpu_of(x.device)):
        return 16
    if launch_options().deterministic:
        return 64
    rows = num_ids / num_experts
    return 16 if rows <= 8 else 32 if rows <= 24 else 64 if rows <= 96 else 128


def scaled_block_rows(weight: ScaledExperts) -> int:
    """Return the most rows of a block:
    with scales per block or group, a product takes registers in addition to its accumulator."""
    return 64 if weight.in_blocks or weight.in_groups else 128


def act_reference(gate_up: Tensor, activation: str) -> Tensor:
    """gate_up [T, 2 * I], gate first -> [T, I]; relu2: [T, I] without a gate -> [T, I]"""
    if activation == "relu2":
        return gate_up.relu().square()
    if activation == "swiglu_clamped":
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=CLAMP_LIMIT), up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT)
        return (up + 1) * (gate * torch.sigmoid(CLAMP_ALPHA * gate))
    return gated_reference(gate_up, activation)


def grouped_gemm_reference(
    out: Tensor,
    x: Tensor,
    matrix_of: Callable[[int], Tensor],
    blocks: Alignment,
    weights: Tensor,
    activation: str | None,
    bias: Tensor | None,
) -> Tensor:
    """The definition, block by block into `out`; matrix_of(expert) is [N, K] fp32.

    The CPU engine uses experts_reference, which needs no blocks.
    """
    for place, expert in enumerate(blocks.experts.tolist()):
        if expert < 0:
            continue
        places = torch.arange(place * blocks.block_m, (place + 1) * blocks.block_m)
        rows = (
            torch.where(places % blocks.block_m == 0, place, -1) if blocks.rows is None else blocks.rows[places].long()
        )
        places, rows = places[rows >= 0], rows[rows >= 0]
        y = x[rows // weights.shape[1] if activation else places].float() @ matrix_of(expert).t()
        if bias is not None:
            y += bias[expert]
        if activation:
            out[places] = act_reference(y, activation).to(out.dtype)
        else:
            out[rows] = (y * weights.flatten()[rows, None]).to(out.dtype)
    return out


AMD = 0


@cache
def gpu_of(device: torch.device) -> int:
    """Return the compute capability, 90 for sm_90. The interpreter runs as Hopper."""
    if INTERPRETED:
        return 90
    if torch.version.hip is not None:
        return AMD
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def _descriptor(weight: Tensor, block_n: int, block_k: int) -> Any:
    """Return a descriptor of [E * N, K].
    A tile may extend into the next expert's rows; their results are not written."""
    shape = [weight.shape[0] * weight.shape[1], weight.shape[2]]
    return TensorDescriptor(weight, shape, [weight.stride(1), 1], [block_n, block_k])


@triton.jit
def _grouped_gemm_kernel(
    x_ptr,  # [T, K], or [rows of the alignment, K]
    weight_ptr,  # [E, N or 2 * N, K]
    weight_desc,  # the same as [E * N or E * 2 * N, K], or None
    bias_ptr,  # [E, N or 2 * N] or None
    scales_ptr,  # [E, N or 2 * N], or a block's [E, N / 128, K / 128], or uint8 [E, N or 2 * N, K / 32]; or None
    weights_ptr,  # [T, TOP_K], of the router
    out_ptr,  # [rows of the alignment, N], or [T * TOP_K, N]
    rows_ptr,
    experts_ptr,
    x_stride,
    weight_stride,
    N,
    K,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,  # "": the second product
    LIMIT: tl.constexpr,  # of the activation and of up; 0: there is none
    KIND: tl.constexpr,  # "float", or "int8" or "e4m3": then an element of the weights is an int16 of two
    BLOCKS: tl.constexpr,  # 128 x 128 weights share a scale; a tile lies in one block
    GROUPS: tl.constexpr,  # 32 inputs of an output share a power of two
    PTX: tl.constexpr,
    SINGLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per block of rows and BLOCK_N outputs."""
    FIRST: tl.constexpr = ACTIVATION != ""
    GATED: tl.constexpr = FIRST and ACTIVATION != "relu2"
    PACKED: tl.constexpr = 1 if KIND == "float" else 2  # weights in one element
    num_n = tl.cdiv(N, BLOCK_N)
    block, n_tile = tile_of_program(num_n, GROUP_M)
    wait_for_inputs(PDL)
    expert = tl.load(experts_ptr + block)
    if expert < 0:
        return
    m = tl.arange(0, BLOCK_M)
    rows = rows_of_block(rows_ptr, block, BLOCK_M, SINGLE)
    valid = rows >= 0
    places = block.to(tl.int64) * BLOCK_M + m
    sources = rows.to(tl.int64) // TOP_K if FIRST else places
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + sources[:, None] * x_stride + k[None, :]
    first = expert * N * (2 if GATED else 1)  # row of the expert in [E * N, K]
    weight_rows = first.to(tl.int64) + tl.minimum(n, N - 1)  # the last rows are repeated, and not written again
    k_of_weight = tl.arange(0, BLOCK_K // PACKED)
    weight_ptrs = weight_ptr + weight_rows[:, None] * weight_stride + k_of_weight[None, :]
    up_ptrs = weight_ptrs + N.to(tl.int64) * weight_stride
    group_ptrs, up_group_ptrs = scales_ptr, scales_ptr
    if GROUPS:
        group_ptrs = scales_ptr + weight_rows[:, None] * tl.cdiv(K, 32) + tl.arange(0, BLOCK_K // 32)[None, :]
        up_group_ptrs = group_ptrs + N.to(tl.int64) * tl.cdiv(K, 32)

    if SWAP:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up_acc = acc
    for start in range(0, K, BLOCK_K):
        x_mask = valid[:, None] if EVEN_K else valid[:, None] & (k < K - start)[None, :]
        x = tl.load(x_ptrs + start, mask=x_mask, other=0.0)
        if weight_desc is not None:
            weight = weight_desc.load([first + n_tile * BLOCK_N, start // PACKED])
        else:
            weight = _load_columns(weight_ptrs + start // PACKED, k_of_weight * PACKED, K - start, EVEN_K)
        if BLOCKS:
            block_scale = tl.load(scales_ptr + _block_of(expert, n_tile * BLOCK_N, start, N, K, GATED))
            acc += _multiply(x, weight, tl.zeros_like(acc), None, start, K, SWAP, KIND, PTX) * block_scale
        else:
            acc = _multiply(x, weight, acc, group_ptrs if GROUPS else None, start, K, SWAP, KIND, PTX)
        if GATED:
            if weight_desc is not None:
                up = weight_desc.load([first + N + n_tile * BLOCK_N, start // PACKED])
            else:
                up = _load_columns(up_ptrs + start // PACKED, k_of_weight * PACKED, K - start, EVEN_K)
            if BLOCKS:
                block_scale = tl.load(scales_ptr + _block_of(expert, N + n_tile * BLOCK_N, start, N, K, GATED))
                up_acc += _multiply(x, up, tl.zeros_like(up_acc), None, start, K, SWAP, KIND, PTX) * block_scale
            else:
                up_acc = _multiply(x, up, up_acc, up_group_ptrs if GROUPS else None, start, K, SWAP, KIND, PTX)

    output_scales = None if BLOCKS or GROUPS else scales_ptr
    y = tl.trans(acc) if SWAP else acc
    y = finish_outputs(y, bias_ptr, output_scales, first + n, n < N)
    if GATED:
        up = tl.trans(up_acc) if SWAP else up_acc
        y = activate(y, finish_outputs(up, bias_ptr, output_scales, first + N + n, n < N), ACTIVATION, LIMIT)
        targets = places
    elif FIRST:
        y = squared_relu(y)
        targets = places
    else:
        y *= tl.load(weights_ptr + rows, mask=valid, other=0.0)[:, None]
        targets = rows.to(tl.int64)
    out_ptrs = out_ptr + targets[:, None] * N + n[None, :]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (n < N)[None, :])


@triton.jit
def _block_of(expert, output, start, N, K, GATED: tl.constexpr):
    """Return the position of the scale of the tile that begins at this output of the expert and this input."""
    rows = tl.cdiv(N * (2 if GATED else 1), 128)
    return (expert * rows + output // 128) * tl.cdiv(K, 128) + start // 128


@triton.jit
def tile_of_program(num_n, GROUP_M: tl.constexpr):
    """Return (block of rows, tile of outputs): GROUP_M blocks use one tile before they move to the next."""
    program = tl.program_id(0)
    num_m = tl.num_programs(0) // num_n
    return tl.swizzle2d(program // num_n, program % num_n, num_m, num_n, GROUP_M)


@triton.jit
def rows_of_block(rows_ptr, block, BLOCK_M: tl.constexpr, SINGLE: tl.constexpr):
    """Return [BLOCK_M] indices into the flat ids, -1 for padding. SINGLE: one id per block, nothing to load."""
    m = tl.arange(0, BLOCK_M)
    return tl.where(m == 0, block, -1) if SINGLE else tl.load(rows_ptr + block * BLOCK_M + m)


@triton.jit
def _load_columns(ptrs, k, left, EVEN_K: tl.constexpr):
    """Load a tile of weights, with zeros beyond the end of K."""
    return tl.load(ptrs) if EVEN_K else tl.load(ptrs, mask=(k < left)[None, :], other=0)


@triton.jit
def _multiply(x, weight, acc, group_ptrs, start, K, SWAP: tl.constexpr, KIND: tl.constexpr, PTX: tl.constexpr):
    """Return acc + x W^T, or its transpose. Bytes are converted exactly to x's type in registers. group_ptrs: to the
    powers of two of the first tile's groups; None: there are none. start: the tile's first input."""
    if KIND == "float":
        return _dot(x, weight, acc, SWAP)
    else:
        even, odd = unpack_pairs(weight, KIND, x.dtype, PTX)
        if group_ptrs is not None:
            group = start // 32 + tl.arange(0, x.shape[1] // 32)
            exponents = tl.load(group_ptrs + start // 32, mask=(group < tl.cdiv(K, 32))[None, :], other=0)
            even, odd = scaled_groups(even, exponents), scaled_groups(odd, exponents)
        x_even, x_odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
        return _dot(x_odd, odd, _dot(x_even, even, acc, SWAP), SWAP)


@triton.jit
def _dot(x, weight, acc, SWAP: tl.constexpr):
    if SWAP:
        return tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
    else:
        return tl.dot(x, tl.trans(weight), acc, input_precision="ieee")


@triton.jit
def finish_outputs(y, bias_ptr, scales_ptr, outputs, mask):
    """Return y [M, N] * scale + bias, each per output."""
    if scales_ptr is not None:
        y *= tl.load(scales_ptr + outputs, mask=mask, other=0.0)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + outputs, mask=mask, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def squared_relu(y):
    """Return relu(y)^2 in fp32."""
    y = tl.maximum(y, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return y * y


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr):
    """Return activation(gate) * up in fp32."""
    if LIMIT > 0:
        tl.static_assert(ACTIVATION == "silu")
        return limited_product(gate * tl.sigmoid(gate), up, LIMIT)
    elif ACTIVATION == "silu":
        return gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "gelu":
        return gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif ACTIVATION == "gelu_tanh":
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    else:
        tl.static_assert(ACTIVATION == "swiglu_clamped")
        gate = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)  # CLAMP_LIMIT
        up = tl.clamp(up, -7.0, 7.0, propagate_nan=tl.PropagateNan.ALL)
        return (up + 1.0) * gate * tl.sigmoid(1.702 * gate)  # CLAMP_ALPHA
