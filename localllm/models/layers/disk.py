"""A layer's routed experts on disk: a bounded number of them is in RAM, each read as a whole when it is needed.

    ExpertForm      how the matrices of an expert lie in its record, the same for all experts of a layer
    write_experts   writes the file, expert after expert
    ExpertCache     the experts in RAM, for all layers of a model; reads the others
    DiskMatrices    stands for the list of a layer's matrices

An expert's record has the bytes that the native library multiplies with: gate_up and down in one piece, as RAM holds
them. The system's page cache would forget exactly what the next token needs, and a page fault reads 4 KiB.

Which experts stay: the latest used (10 to 25 % in RAM meet half to four fifths of the reads of published traces). A
prompt needs nearly all experts of a layer once, so that it would drive out everything: what it reads is the first to be
replaced, and so is what a token reads if not even one token's experts fit.
Does not know: checkpoints, which layers are on disk, how a row's experts are chosen.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, overload

from torch import Tensor

from localllm.errors import DoesNotFit, UnsupportedOption
from localllm.files.record_file import RecordFile, padded, write_records
from localllm.kernels.cpu.matrix import NativeWeight, matrices_of, padded_outputs, parts_of
from localllm.kernels.cpu.native.structures import KIND_STORED, NativeMatrix, Stored
from localllm.kernels.cpu.stored_blocks import table_address
from localllm.models.layers.linear import Weight
from localllm.units import format_bytes

ALIGNMENT = 64  # of a matrix's parts in a record, as vector loads need it
AHEAD = 4  # experts that are being read while one of a prompt's is multiplied
GROWTH = 256 * 2**20  # bytes of the cache that are obtained at a time


@dataclass(frozen=True, slots=True)
class MatrixForm:
    """Layout of a matrix within a record. Places are bytes from the start of the record."""

    kind: int
    outputs: int
    inputs: int
    places: dict[str, tuple[int, int]]  # of a field of `NativeMatrix`: where it begins, its bytes

    def at(self, address: int) -> NativeMatrix:
        """Return the matrix of the record at an address, without a bias."""
        stored = self.kind - KIND_STORED
        table = table_address(Stored(stored).name) if stored >= 0 else None
        matrix = NativeMatrix(kind=self.kind, outputs=self.outputs, inputs=self.inputs, table=table)
        self.place(matrix, address)
        return matrix

    def place(self, matrix: NativeMatrix, address: int) -> None:
        """Let a matrix read the record at another address."""
        for name, (start, _) in self.places.items():
            setattr(matrix, name, address + start)


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """Layout of a record: the two matrices of each expert of a layer."""

    gate_up: MatrixForm
    down: MatrixForm
    num_bytes: int

    @classmethod
    def of(cls, gate_up: NativeMatrix, down: NativeMatrix) -> ExpertForm:
        forms, end = list[MatrixForm](), 0
        for matrix in (gate_up, down):
            places = dict[str, tuple[int, int]]()
            for part in parts_of(matrix):
                places[part.field] = end, part.num_bytes
                end += -(-part.num_bytes // ALIGNMENT) * ALIGNMENT
            forms.append(MatrixForm(matrix.kind, matrix.outputs, matrix.inputs, places))
        return cls(forms[0], forms[1], end)

    @classmethod
    def of_json(cls, facts: Mapping[str, Any]) -> ExpertForm:
        gate_up, down = (
            MatrixForm(**{**each, "places": {name: tuple(place) for name, place in each["places"].items()}})
            for each in (facts["gate_up"], facts["down"])
        )
        return cls(gate_up, down, facts["num_bytes"])


_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14


def obtain_pages(address: int, num_bytes: int) -> None:
    """Give every page memory of its own. address: of a page of anonymous memory. The system's call writes the pages
    once; without it, they are written a second time. Lets other Python threads run."""
    if sys.platform == "linux":
        place, size = ctypes.c_void_p(address), ctypes.c_size_t(num_bytes)
        if ctypes.CDLL(None).madvise(place, size, _POPULATE_WRITE) == 0:
            return
    ctypes.memset(address, 0, num_bytes)


Pairs = Callable[[int], Iterator[tuple[Weight, Weight]]]
"""Returns gate_up and down of one expert of a layer after another, in RAM; each is read when it is asked for."""


def write_experts(
    path: Path, digest: str, layers: Sequence[int], count: int, pairs: Pairs, tensors: Callable[[], Iterable[str]]
) -> None:
    """Write the file of the experts of these layers, `count` in each, while no more than two of them are in RAM.

    tensors: returns the names of the checkpoint's tensors that were read for them. Raises `UnsupportedOption` for
    matrices that the native library cannot multiply with, `DiskFull`, `NotWritable`.
    """
    forms = {layer: ExpertForm.of(*(each[0] for each in _held(*next(pairs(layer))))) for layer in layers}
    facts: dict[str, Any] = {"forms": {str(layer): asdict(form) for layer, form in forms.items()}, "count": count}

    def records() -> Iterator[list[Any]]:
        for layer in layers:
            for pair in pairs(layer):
                held = _held(*pair)
                if (found := ExpertForm.of(held[0][0], held[1][0])) != forms[layer]:
                    raise _unsupported(f"The experts of layer {layer} are stored in different ways: {found}.")
                yield [
                    piece
                    for matrix, _ in held
                    for part in parts_of(matrix)
                    for piece in (
                        ctypes.string_at(getattr(matrix, part.field), part.num_bytes),
                        bytes(-part.num_bytes % ALIGNMENT),
                    )
                ]
        facts["tensors"] = sorted(tensors())

    write_records(path, digest, facts, [forms[layer].num_bytes for layer in layers for _ in range(count)], records())


def _held(*weights: Weight) -> list[tuple[NativeMatrix, Any]]:
    """Return the matrix of each weight, and the owner of its memory."""
    found = []
    for weight in weights:
        matrices = matrices_of(weight)
        if matrices is None or len(matrices) > 1:
            name = f"{weight.dtype}" if isinstance(weight, Tensor) else type(weight).__name__
            raise _unsupported(f"An expert has no layout that this processor multiplies ({name}).")
        found.append((matrices[0].matrix, (matrices[0], weight)))
    return found


def _unsupported(why: str) -> UnsupportedOption:
    hint = "--weights-on ram, or another quantisation of the same model."
    return UnsupportedOption("--weights-on disk is not supported for this model.", why, hint, param="weights_on")


class ExpertCache:
    """The experts of a model that are in RAM, at most as many as the cache has slots for. Not thread-safe."""

    stays_in_ram = True

    def __init__(self, file: RecordFile, cache_bytes: int, top_k: int, free_bytes: Callable[[], int]) -> None:
        """free_bytes: returns the RAM that may still be taken. Raises `DoesNotFit` if the cache has no place for the
        experts of one token in one layer, or if another program takes the memory while it is obtained."""
        self.file, self.count = file, int(file.facts["count"])
        self.forms = {int(layer): ExpertForm.of_json(form) for layer, form in file.facts["forms"].items()}
        self._first = {layer: place * self.count for place, layer in enumerate(self.forms)}
        self.slot_bytes = max(padded(form.num_bytes) for form in self.forms.values())
        self.num_slots = min(cache_bytes // self.slot_bytes, len(self.forms) * self.count)
        self.hits, self.reads, self.read_bytes = 0, 0, 0
        if self.num_slots < top_k:
            raise DoesNotFit(
                "The RAM for experts that are read from disk is too small.",
                f"A token needs {top_k} experts of a layer at once, {format_bytes(top_k * self.slot_bytes)}; "
                f"{format_bytes(cache_bytes)} are set or free.",
                f"--expert-cache-gib {top_k * self.slot_bytes / 2**30:.2g}, or close other programs.",
                param="expert_cache_gib",
            )  # fmt: skip
        self._keeps_tokens = self.num_slots >= top_k * len(self.forms)
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
        self._memory = mmap.mmap(-1, self.ram_bytes, **private)  # shared memory would have no huge pages
        with suppress(OSError, AttributeError, ValueError):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._memory)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._obtain(free_bytes)
        self._free = list(range(self.num_slots))[::-1]
        self._slots: OrderedDict[tuple[int, int], int] = OrderedDict()  # the first is the next to be replaced
        self._pending: dict[tuple[int, int], list[Future[None]]] = {}  # being read
        self._expected: deque[int] = deque()  # experts of the layer of the prompt that is computed

    @property
    def ram_bytes(self) -> int:
        return self.num_slots * self.slot_bytes

    def require(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Return where the records of these experts are in RAM, distinct ones and no more than there are slots. They
        stay until the next call. Raises `CorruptModel` for a record that could not be read."""
        self.begin(layer, experts)
        keys = [(layer, expert) for expert in experts]
        for key in keys:
            self._finish(key)
        return [self._address_of(self._slots[key]) for key in keys]

    def begin(self, layer: int, experts: Sequence[int]) -> None:
        """Begin to read the experts of the next call of `require`."""
        keys = [(layer, expert) for expert in experts]
        for key in keys:
            self._begin(key, keys, keeps=self._keeps_tokens)

    def expect(self, experts: Sequence[int]) -> None:
        """Announce the experts of the next calls of `next_of`, in their order."""
        self._expected = deque(experts)

    def next_of(self, layer: int, expert: int) -> int:
        """Return where an expert's record is in RAM until the next call for another expert, and begin to read those
        that are expected behind it. Raises `CorruptModel`."""
        key = layer, expert
        while self._expected and self._expected[0] != expert:
            self._expected.popleft()
        self._begin(key, [key], keeps=False)
        ahead = [(layer, each) for each in islice(self._expected, 1, min(AHEAD, self.num_slots - 1) + 1)]
        for each in ahead:
            self._begin(each, [key, *ahead], keeps=False)
        self._finish(key)
        return self._address_of(self._slots[key])

    def close(self) -> None:
        """End reading. Idempotent."""
        self.file.close()

    def _begin(self, key: tuple[int, int], in_use: Sequence[tuple[int, int]], *, keeps: bool) -> None:
        """Begin to read an expert unless it is in RAM. keeps: replace it last, not first."""
        if key in self._slots:
            self.hits += key not in self._pending
            if keeps:
                self._slots.move_to_end(key)
            return
        slot = self._free.pop() if self._free else self._evict(in_use)
        self._slots[key] = slot
        self._slots.move_to_end(key, last=keeps)
        start = slot * self.slot_bytes
        layer, expert = key
        self._pending[key] = self.file.start(self._first[layer] + expert, self._view[start : start + self.slot_bytes])
        self.reads += 1
        self.read_bytes += self.forms[layer].num_bytes

    def _evict(self, in_use: Sequence[tuple[int, int]]) -> int:
        """Return the slot of the first expert that is not in use, after whatever is still being read into it."""
        victim = next(key for key in self._slots if key not in in_use)
        wait(self._pending.pop(victim, []))
        return self._slots.pop(victim)

    def _finish(self, key: tuple[int, int]) -> None:
        """Wait until an expert is in RAM. One that could not be read has left its slot when the error is raised."""
        parts = self._pending.pop(key, [])
        wait(parts)
        for part in parts:
            if (error := part.exception()) is not None:
                self._free.append(self._slots.pop(key))
                raise error

    def _address_of(self, slot: int) -> int:
        return self._address + slot * self.slot_bytes

    def _obtain(self, free_bytes: Callable[[], int]) -> None:
        """Give every page memory of its own, a piece at a time while there is enough: what was free when the plan was
        made may have been taken since."""
        for start in range(0, self.ram_bytes, GROWTH):
            size = min(GROWTH, self.ram_bytes - start)
            if (free := free_bytes()) < size:
                raise DoesNotFit(
                    "The RAM for experts that are read from disk has been taken by other programs.",
                    f"{format_bytes(self.ram_bytes)} were free when the model was planned; after {format_bytes(start)} "
                    f"of them {format_bytes(max(0, free))} are left besides the reserve.",
                    "Close other programs and start again, or set a smaller --expert-cache-gib.",
                    param="expert_cache_gib",
                )  # fmt: skip
            obtain_pages(self._address + start, size)


class DiskMatrices(Sequence[NativeWeight]):
    """The gate_up or the down of all experts of a layer. An item is valid until one of another expert is asked for."""

    __slots__ = ("cache", "form", "layer")

    def __init__(self, cache: ExpertCache, layer: int, name: str) -> None:
        """name: gate_up or down."""
        self.cache, self.layer = cache, layer
        self.form: MatrixForm = getattr(cache.forms[layer], name)

    def __len__(self) -> int:
        return self.cache.count

    @overload
    def __getitem__(self, expert: int) -> NativeWeight: ...
    @overload
    def __getitem__(self, expert: slice) -> list[NativeWeight]: ...
    def __getitem__(self, expert: int | slice) -> NativeWeight | list[NativeWeight]:
        assert isinstance(expert, int), "experts are read one at a time"
        return NativeWeight(self.form.at(self.cache.next_of(self.layer, expert)), self.cache)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs of each matrix."""
        return self.form.outputs, self.form.inputs

    def prepare(self, ids: Tensor) -> None:
        """Announce the experts of the rows that are multiplied next, expert after expert."""
        self.cache.expect([each for each in ids.unique().tolist() if each >= 0])

    def begin(self, ids: Sequence[Sequence[int]]) -> None:
        """Begin to read what the first of some rows choose, as many of them as there are slots for."""
        _, _, experts = next(row_groups(ids, self.cache.num_slots))
        self.cache.begin(self.layer, experts)

    def matrices(self, biases: Tensor | None) -> tuple[Any, list[object]]:
        """Return an array of the matrices of all experts, whose places are still to be set, and what has to be kept."""
        bare = [self.form.at(0) for _ in range(len(self))]
        if biases is None:
            return (NativeMatrix * len(self))(*bare), []
        wide = padded_outputs(biases.float())
        for matrix, bias in zip(bare, wide, strict=True):
            matrix.bias = bias.data_ptr()
        return (NativeMatrix * len(self))(*bare), [wide]


def row_groups(ids: Sequence[Sequence[int]], most: int) -> Iterator[tuple[int, int, list[int]]]:
    """Yield neighbouring rows that choose at most `most` distinct experts, more than one row does: the first, the one
    after the last, and their experts. Rows of padding, whose ids are -1, have none."""
    first, chosen = 0, dict[int, None]()
    for row, each in enumerate(ids):
        own = dict.fromkeys(expert for expert in each if expert >= 0)
        if len(more := chosen | own) > most:
            yield first, row, list(chosen)
            first, more = row, own
        chosen = more
    yield first, len(ids), list(chosen)
