"""The operations of a recurrent part in a decode step's list (lone_step.py), up to its last projection.

    LINEAR      norm, then all that one matrix makes: [B | C | x], [q | k | v | z | b | a] or [z | x | B | C | dt]
    CONVOLVE    the causal convolution, between two MULTIPLY for LFM2
    DELTA       the gated delta rule, or SCAN: Mamba-2's
    GATED_NORM  with its gate (MULTIPLY for a gate without a norm)

Does not know: layers, the residual stream's additions.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from localllm.kernels.cpu.native.structures import (
    Activation,
    NativeConvolution,
    NativeGatedDelta,
    NativeGatedNorm,
    NativeSelectiveScan,
    Op,
)
from localllm.kernels.cpu.recurrent import STATE_TYPES
from localllm.kernels.layer_state import LayerState
from localllm.models.layers.gated_delta_net import GatedDeltaNet
from localllm.models.layers.mamba2 import Mamba2
from localllm.models.layers.short_conv import ShortConv
from localllm.models.lone_writer import Buffer, Writer


def write_recurrence(writer: Writer, part: object, state: LayerState, norm: Any) -> None:
    """Write the operations of `part` on the stream; the result is in the writer's buffer `recurred`."""
    if isinstance(part, ShortConv):
        _short_conv(writer, part, state, norm)
    elif isinstance(part, GatedDeltaNet):
        _gated_delta(writer, part, state, norm)
    else:
        assert isinstance(part, Mamba2), type(part)
        _mamba2(writer, part, state, norm)


def _short_conv(writer: Writer, part: ShortConv, state: LayerState, norm: Any) -> None:
    width = part.weight.shape[1]
    writer.linear(part.in_proj, writer.stream, writer.projected, norm=norm)
    writer.multiply(writer.projected, 0, writer.projected, 2 * width, width)
    _convolve(writer, part.weight, part.bias, state, 2 * width, writer.recurred, is_silu=False)
    writer.multiply(writer.projected, width, writer.recurred, 0, width)


def _gated_delta(writer: Writer, part: GatedDeltaNet, state: LayerState, norm: Any) -> None:
    heads = part.heads
    channels, values, count, _ = heads.parts
    keys = heads.key_heads * heads.key_dim
    writer.linear(part.in_proj, writer.stream, writer.projected, norm=norm)
    _convolve(writer, part.weight, None, state, 0, writer.mixed, is_silu=True)
    writer.recurred.widen(values)
    assert state.matrix is not None
    rule = NativeGatedDelta(
        rate=writer.address(part.rate), dt_bias=writer.address(part.dt_bias), states=state.matrix.data_ptr(),
        key_heads=heads.key_heads, heads=heads.value_heads, key_dim=heads.key_dim, value_dim=heads.value_dim,
        is_tiled=heads.tiled,
    )  # fmt: skip
    writer.recurrent(
        Op.DELTA, rule, q=(writer.mixed, 0), k=(writer.mixed, keys), v=(writer.mixed, 2 * keys),
        a=(writer.projected, channels + values + count), b=(writer.projected, channels + values),
        y=(writer.recurred, 0),
    )  # fmt: skip
    _norm(writer, part.norm, part.eps, channels, heads.value_heads, heads.value_dim, gate_first=False)


def _mamba2(writer: Writer, part: Mamba2, state: LayerState, norm: Any) -> None:
    heads = part.heads
    width, columns = heads.width, heads.groups * heads.state_size
    writer.linear(part.in_proj, writer.stream, writer.projected, norm=norm)
    _convolve(writer, part.weight, part.bias, state, width, writer.mixed, is_silu=True)
    writer.recurred.widen(width)
    assert state.matrix is not None
    scan = NativeSelectiveScan(
        rate=writer.address(part.rate), dt_bias=writer.address(part.dt_bias), skip=writer.address(part.skip),
        states=state.matrix.data_ptr(), heads=heads.heads, groups=heads.groups, head_dim=heads.head_dim,
        state_size=heads.state_size, least=part.limits[0], most=part.limits[1],
    )  # fmt: skip
    writer.recurrent(
        Op.SCAN, scan, x=(writer.mixed, 0), dt=(writer.projected, 2 * width + 2 * columns),
        b=(writer.mixed, width), c=(writer.mixed, width + columns), y=(writer.recurred, 0),
    )  # fmt: skip
    if part.norm is None:
        writer.multiply(writer.projected, 0, writer.recurred, 0, width, Activation.SILU)
    else:
        _norm(writer, part.norm, part.eps, 0, heads.groups, width // heads.groups, gate_first=part.gate_first)


def _convolve(
    writer: Writer,
    weight: Tensor,
    bias: Tensor | None,
    state: LayerState,
    offset: int,
    target: Buffer,
    *,
    is_silu: bool,
) -> None:
    """Convolve the columns of `projected` from `offset` on."""
    taps, channels = weight.shape
    target.widen(channels)
    assert state.conv is not None
    convolution = NativeConvolution(
        weight=writer.address(weight), bias=writer.address(bias), states=state.conv.data_ptr(),
        state_type=STATE_TYPES[state.conv.dtype], channels=channels, taps=taps, is_silu=is_silu,
    )  # fmt: skip
    writer.recurrent(Op.CONVOLVE, convolution, x=(writer.projected, offset), y=(target, 0))


def _norm(
    writer: Writer, weight: Tensor, eps: float, gate_offset: int, groups: int, width: int, *, gate_first: bool
) -> None:
    """Norm `recurred` in place, with the gate from column `gate_offset` of `projected` on."""
    norm = NativeGatedNorm(
        weight=writer.address(weight), groups=groups, width=width, shares_weight=weight.numel() == width,
        gate_first=gate_first, eps=eps,
    )  # fmt: skip
    writer.recurrent(
        Op.GATED_NORM, norm, x=(writer.recurred, 0), gate=(writer.projected, gate_offset), y=(writer.recurred, 0)
    )
