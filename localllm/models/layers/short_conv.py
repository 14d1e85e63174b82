"""The gated short convolution of LFM2: y = out(C * conv(B * x)), where B, C and x come from one matrix.

Does not know: which request owns which state (the step's `StateStep` does).
"""

from __future__ import annotations

from torch import Tensor

from localllm.kernels.causal_conv import causal_conv
from localllm.kernels.layer_state import LayerState, StateStep
from localllm.models.layers.linear import Linear
from localllm.models.layers.split import Projection


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
        assert state.conv is not None
        before, after, inputs = self.in_proj(x).chunk(3, dim=1)
        y = causal_conv(before * inputs, self.weight, self.bias, state.conv, step, silu=False)
        return self.out(y.mul_(after))


def as_taps(weight: Tensor) -> Tensor:
    """Return the weight of a depthwise convolution, [channels, K] or [channels, 1, K], as [K, channels] in fp32."""
    return weight.reshape(weight.shape[0], -1).t().float().contiguous()
