"""A weight matrix and its bias, packed for the device by kernels/linear.py or already quantised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from localllm.kernels.cpu.half import CpuHalfWeight
from localllm.kernels.cpu.int8 import table_nbytes
from localllm.kernels.cpu.pack import CpuPacker, cpu_layout, is_on_cpu, packed_nbytes
from localllm.kernels.cpu.stored_blocks import GGUFBlocks, blocks_table
from localllm.kernels.fused_epilogue import PendingNorm, Unfinished
from localllm.kernels.linear import StackedWeight, linear, linear_fp32, linear_unfinished, pack_weight
from localllm.kernels.quantized_weight import MetaWeight, QuantizedTable, QuantizedWeight
from localllm.kernels.rms_norm import normed

Weight = Tensor | QuantizedWeight


class Linear:
    """y = x W^T + b. Owns the weight: if the device needs another layout, only the packed copy is kept.

    packer: packs a quantised weight on a CPU.
    """

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Weight, bias: Tensor | None = None, *, packer: CpuPacker | None = None) -> None:
        self.weight = to_device_layout(weight, packer or CpuPacker())
        self.bias = bias

    def __call__(self, x: Tensor, first_row: int = 0) -> Tensor:
        """Map [T, K] to [T, N]. first_row: index of x's first row in the step, for adapters per row (lora.py)."""
        weight = self.weight
        return linear(x, weight, self.bias) if isinstance(weight, Tensor) else weight.linear(x, self.bias)

    def unfinished(self, x: Tensor | PendingNorm, first_row: int = 0) -> Unfinished:
        """Map [T, K] to [T, N], but leave the last work of the product to the reader (kernels/fused_epilogue.py)."""
        weight = self.weight
        if isinstance(weight, Tensor):
            return linear_unfinished(x, weight, self.bias)
        if hasattr(weight, "unfinished"):
            product: Unfinished = weight.unfinished(x, self.bias)
            return product
        return weight.linear(normed(x), self.bias)

    def in_fp32(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Map [T, K] to [T, N] fp32, in `out` if given, without an adapter."""
        if isinstance(self.weight, Tensor):
            return linear_fp32(x, self.weight, self.bias, out)
        # A 16-bit weight on a CPU is multiplied in fp32: no digit is lost unless x's type is given back.
        y = self.weight.linear(x.float() if isinstance(self.weight, CpuHalfWeight) else x, self.bias)
        return y.float() if out is None else out.copy_(y)


class ScaledOutputs:
    """A matrix whose outputs are multiplied, each by its own factor (Falcon-H1)."""

    __slots__ = ("factors", "linear")

    def __init__(self, linear: Linear, factors: Tensor) -> None:
        """factors: [N] fp32."""
        self.linear, self.factors = linear, factors

    def __call__(self, x: Tensor, first_row: int = 0) -> Tensor:
        return self.linear(x, first_row).mul_(self.factors)


def unfinished(part: Callable[..., Tensor], x: Tensor | PendingNorm, *inputs: Any) -> Unfinished:
    """Call a matrix or a part of a layer. One with a method `unfinished` leaves the last work of its last product to
    the reader, and its first product may divide by the root mean square of x."""
    if not hasattr(part, "unfinished"):
        return part(normed(x), *inputs)
    result: Unfinished = part.unfinished(x, *inputs)
    return result


def to_device_layout(weight: Weight, packer: CpuPacker) -> Weight:
    """Return the weight in the layout that its device reads fastest, on a CPU as `packer` packs it."""
    if isinstance(weight, Tensor):
        return pack_weight(weight)
    packed = packer.pack(weight) if is_on_cpu(weight) else weight
    if packed is weight and isinstance(weight, StackedWeight):
        return StackedWeight([to_device_layout(part, packer) for part in weight.parts])
    return packed


def device_layout_bytes(weight: QuantizedWeight, device: torch.device, cpu_weights: str) -> int:
    """Return the bytes of `to_device_layout`'s result on `device`; the weight may be on `meta`."""
    is_cpu = device.type == "cpu"
    if is_cpu and cpu_layout(weight, cpu_weights) is not None:
        return packed_nbytes(weight, cpu_weights)
    if not isinstance(weight, StackedWeight):
        return packed_nbytes(weight, cpu_weights) if is_cpu else weight.nbytes
    return sum(
        part.numel() * part.dtype.itemsize
        if isinstance(part, Tensor)
        else device_layout_bytes(part, device, cpu_weights)
        for part in weight.parts
    )


def as_head(weight: Weight) -> Weight:
    """Return the weight as a head, whose logits need more digits than torch's products of 16-bit weights have."""
    return replace(weight, is_head=True) if isinstance(weight, CpuHalfWeight) else weight


def shared_table(table: QuantizedTable, device: torch.device, packer: CpuPacker) -> QuantizedTable | None:
    """Return the embedding and the head that is tied to it as one matrix, packed for the head's products; None: their
    device reads the table as it is, or rows of the head's layout cannot be looked up. The table may be on `meta`."""
    layout = cpu_layout(table, packer.mode) if device.type == "cpu" else None
    if layout is None or (layout == "int8" and not isinstance(table, GGUFBlocks)):
        return None
    if not is_on_cpu(table):
        size = table_nbytes(*table.shape) if layout == "int8" else packed_nbytes(table, packer.mode)
        return MetaWeight(table.shape, size, -(-size // 64) * 64)
    if layout == "int8" and isinstance(table, GGUFBlocks):
        return blocks_table(table)
    return cast(QuantizedTable, packer.pack(table))


def tied_head(table: QuantizedTable, device: torch.device, cpu_weights: str) -> QuantizedWeight:
    """Return the head of an embedding that `shared_table` did not pack: the table itself, or a copy in another
    layout."""
    is_meta = device.type == "cpu" and not is_on_cpu(table)
    if not is_meta or cpu_layout(table, cpu_weights) is None:
        return table  # `Linear` packs it, or reads the table's own bytes
    return MetaWeight(table.shape, packed_nbytes(table, cpu_weights))
