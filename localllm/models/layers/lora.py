"""Linear layers that add low-rank adapters, and the device buffers for adapters.

A layer may consist of several stored matrices above one another, in its own order (weights/ knows it). Adapters name
the stored matrices, so each has its part of the layer: the parts' A are stacked, their B lie along a diagonal.
Adapters are loaded and unloaded while others run: each has a slot, and a slot that no request uses may be overwritten.
Does not know: files (models/weights/lora.py), requests, names of adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localllm.kernels.cpu.pack import CpuPacker
from localllm.kernels.fused_epilogue import PendingNorm, Unfinished
from localllm.kernels.launch import runs_triton
from localllm.kernels.lora import LoraRows, add_lora, lora_rows
from localllm.kernels.rms_norm import normed
from localllm.models.inputs import ForwardInputs
from localllm.models.layers.linear import Linear, Weight


@dataclass(frozen=True, slots=True, eq=False)
class LoraPart:
    """The rows of a layer that one stored matrix fills, or a shard's part of them."""

    names: tuple[str, ...]  # names of the stored matrix without .weight; empty: adapters cannot name it
    first: int  # row of the layer
    count: int
    order: npt.NDArray[np.int64] | None  # row i of the part is row order[i] of the stored matrix; None: row i
    stored: tuple[int, int]  # shape of the stored matrix
    columns: range | None = None  # the layer's inputs in the stored matrix; None: all


class LoraMatrix(NamedTuple):
    """One matrix of an adapter: W becomes W + b a."""

    a: Tensor  # [r, K]
    b: Tensor  # [N, r], the adapter's scale included


@dataclass(slots=True)
class LoraStep:
    """The running step's adapters, shared by all layers of a model."""

    rows: LoraRows | None = None  # None: no request has an adapter


class LoraLinear(Linear):
    """y = x W^T + b + (x A^T) B^T, with A and B of each row's adapter."""

    __slots__ = ("a", "b", "parts", "ranks", "step")

    def __init__(
        self, weight: Weight, bias: Tensor | None, parts: Sequence[LoraPart], a: Tensor, b: Tensor, step: LoraStep,
        *, packer: CpuPacker,
    ) -> None:  # fmt: skip
        """a [slots, R, K] and b [slots, N, R] are zeros; R is the maximal rank times the number of parts."""
        super().__init__(weight, bias, packer=packer)
        self.parts, self.a, self.b, self.step = tuple(parts), a, b, step
        self.ranks = np.zeros(len(a), np.int64)  # current rank in each slot; native steps read it where it is

    def __call__(self, x: Tensor, first_row: int = 0) -> Tensor:
        y = super().__call__(x, first_row)
        if self.step.rows is not None:
            add_lora(y, x, self.a, self.b, self.step.rows.part(first_row, len(x)), self.ranks)
        return y

    def unfinished(self, x: Tensor | PendingNorm, first_row: int = 0) -> Unfinished:
        return super().unfinished(x, first_row) if self.step.rows is None else self(normed(x), first_row)

    def clear(self, slot: int) -> None:
        self.a[slot].zero_()
        self.b[slot].zero_()
        self.ranks[slot] = 0

    def put(self, slot: int, matrices: Sequence[LoraMatrix | None]) -> None:
        """Write an adapter into a cleared slot: a matrix or None for each part."""
        rank = 0
        for part, matrix in zip(self.parts, matrices, strict=True):
            if matrix is None:
                continue
            own = slice(rank, rank + len(matrix.a))
            b = matrix.b if part.order is None else matrix.b[torch.from_numpy(part.order)]
            a = matrix.a if part.columns is None else matrix.a[:, part.columns.start : part.columns.stop]
            self.a[slot, own] = a.to(self.a)
            self.b[slot, part.first : part.first + part.count, own] = b.to(self.b)
            rank = own.stop
        self.ranks[slot] = rank


class LoraLimits(NamedTuple):
    """The adapters that a model has room for: their number and largest rank."""

    max_loras: int
    max_rank: int


class LoraBank:
    """All layers of a model that take adapters. Starts empty; the loader adds each layer (weights/weights.py)."""

    def __init__(self, limits: LoraLimits, elsewhere: frozenset[int] = frozenset()) -> None:
        """elsewhere: layers that other pipeline stages have."""
        self.max_loras, self.max_rank = limits
        self._elsewhere = elsewhere
        self.step = LoraStep()
        self.layers: list[LoraLinear] = []
        self._places: dict[str, tuple[LoraLinear, int]] = {}  # stored name -> the layer, and which of its parts

    def linear(
        self, weight: Weight, bias: Tensor | None, parts: Sequence[LoraPart], dtype: torch.dtype, device: torch.device,
        *, packer: CpuPacker,
    ) -> LoraLinear:  # fmt: skip
        rows, columns = weight.shape
        rank = self.max_rank * len(parts)
        # Zero now, so that the pages are allocated during the load and not by the first adapter.
        a = torch.empty((self.max_loras, rank, columns), dtype=dtype, device=device).zero_()
        if runs_triton(a, "adapters"):
            b = torch.empty((self.max_loras, rows, rank), dtype=dtype, device=device).zero_()
        else:  # outputs beside one another, as native steps read them
            b = torch.empty((self.max_loras, rank, rows), dtype=dtype, device=device).zero_().transpose(1, 2)
        layer = LoraLinear(weight, bias, parts, a, b, self.step, packer=packer)
        self.layers.append(layer)
        self._places |= {name: (layer, index) for index, part in enumerate(parts) for name in part.names}
        return layer

    def shape_of(self, name: str) -> tuple[int, int] | None:
        """Return (rows, columns) of a stored matrix; None: no layer takes an adapter for it."""
        if name not in self._places:
            return None
        layer, index = self._places[name]
        return layer.parts[index].stored

    def is_elsewhere(self, name: str) -> bool:
        """Return whether a stored matrix belongs to another pipeline stage, by the first number in its name."""
        number = next((int(word) for word in name.split(".") if word.isdecimal()), -1)
        return number in self._elsewhere

    def put(self, slot: int, matrices: Mapping[str, LoraMatrix]) -> None:
        """Write an adapter with checked names and shapes into a slot that no request uses."""
        by_layer: dict[int, list[LoraMatrix | None]] = {id(layer): [None] * len(layer.parts) for layer in self.layers}
        for name, matrix in matrices.items():
            layer, index = self._places[name]
            by_layer[id(layer)][index] = matrix
        with torch.inference_mode():
            for layer in self.layers:
                layer.clear(slot)
                layer.put(slot, by_layer[id(layer)])

    def begin(self, inputs: ForwardInputs) -> None:
        """Set the adapters of the step, before its layers run."""
        ids, adapters = inputs.adapters, inputs.adapters_host
        self.step.rows = None if ids is None else lora_rows(ids, adapters, inputs.query_lens)

    def begin_row(self, adapter: int) -> None:
        """Set the adapter of one token, -1: none, before a layer runs by itself."""
        ids = torch.tensor([adapter], dtype=torch.int32)
        self.step.rows = None if adapter < 0 else lora_rows(ids, (adapter,), (1,))

    def end(self) -> None:
        self.step.rows = None
