"""Token embeddings, scaled where the family says so (Gemma)."""

from __future__ import annotations

import torch
from torch import Tensor


class Embedding:
    """Rows of the vocabulary, in the type they are stored in; what comes out has the model's type."""

    __slots__ = ("dtype", "scale", "weight")

    def __init__(self, weight: Tensor, dtype: torch.dtype, scale: float | None) -> None:
        self.weight = weight  # [vocab, hidden]
        self.dtype = dtype
        # The checkpoint was trained with the scale rounded to its type.
        self.scale = None if scale is None else float(torch.tensor(scale, dtype=dtype, device="cpu"))

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[T] int64 -> [T, hidden], a fresh tensor that the caller may write into"""
        rows = self.weight.index_select(0, token_ids).to(self.dtype)
        return rows if self.scale is None else rows.mul_(self.scale)
