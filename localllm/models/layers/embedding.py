"""Token embeddings, with the family's scale, learned positions or norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from localllm.kernels.quantized_weight import QuantizedTable
from localllm.models.inputs import GivenEmbeds
from localllm.models.layers.group import Group
from localllm.models.layers.norm import LayerNorm, RMSNorm


def sinusoids(count: int, size: int, *, reaches_end: bool) -> Tensor:
    """Return the sines, then the cosines, of positions 0 .. count - 1 [count, size] fp32, with frequencies from 1 to
    1/10000 (Vaswani et al. 2017). reaches_end: the last frequency is 1/10000 itself (M2M-100)."""
    half = size // 2
    exponents = torch.arange(half, device="cpu") / (half - 1 if reaches_end else half)
    angles = torch.arange(count, device="cpu")[:, None] * 10000.0**-exponents
    return torch.cat((angles.sin(), angles.cos(), angles.new_zeros(count, size % 2)), dim=1)


class EmbeddingTable:
    """The embedding table, in its stored type; outputs have the model's type."""

    __slots__ = ("dtype", "norm", "norms_given", "position_offset", "positions", "scale", "scales_given", "weight")

    def __init__(
        self,
        weight: Tensor | QuantizedTable,
        dtype: torch.dtype,
        scale: float | None = None,
        *,
        positions: Tensor | None = None,
        position_offset: int = 0,
        norm: RMSNorm | LayerNorm | None = None,
        norms_given: bool = True,
        scales_given: bool = False,
    ) -> None:
        self.weight = weight  # [vocab, hidden]
        self.dtype = dtype
        # Gemma was trained with the scale rounded to its type. (Other families use whole numbers.)
        self.scale = None if scale is None else float(torch.tensor(scale, dtype=dtype, device="cpu"))
        self.positions = positions  # [rows, hidden]: learned, added (GPT-2); position p is in row p + position_offset
        self.position_offset = position_offset
        self.norm = norm
        self.norms_given = norms_given  # norm the output (Bloom), or the rows of the table alone (Muse Glimmer)
        self.scales_given = scales_given  # also scale embeddings that the request supplied (Granite)

    def __call__(self, token_ids: Tensor, positions: Tensor, given: GivenEmbeds | None = None) -> Tensor:
        """Return the embeddings [T, hidden] of T int64 tokens, in a fresh tensor that the caller may change."""
        rows = self._rows(token_ids)
        if given is not None and self.scales_given:
            rows.index_copy_(0, given.places, given.values)
        if self.scale is not None:
            rows.mul_(self.scale)
        if self.norm is not None and not self.norms_given:
            rows = self.norm(rows)
        if given is not None and not self.scales_given:
            rows.index_copy_(0, given.places, given.values)
        if self.positions is not None:
            rows.add_(self.positions.index_select(0, positions + self.position_offset))
        return self.norm(rows) if self.norm is not None and self.norms_given else rows

    def _rows(self, token_ids: Tensor) -> Tensor:
        if isinstance(self.weight, Tensor):
            return self.weight.index_select(0, token_ids).to(self.dtype)
        return self.weight.dequantize_rows(token_ids, self.dtype)


class SplitEmbeddingTable(EmbeddingTable):
    """The embeddings of a range of the vocabulary. Each shard looks up its own tokens; the others' are zeros."""

    __slots__ = ("group", "vocab")

    def __init__(
        self, weight: Tensor | QuantizedTable, dtype: torch.dtype, vocab: range, group: Group, **kept: Any
    ) -> None:
        """weight: the rows `vocab`. kept: as for `EmbeddingTable`."""
        super().__init__(weight, dtype, **kept)
        self.vocab, self.group = vocab, group

    def _rows(self, token_ids: Tensor) -> Tensor:
        if not self.vocab:
            return self.group.sum_(token_ids.new_zeros((len(token_ids), self.weight.shape[1]), dtype=self.dtype))
        foreign = (token_ids < self.vocab.start) | (token_ids >= self.vocab.stop)
        own = (token_ids - self.vocab.start).masked_fill_(foreign, 0)
        return self.group.sum_(super()._rows(own).masked_fill_(foreign[:, None], 0.0))
