"""A weight matrix and its bias, laid out for the device by kernels/linear.py or quantised already."""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.kernels.cpu.pack import cpu_layout, lies_on_cpu, pack_for_cpu, packed_nbytes
from localllm.kernels.linear import linear, pack_weight
from localllm.kernels.quantized_weight import PromisedWeight, QuantizedTable, QuantizedWeight
from localllm.kernels.stacked_weight import StackedWeight

Weight = Tensor | QuantizedWeight


class Linear:
    """y = x W^T + b. Takes the weight over: where the device wants another layout only the packed copy is kept."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Weight, bias: Tensor | None = None) -> None:
        self.weight = lay_out(weight)
        self.bias = bias

    def __call__(self, x: Tensor, first_row: int = 0) -> Tensor:
        """[T, K] -> [T, N]. first_row: where x begins in the step, for layers that treat rows differently (lora.py)."""
        weight = self.weight
        return linear(x, weight, self.bias) if isinstance(weight, Tensor) else weight.linear(x, self.bias)


def lay_out(weight: Weight) -> Weight:
    """The weight as its device reads it fastest."""
    if isinstance(weight, Tensor):
        return pack_weight(weight)
    packed = pack_for_cpu(weight) if lies_on_cpu(weight) else weight
    if packed is weight and isinstance(weight, StackedWeight):
        return StackedWeight([lay_out(part) for part in weight.parts])
    return packed


def laid_out_bytes(weight: QuantizedWeight, device: torch.device) -> int:
    """Bytes of what `lay_out` makes on `device` of a weight that may be on `meta`."""
    if device.type == "cpu" and cpu_layout(weight) is not None:
        return packed_nbytes(weight)
    if not isinstance(weight, StackedWeight):
        return weight.nbytes
    return sum(
        part.numel() * part.dtype.itemsize if isinstance(part, Tensor) else laid_out_bytes(part, device)
        for part in weight.parts
    )


def tied_head(table: QuantizedTable, device: torch.device) -> QuantizedWeight:
    """What a head becomes that shares its matrix with the embedding: the table, or a copy in a layout of its own."""
    is_promise = device.type == "cpu" and not lies_on_cpu(table)
    if not is_promise or cpu_layout(table) is None:
        return table  # a `Linear` lays it out
    return PromisedWeight(table.shape, packed_nbytes(table))
