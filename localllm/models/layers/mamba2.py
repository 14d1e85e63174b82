"""A layer of Mamba-2 (Granite 4 H, Nemotron-H, Bamba, Falcon-H1): project, convolve, scan, gate, norm, project.

Does not know: which request owns which state (the step's `StateStep` does).
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.causal_conv import causal_conv
from localllm.kernels.gated_norm import gated_norm
from localllm.kernels.layer_state import LayerState, StateStep
from localllm.kernels.selective_scan import NO_LIMITS, selective_scan
from localllm.models.layers.short_conv import as_taps
from localllm.models.layers.split import Projection


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


class Mamba2:
    """The state has a conv tensor of the channels [x | B | C], and a matrix [heads, head_dim, state_size]."""

    __slots__ = (
        "bias", "dt_bias", "eps", "gate_first", "heads", "in_proj", "limits", "norm", "out", "rate", "skip", "weight",
    )  # fmt: skip

    def __init__(
        self, in_proj: Projection, weight: Tensor, bias: Tensor | None, rate: Tensor, dt_bias: Tensor, skip: Tensor,
        norm: Tensor | None, eps: float, out: Projection, heads: ScanHeads, *,
        limits: tuple[float, float] = NO_LIMITS, gate_first: bool = True,
    ) -> None:  # fmt: skip
        """in_proj: outputs [z | x | B | C | dt].

        weight [channels, K] or [channels, 1, K], bias [channels]: the convolution's, as stored. rate [heads]:
        -exp(A_log) in fp32. skip [heads]: D. norm [width]: the weight of the norm; None: there is a gate only. limits:
        of the time step after its softplus, `time_step_limit`. gate_first: the gate comes before the norm.
        """
        self.in_proj, self.out, self.heads, self.eps, self.limits = in_proj, out, heads, eps, limits
        self.gate_first, self.norm = gate_first, None if norm is None else norm.float().contiguous()
        self.weight = as_taps(weight)
        self.bias = None if bias is None else bias.float()
        self.rate, self.dt_bias, self.skip = (each.float().contiguous() for each in (rate, dt_bias, skip))

    def __call__(self, x: Tensor, state: LayerState, step: StateStep) -> Tensor:
        """Map x [T, hidden] to [T, hidden]; writes the rows' states."""
        assert state.conv is not None
        assert state.matrix is not None
        heads, tokens = self.heads, len(x)
        z, inputs, dt = self.in_proj(x).split(heads.parts, dim=1)
        mixed = causal_conv(inputs, self.weight, self.bias, state.conv, step, silu=True)
        columns = heads.groups * heads.state_size
        values, b, c = mixed.split([heads.width, columns, columns], dim=1)
        y = selective_scan(
            values.view(tokens, heads.heads, heads.head_dim), dt,
            b.view(tokens, heads.groups, heads.state_size), c.view(tokens, heads.groups, heads.state_size),
            self.rate, self.dt_bias, self.skip, state.matrix, step, limits=self.limits,
        )  # fmt: skip
        y, z = (each.view(tokens, heads.groups, -1) for each in (y, z))
        if self.norm is None:
            gated = y.mul_(F.silu(z.float()))
        else:
            gated = gated_norm(y, z, self.norm, self.eps, gate_first=self.gate_first)
        return self.out(gated.view(tokens, -1))
