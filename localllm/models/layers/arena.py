"""Experts in RAM beside a device: one piece of memory, from which a device copies without the processor's help.

    Arena            the memory: filled in order, obtained in pieces while enough RAM is free, page-locked in pieces
    Records          the experts of one layer in it: an expert's record has the bytes of its matrices and biases
    RecordMatrices   stands for the list of a layer's matrices

A record has the layout of one on disk (disk.py). The CPU multiplies with it where it is, and a device unpacks the same
bytes (kernels/moe/from_lanes.py): there is one copy.
Page-locking is the arena's own: torch's allocator of page-locked memory rounds sizes up to powers of two.
Does not know: which layers are in RAM, checkpoints, when a device copies.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from threading import Thread
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from localllm.errors import DoesNotFit
from localllm.kernels.cpu.half import CpuHalfWeight, HalfRows
from localllm.kernels.cpu.matrix import NativeWeight, matrices_of, padded_outputs, parts_of
from localllm.kernels.cpu.native.structures import KIND_STORED, OUTPUTS, Kind, NativeMatrix, Stored
from localllm.kernels.cpu.q4 import PER_GROUP, CpuQ4Weight
from localllm.kernels.cpu.stored_blocks import CpuStoredWeight, GGUFBlocks
from localllm.kernels.quantized_weight import QuantizedWeight
from localllm.models.layers.disk import ALIGNMENT, GROWTH, ExpertForm, MatrixForm, obtain_pages
from localllm.models.layers.linear import Weight
from localllm.units import format_bytes

log = logging.getLogger(__name__)

PINNED_AT_A_TIME = 2**30
PINNED_SHARE = 0.8  # of the RAM, at most

Register = Callable[[int, int], bool]
"""Page-locks (address, bytes) for a device, and returns whether the system allows it."""


class Arena:
    """One anonymous mapping, for one thread at a time."""

    stays_in_ram = True

    def __init__(self, num_bytes: int, free_bytes: Callable[[], int]) -> None:
        """free_bytes: returns the RAM that may still be taken."""
        self.num_bytes, self.used_bytes, self.pinned_bytes = num_bytes, 0, 0
        self._free_bytes, self._obtained = free_bytes, 0
        self._obtaining: Thread | None = None
        self._unregister: Callable[[int], object] | None = None
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
        memory = mmap.mmap(-1, max(num_bytes, mmap.PAGESIZE), **private)  # shared memory would have no huge pages
        with suppress(OSError, AttributeError, ValueError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping
        self.address = self._bytes.data_ptr()

    def take(self, num_bytes: int) -> Tensor:
        """Return the next bytes, from a multiple of 64 on, which have pages of their own. A thread obtains as many more
        meanwhile. Raises `DoesNotFit` if other
        programs have taken the RAM meanwhile."""
        end = self.used_bytes + num_bytes
        assert end <= self.num_bytes, f"{end} bytes of an arena of {self.num_bytes}: the plan is wrong"
        self._finish_obtaining()
        self._obtain(end)
        ahead = min(self.num_bytes, end + num_bytes)
        if self._obtained < ahead:  # as much again, while these bytes are written
            self._obtaining = Thread(target=self._obtain_ahead, args=(ahead,), name="arena", daemon=True)
            self._obtaining.start()
        found = self._bytes[self.used_bytes : end]
        self.used_bytes = end + -end % ALIGNMENT
        return found

    def _obtain(self, end: int) -> None:
        """Give the pages up to `end` memory of their own, in pieces. Raises `DoesNotFit`."""
        while self._obtained < end:
            size = min(GROWTH, self.num_bytes - self._obtained)
            if (free := self._free_bytes()) < size:
                raise DoesNotFit(
                    "Other programs have taken RAM while the model was loaded.",
                    f"{format_bytes(self.num_bytes)} were planned for the weights in RAM; after "
                    f"{format_bytes(self._obtained)} of them {format_bytes(max(0, free))} are free.",
                    "Close other programs and start again, or see localllm fit for what fits now.",
                )  # fmt: skip
            obtain_pages(self.address + self._obtained, size)
            self._obtained += size

    def _obtain_ahead(self, end: int) -> None:
        with suppress(DoesNotFit):  # whoever takes these bytes is told
            self._obtain(end)

    def _finish_obtaining(self) -> None:
        if self._obtaining is not None:
            self._obtaining.join()
            self._obtaining = None

    def give_back(self, part: Tensor) -> None:
        """Take back the bytes that were taken last."""
        self.used_bytes = part.data_ptr() - self.address

    def pin(self, register: Register, unregister: Callable[[int], object], most_bytes: int) -> int:
        """Page-lock the arena from its beginning on, in pieces of PINNED_AT_A_TIME and at most `most_bytes`, until the
        system refuses. Return how many bytes are page-locked."""
        self._unregister = unregister
        while (size := min(PINNED_AT_A_TIME, self.used_bytes - self.pinned_bytes)) > 0:
            if self.pinned_bytes + size > most_bytes or not register(self.address + self.pinned_bytes, size):
                break
            self.pinned_bytes += size
        return self.pinned_bytes

    def pieces(self, part: Tensor) -> Iterator[tuple[Tensor, bool]]:
        """Yield some bytes of the arena in parts that one copy may take, and whether each is page-locked: a copy does
        not cross from one page-locked piece into another."""
        start = part.data_ptr() - self.address
        end = start + part.numel()
        while start < end:
            is_pinned = start < self.pinned_bytes
            stop = min(end, (start // PINNED_AT_A_TIME + 1) * PINNED_AT_A_TIME)
            stop = min(stop, self.pinned_bytes) if is_pinned else stop
            yield self._bytes[start:stop], is_pinned
            start = stop

    def close(self) -> None:
        """End the page-locking. Idempotent; the memory is freed with the last tensor of it."""
        self._finish_obtaining()
        starts, self.pinned_bytes = range(0, self.pinned_bytes, PINNED_AT_A_TIME), 0
        for start in starts:
            if self._unregister is not None:
                self._unregister(self.address + start)

    def records(
        self, count: int, pairs: Iterable[tuple[Weight, Weight]], biases: Sequence[Tensor | None]
    ) -> Records | None:
        """Write the experts of a layer, each dropped before the next one is read, and return them. None: the native
        library has no layout for their matrices, or they differ in it; nothing is held then.

        biases: [count, N] of both matrices; None: without one.
        """
        records: Records | None = None
        for expert, pair in enumerate(pairs):
            sources = [_source_of(weight, None if bias is None else bias[expert])
                       for weight, bias in zip(pair, biases, strict=True)]  # fmt: skip
            held = [each for each in sources if each is not None]
            found = ExpertForm.of(held[0].matrix, held[1].matrix) if len(held) == len(sources) else None
            if records is None and found is not None:
                records = Records(found, self.take(count * found.num_bytes).view(count, -1))
            if records is None or found != records.form:
                if records is not None:
                    self.give_back(records.bytes)
                return None
            records.write(expert, held)
        return records


class _Source(NamedTuple):
    """A matrix to be copied to a record."""

    matrix: NativeMatrix
    rows: HalfRows | None  # its weights; None: they are where the matrix says
    owner: object


def _source_of(weight: Weight, bias: Tensor | None) -> _Source | None:
    """Return what a record is written from. None: the native library has no layout of one matrix for the weight."""
    if isinstance(weight, HalfRows):  # packed where it stays: another copy of it would take most of a load
        padded = None if bias is None else padded_outputs(bias.float())
        matrix = weight.matrix()
        matrix.bias = None if padded is None else padded.data_ptr()
        return _Source(matrix, weight, padded)
    held = matrices_of(weight, bias)
    return _Source(held[0].matrix, None, (held, weight)) if held is not None and len(held) == 1 else None


class Records:
    """The experts of a layer, one record after the other."""

    __slots__ = ("bytes", "form")
    stays_in_ram = True

    def __init__(self, form: ExpertForm, held: Tensor) -> None:
        """held: [E, bytes of a record] uint8."""
        self.form, self.bytes = form, held

    def write(self, expert: int, sources: Sequence[_Source]) -> None:
        """Write both matrices of an expert to its record."""
        address = self.bytes[expert].data_ptr()
        for source, form in zip(sources, (self.form.gate_up, self.form.down), strict=True):
            for part in parts_of(source.matrix):
                target = address + form.places[part.field][0]
                if part.field == "weights" and source.rows is not None:
                    source.rows.write(target)
                else:
                    ctypes.memmove(target, getattr(source.matrix, part.field), part.num_bytes)

    def biases(self) -> tuple[Tensor | None, Tensor | None]:
        """Return views [E, N] fp32 of the biases of both matrices."""
        views = list[Tensor | None]()
        for form in (self.form.gate_up, self.form.down):
            start, size = form.places.get("bias", (0, 0))
            views.append(self.bytes[:, start : start + size].view(torch.float32)[:, : form.outputs] if size else None)
        return views[0], views[1]


class RecordMatrices(Sequence[QuantizedWeight]):
    """The gate_up or the down of all experts of a layer, which share the records' memory."""

    __slots__ = ("form", "records")
    stays_in_ram = True

    def __init__(self, records: Records, name: str) -> None:
        """name: gate_up or down."""
        self.records = records
        self.form: MatrixForm = getattr(records.form, name)

    def __len__(self) -> int:
        return len(self.records.bytes)

    @overload
    def __getitem__(self, expert: int) -> QuantizedWeight: ...
    @overload
    def __getitem__(self, expert: slice) -> list[QuantizedWeight]: ...
    def __getitem__(self, expert: int | slice) -> QuantizedWeight | list[QuantizedWeight]:
        """Return an expert's matrix without its bias, in the class that multiplies many rows fastest."""
        assert isinstance(expert, int), "experts are read one at a time"
        form, record = self.form, self.records.bytes[expert]
        start, size = form.places["weights"]
        held, kind = record[start : start + size], form.kind
        if kind in PER_GROUP:
            order = form.places.get("input_order")
            inputs = None if order is None else record[order[0] : order[0] + order[1]].view(torch.int32)
            blocks = held.view(-(-form.outputs // OUTPUTS), form.inputs // 32, -1)
            return CpuQ4Weight(blocks, form.outputs, Kind(kind), inputs)
        if kind in (Kind.BF16, Kind.BF16_ROUNDED, Kind.F16):
            halves = held.view(torch.float16 if kind == Kind.F16 else torch.bfloat16)
            blocks = halves.view(-1, (form.inputs + 1) // 2, OUTPUTS, 2)
            return CpuHalfWeight(blocks, form.outputs, is_exact=kind == Kind.BF16)
        if kind >= KIND_STORED:
            rows = held.view(form.outputs, -1)
            return CpuStoredWeight(GGUFBlocks((rows,), Stored(kind - KIND_STORED).name, form.inputs, is_copy=True))
        bare = form.at(record.data_ptr())
        bare.bias = None
        return NativeWeight(bare, self.records)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs of each matrix."""
        return self.form.outputs, self.form.inputs

    def matrices(self) -> Any:
        """Return an array of the matrices of all experts, with their biases."""
        return (NativeMatrix * len(self))(*(self.form.at(record.data_ptr()) for record in self.records.bytes))
