"""Chooses the layout of a quantised weight on a CPU, and computes its size.

    mode      4 bits, groups that 32 divides    Q5, Q6     other blocks of GGUF files     everything else
    fast      q4, as stored                     int8       stored: in the file's bytes    int8
    small     likewise                          stored     likewise                       likewise
    exact     as stored, widened to fp32 in     likewise   likewise                       likewise
              every step

Q8_0 becomes int8 where torch has a fast product for it: that takes a little less memory, and prompts are faster. Q5 and
Q6 take a quarter to a half more memory as int8, and half of the time (docs/lab.md, "Q5 and Q6 beside VNNI"). q4 and
stored need the native library; without it these weights become int8 too. Weights that do not fit a layout (by shape, an
old torch, a processor without the instructions) run as stored. The mode is the `cpu_weights` of the model's settings:
two models of one process may differ in it.
An embedding that is also the head has one copy, whose rows can be looked up (models/layers/linear.py).
Does not know: layers, devices other than the CPU.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from localllm.kernels.cpu.blocks import BLOCK, Examples
from localllm.kernels.cpu.int8 import has_int8, int8_codes, int8_nbytes, pack_int8
from localllm.kernels.cpu.native.library import native
from localllm.kernels.cpu.native.structures import MAX_INT8_INPUTS, OUTPUTS
from localllm.kernels.cpu.q4 import blocks_nbytes, fits_q4, pack_q4, q4_nbytes
from localllm.kernels.cpu.stored_blocks import (
    KINDS,
    CpuStoredWeight,
    GGUFBlocks,
    blocks_codes,
    blocks_int8,
    blocks_q4,
)
from localllm.kernels.fp8_linear import Fp8Weight
from localllm.kernels.int8_linear import Int8Weight
from localllm.kernels.launch import INTERPRETED
from localllm.kernels.linear import PACK_MIN_ELEMENTS as WHOLE_MIN_ELEMENTS
from localllm.kernels.linear import StackedWeight, should_pack
from localllm.kernels.planar.linear import PlanarWeight
from localllm.kernels.quantized_weight import MetaWeight, QuantizedWeight

Layout = Literal["q4", "stored", "int8"]
ROUNDED = {"fast": frozenset({"Q8_0", "Q5_0", "Q5_1", "Q5_K", "Q6_K"}), "small": frozenset({"Q8_0"})}
"""Block types that become int8 in a mode, where torch has a fast product for it."""
PACK_MIN_ELEMENTS = 1 << 16  # smaller weights stay exact, since a step's fixed costs dominate


def is_on_cpu(weight: QuantizedWeight) -> bool:
    """Return whether the weight is in this machine's memory, in a known layout."""
    if isinstance(weight, StackedWeight):
        return all(not isinstance(part, Tensor) and is_on_cpu(part) for part in weight.parts)
    if isinstance(weight, GGUFBlocks):
        return weight.pieces[0].device.type == "cpu"
    tensor = weight.words if isinstance(weight, PlanarWeight) else getattr(weight, "values", None)
    return isinstance(tensor, Tensor) and tensor.device.type == "cpu"


class CpuPacker:
    """Packs the quantised weights of one model. The second of a shape takes less time than the first."""

    def __init__(self, mode: str = "fast") -> None:
        self.mode = mode
        self.is_exact = mode == "exact"  # also of bf16 weights, which are not packed here
        self._examples = Examples()

    def pack(self, weight: QuantizedWeight) -> QuantizedWeight:
        """Return the weight in this processor's fastest layout (drop the original), or `weight` itself."""
        layout = cpu_layout(weight, self.mode)
        if layout is None:
            return weight.copied() if isinstance(weight, GGUFBlocks) else weight
        if isinstance(weight, GGUFBlocks):
            if layout == "stored":
                return CpuStoredWeight(weight.copied())
            return blocks_q4(weight) if layout == "q4" else blocks_int8(weight, self._examples)
        if layout == "int8":
            return pack_int8(*_codes(weight), self._examples)
        assert isinstance(weight, PlanarWeight)
        return pack_q4(weight)


def packed_nbytes(weight: QuantizedWeight, mode: str) -> int:
    """Return the bytes of the result of `CpuPacker.pack`. The weight may be on `meta`: only its shape is read."""
    layout = cpu_layout(weight, mode)
    if layout is None:
        return weight.nbytes
    if layout == "int8":
        return int8_nbytes(*weight.shape)
    if isinstance(weight, GGUFBlocks) and layout == "stored":
        return weight.nbytes
    if isinstance(weight, GGUFBlocks):
        return blocks_nbytes(*weight.shape, KINDS[weight.block_type])
    assert isinstance(weight, PlanarWeight)
    return q4_nbytes(weight)


def native_nbytes(weight: Tensor | QuantizedWeight, mode: str) -> int | None:
    """Return the bytes of the matrix that the native library multiplies with once the weight is packed, its fields at
    multiples of 64; None: it has no layout of one matrix for it. The weight may be on `meta`."""
    if isinstance(weight, MetaWeight):
        return weight.native_nbytes
    rows, columns = weight.shape
    padded = -(-rows // OUTPUTS) * OUTPUTS
    if not isinstance(weight, Tensor) and (layout := cpu_layout(weight, mode)) is not None:
        if layout != "int8":
            return -(-packed_nbytes(weight, mode) // 64) * 64
        return padded * (columns + 4) if columns % BLOCK == 0 and columns <= MAX_INT8_INPUTS else None
    small = rows * columns < WHOLE_MIN_ELEMENTS and not isinstance(weight, StackedWeight)
    is_packed = isinstance(weight, Tensor) and should_pack(weight.numel(), torch.device("cpu"), weight.dtype)
    return padded * columns * 4 if small or is_packed else None


def cpu_layout(weight: QuantizedWeight, mode: str) -> Layout | None:
    """Return the layout for a weight; None: as stored. Only shapes are read."""
    if isinstance(weight, StackedWeight):
        return "int8" if _joins(weight, mode) else None
    rows, columns = weight.shape
    is_known = isinstance(weight, PlanarWeight | Int8Weight | Fp8Weight | GGUFBlocks)
    if mode == "exact" or INTERPRETED or rows * columns < PACK_MIN_ELEMENTS or not is_known:
        return None
    if native() is not None and _fits_q4(weight):
        return "q4"
    if isinstance(weight, GGUFBlocks) and (weight.block_type not in ROUNDED[mode] or not has_int8()):
        return "stored"
    return "int8" if has_int8() else None


def _joins(weight: StackedWeight, mode: str) -> bool:
    """Return whether all parts become int8, so that they can be one matrix, of whole blocks, so that it takes no more
    memory."""
    is_int8 = (not isinstance(part, Tensor) and cpu_layout(part, mode) == "int8" for part in weight.parts)
    return all(is_int8) and all(part.shape[0] % BLOCK == 0 for part in weight.parts[:-1])


def _fits_q4(weight: QuantizedWeight) -> bool:
    if isinstance(weight, GGUFBlocks):
        return weight.block_type in KINDS
    return isinstance(weight, PlanarWeight) and fits_q4(weight)


def _codes(weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """Return values [N, K] int8, scales [N] fp32."""
    if isinstance(weight, StackedWeight):
        parts = [_codes(part) for part in weight.parts if not isinstance(part, Tensor)]
        return torch.cat([values for values, _ in parts]), torch.cat([scales for _, scales in parts])
    return blocks_codes(weight) if isinstance(weight, GGUFBlocks) else int8_codes(weight)


def describe_layout(mode: str) -> str:
    """Describe how quantised weights run on this CPU in that mode, for users."""
    if mode == "exact":
        return "weights as stored, widened to float32 in every step: exact and slow"
    stored = "other blocks of GGUF files" if mode == "small" or not has_int8() else "Q2, Q3, IQ and TQ blocks"
    four = f"4-bit weights as stored, {stored} too" if native() is not None else None
    others = "others" if four else "weights"
    if has_int8():
        eight = f"{others} as 8 bits with one scale an output"
    else:
        eight = f"{others} as stored, widened to float32 in every step: this processor has no fast int8 product"
    return eight if four is None else f"{four}, {eight}"
