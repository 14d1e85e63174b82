"""A depthwise causal convolution over each row's tokens, with the last inputs of the row kept as its state.

    y[t] = act(bias + sum over j of weight[j] * x[t - K + 1 + j])        K taps, the oldest first

Inputs before the row's first token come from the state, or are zero. Sums are in fp32 and in the order of the taps: a
token's result has the same bits however its request is cut into rows. Limited by memory bandwidth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.kernels.cpu.native.library import native
from localllm.kernels.cpu.recurrent import causal_conv as native_causal_conv
from localllm.kernels.launch import cdiv, early_launch, next_power_of_2, runs_triton, tl, triton, wait_for_inputs
from localllm.kernels.layer_cache import HostRow, StateStep

TOKENS = 8  # that a program takes at a time


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor, step: StateStep, *, silu: bool
) -> Tensor:
    """Return the convolution of x [T, C] in its type; writes the states of the step's rows.

    weight [K, C] and bias [C] fp32, contiguous. conv_state [places, C, K - 1] as in a LayerState. silu: apply SiLU.
    """
    assert weight.is_contiguous()
    assert conv_state.is_contiguous()
    assert x.stride(1) == 1
    assert conv_state.shape[1:] == (x.shape[1], weight.shape[0] - 1), (conv_state.shape, x.shape, weight.shape)
    if runs_triton(x, "recurrent"):
        return _launch(x, weight, bias, conv_state, step, silu)
    if not x.is_cuda and (library := native()) is not None:
        return native_causal_conv(library, x, weight, bias, conv_state, step, silu)
    return causal_conv_reference(x, weight, bias, conv_state, step, silu=silu)


def causal_conv_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor, step: StateStep, *, silu: bool
) -> Tensor:
    """The plain-torch twin."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for row in step.host_rows():
        out[row.first : row.end] = _row(x[row.first : row.end], weight, bias, conv_state, row, silu)
    return out


def _row(x: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor, row: HostRow, silu: bool) -> Tensor:
    """Return the convolution of one row in fp32."""
    inputs = torch.cat((row.load(conv_state).t().float(), x.float()))  # [K - 1 + tokens, C]
    count = len(x)
    y = torch.zeros_like(inputs[:count]) if bias is None else bias.expand(count, -1).clone()
    for tap, factors in enumerate(weight):
        y += inputs[tap : tap + count] * factors
    row.store(conv_state, inputs[count:].t())
    return y / (1 + torch.exp(-y)) if silu else y


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor, step: StateStep, silu: bool) -> Tensor:
    taps, channels = weight.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = min(128, next_power_of_2(channels))
    num_rows = step.read.shape[0]
    _causal_conv_kernel[(num_rows, cdiv(channels, block))](
        x, weight, bias, conv_state, out, step.cu_seqlens, step.read, step.write, step.save, x.stride(0), channels,
        TAPS=taps, SILU=silu, TOKENS=TOKENS, BLOCK=block, num_warps=4, **early_launch(x.device),
    )  # fmt: skip
    return out


@triton.jit
def _causal_conv_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, out_ptr, cu_seqlens_ptr, read_ptr, write_ptr, save_ptr, x_stride, channels,
    TAPS: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK channels of a row. bias_ptr may be None."""
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    first = tl.load(cu_seqlens_ptr + row).to(tl.int64)
    count = tl.load(cu_seqlens_ptr + row + 1).to(tl.int64) - first
    read = tl.load(read_ptr + row).to(tl.int64)
    x_ptr += first * x_stride
    before = state_ptr + (read * channels + channel) * (TAPS - 1)  # the input at position p < 0 is at TAPS - 1 + p
    bias = tl.zeros([BLOCK], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channel, mask=inside, other=0.0)
    for start in range(0, count, TOKENS):
        token = start + tl.arange(0, TOKENS)
        y = tl.zeros([TOKENS, BLOCK], tl.float32) + bias[None, :]
        for tap in tl.static_range(TAPS):
            factor = tl.load(weight_ptr + tap * channels + channel, mask=inside, other=0.0)
            y += (
                _inputs(x_ptr, before, token + (tap - TAPS + 1), count, read, x_stride, channel, inside, TAPS)
                * (factor[None, :])
            )
        if SILU:
            y = y / (1.0 + tl.exp(-y))
        place = out_ptr + (first + token)[:, None] * channels + channel[None, :]
        tl.store(place, y.to(out_ptr.dtype.element_ty), mask=(token < count)[:, None] & inside[None, :])
    _keep(x_ptr, before, state_ptr, write_ptr, save_ptr, row, count, read, x_stride, channels, channel, TAPS)


@triton.jit
def _inputs(x_ptr, before, position, count, read, x_stride, channel, inside, TAPS: tl.constexpr):
    """Return the row's inputs at the positions [n], from the state where a position is negative."""
    old_mask = (position < tl.where(read > 0, 0, -TAPS))[:, None] & inside[None, :]
    old = tl.load(before[None, :] + (TAPS - 1 + position)[:, None], mask=old_mask, other=0.0)
    new_mask = ((position >= 0) & (position < count))[:, None] & inside[None, :]
    new = tl.load(x_ptr + position[:, None] * x_stride + channel[None, :], mask=new_mask, other=0.0)
    return tl.where((position < 0)[:, None], old.to(tl.float32), new.to(tl.float32))


@triton.jit
def _keep(
    x_ptr, before, state_ptr, write_ptr, save_ptr, row, count, read, x_stride, channels, channel,
    TAPS: tl.constexpr,
):  # fmt: skip
    """Write the row's last TAPS - 1 inputs, oldest first. A row may write the place that it has read: each round reads
    inputs that are later than those written so far, and the barrier keeps other threads' reads before them."""
    write = tl.load(write_ptr + row).to(tl.int64)
    save = tl.load(save_ptr + row).to(tl.int64)
    for kept in tl.static_range(TAPS - 1):
        position = count - (TAPS - 1) + kept
        old_end = tl.where((position < 0) & (read > 0), channels, 0)
        old = tl.load(before + TAPS - 1 + position, mask=channel < old_end, other=0.0)
        new_end = tl.where(position < 0, 0, channels)
        new = tl.load(x_ptr + position * x_stride + channel, mask=channel < new_end, other=0.0)
        value = tl.where(position < 0, old.to(tl.float32), new.to(tl.float32)).to(state_ptr.dtype.element_ty)
        tl.debug_barrier()
        place = channel * (TAPS - 1) + kept
        end = tl.where(write > 0, channels, 0)
        tl.store(state_ptr + write * channels * (TAPS - 1) + place, value, mask=channel < end)
        end = tl.where(save > 0, channels, 0)
        tl.store(state_ptr + save * channels * (TAPS - 1) + place, value, mask=channel < end)
