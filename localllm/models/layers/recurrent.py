"""Recurrent layers: project, convolve, run the recurrence, gate and norm, project.

    ShortConv       LFM2: y = out(C * conv(B * x)), where B, C and x come from one matrix
    GatedDeltaNet   Qwen3-Next, Qwen3.5, OLMo Hybrid: the delta rule, norm, gate
    Mamba2          Granite 4 H, Nemotron-H, Bamba, Falcon-H1: scan, gate, norm

In a decode step's list (native_writer.py) a recurrent layer is, up to its last projection:

    LINEAR      norm, then all that one matrix makes: [B | C | x], [q | k | v | z | b | a] or [z | x | B | C | dt]
    CONVOLVE    the causal convolution, between two MULTIPLY for LFM2
    DELTA       the gated delta rule, or SCAN: Mamba-2's
    GATED_NORM  with its gate (MULTIPLY for a gate without a norm)

Does not know: which request owns which state (the step's `StateStep` does).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.causal_conv import causal_conv
from localllm.kernels.cpu.native.structures import Activation, NativeGatedDelta, NativeSelectiveScan, Op
from localllm.kernels.gated_delta import gated_delta
from localllm.kernels.gated_norm import gated_norm
from localllm.kernels.layer_cache import LayerState, StateStep
from localllm.kernels.selective_scan import NO_LIMITS, selective_scan
from localllm.models.layers.group import Group, Projection
from localllm.models.layers.linear import Linear
from localllm.models.layers.native_writer import Buffer, Writer


class ShortConv:
    """The state has a conv tensor of hidden-size channels, and no matrix."""

    __slots__ = ("bias", "in_proj", "out", "weight")

    def __init__(self, in_proj: Linear, weight: Tensor, bias: Tensor | None, out: Projection) -> None:
        """in_proj: outputs [B | C | x]. weight [channels, K] or [channels, 1, K], and bias [channels]: as stored."""
        self.in_proj, self.out = in_proj, out
        self.weight = as_taps(weight)
        self.bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor, state: LayerState, step: StateStep) -> Tensor:
        """Map x [T, hidden] to [T, hidden]; writes the rows' states."""
        return self.out(self.recur(_projected(self, x, state, step), state, step))

    def recur(self, projected: Tensor, state: LayerState, step: StateStep) -> Tensor:
        assert state.conv is not None
        before, after, inputs = projected.chunk(3, dim=1)
        y = causal_conv(before * inputs, self.weight, self.bias, state.conv, step, silu=False)
        return y.mul_(after)

    def write(self, writer: Writer, state: LayerState, norm: Any) -> None:
        """Write the operations up to the last projection; the result is in the writer's buffer `recurred`."""
        width = self.weight.shape[1]
        writer.linear(self.in_proj, writer.stream, writer.projected, norm=norm)
        writer.multiply(writer.projected, 0, writer.projected, 2 * width, width)
        writer.convolve(self.weight, self.bias, state, 2 * width, writer.recurred, is_silu=False)
        writer.multiply(writer.projected, width, writer.recurred, 0, width)

    def write_out(self, writer: Writer, target: Buffer, factor: float = 1.0, *, adds: bool = False) -> None:
        """Write the last projection: added to the stream, or written to another buffer."""
        writer.linear(self.out, writer.recurred, target, factor=factor, adds=adds)


def as_taps(weight: Tensor) -> Tensor:
    """Return the weight of a depthwise convolution, [channels, K] or [channels, 1, K], as [K, channels] in fp32."""
    return weight.reshape(weight.shape[0], -1).t().float().contiguous()


class DeltaHeads(NamedTuple):
    """Heads of a gated delta net, of a shard where it is one."""

    key_heads: int
    value_heads: int
    key_dim: int  # of a head
    value_dim: int
    tiled: bool = False  # value head j uses key head j % key_heads, as GGUF files store it; else j // (their ratio)

    @property
    def parts(self) -> list[int]:
        """Outputs of in_proj: the convolution's channels [q | k | v], z, b, a."""
        values = self.value_heads * self.value_dim
        return [2 * self.key_heads * self.key_dim + values, values, self.value_heads, self.value_heads]


class GatedDeltaNet:
    """The state has a conv tensor of the channels [q | k | v], and a matrix [value_heads, key_dim, value_dim]."""

    __slots__ = ("beta_scale", "dt_bias", "eps", "heads", "in_proj", "norm", "out", "rate", "weight")

    def __init__(
        self, in_proj: Linear, weight: Tensor, rate: Tensor, dt_bias: Tensor, norm: Tensor, eps: float,
        out: Projection, heads: DeltaHeads, *, beta_scale: float = 1.0,
    ) -> None:  # fmt: skip
        """in_proj: outputs [q | k | v | z | b | a], each part's heads one after the other; the matrices of a checkpoint
        are stacked, and those that it groups by key head (Qwen3-Next's qkvz and ba) reordered.

        weight [channels, K] or [channels, 1, K]: the convolution's, as stored. rate [value_heads]: -exp(A_log) in fp32.
        norm [value_dim]: the weight of the norm before the gate, which is stored as it is applied (not minus 1).
        beta_scale: as kernels/gated_delta.py defines it.
        """
        self.beta_scale = beta_scale
        self.in_proj, self.out, self.heads, self.eps = in_proj, out, heads, eps
        self.weight = as_taps(weight)
        self.rate, self.dt_bias, self.norm = (each.float().contiguous() for each in (rate, dt_bias, norm))

    def __call__(self, x: Tensor, state: LayerState, step: StateStep) -> Tensor:
        """Map x [T, hidden] to [T, hidden]; writes the rows' states."""
        heads, tokens = self.heads, len(x)
        projected = _projected(self, x, state, step)
        y = self.recur(projected, state, step)
        z = projected.split(heads.parts, dim=1)[1].view(tokens, heads.value_heads, heads.value_dim)
        return self.out(gated_norm(y, z, self.norm, self.eps, gate_first=False).view(tokens, -1))

    def recur(self, projected: Tensor, state: LayerState, step: StateStep) -> Tensor:
        """Return [T, value_heads, value_dim]."""
        assert state.conv is not None
        assert state.matrix is not None
        heads, tokens = self.heads, len(projected)
        inputs, _, b, a = projected.split(heads.parts, dim=1)
        mixed = causal_conv(inputs, self.weight, None, state.conv, step, silu=True)
        keys = heads.key_heads * heads.key_dim
        q, k, v = mixed.split([keys, keys, heads.value_heads * heads.value_dim], dim=1)
        q, k = (each.view(tokens, heads.key_heads, heads.key_dim) for each in (q, k))
        v = v.view(tokens, heads.value_heads, heads.value_dim)
        return gated_delta(
            q, k, v, a, b, self.rate, self.dt_bias, state.matrix, step,
            tiled=heads.tiled, beta_scale=self.beta_scale,
        )  # fmt: skip

    def write(self, writer: Writer, state: LayerState, norm: Any) -> None:
        """Write the operations up to the last projection; the result is in the writer's buffer `recurred`."""
        heads = self.heads
        channels, values, count, _ = heads.parts
        keys = heads.key_heads * heads.key_dim
        writer.linear(self.in_proj, writer.stream, writer.projected, norm=norm)
        writer.convolve(self.weight, None, state, 0, writer.mixed, is_silu=True)
        writer.recurred.widen(values)
        assert state.matrix is not None
        rule = NativeGatedDelta(
            rate=writer.address(self.rate), dt_bias=writer.address(self.dt_bias), states=state.matrix.data_ptr(),
            key_heads=heads.key_heads, heads=heads.value_heads, key_dim=heads.key_dim, value_dim=heads.value_dim,
            is_tiled=heads.tiled, beta_scale=self.beta_scale,
        )  # fmt: skip
        writer.recurrent(
            Op.DELTA, rule, q=(writer.mixed, 0), k=(writer.mixed, keys), v=(writer.mixed, 2 * keys),
            a=(writer.projected, channels + values + count), b=(writer.projected, channels + values),
            y=(writer.recurred, 0),
        )  # fmt: skip
        writer.norm_recurred(self.norm, self.eps, channels, heads.value_heads, heads.value_dim, gate_first=False)

    def write_out(self, writer: Writer, target: Buffer, factor: float = 1.0, *, adds: bool = False) -> None:
        """Write the last projection: added to the stream, or written to another buffer."""
        writer.linear(self.out, writer.recurred, target, factor=factor, adds=adds)


class ScanHeads(NamedTuple):
    """Heads of a Mamba-2 layer, of a shard where it is one."""

    heads: int
    head_dim: int
    groups: int  # of B and C, and of the norm
    state_size: int

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def parts(self) -> list[int]:
        """Outputs of in_proj: z, the convolution's channels [x | B | C], dt."""
        return [self.width, self.width + 2 * self.groups * self.state_size, self.heads]


class SplitGroups(NamedTuple):
    """The groups of a norm whose heads are on several shards."""

    group: Group
    num_groups: int  # of all shards
    own: int  # the one that this shard has a part of
    size: int  # numbers of a group over all shards

    def gated_norm(self, y: Tensor, gate: Tensor, weight: Tensor, eps: float, *, gate_first: bool) -> Tensor:
        """Return the gated norm of y [T, 1, own numbers], as kernels/gated_norm.py defines it for whole groups: the
        sums of squares are added up in fp32. weight: [own numbers] fp32."""
        opened = F.silu(gate.float())
        x = y.float().mul_(opened) if gate_first else y.float()
        squares = x.new_zeros((len(x), self.num_groups))
        squares[:, self.own] = x.square().sum((1, 2))
        self.group.sum_(squares)
        inverse = squares[:, self.own].div(self.size).add_(eps).rsqrt_()
        x = x.mul(inverse[:, None, None]).mul_(weight)
        return (x if gate_first else x.mul_(opened)).to(y.dtype)


class Mamba2:
    """The state has a conv tensor of the channels [x | B | C], and a matrix [heads, head_dim, state_size]."""

    __slots__ = (
        "bias", "dt_bias", "eps", "exchange", "gate_first", "heads", "in_proj", "limits", "norm", "out", "rate", "skip",
        "weight",
    )  # fmt: skip

    def __init__(
        self, in_proj: Projection, weight: Tensor, bias: Tensor | None, rate: Tensor, dt_bias: Tensor, skip: Tensor,
        norm: Tensor | None, eps: float, out: Projection, heads: ScanHeads, *,
        limits: tuple[float, float] = NO_LIMITS, gate_first: bool = True, exchange: SplitGroups | None = None,
    ) -> None:  # fmt: skip
        """in_proj: outputs [z | x | B | C | dt].

        weight [channels, K] or [channels, 1, K], bias [channels]: the convolution's, as stored. rate [heads]:
        -exp(A_log) in fp32. skip [heads]: D. norm [width]: the weight of the norm; None: there is a gate only. limits:
        of the time step after its softplus, `time_step_limit`. gate_first: the gate comes before the norm. exchange:
        of a shard that holds a part of a group.
        """
        self.in_proj, self.out, self.heads, self.eps, self.limits = in_proj, out, heads, eps, limits
        self.exchange = exchange
        self.gate_first, self.norm = gate_first, None if norm is None else norm.float().contiguous()
        self.weight = as_taps(weight)
        self.bias = None if bias is None else bias.float()
        self.rate, self.dt_bias, self.skip = (each.float().contiguous() for each in (rate, dt_bias, skip))

    def __call__(self, x: Tensor, state: LayerState, step: StateStep) -> Tensor:
        """Map x [T, hidden] to [T, hidden]; writes the rows' states."""
        heads, tokens = self.heads, len(x)
        projected = _projected(self, x, state, step)
        y, z = self.recur(projected, state, step), projected.split(heads.parts, dim=1)[0]
        y, z = (each.view(tokens, heads.groups, -1) for each in (y, z))
        if self.norm is None:
            gated = y.mul_(F.silu(z.float()))
        elif self.exchange is not None:
            gated = self.exchange.gated_norm(y, z, self.norm, self.eps, gate_first=self.gate_first)
        else:
            gated = gated_norm(y, z, self.norm, self.eps, gate_first=self.gate_first)
        return self.out(gated.view(tokens, -1))

    def recur(self, projected: Tensor, state: LayerState, step: StateStep) -> Tensor:
        """Return [T, heads, head_dim]."""
        assert state.conv is not None
        assert state.matrix is not None
        heads, tokens = self.heads, len(projected)
        _, inputs, dt = projected.split(heads.parts, dim=1)
        mixed = causal_conv(inputs, self.weight, self.bias, state.conv, step, silu=True)
        columns = heads.groups * heads.state_size
        values, b, c = mixed.split([heads.width, columns, columns], dim=1)
        return selective_scan(
            values.view(tokens, heads.heads, heads.head_dim), dt,
            b.view(tokens, heads.groups, heads.state_size), c.view(tokens, heads.groups, heads.state_size),
            self.rate, self.dt_bias, self.skip, state.matrix, step, limits=self.limits,
        )  # fmt: skip

    def write(self, writer: Writer, state: LayerState, norm: Any) -> None:
        """Write the operations up to the last projection; the result is in the writer's buffer `recurred`."""
        heads = self.heads
        width, columns = heads.width, heads.groups * heads.state_size
        writer.linear(self.in_proj, writer.stream, writer.projected, norm=norm)
        writer.convolve(self.weight, self.bias, state, width, writer.mixed, is_silu=True)
        writer.recurred.widen(width)
        assert state.matrix is not None
        scan = NativeSelectiveScan(
            rate=writer.address(self.rate), dt_bias=writer.address(self.dt_bias), skip=writer.address(self.skip),
            states=state.matrix.data_ptr(), heads=heads.heads, groups=heads.groups, head_dim=heads.head_dim,
            state_size=heads.state_size, least=self.limits[0], most=self.limits[1],
        )  # fmt: skip
        writer.recurrent(
            Op.SCAN, scan, x=(writer.mixed, 0), dt=(writer.projected, 2 * width + 2 * columns),
            b=(writer.mixed, width), c=(writer.mixed, width + columns), y=(writer.recurred, 0),
        )  # fmt: skip
        if self.norm is None:
            writer.multiply(writer.projected, 0, writer.recurred, 0, width, Activation.SILU)
        else:
            groups, gate_first = heads.groups, self.gate_first
            writer.norm_recurred(self.norm, self.eps, 0, groups, width // groups, gate_first=gate_first)

    def write_out(self, writer: Writer, target: Buffer, factor: float = 1.0, *, adds: bool = False) -> None:
        """Write the last projection: added to the stream, or written to another buffer."""
        writer.linear(self.out, writer.recurred, target, factor=factor, adds=adds)


def _projected(
    layer: ShortConv | GatedDeltaNet | Mamba2, x: Tensor, state: LayerState, step: StateStep
) -> Tensor:  # fmt: skip
    """Return the layer's projection of x, which a step with drafts keeps: its states come after the right ones."""
    projected = layer.in_proj(x)
    if step.drafted is not None:
        step.drafted.keep(layer.recur, state, projected)
    return projected
