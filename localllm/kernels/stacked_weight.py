"""A matrix of parts that cannot be merged, since the checkpoint stores the parts of a layer in different formats.

A GGUF file may store q and k in 4 bits and v in 6; GPTQ with desc_act orders the inputs of each part differently.
Does not know: the format of its parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from localllm.kernels.linear import linear
from localllm.kernels.quantized_weight import QuantizedWeight


class StackedWeight:
    """W = [part 0; part 1; ...]; a `QuantizedWeight`. Plain parts are as `pack_weight` returns them."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Tensor | QuantizedWeight]) -> None:
        columns = {part.shape[1] for part in parts}
        assert len(columns) == 1, f"parts with {columns} inputs"
        self.parts = tuple(parts)

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.dtype.itemsize if isinstance(part, Tensor) else part.nbytes
                   for part in self.parts)  # fmt: skip

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K], bias [N] -> [T, N] in x's dtype"""
        outs, start = [], 0
        for part in self.parts:
            stop = start + part.shape[0]
            own = None if bias is None else bias[start:stop]
            outs.append(linear(x, part, own) if isinstance(part, Tensor) else part.linear(x, own))
            start = stop
        return torch.cat(outs, dim=1)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[N, K]"""
        return torch.cat(
            [
                (part.to_dense() if part.is_mkldnn else part).to(dtype)
                if isinstance(part, Tensor)
                else part.dequantize(dtype)
                for part in self.parts
            ]
        )
