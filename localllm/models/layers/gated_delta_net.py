"""A layer of the gated delta net (Qwen3-Next, Qwen3.5): project, convolve, run the delta rule, norm, gate, project.

Does not know: which request owns which state (the step's `StateStep` does).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from localllm.kernels.causal_conv import causal_conv
from localllm.kernels.gated_delta import gated_delta
from localllm.kernels.gated_norm import gated_norm
from localllm.kernels.layer_state import LayerState, StateStep
from localllm.models.layers.linear import Linear
from localllm.models.layers.short_conv import as_taps
from localllm.models.layers.split import Projection


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

    __slots__ = ("dt_bias", "eps", "heads", "in_proj", "norm", "out", "rate", "weight")

    def __init__(
        self, in_proj: Linear, weight: Tensor, rate: Tensor, dt_bias: Tensor, norm: Tensor, eps: float,
        out: Projection, heads: DeltaHeads,
    ) -> None:  # fmt: skip
        """in_proj: outputs [q | k | v | z | b | a], each part's heads one after the other; the matrices of a checkpoint
        are stacked, and those that it groups by key head (Qwen3-Next's qkvz and ba) reordered.

        weight [channels, K] or [channels, 1, K]: the convolution's, as stored. rate [value_heads]: -exp(A_log) in fp32.
        norm [value_dim]: the weight of the norm before the gate, which is stored as it is applied (not minus 1).
        """
        self.in_proj, self.out, self.heads, self.eps = in_proj, out, heads, eps
        self.weight = as_taps(weight)
        self.rate, self.dt_bias, self.norm = (each.float().contiguous() for each in (rate, dt_bias, norm))

    def __call__(self, x: Tensor, state: LayerState, step: StateStep) -> Tensor:
        """Map x [T, hidden] to [T, hidden]; writes the rows' states."""
        assert state.conv is not None
        assert state.matrix is not None
        heads, tokens = self.heads, len(x)
        inputs, z, b, a = self.in_proj(x).split(heads.parts, dim=1)
        mixed = causal_conv(inputs, self.weight, None, state.conv, step, silu=True)
        keys = heads.key_heads * heads.key_dim
        q, k, v = mixed.split([keys, keys, heads.value_heads * heads.value_dim], dim=1)
        q, k = (each.view(tokens, heads.key_heads, heads.key_dim) for each in (q, k))
        v, z = (each.view(tokens, heads.value_heads, heads.value_dim) for each in (v, z))
        y = gated_delta(q, k, v, a, b, self.rate, self.dt_bias, state.matrix, step, tiled=heads.tiled)
        return self.out(gated_norm(y, z, self.norm, self.eps, gate_first=False).view(tokens, -1))
