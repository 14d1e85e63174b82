"""The source of a builder's tensors: what a builder asks for by Llama's names, and a shard's share of each matrix.

A shard reads the rows of matrices that are split by outputs, and the columns of matrices split by inputs.
Does not know: checkpoints and how they store tensors (weights.py, meta.py), layers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from localllm.kernels.cpu.pack import CpuPacker
from localllm.kernels.moe.weights import ExpertWeights
from localllm.kernels.quantized_weight import QuantizedTable
from localllm.models.layers.embedding import RamTable, Table
from localllm.models.layers.far import Crossing
from localllm.models.layers.group import GatheredInput, Group, PaddedInput, Projection
from localllm.models.layers.linear import Linear, Weight
from localllm.models.layers.moe import Experts
from localllm.models.spec.shard import Shard, even

Progress = Callable[[int, int], None]
NORMS = "norm.weight"
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
PER_LAYER_EMBEDDING = "model.embed_tokens_per_layer.weight"
LOOKED_UP = {EMBEDDING: "embedding", PER_LAYER_EMBEDDING: "per-layer embeddings"}
"""Tables of which a token reads one row, if the head does not share them."""


class TensorSource(Protocol):
    """The source of a builder's tensors. Each result has the requested shape, or an error is raised."""

    @property
    def device(self) -> torch.device:
        """Device of the tensors: the model's, or `meta` if only headers are read."""
        ...

    @property
    def packer(self) -> CpuPacker:
        """Packs this model's quantised matrices on a CPU, as the setting `cpu_weights` says."""
        ...

    def keeps_half(self, dtype: torch.dtype, shape: tuple[int, int]) -> bool:
        """Return whether a matrix stored in `dtype` is held in 16 bits for the native library: the model's type has
        16 bits, or the matrix is stored so and the model computes in float32."""
        ...

    def has(self, name: str) -> bool: ...

    def take(
        self,
        names: Iterable[str],
        shape: tuple[int, ...],
        *,
        keep_narrow: bool = False,
        dtype: torch.dtype | None = None,
        rows: range | None = None,
    ) -> Tensor:
        """Return the named tensors stacked by rows, together of `shape`, in dtype; None: the model's.

        keep_narrow: keep the stored type if it is smaller. rows: those to return; None: all.
        """
        ...

    def values(self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None) -> Tensor:
        """Return a small tensor whose dimensions checkpoints store in several ways, as `shape`, in dtype; None: the
        model's."""
        ...

    def table(
        self,
        name: str,
        shape: tuple[int, int],
        *,
        keep_narrow: bool = False,
        rows: range | None = None,
        has_head: bool = False,
    ) -> Tensor | QuantizedTable:
        """Return a matrix whose rows are looked up, as `take` does, but quantised if it is stored so.

        has_head: the matrix is the head, too. A quantised one is then in the layout of a head if rows of that layout
        can be looked up."""
        ...

    def linear(
        self,
        stems: Sequence[str],
        shape: tuple[int, int],
        *,
        bias: bool = False,
        order: Tensor | None = None,
        columns: range | None = None,
    ) -> Linear:
        """Return the matrices `stem`.weight stacked by rows as one layer, with the biases `stem`.bias.

        shape: of the whole stack. order [rows] int64: row i of the layer is row order[i] of the stack, rows of the same
        matrix being neighbours; None: all rows. columns: inputs to take, as `widened` returned them; None: all.
        """
        ...

    def head(self, rows: Tensor) -> Weight | None:
        """Return the head of an encoder-decoder, quantised, of its rows [vocab, hidden]; None: it is not quantised."""
        ...

    def widened(self, stem: str, columns: range, total: int) -> range | None:
        """Return the smallest range of a matrix's `total` inputs that holds `columns` and that it can be cut to.
        None: it can only be cut by rows."""
        ...

    def experts(
        self,
        prefix: str,
        names: Sequence[str],
        shape: tuple[int, int, int],
        *,
        bias: bool = False,
        own: range | None = None,
        order: Tensor | None = None,
        columns: range | None = None,
    ) -> tuple[ExpertWeights, Tensor | None]:
        """Return the matrices `prefix`.E.`name` of every expert E, stacked by rows over `names`, and the biases [E, N].

        shape: (experts, N, K), of all experts. A checkpoint may also store one tensor [E, n, K] per name,
        `prefix`.`name`, or one for all names, `prefix`.gate_up_proj. own: the experts to return; None: all. order,
        columns: as in `linear`, the same for each expert; `columns` as `widened_experts` returned them.
        """
        ...

    def expert_biases(self, prefix: str, names: Sequence[str], shape: tuple[int, int]) -> Tensor:
        """Return the biases of `experts`, [E, N]."""
        ...

    def each_expert(self, prefix: str, names: Sequence[str], shape: tuple[int, int, int]) -> Iterator[Weight]:
        """Yield the matrices of `experts` one after another, each read when it is asked for."""
        ...

    def widened_experts(self, prefix: str, name: str, columns: range, total: int) -> range | None:
        """Return what `widened` does, for the matrices `prefix`.E.`name` of the experts."""
        ...

    def read_ahead(self, layer: int) -> None:
        """Let the system read a layer's tensors from their files into its page cache. For a thread beside the one that
        takes them."""
        ...

    def drop_pages(self) -> None:
        """Drop from the system's page cache the file pages of the tensors that were read since the last call."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertCut:
    """The part of a layer's experts that a shard takes."""

    own: range  # of the experts
    order: Tensor | None  # rows of each expert's matrix; None: all
    columns: range | None  # None: all

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of an expert's matrix, of whose rows and columns these are taken."""
        return (
            rows if self.order is None else len(self.order),
            columns if self.columns is None else len(self.columns),
        )


@dataclass(frozen=True, slots=True)
class FarWeights:
    """The layers whose experts stay in RAM or on disk, the source of their tensors, and the way of a step's rows to
    them; and the tables that stay in RAM, and their source."""

    source: TensorSource
    layers: frozenset[int]
    crossing: Crossing
    tables: frozenset[str] = frozenset()  # by Llama's names
    table_source: TensorSource | None = None  # in the layout of the model's device; None: there are no tables


@dataclass(slots=True)
class AlikeLayers:
    """One object for the experts of all layers that are stored alike, in a model that has only sizes."""

    forms: Mapping[int, Hashable]  # of each layer: the names, types and shapes of its tensors
    found: dict[Hashable, Experts] = field(default_factory=dict)
    layers: dict[int, Experts] = field(default_factory=dict)

    def experts(self, layer: int, build: Callable[[], Experts]) -> Experts:
        form = self.forms.get(layer, layer)
        if form not in self.found:
            self.found[form] = build()
        return self.layers.setdefault(layer, self.found[form])


@dataclass(frozen=True, slots=True)
class ShardWeights:
    """A source of tensors, and the shard that takes its share of them."""

    source: TensorSource
    shard: Shard
    group: Group
    far: FarWeights | None = None  # None: all of the model is on its device
    alike: AlikeLayers | None = None  # None: each layer has experts of its own

    def looked_up(self, name: str, shape: tuple[int, int], *, keep_narrow: bool, rows: range | None = None) -> Table:
        """Return a table that is only looked up, as `TensorSource.table` does; it may be in RAM."""
        far = self.far
        if far is None or far.table_source is None or name not in far.tables:
            return self.source.table(name, shape, keep_narrow=keep_narrow, rows=rows)
        held = far.table_source.table(name, shape, keep_narrow=keep_narrow, rows=rows)
        far.table_source.drop_pages()
        return RamTable(held, far.crossing)

    def row_parallel(
        self, stem: str, shape: tuple[int, int], own: range, counts: tuple[int, ...], *, bias: bool = False
    ) -> Projection:
        """Return the layer that maps the shard's inputs `own` to its part of the sum over all shards.

        shape: of the whole matrix. counts: inputs of each shard. The bias is in the part of the first shard that has
        inputs.
        """
        if len(own) == shape[1]:
            return self.source.linear([stem], shape, bias=bias)
        held = self.source.widened(stem, own, shape[1])
        if held is None:
            return self.by_rows(stem, shape, counts, bias=bias)
        linear = self.source.linear([stem], shape, bias=bias and own.start == 0, columns=held)
        return linear if held == own else PaddedInput(linear, own.start - held.start, held.stop - own.stop)

    def by_rows(
        self, stem: str, shape: tuple[int, int], counts: tuple[int, ...], *, bias: bool, order: Tensor | None = None
    ) -> Projection:
        """Return the layer that maps the inputs of all shards to this shard's rows. order [K] int64: where each input
        of the matrix is among the inputs of all shards; None: at the same place."""
        rows = even(shape[0], self.shard.size)
        first = sum(rows[: self.shard.index])
        own = torch.arange(first, first + rows[self.shard.index], device="cpu")
        linear = self.source.linear([stem], shape, bias=bias, order=own)
        order = None if order is None else order.to(self.source.device)
        return GatheredInput(linear, self.group, counts, first, shape[0], order)


def stacked_rows(own: range, size: int, copies: int = 1) -> Tensor | None:
    """Return the rows `own` of each of `copies` matrices of `size` rows that are stacked; None: all of them."""
    if len(own) == size:
        return None
    return torch.cat([torch.arange(own.start, own.stop, device="cpu") + size * copy for copy in range(copies)])
