"""The feed-forward part: gated, down(act(gate(x)) * up(x)) with gate and up as one matrix, or down(act(up(x)))."""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.fused_epilogue import PendingNorm, Unfinished, whole
from localllm.kernels.gated import ACTIVATIONS, gated, limit_of
from localllm.kernels.rms_norm import normed
from localllm.models.layers.group import Group, Projection
from localllm.models.layers.linear import Linear, unfinished
from localllm.models.layers.native_writer import Buffer, Writer

CPU_ROWS = 256
"""Rows at a time on a CPU. The buffer between the matrices is a model's widest: for a whole prefill chunk it exceeds
what malloc keeps, and allocating its pages again in every layer costs a tenth of the step.
"""

UNGATED: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: F.silu(x, inplace=True),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": torch.relu_,
    "relu2": lambda x: x.relu_().square_(),
    "quick_gelu": lambda x: x.mul_(torch.sigmoid(1.702 * x)),
}
"""Activations that may write into their input."""


class SparseGate:
    """A gated activation whose gate is cut off (Gemma 3n): act(relu(gate - mean - deviations * std)) * up, statistics
    over a row."""

    __slots__ = ("_shared", "activation", "deviations")

    def __init__(
        self, activation: str, share: float, dtype: torch.dtype, shared: tuple[Group, int] | None = None
    ) -> None:
        """share: of a normal distribution that is cut off. shared: the shards among which a row is divided, and its
        width over all of them."""
        self.activation, self._shared = activation, shared
        self.deviations = float(torch.tensor(NormalDist().inv_cdf(share), dtype=dtype, device="cpu"))  # as trained

    def __call__(self, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2 * I], gate first -> [T, I]."""
        gate, up = gate_up.chunk(2, dim=-1)
        if self._shared is None:
            std, mean = torch.std_mean(gate.float(), dim=-1, keepdim=True, correction=0)
        else:
            (group, width), wide = self._shared, gate.double()  # a difference of two large sums follows
            sums = group.sum_(torch.stack((wide.sum(-1), wide.square().sum(-1)), -1)).div_(width)
            mean, square = sums.split(1, -1)
            std, mean = (square - mean.square()).clamp_min_(0).sqrt_().float(), mean.float()
        gate = torch.relu_(gate - std.mul_(self.deviations).add_(mean).to(gate.dtype))
        return UNGATED[self.activation](gate).mul_(up)


class GatedMLP:
    __slots__ = ("activation", "down", "gate_up")

    def __init__(self, gate_up: Projection, down: Projection, activation: str | SparseGate) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activation = activation
        assert isinstance(activation, SparseGate) or limit_of(activation)[0] in ACTIVATIONS, activation

    def __call__(self, x: Tensor, slot_mapping: Tensor | None = None) -> Tensor:
        """Map x [T, hidden] to [T, hidden]; padding rows are computed like any other."""
        return whole(self.unfinished(x, slot_mapping))

    def unfinished(self, x: Tensor | PendingNorm, slot_mapping: Tensor | None = None) -> Unfinished:
        """Do the same, but leave the last work of the last product to the reader."""
        return _by_rows(x, self._compute)

    def write(self, writer: Writer, norm: Any) -> None:
        """Write the operations up to the last matrix; the result is in the writer's buffer `features`."""
        if isinstance(self.activation, SparseGate):
            writer.gated(self.gate_up, norm, self.activation.activation, deviations=self.activation.deviations)
        else:
            writer.gated(self.gate_up, norm, self.activation)

    def write_out(self, writer: Writer, target: Buffer, factor: float = 1.0, *, adds: bool = False) -> None:
        """Write the last matrix: added to the stream, or written to another buffer."""
        writer.linear(self.down, writer.features, target, factor=factor, adds=adds)

    def _compute(self, x: Tensor | PendingNorm, first: int) -> Unfinished:
        if isinstance(self.activation, SparseGate):
            features = self.activation(self.gate_up(normed(x), first))
        else:
            features = gated(unfinished(self.gate_up, x, first), self.activation)
        return unfinished(self.down, features, first)


class MLP:
    __slots__ = ("activation", "down", "up")

    def __init__(self, up: Linear, down: Projection, activation: str) -> None:
        self.up = up
        self.down = down
        self.activation = UNGATED[activation]

    def __call__(self, x: Tensor, slot_mapping: Tensor | None = None) -> Tensor:
        """Map x [T, hidden] to [T, hidden]; padding rows are computed like any other."""
        return whole(self.unfinished(x, slot_mapping))

    def unfinished(self, x: Tensor | PendingNorm, slot_mapping: Tensor | None = None) -> Unfinished:
        """Do the same, but leave the last work of the last product to the reader."""
        return _by_rows(x, self._compute)

    def write(self, writer: Writer, norm: Any) -> None:
        """Write the operations up to the last matrix; the result is in the writer's buffer `features`."""
        writer.linear(self.up, writer.stream, writer.features, norm=norm, activation=writer.activation)

    def write_out(self, writer: Writer, target: Buffer, factor: float = 1.0, *, adds: bool = False) -> None:
        """Write the last matrix: added to the stream, or written to another buffer."""
        writer.linear(self.down, writer.features, target, factor=factor, adds=adds)

    def _compute(self, x: Tensor | PendingNorm, first: int) -> Unfinished:
        return unfinished(self.down, self.activation(whole(self.up.unfinished(x, first))), first)


def _by_rows(x: Tensor | PendingNorm, compute: Callable[[Tensor | PendingNorm, int], Unfinished]) -> Unfinished:
    """Apply compute(rows, index of the first row) to a few rows at a time on a CPU, to all at once on a GPU."""
    if x.device.type != "cpu" or x.shape[0] <= CPU_ROWS:
        return compute(x, 0)
    parts = normed(x).split(CPU_ROWS)
    return torch.cat([whole(compute(rows, place * CPU_ROWS)) for place, rows in enumerate(parts)])
