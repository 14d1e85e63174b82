"""The recurrent operations through the native library: tensors as the structures of recurrent.h.

Each function is its operation's kernel on a CPU; the files causal_conv.py, gated_delta.py, selective_scan.py and
gated_norm.py define what it computes. Activations of other types are converted to fp32 and back.
Does not know: what the operations compute.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.kernels.cpu.native.library import Library, Pool
from localllm.kernels.cpu.native.structures import (
    CacheType,
    NativeConvolution,
    NativeGatedDelta,
    NativeGatedNorm,
    NativeSelectiveScan,
    NativeStateRows,
)
from localllm.kernels.layer_cache import StateStep

STATE_TYPES = {
    torch.float32: CacheType.F32,
    torch.bfloat16: CacheType.BF16,
    torch.float16: CacheType.F16,
}


def causal_conv(
    library: Library | Pool,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    step: StateStep,
    silu: bool,
) -> Tensor:
    wide, out = x.float(), torch.empty(x.shape)
    operation = NativeConvolution(
        x=wide.data_ptr(), y=out.data_ptr(), x_stride=wide.stride(0), y_stride=out.stride(0), weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(), states=conv_state.data_ptr(),
        state_type=STATE_TYPES[conv_state.dtype], channels=x.shape[1], taps=weight.shape[0], is_silu=silu,
    )  # fmt: skip
    library.run_recurrent(operation, _rows(step))
    return out.to(x.dtype)


def gated_delta(
    library: Library | Pool, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, rate: Tensor, dt_bias: Tensor,
    matrix: Tensor, step: StateStep, tiled: bool, beta_scale: float = 1.0,
) -> Tensor:  # fmt: skip
    wide = [each.float() for each in (q, k, v, a, b)]
    out = torch.empty(v.shape)
    operation = NativeGatedDelta(
        *(each.data_ptr() for each in (*wide, out)), *(each.stride(0) for each in (*wide, out)),
        rate.data_ptr(), dt_bias.data_ptr(), matrix.data_ptr(), k.shape[1], v.shape[1], k.shape[2], v.shape[2], tiled,
        beta_scale,
    )  # fmt: skip
    library.run_recurrent(operation, _rows(step))
    return out.to(v.dtype)


def selective_scan(
    library: Library | Pool, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, rate: Tensor, dt_bias: Tensor, skip: Tensor,
    matrix: Tensor, step: StateStep, limits: tuple[float, float],
) -> Tensor:  # fmt: skip
    wide = [each.float() for each in (x, dt, b, c)]
    out = torch.empty(x.shape)
    operation = NativeSelectiveScan(
        *(each.data_ptr() for each in (*wide, out)), *(each.stride(0) for each in (*wide, out)),
        rate.data_ptr(), dt_bias.data_ptr(), skip.data_ptr(), matrix.data_ptr(), x.shape[1], b.shape[1], x.shape[2],
        b.shape[2], *limits,
    )  # fmt: skip
    library.run_recurrent(operation, _rows(step))
    return out.to(x.dtype)


def gated_norm(
    library: Library | Pool, x: Tensor, gate: Tensor, weight: Tensor, eps: float, gate_first: bool
) -> Tensor:
    (tokens, groups, width), out = x.shape, torch.empty(x.shape)
    wide = x.float(), gate.float(), out
    operation = NativeGatedNorm(
        *(each.data_ptr() for each in wide), *(each.stride(0) for each in wide), weight.data_ptr(), groups, width,
        weight.numel() == width, gate_first, eps,
    )  # fmt: skip
    library.gated_norm(operation, tokens)
    return out.to(x.dtype)


def _rows(step: StateStep) -> NativeStateRows:
    tensors = (step.cu_seqlens, step.read, step.write, step.save)
    return NativeStateRows(*(each.data_ptr() for each in tensors), len(step.query_lens))
