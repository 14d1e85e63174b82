"""Token embeddings, with the family's scale, learned positions or norm; their table may be in RAM beside a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from localllm.kernels.quantized_weight import QuantizedTable
from localllm.models.inputs import GivenEmbeds
from localllm.models.layers.far import Crossing
from localllm.models.layers.group import Group
from localllm.models.layers.norm import LayerNorm, RMSNorm

CHECKED_ROWS = 64  # of a table that a device reads in RAM


def sinusoids(count: int, size: int, *, reaches_end: bool) -> Tensor:
    """Return the sines, then the cosines, of positions 0 .. count - 1 [count, size] fp32, with frequencies from 1 to
    1/10000 (Vaswani et al. 2017). reaches_end: the last frequency is 1/10000 itself (M2M-100)."""
    half = size // 2
    exponents = torch.arange(half, device="cpu") / (half - 1 if reaches_end else half)
    angles = torch.arange(count, device="cpu")[:, None] * 10000.0**-exponents
    return torch.cat((angles.sin(), angles.cos(), angles.new_zeros(count, size % 2)), dim=1)


class RamTable:
    """A table in RAM beside a device, of which a step reads a few rows.

    A device that reads RAM does so by itself (`map`), also in recorded steps and for tokens that only it knows yet.
    For any other device the host looks the rows up, and waits for that until the device has done everything before.
    """

    __slots__ = ("_buffers", "_crossing", "_locked", "_mapped", "held")
    stays_in_ram = True

    def __init__(self, held: Tensor | QuantizedTable, crossing: Crossing) -> None:
        """held: [N, K] in RAM, in the layout of the device."""
        self.held, self._crossing = held, crossing
        self._mapped: Tensor | QuantizedTable | None = None  # the same memory, as the device addresses it
        self._buffers: tuple[Tensor, Tensor] | None = None  # in RAM: the tokens of a step, and their rows
        self._locked: list[int] = []  # addresses of the memory that is page-locked for the device

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.held.shape
        return rows, columns

    @property
    def nbytes(self) -> int:
        return self.held.nbytes

    @property
    def is_mapped(self) -> bool:
        return self._mapped is not None

    def map(self, view_of: Callable[[Tensor], Tensor | None]) -> str:
        """Let the device read the table by itself. view_of: returns a tensor of the device with the memory of one in
        RAM; None: the system does not allow that. Return why the host still looks rows up; empty: it does not."""
        named, views = {"": self.held}, dict[str, Tensor]()
        if not isinstance(self.held, Tensor):
            named = {each.name: getattr(self.held, each.name) for each in fields(self.held)}  # type: ignore[arg-type]
        for name, part in named.items():
            if not isinstance(part, Tensor):
                continue
            if (view := view_of(part)) is None:
                return "the system does not let it"
            self._locked += [part.data_ptr()] if view.device != part.device else []
            ids = torch.linspace(0, len(part) - 1, min(len(part), CHECKED_ROWS), device="cpu").long()
            got, wanted = view.index_select(0, ids.to(view.device)).cpu(), part.index_select(0, ids)
            if not torch.equal(got.view(torch.uint8), wanted.view(torch.uint8)):
                return "it reads other values there than the CPU"
            views[name] = view
        self._mapped = views.get("") if "" in views else replace(self.held, **views)  # type: ignore[type-var]
        return ""

    def unmap(self) -> list[int]:
        """Let the host look rows up, and return the addresses whose page-locking can end."""
        locked, self._locked, self._mapped = self._locked, [], None
        return locked

    def dequantize_rows(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return [T, K], the given rows [T] int64 of the device."""
        if self._mapped is not None:
            return _rows_of(self._mapped, rows, dtype)
        link, split = self._crossing.link, self._crossing.split
        ids, found = self._buffers_for(len(rows), dtype)
        link.copy(ids, rows)
        work = partial(self._read, ids, found)
        work() if split is None else split(work)
        out = torch.empty(found.shape, dtype=dtype, device=rows.device)
        link.copy(out, found)
        return out

    def _read(self, ids: Tensor, out: Tensor) -> None:
        self._crossing.link.wait()
        with torch.inference_mode():
            out.copy_(_rows_of(self.held, ids, out.dtype))

    def _buffers_for(self, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the buffers for the rows of a step. Recorded steps keep the buffers that they were recorded with."""
        if self._buffers is None or len(self._buffers[0]) < count or self._buffers[1].dtype != dtype:
            buffer = self._crossing.link.buffer
            self._buffers = buffer(count, 1, torch.int64), buffer(count, self.shape[1], dtype)
        ids, found = self._buffers
        return ids[:count, 0], found[:count]


Table = Tensor | QuantizedTable | RamTable


def _rows_of(table: Table, rows: Tensor, dtype: torch.dtype) -> Tensor:
    return table.index_select(0, rows).to(dtype) if isinstance(table, Tensor) else table.dequantize_rows(rows, dtype)


class EmbeddingTable:
    """The embedding table, in its stored type; outputs have the model's type."""

    __slots__ = ("dtype", "norm", "norms_given", "position_offset", "positions", "scale", "scales_given", "weight")

    def __init__(
        self,
        weight: Table,
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
        return _rows_of(self.weight, token_ids, self.dtype)


class SplitEmbeddingTable(EmbeddingTable):
    """The embeddings of a range of the vocabulary. Each shard looks up its own tokens; the others' are zeros."""

    __slots__ = ("group", "vocab")

    def __init__(self, weight: Table, dtype: torch.dtype, vocab: range, group: Group, **kept: Any) -> None:
        """weight: the rows `vocab`. kept: as for `EmbeddingTable`."""
        super().__init__(weight, dtype, **kept)
        self.vocab, self.group = vocab, group

    def _rows(self, token_ids: Tensor) -> Tensor:
        if not self.vocab:
            return self.group.sum_(token_ids.new_zeros((len(token_ids), self.weight.shape[1]), dtype=self.dtype))
        foreign = (token_ids < self.vocab.start) | (token_ids >= self.vocab.stop)
        own = (token_ids - self.vocab.start).masked_fill_(foreign, 0)
        return self.group.sum_(super()._rows(own).masked_fill_(foreign[:, None], 0.0))
