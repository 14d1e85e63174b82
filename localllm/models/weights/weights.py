"""The tensors for a builder, read from where a checkpoint stores them (layout.py).

Does not know: how the parts make a model (decoder/builder.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, groupby
from typing import Self, cast

import torch
from torch import Tensor

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.kernels.cpu.half import HALVES, HalfRows, fits_half, pack_half
from localllm.kernels.cpu.pack import CpuPacker
from localllm.kernels.cpu.stored_blocks import GGUFBlocks
from localllm.kernels.linear import StackedWeight, should_pack
from localllm.kernels.moe.weights import ExpertWeights, needs_stacked_experts
from localllm.kernels.quantized_weight import QuantizedTable
from localllm.models.formats import matrices
from localllm.models.formats.at_load import AtLoad
from localllm.models.formats.checkpoint import FLOATS, Checkpoint, ExpertCheckpoint, drop_pages, read_ahead
from localllm.models.formats.linear_format import LinearFormat, StoredPart, TableFormat
from localllm.models.layers.linear import Linear, Weight, as_head, shared_table, to_device_layout
from localllm.models.layers.lora import LoraBank, LoraPart
from localllm.models.layers.moe import join_experts
from localllm.models.spec.family import Storage
from localllm.models.weights.layout import StoredLayout, split_order, wrong_shape
from localllm.models.weights.source import LM_HEAD, ExpertCut, Progress


class TensorsRead:
    """The stored tensors that were read, whole or in part."""

    def __init__(self, layout: StoredLayout, progress: Progress | None) -> None:
        self.names: set[str] = set()
        self.cached: set[str] = set()  # of them, those whose file pages have not been dropped
        self.done_bytes = 0
        self._layout, self._tensors, self._progress = layout, layout.checkpoint.tensors, progress

    @cached_property
    def total_bytes(self) -> int:
        return sum(info.num_bytes for name, info in self._tensors.items() if not self._layout.is_ignored(name))

    def add(self, names: Iterable[str]) -> None:
        new = [name for name in dict.fromkeys(names) if name not in self.names]
        self.names.update(new)
        self.cached.update(new)
        self.done_bytes += sum(self._tensors[name].num_bytes for name in new)
        if self._progress is not None:
            self._progress(self.done_bytes, self.total_bytes)


class Weights:
    """The checkpoint's tensors, shaped and converted for the builder. None of them stays mapped."""

    def __init__(
        self,
        layout: StoredLayout,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress | None = None,
        *,
        quantize: AtLoad | None = None,
        lora: LoraBank | None = None,
        lora_storage: Storage | None = None,
        cpu_weights: str = "fast",
        half_weights: bool = False,
    ) -> None:
        """quantize: how to quantise plain matrices right after reading. lora: makes the layers that take adapters.

        lora_storage: the names and row order that adapters use; None: the checkpoint's own. cpu_weights: the layout of
        quantised matrices on a CPU: fast, small or exact. half_weights: keep large 16-bit matrices 16 bits wide on a
        CPU, if the model's type is float32; False: widen them. If that type has 16 bits, all large matrices have it.
        """
        self._target = device
        self.device = self._load_device(device)
        self._quantize, self.packer = quantize, CpuPacker(cpu_weights)
        self._half_weights = device.type == "cpu" and (dtype in HALVES or (half_weights and dtype == torch.float32))
        self._lora, self._lora_storage = lora, lora_storage
        self.layout, self._dtype = layout, dtype
        self.read = TensorsRead(layout, progress)

    def _load_device(self, target: torch.device) -> torch.device:
        """Return the device of the tensors for a model that runs on `target`."""
        return target

    def in_ram(self) -> Self:
        """Return the source of the same tensors for parts that the CPU computes beside a model on a device."""
        cpu = torch.device("cpu")
        found = type(self)(
            self.layout, cpu, torch.float32, quantize=self._quantize, cpu_weights=self.packer.mode, half_weights=True
        )
        found.read = self.read
        return found

    def tables_in_ram(self) -> Self:
        """Return the source of the same tensors for tables that are in RAM in the layout of the model's device."""
        found = type(self)(self.layout, self._target, self._dtype, cpu_weights=self.packer.mode)
        found.device, found.read = torch.device("cpu"), self.read
        return found

    def has(self, name: str) -> bool:
        return self.layout.name(name) in self.layout.checkpoint.tensors

    def keeps_half(self, dtype: torch.dtype, shape: tuple[int, int]) -> bool:
        kept = self._dtype if self._dtype in HALVES else dtype
        return self._half_weights and fits_half(kept, *shape)

    def take(
        self,
        names: Iterable[str],
        shape: tuple[int, ...],
        *,
        keep_narrow: bool = False,
        dtype: torch.dtype | None = None,
        rows: range | None = None,
    ) -> Tensor:
        layout = self.layout
        stored = [layout.name(name) for name in names]
        if rows is None or len(rows) == shape[0]:
            orders: Sequence[Tensor | None] = [None] * len(stored)
        else:
            heights = [layout.height_of(name) for name in stored]
            if sum(heights) != shape[0]:
                raise wrong_shape(stored, (sum(heights), *shape[1:]), shape)
            orders = split_order(torch.arange(rows.start, rows.stop, device="cpu"), heights, [None] * len(stored))
        parts = [StoredPart(n, order, layout.is_transposed(n)) for n, order in zip(stored, orders, strict=True)]
        own = (shape[0] if rows is None else len(rows), *shape[1:])
        return self._plain(parts, own, keep_narrow, dtype=dtype)

    def values(self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None) -> Tensor:
        found = matrices.info(self.layout.checkpoint, self.layout.name(name)).shape
        if math.prod(found) != math.prod(shape):
            raise wrong_shape([self.layout.name(name)], found, shape)
        return self.take([name], found, dtype=dtype).view(shape)

    def table(
        self,
        name: str,
        shape: tuple[int, int],
        *,
        keep_narrow: bool = False,
        rows: range | None = None,
        has_head: bool = False,
    ) -> Tensor | QuantizedTable:
        stored, format = self.layout.name(name), self.layout.format
        stem = stored.removesuffix(".weight")
        if not isinstance(format, TableFormat) or not format.is_table(self.layout.checkpoint, stem, self._target):
            return self.take([name], shape, keep_narrow=keep_narrow, rows=rows)
        found = format.shape(self.layout.checkpoint, stem)
        if found != shape:
            raise wrong_shape([stored], found, shape)
        order = None if rows is None or len(rows) == shape[0] else torch.arange(rows.start, rows.stop, device="cpu")
        matrix = self._matrix(format.kind(self.layout.checkpoint, stem), [StoredPart(stem, order)], shape)
        table = cast(QuantizedTable, matrix)  # guaranteed by `is_table`
        if has_head and (shared := shared_table(table, self._target, self.packer)) is not None:
            return shared
        if not isinstance(table, GGUFBlocks):
            return table
        return table.copied() if self._target.type == "cpu" else table.repacked()

    def linear(
        self,
        stems: Sequence[str],
        shape: tuple[int, int],
        *,
        bias: bool = False,
        order: Tensor | None = None,
        columns: range | None = None,
    ) -> Linear:
        parts = self.layout.parts(stems, order, shape, columns)
        own = (shape[0] if order is None else len(order), shape[1] if columns is None else len(columns))
        weight = self._weight(parts, own, self._at_load(list(stems)))
        biases = self._biases(parts, own[:1]) if bias else None
        if stems[0] == LM_HEAD.removesuffix(".weight"):
            return Linear(as_head(weight), biases, packer=self.packer)
        if self._lora is None:
            return Linear(weight, biases, packer=self.packer)
        lora_parts = self._lora_parts(stems, parts, order, shape[1])
        return self._lora.linear(weight, biases, lora_parts, self._dtype, self.device, packer=self.packer)

    def head(self, rows: Tensor) -> Weight | None:
        quantize = self._quantize
        if quantize is None or not quantize.takes_head(self._target, self.packer.mode):
            return None
        return self._finished(rows, quantize)

    def _biases(self, parts: Sequence[StoredPart], shape: tuple[int, ...]) -> Tensor:
        missing = self.layout.storage.without_bias
        if not any(part.stem.endswith(missing) for part in parts):
            return self._plain([StoredPart(f"{part.stem}.bias", part.order) for part in parts], shape)
        assert all(part.order is None for part in parts), "rows without a bias are not divided"
        each = [(part.stem, self.layout.rows_of(part.stem)) for part in parts]
        return torch.cat([
            torch.zeros(rows, dtype=self._dtype, device=self.device) if stem.endswith(missing)
            else self._plain([StoredPart(f"{stem}.bias")], (rows,))
            for stem, rows in each
        ])  # fmt: skip

    def _at_load(self, stems: list[str]) -> list[AtLoad | None]:
        """Return how each of the layer's stored matrices is quantised after reading; None: it is kept as it is."""
        fused, _ = self.layout.fused(stems)
        known = stems[:1] if len(fused) == 1 else fused
        return [self._quantize if self._quantize is not None and self._quantize.takes([s]) else None for s in known]

    def widened(self, stem: str, columns: range, total: int) -> range | None:
        quantize = self._quantize if self._quantize is not None and self._quantize.takes([stem]) else None
        return self._widened(self.layout.name(f"{stem}.weight").removesuffix(".weight"), columns, total, quantize)

    def widened_experts(self, prefix: str, name: str, columns: range, total: int) -> range | None:
        stored = self.layout.stacked_name(f"{prefix}.{name}")
        stored = stored or self.layout.name(f"{prefix}.0.{name}.weight").removesuffix(".weight")
        return self._widened(stored, columns, total, self._quantize)

    def _widened(self, stored: str, columns: range, total: int, quantize: AtLoad | None) -> range | None:
        if (format := self.layout.format_of(stored)) is not None:
            return format.widened(self.layout.checkpoint, stored, columns)
        return columns if quantize is None else quantize.widened(columns, total)

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
        cut = ExpertCut(range(shape[0]) if own is None else own, order, columns)
        count = len(cut.own)
        each = self._expert_matrices(prefix, names, shape, cut)
        try:
            at_once = needs_stacked_experts(self._target)
            experts = join_experts(each, count, at_once=at_once, packer=self.packer)
        except ValueError as error:
            raise UnsupportedModel(
                f"The experts of {prefix} have a stored form that cannot run on {self._target}.",
                f"{error}.",
                "--device cpu, or another quantisation of the same model."
                if cut.order is None and cut.columns is None
                else "--enable-expert-parallel, so that each rank has whole experts.",
            ) from error
        return experts, self.expert_biases(prefix, names, shape[:2], cut) if bias else None

    def each_expert(self, prefix: str, names: Sequence[str], shape: tuple[int, int, int]) -> Iterator[Weight]:
        """Yield the matrices that `experts` returns one after another, each read when it is asked for. A matrix of
        16 bits is not packed yet: its bytes are the checkpoint's."""
        cut = ExpertCut(range(shape[0]), None, None)
        for matrix in self._expert_matrices(prefix, names, shape, cut, packs=False):
            yield to_device_layout(matrix, self.packer)

    def read_ahead(self, layer: int) -> None:
        of_layer = re.compile(rf"\D*\.{layer}\.")
        tensors = self.layout.checkpoint.tensors
        read_ahead(tensors[name] for name in tensors if of_layer.match(name) and not self.layout.is_ignored(name))

    def drop_pages(self) -> None:
        drop_pages(self.layout.checkpoint.tensors[name] for name in self.read.cached)
        self.read.cached.clear()

    def unused(self, prefix: str = "") -> frozenset[str]:
        """Return the names of tensors below `prefix` that no layer has taken, without those that carry no
        information."""
        names = [name for name in self.layout.checkpoint.tensors if name.startswith(prefix)]
        left = [name for name in names if name not in self.read.names and not self.layout.is_ignored(name)]
        return frozenset(name for name in left if not self._is_zero_bias(name))

    def _is_zero_bias(self, stored: str) -> bool:
        """Return whether a tensor is one of the zeros that AutoGPTQ wrote as the bias of every quantised matrix.
        Raises `CorruptModel` for another bias that no layer adds."""
        stem = stored.removesuffix(".bias")
        if stem == stored or self.layout.format_of(stem) is None:
            return False
        if matrices.stored(self.layout.checkpoint, stored).any():
            raise CorruptModel(
                f"{stored} is not zero.",
                f"{self.layout.spec.architecture} has no bias there, and ignoring the tensor would change the answers.",
                "Use another quantisation of the same model.",
            )
        return True

    # -- adapters

    def _lora_parts(
        self, stems: Sequence[str], parts: Sequence[StoredPart], order: Tensor | None, width: int
    ) -> list[LoraPart]:
        """Return the names that adapters use for the parts of a layer, and the rows and columns of each part."""
        fused, _ = self.layout.fused(list(stems))
        storage = self._lora_storage
        if storage is None:
            storage = self.layout.storage
            orders: Sequence[Tensor | None] = [part.order for part in parts]
        else:
            fuses = storage.fuses([stem.rpartition(".")[2] for stem in stems])
            if fused != list(stems) or fuses or any(storage.rows.get(stem.rpartition(".")[2]) for stem in stems):
                count = sum(self.layout.rows_of(part.stem) for part in parts) if order is None else len(order)
                return [LoraPart((), 0, count, None, (0, width))]
            orders = split_order(order, [self.layout.rows_of(part.stem) for part in parts], [None] * len(parts))
        heights = [self.layout.rows_of(part.stem) for part in parts]
        counts = [height if rows is None else len(rows) for height, rows in zip(heights, orders, strict=True)]
        starts = [0, *accumulate(counts)]
        names = [storage.spellings(storage.stored_name(f"{stem}.weight")) for stem in fused]
        names = [[name.removesuffix(".weight") for name in each] for each in names]
        return [
            LoraPart(
                tuple(spelled),
                start,
                count,
                None if rows is None or rows.is_meta else rows.numpy(),
                (height, width),
                parts[0].columns,
            )
            for spelled, start, count, rows, height in zip(names, starts, counts, orders, heights, strict=False)
        ]

    # -- experts

    def _expert_matrices(
        self, prefix: str, names: Sequence[str], shape: tuple[int, int, int], cut: ExpertCut, *, packs: bool = True
    ) -> Iterator[Weight]:
        """Yield one expert's matrix after another, each read only when requested. packs: pack 16 bits."""
        count, rows, columns = shape
        stacked, stored_order = self.layout.stacked_experts(prefix, names, rows)
        if not stacked:
            for expert in cut.own:
                stems = [f"{prefix}.{expert}.{name}" for name in names]
                parts = self.layout.parts(stems, cut.order, (rows, columns), cut.columns)
                yield self._weight(parts, cut.shape(rows, columns), [self._quantize], packs=packs)
        elif (format := self.layout.format_of(stacked[0])) is None:
            yield from self._slices(stacked, stored_order, shape, cut, packs=packs)
        elif self.layout.has_experts_apart(stacked[0]):
            yield from self._quantized_slices(format, stacked, stored_order, cut, (rows, columns))
        else:
            heights = [format.shape(self.layout.checkpoint, stem)[0] // count for stem in stacked]
            if cut.order is not None and sum(heights) != rows:
                raise wrong_shape(stacked, (sum(heights), columns), (rows, columns))
            whole = [torch.arange(h, device="cpu") if stored_order is None else stored_order for h in heights]
            orders = [order for order in split_order(cut.order, heights, whole) if order is not None]
            for expert in cut.own:
                tall = zip(stacked, orders, heights, strict=True)
                parts = [StoredPart(stem, own + expert * height, columns=cut.columns) for stem, own, height in tall]
                yield self._weight(parts, cut.shape(rows, columns))

    def _slices(
        self, stacked: Sequence[str], stored_order: Tensor | None, shape: tuple[int, int, int], cut: ExpertCut, *,
        packs: bool,
    ) -> Iterator[Weight]:  # fmt: skip
        """Yield each expert's matrix from plain tensors [E, n, K], or [E, K, n] if stored transposed."""
        views = self._expert_views(stacked, shape)
        if cut.columns is not None:
            views = [view[:, :, cut.columns.start : cut.columns.stop] for view in views]
        orders = split_order(cut.order, [view.shape[1] for view in views], [stored_order] * len(views))
        orders = [None if order is None else order.to(views[0].device) for order in orders]
        for expert in cut.own:
            each = zip(views, orders, strict=True)
            parts = [view[expert] if order is None else view[expert][order] for view, order in each]
            if not packs and self._quantize is None and (rows := self._half_rows(parts)) is not None:
                yield rows
                continue
            matrix = torch.cat(parts) if len(parts) > 1 else parts[0]
            if self._quantize is None and self.keeps_half(matrix.dtype, (matrix.shape[0], matrix.shape[1])):
                kept = matrix.to(self._dtype) if self._dtype in HALVES else matrix
                yield pack_half(kept, is_exact=self.packer.is_exact)
            else:
                yield self._finished(matrix.to(self.device, self._dtype, copy=True).contiguous(), self._quantize)
        self.read.add(stacked)

    def _quantized_slices(
        self, format: LinearFormat, stacked: Sequence[str], stored_order: Tensor | None, cut: ExpertCut,
        shape: tuple[int, int],
    ) -> Iterator[Weight]:  # fmt: skip
        """Yield each expert's matrix from quantised tensors [E, n, K], whose scales are stored for each expert."""
        whole = self.layout.checkpoint
        names = [name for stem in stacked for name in format.tensors(whole, stem)]
        heights = [whole.tensors[f"{stem}.weight"].shape[1] for stem in stacked]
        orders = split_order(cut.order, heights, [stored_order] * len(stacked))
        parts = [StoredPart(stem, own, columns=cut.columns) for stem, own in zip(stacked, orders, strict=True)]
        for expert in cut.own:
            weight = self._read(format, parts, ExpertCheckpoint(whole, names, expert))
            if tuple(weight.shape) != cut.shape(*shape):
                raise wrong_shape(stacked, weight.shape, cut.shape(*shape))
            yield self._finished(weight, None)
        self.read.add(names)

    def _expert_views(self, stacked: Sequence[str], shape: tuple[int, int, int]) -> Sequence[Tensor]:
        """Return the stored tensors as [E, n, K]; together they have `shape`."""
        views = [self._stored(StoredPart(name)) for name in stacked]
        views = [v.transpose(1, 2) if self.layout.is_transposed(n) else v for n, v in zip(stacked, views, strict=True)]
        flipped = [view.transpose(1, 2) for view in views]  # transformers 5 writes some families' the other way
        ways = [views, flipped] if self.layout.is_transposed(stacked[0]) else [views]
        for each in ways[::-1] if self.layout.is_flipped(stacked[0], shape) else ways:
            got = (sum(view.shape[1] for view in each), *each[0].shape[2:])
            if all(view.shape[0] == shape[0] for view in each) and got == shape[1:]:
                return each
        raise wrong_shape(stacked, views[0].shape, shape)

    def expert_biases(
        self, prefix: str, names: Sequence[str], shape: tuple[int, int], cut: ExpertCut | None = None
    ) -> Tensor:
        """Return the biases [E, N] of `experts`. cut: the part of them to return; None: all."""
        cut = cut or ExpertCut(range(shape[0]), None, None)
        biases = self._all_expert_biases(prefix, names, shape)
        if biases.is_meta:
            return biases.new_empty((len(cut.own), shape[1] if cut.order is None else len(cut.order)))
        biases = biases[cut.own.start : cut.own.stop]
        biases = biases if cut.order is None else biases[:, cut.order.to(biases.device)]
        return biases.clone(memory_format=torch.contiguous_format) if len(cut.own) < shape[0] else biases

    def _all_expert_biases(self, prefix: str, names: Sequence[str], shape: tuple[int, int]) -> Tensor:
        fused = "gate_up_proj" if len(names) == 2 else names[0]
        for stored in (f"{prefix}.{fused}_bias", f"{prefix}.{fused}.bias"):
            if not self.has(stored):
                continue
            biases = self.take([stored], shape)
            if len(names) == 2 and self.layout.storage.interleaved_experts and not biases.is_meta:
                biases = torch.cat((biases[:, ::2], biases[:, 1::2]), dim=1)
            return biases
        each = (shape[0], shape[1] // len(names))
        return torch.cat([self.take([f"{prefix}.{name}.bias"], each) for name in names], dim=1)

    # -- matrices

    def _weight(
        self, parts: Sequence[StoredPart], shape: tuple[int, int], quantize: Sequence[AtLoad | None] = (None,), *,
        packs: bool = True,
    ) -> Weight:  # fmt: skip
        """Return the parts stacked by rows: one matrix, or several if they are stored differently.

        quantize: for each part how it is quantised after reading, or one entry for all parts. packs: pack a matrix of
        16 bits.
        """
        if not packs and not any(quantize) and (rows := self._stored_rows(parts, shape)) is not None:
            return rows
        each = list(quantize) * (len(parts) if len(quantize) == 1 else 1)
        weights = []
        for (kind, made), run in groupby(
            zip(parts, each, strict=True), lambda of: (self.layout.kind(of[0].stem), of[1])
        ):
            weight = self._matrix(kind, [part for part, _ in run], shape, made is not None)
            weights.append(made(weight) if made is not None and isinstance(weight, Tensor) else weight)
        weights = _with_plain_joined(weights)
        weight = weights[0] if len(weights) == 1 else StackedWeight(weights)
        if tuple(weight.shape) != shape:
            raise wrong_shape([part.stem for part in parts], weight.shape, shape)
        return self._finished(weight, None)

    def _stored_rows(self, parts: Sequence[StoredPart], shape: tuple[int, int]) -> HalfRows | None:
        """Return the parts as they are stored; None: they are quantised, or do not stay 16 bits wide."""
        if any(self.layout.kind(part.stem) is not None for part in parts):
            return None
        named = [replace(part, stem=f"{part.stem}.weight") for part in parts]
        rows = self._half_rows([self._stored(part) for part in named])
        if rows is None or rows.shape != shape:  # the usual way names what is wrong with the shape
            return None
        self.read.add([name for part in named for name in self.layout.tensors_of(part.stem)])
        return rows

    def _half_rows(self, parts: Sequence[Tensor]) -> HalfRows | None:
        """Return matrices [n, K] as one above the other; None: that does not stay 16 bits wide in the type it has."""
        dtype, columns = parts[0].dtype, parts[0].shape[-1]
        alike = all(part.dtype == dtype and part.ndim == 2 and part.shape[1] == columns for part in parts)
        keeps = self._dtype == torch.float32 and self.keeps_half(dtype, (sum(map(len, parts)), columns))
        if not alike or not keeps or parts[0].is_meta:
            return None
        whole = tuple(part if part.stride(1) == 1 else part.contiguous() for part in parts)
        return HalfRows(whole, self.packer.is_exact)

    def _finished(self, weight: Weight, quantize: AtLoad | None) -> Weight:
        """Return the weight as the layer gets it, quantised if requested."""
        return weight if quantize is None or not isinstance(weight, Tensor) else quantize(weight)

    def _matrix(
        self, kind: object, parts: list[StoredPart], layer: tuple[int, int], keep_narrow: bool = False
    ) -> Weight:
        """Read parts of one kind for a layer of shape `layer`; the caller checks that their rows fill it."""
        if kind is None:
            named = [replace(part, stem=f"{part.stem}.weight") for part in parts]
            # Packing copies the weight, so a single matrix may be read from the mapped file.
            rows = self.layout.rows_of(parts[0].stem) if parts[0].order is None else len(parts[0].order)
            may_view = len(parts) == 1 and should_pack(rows * layer[1], self.device, self._dtype)
            is_half = not keep_narrow and self._is_half(parts, layer[1])
            keep_narrow |= is_half and self._dtype == torch.float32
            matrix = self._plain(named, None, keep_narrow, columns=layer[1], may_view=may_view)
            return pack_half(matrix, is_exact=self.packer.is_exact) if is_half else matrix
        assert self.layout.format is not None
        weight = self._read(self.layout.format, parts)
        self.read.add(
            [name for part in parts for name in self.layout.format.tensors(self.layout.checkpoint, part.stem)]
        )
        return weight

    def _is_half(self, parts: Sequence[StoredPart], columns: int) -> bool:
        """Return whether the layer's unquantised parts, together, stay 16 bits wide."""
        stored = [matrices.info(self.layout.checkpoint, f"{part.stem}.weight") for part in parts]
        types = {matrices.TYPES.get(info.dtype) for info in stored}
        rows = sum(self.layout.rows_of(part.stem) if part.order is None else len(part.order) for part in parts)
        dtype = types.pop()
        is_one_type = (not types and dtype is not None) or self._dtype in HALVES
        return is_one_type and self.keeps_half(dtype or self._dtype, (rows, columns))

    def _read(self, format: LinearFormat, parts: list[StoredPart], checkpoint: Checkpoint | None = None) -> Weight:
        """checkpoint: None: all of it."""
        return format.read(checkpoint or self.layout.checkpoint, parts, self.device, self._dtype)

    # -- plain tensors; here a part's stem is the full stored name

    def _plain(
        self,
        parts: Sequence[StoredPart],
        shape: tuple[int, ...] | None,
        keep_narrow: bool = False,
        *,
        columns: int | None = None,
        dtype: torch.dtype | None = None,
        may_view: bool = False,
    ) -> Tensor:
        """Return the parts stacked by rows: of `shape`, or any number of rows of `columns`.

        may_view: the result may be a view of the mapped file, which the caller does not keep.
        """
        tensors = [self._stored(part) for part in parts]
        if shape is not None and len(shape) == 1:  # ERNIE's correction of router scores is a matrix of one row
            tensors = [tensor[0] if tensor.ndim == 2 and len(tensor) == 1 else tensor for tensor in tensors]
        width = shape[1:] if shape is not None else (columns,)
        for part, tensor in zip(parts, tensors, strict=True):
            if tuple(tensor.shape[1:]) != width:
                raise wrong_shape([part.stem], tensor.shape, shape or ("any", columns))
        got = (sum(tensor.shape[0] for tensor in tensors), *width)
        if shape is not None and got != shape:
            raise wrong_shape([part.stem for part in parts], got, shape)
        dtype = dtype or self._dtype
        if keep_narrow and tensors[0].dtype.itemsize < dtype.itemsize:
            dtype = tensors[0].dtype
        if self.device.type == "meta":
            whole = torch.empty(got, dtype=dtype, device=self.device)  # torch.cat takes seconds on `meta`
        elif may_view and tensors[0].dtype == dtype:
            whole = tensors[0]
        else:
            whole = torch.empty(got, dtype=dtype, device=self.device)
            for tensor, place in zip(tensors, whole.split([len(tensor) for tensor in tensors]), strict=True):
                place.copy_(tensor)
        self.read.add([name for part in parts for name in self.layout.tensors_of(part.stem)])
        return whole

    def _stored(self, part: StoredPart) -> Tensor:
        info = matrices.info(self.layout.checkpoint, part.stem)
        stem = part.stem.removesuffix(".weight")
        if (format := self.layout.format_of(stem)) is not None:
            tensor = format.dequantize(self.layout.checkpoint, stem)
        elif info.dtype in FLOATS:
            tensor = self.layout.checkpoint.tensor(part.stem)
        else:
            raise UnsupportedModel(
                f"{part.stem} in {info.file.name} is stored as {info.dtype}.", f"Supported: {', '.join(FLOATS)}."
            )
        for end, value in self.layout.storage.added:
            tensor = tensor.float() - value if part.stem.endswith(end) else tensor
        tensor = tensor.t() if part.transposed else tensor
        tensor = tensor if part.columns is None else tensor[:, part.columns.start : part.columns.stop]
        return tensor if part.order is None else tensor[part.order.to(tensor.device)]


def _with_plain_joined(weights: Sequence[Weight]) -> list[Weight]:
    """Return the matrices with adjacent plain ones as one tensor: a format may have widened them from other types."""
    joined: list[Weight] = []
    for is_plain, run in groupby(weights, lambda weight: isinstance(weight, Tensor)):
        each = list(run)
        if not is_plain or len(each) == 1:
            joined += each
            continue
        tensors = [weight for weight in each if isinstance(weight, Tensor)]
        if tensors[0].is_meta:  # torch.cat takes seconds on `meta`
            joined.append(tensors[0].new_empty((sum(map(len, tensors)), tensors[0].shape[1])))
        else:
            joined.append(torch.cat(tensors))
    return joined
