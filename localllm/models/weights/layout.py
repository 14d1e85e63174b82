"""The stored names, row orders and sizes of what a builder asks for by Llama's names.

Does not know: how tensors are read and converted (weights.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from localllm.errors import CorruptModel
from localllm.models.formats import matrices
from localllm.models.formats.checkpoint import Checkpoint
from localllm.models.formats.linear_format import LinearFormat, StoredPart
from localllm.models.spec.family import Storage
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.weights.source import LM_HEAD

_KV_PARTS = "k_proj", "v_proj", "k_norm", "v_norm"


class StoredLayout:
    """One checkpoint as one model reads it. storage: maps Llama's names to the checkpoint's names and row order.
    format: how matrices are stored; None: unquantised."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec, storage: Storage, format: LinearFormat | None) -> None:
        self.checkpoint, self.spec, self.storage, self.format = checkpoint, spec, storage, format
        self._names: dict[str, str] = {}
        # Layers that read another layer's KV may still store K and V weights.
        readers = [layer for layer, source in enumerate(spec.kv_source) if source != layer]
        unread = (f"model.layers.{layer}.self_attn.{part}" for layer in readers for part in _KV_PARTS)
        self._unread = {self.name(f"{stem}.weight").removesuffix(".weight") for stem in unread}

    @cached_property
    def _stems(self) -> set[str]:
        return {name.rpartition(".")[0] for name in self.checkpoint.tensors}

    def name(self, name: str) -> str:
        """Return the checkpoint's name of a tensor; of one stored as several tensors, the stem must exist."""
        known = self._names.get(name)
        if known is None:  # names are asked for again and again, and a GGUF file's are found by forty patterns
            spellings = self.storage.spellings(self.storage.stored_name(name))
            there = self.checkpoint.tensors
            found = (each for each in spellings if each in there or each.removesuffix(".weight") in self._stems)
            known = self._names[name] = next(found, spellings[0])
        return known

    def tensors_of(self, name: str) -> Sequence[str]:
        stem = name.removesuffix(".weight")
        if (format := self.format_of(stem)) is not None:
            return format.tensors(self.checkpoint, stem)
        return [name]

    def format_of(self, stem: str) -> LinearFormat | None:
        """Return the checkpoint's format if it stores this matrix, else None."""
        return None if self.kind(stem) is None else self.format

    def kind(self, stem: str) -> object:
        """Return how the checkpoint's format stores this matrix; None: unquantised."""
        return None if self.format is None else self.format.kind(self.checkpoint, stem)

    def is_transposed(self, stored: str) -> bool:
        return bool(self.storage.transposed) and stored.endswith(self.storage.transposed)

    def is_ignored(self, stored: str) -> bool:
        """Return whether a tensor carries no information: tables that are recomputed, a second copy of a tied head."""
        head = self.name(LM_HEAD)
        return (
            stored.endswith("rotary_emb.inv_freq")
            or (self.spec.tie_word_embeddings and stored == head)
            or any(re.fullmatch(pattern, stored) for pattern in self.storage.ignored)
            or (self.format is not None and self.format.ignores(stored))
            or stored.rpartition(".")[0] in self._unread
            or (self.storage.more_layers and _layer_of(stored) >= self.spec.num_layers)
        )

    def height_of(self, name: str) -> int:
        """Return the first dimension of a tensor, whatever its rank."""
        if (format := self.format_of(name.removesuffix(".weight"))) is not None:
            return format.shape(self.checkpoint, name.removesuffix(".weight"))[0]
        shape = matrices.info(self.checkpoint, name).shape
        return shape[-1] if self.is_transposed(name) else shape[0]

    def rows_of(self, stem: str) -> int:
        return self.height_of(f"{stem}.weight")

    def _columns_of(self, stem: str) -> int:
        if (format := self.format_of(stem)) is not None:
            return format.shape(self.checkpoint, stem)[1]
        shape = matrices.info(self.checkpoint, f"{stem}.weight").shape
        return shape[0] if self.is_transposed(f"{stem}.weight") else shape[-1]

    def parts(
        self, stems: Sequence[str], order: Tensor | None, shape: tuple[int, int], columns: range | None = None
    ) -> list[StoredPart]:
        """Return the stored matrices that fill `shape` with the rows of `stems`, and what to take of each."""
        stems = list(stems)
        fused, own = self.fused(stems)
        stored = [self.name(f"{stem}.weight").removesuffix(".weight") for stem in fused]
        transposed = [self.is_transposed(f"{stem}.weight") for stem in stored]
        rows = [self.rows_of(stem) for stem in stored]
        if sum(rows) != shape[0]:  # check before missing rows are selected or rows are left over
            raise wrong_shape(stored, (sum(rows), shape[1]), shape)
        for stem in stored if columns is not None else ():
            if (width := self._columns_of(stem)) != shape[1]:
                raise wrong_shape([stem], (self.rows_of(stem), width), shape)
        orders = split_order(order, rows, own)
        return [StoredPart(*part, columns) for part in zip(stored, orders, transposed, strict=True)]

    def fused(self, stems: list[str]) -> tuple[list[str], list[Tensor | None]]:
        """Return the stems under which a fusing checkpoint stores these, and the order of the rows of each."""
        storage, spec = self.storage, self.spec
        prefix, words = stems[0].rpartition(".")[0], [stem.rpartition(".")[2] for stem in stems]
        if storage.fused_qkv and words[0] == "q_proj" and len(stems) == 3:
            rows = storage.qkv_rows
            sizes = spec.num_heads, spec.num_kv_heads, spec.head_dim
            order = None if rows is None else torch.tensor(rows(*sizes), device="cpu")
            fused = f"{prefix}.{storage.fused_qkv}"
            return [fused], [self._stored_rows(fused) if order is None else order]
        if storage.fused_gate_up and words[0] == "gate_proj" and len(stems) == 2:
            fused, width = f"{prefix}.{storage.fused_gate_up}", spec.intermediate_size
            if storage.gate_is_last:
                return [fused], [torch.arange(2 * width, device="cpu").roll(-width)]
            return [fused], [self._stored_rows(fused)]
        names, orders = list(stems), [self._stored_rows(stem) for stem in stems]
        for matrix in storage.fused_recurrent:
            if matrix.parts[0] in words and spec.recurrent is not None:
                first = words.index(matrix.parts[0])
                replaced = slice(first, first + len(matrix.parts))
                words[replaced], names[replaced] = [matrix.name], [f"{prefix}.{matrix.name}"]
                orders[replaced] = [torch.tensor(matrix.rows(spec.recurrent), device="cpu")]
        return names, orders

    def _stored_rows(self, stem: str) -> Tensor | None:
        """Return the order of a matrix's rows in the stored one; None: unchanged."""
        rows, spec = self.storage.rows.get(stem.rpartition(".")[2]), self.spec
        if rows is None:
            return None
        return torch.tensor(rows(spec.num_heads, spec.num_kv_heads, spec.head_dim), device="cpu")

    def stacked_experts(self, prefix: str, names: Sequence[str], rows: int) -> tuple[list[str], Tensor | None]:
        """Return the stored tensors that hold these matrices for all experts, and the order of an expert's rows."""
        interleaved = torch.cat((torch.arange(0, rows, 2, device="cpu"), torch.arange(1, rows, 2, device="cpu")))
        if len(names) == 2 and (stored := self.stacked_name(f"{prefix}.gate_up_proj")):
            return [stored], interleaved if self.storage.interleaved_experts else None
        found = [self.stacked_name(f"{prefix}.{name}") for name in names]
        return [stored for stored in found if stored is not None], None

    def has_experts_apart(self, stem: str) -> bool:
        """Return whether a quantised matrix of all experts is [E, n, K], each expert with scales of its own."""
        found = self.checkpoint.tensors.get(f"{stem}.weight")
        return found is not None and len(found.shape) == 3 and found.dtype.startswith("F8_")

    def stacked_name(self, stem: str) -> str | None:
        for stored in self.storage.spellings(self.storage.stored_name(f"{stem}.weight")):
            bare = stored.removesuffix(".weight")
            if self.format_of(bare) is not None:
                return bare
            if found := next((name for name in (stored, bare) if name in self.checkpoint.tensors), None):
                return found
        return None

    def is_flipped(self, stored: str, shape: tuple[int, int, int]) -> bool:
        """Return whether the other matrix of a mixture is stored [E, n, K] where [E, K, n] was published. That decides
        for a square matrix, which fits either way."""
        first, last = "gate_up_proj", "down_proj"
        other = stored.replace(first, last) if first in stored else stored.replace(last, first)
        wanted = (shape[2], shape[1] // 2) if first in stored else (2 * shape[2], shape[1])
        found = self.checkpoint.tensors.get(other)
        return found is not None and tuple(found.shape[1:]) == wanted and wanted[0] != wanted[1]


def split_order(order: Tensor | None, heights: Sequence[int], own: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Split `order`, of all stacked matrices, into one order each. own: its rows in the stored matrix."""
    if order is None:
        return own
    wanted = [order[(order >= a) & (order < b)] - a for a, b in pairwise([0, *accumulate(heights)])]
    return [rows if each is None else each[rows] for rows, each in zip(wanted, own, strict=True)]


def wrong_shape(names: Sequence[str], got: Iterable[int], wanted: Iterable[object]) -> CorruptModel:
    return CorruptModel(f"{' + '.join(names)} has shape {list(got)}.", f"The model's config asks for {list(wanted)}.")


def _layer_of(stored: str) -> int:
    """Return the number of a tensor's layer; -1: none."""
    found = re.search(r"\.layers\.(\d+)\.", stored)
    return -1 if found is None else int(found[1])
