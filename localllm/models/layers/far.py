"""A layer's routed experts in RAM, computed by the CPU, while everything else of the model is on a GPU.

    FarExperts    stands for `Experts` in a mixture: takes rows of the device, returns rows of the device
    Crossing      the way of those rows to RAM and back; one for all layers of a model
    FarStream     the other way: a long prompt's experts are copied to the device and computed there
    RamLink       the copies of both ways

Where RAM does not hold them either, they are on disk (disk.py), and the model may be on the CPU as well. The native
step of such a model begins to read the chosen experts behind the router, computes a shared expert meanwhile, and lets
the host multiply.
The host waits at each such layer until the device has done everything before it. A CUDA graph cannot wait for the
host, so a recorded step is cut into segments at the crossings (runner/graphs.py), and the host computes between them.

The bits of a row's result depend on the row alone for up to FEW_ROWS rows in a step: the native library reads an expert
once for all rows that chose it, multiplies each as if it were alone, and adds a row's experts in the order of its
choices. More rows are multiplied expert by expert.
Does not know: which layers these are (models/fit/far.py), graphs.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from localllm.kernels.cpu.native.library import Library, native
from localllm.kernels.cpu.native.structures import (
    FEW_ROWS,
    MAX_ROWS,
    CacheType,
    JobOutcome,
    NativeExperts,
    NativeMatrix,
    NativeRow,
    Op,
)
from localllm.kernels.moe.experts import ArrivingExperts
from localllm.kernels.moe.from_lanes import bias_of, can_unpack, from_lanes
from localllm.kernels.moe.weights import ExpertWeights
from localllm.models.layers.arena import Arena, Records
from localllm.models.layers.disk import DiskMatrices, ExpertCache, row_groups
from localllm.models.layers.moe import Experts, choices_of, matrix_shape
from localllm.models.layers.native_writer import Buffer, NotSupportedNatively, Writer, sizes
from localllm.models.spec.mixture import STAGING_PLACES as PLACES
from localllm.models.spec.mixture import staged_bytes
from localllm.models.spec.model_spec import ModelSpec

Compute = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Maps x [n, H], ids and weights [n, top_k], all in RAM, to [n, H] fp32, which is written to the last argument."""


class _Rows(NamedTuple):
    """The part of the buffers in RAM that a step uses."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    y: Tensor


TYPES = {torch.float32: CacheType.F32, torch.bfloat16: CacheType.BF16, torch.float16: CacheType.F16}
TOLERANCE = 0.05  # of the largest value: 16-bit products on the device, activations of 8 bits on the CPU
TIMED_ROWS = (8, 64, 256, 1024, 4096)  # until the CPU takes as long as the copy
BOUNCE_BYTES = 64 * 2**20  # of each of PLACES page-locked buffers, for an arena that the system does not page-lock


class RamLink:
    """Copies between a device and RAM, in the order of the device's work; and copies ahead of it, in an order of their
    own, into one of PLACES buffers each."""

    __slots__ = ("_bounces", "_copied", "_device", "_read", "_stream", "_turn")
    stays_in_ram = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._copied: list[Any] = []
        self._read: list[Any] = []
        self._bounces: list[tuple[Tensor, Any]] = []
        self._turn = 0

    def buffer(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Return memory that the device copies to and from, page-locked beside a GPU."""
        return torch.empty((rows, width), dtype=dtype, device="cpu", pin_memory=self._device.type == "cuda")

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy behind the device's work. RAM holds the values only after `wait`."""
        target.copy_(source, non_blocking=True)

    def wait(self) -> None:
        """Wait until the device has done all its work, copies included."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def open_places(self, num_bytes: int) -> list[Tensor]:
        """Return PLACES buffers of the device, for copies ahead of its work."""
        if self._device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
            self._copied, self._read = ([torch.cuda.Event() for _ in range(PLACES)] for _ in range(2))
        return [torch.empty(num_bytes, dtype=torch.uint8, device=self._device) for _ in range(PLACES)]

    def copy_ahead(self, place: int, target: Tensor, pieces: Iterable[tuple[Tensor, bool]]) -> None:
        """Begin to copy pieces of RAM to a buffer, once the device has read what was in it before. pieces: each with
        whether it is page-locked."""
        if self._stream is None:
            start = 0
            for piece, _ in pieces:
                target[start : (start := start + len(piece))].copy_(piece)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._read[place])
            start = 0
            for piece, is_pinned in pieces:
                for part in (piece,) if is_pinned else piece.split(BOUNCE_BYTES):
                    own = target[start : start + len(part)]
                    start += len(part)
                    own.copy_(part if is_pinned else self._bounced(part), non_blocking=True)
                    if not is_pinned:
                        self._bounces[self._turn][1].record(self._stream)
            self._copied[place].record(self._stream)

    def _bounced(self, part: Tensor) -> Tensor:
        """Return a page-locked copy of some bytes, made by the host. Waits for the copy that read the buffer before."""
        if not self._bounces:
            whole = torch.empty((PLACES, BOUNCE_BYTES), dtype=torch.uint8, device="cpu", pin_memory=True)
            self._bounces = [(each, torch.cuda.Event()) for each in whole]
        self._turn = (self._turn + 1) % PLACES
        buffer, read = self._bounces[self._turn]
        read.synchronize()
        return buffer[: len(part)].copy_(part)

    def finish_copies(self) -> None:
        """Wait until all copies ahead are done."""
        if self._stream is not None:
            self._stream.synchronize()

    def await_copy(self, place: int) -> None:
        """Let the device's further work wait until the copy to a buffer is done."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied[place])

    def release(self, place: int) -> None:
        """Say that the device's work so far is all that reads what is in a buffer."""
        if self._stream is not None:
            self._read[place].record(torch.cuda.current_stream(self._device))


class Crossing:
    """The buffers in RAM between a model's layers on a device and its experts in RAM. Not thread-safe: they hold one
    step."""

    __slots__ = ("_buffers", "_max_rows", "_rows", "arena", "cache", "link", "read_bytes", "seconds", "split", "stream")
    stays_in_ram = True

    def __init__(self, link: RamLink, cache: ExpertCache | None = None, arena: Arena | None = None) -> None:
        """cache: of the experts that are on disk. arena: of those in RAM; None: they are in memory of their own."""
        self.link, self.cache, self.arena = link, cache, arena
        self.split: Callable[[Callable[[], None]], None] | None = None
        """Takes the host's work while a step is recorded, in place of doing it."""
        self.stream: FarStream | None = None  # of long prompts; None: the host computes them too
        self.seconds = 0.0  # that the host has computed
        self.read_bytes = 0  # of experts in RAM, that it has read for that
        self._max_rows = 0
        self._buffers: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self._rows: dict[tuple[torch.Size, int, torch.dtype], _Rows] = {}

    def reserve(self, max_rows: int) -> None:
        """Make room for steps of `max_rows` rows. Not while recorded steps are in use: they keep the old buffers."""
        if max_rows > self._max_rows:
            self._max_rows, self._buffers, self._rows = max_rows, {}, {}

    def begin(self, tokens: int) -> None:
        """Begin a step of `tokens` tokens: the experts of a long prompt are on their way before their layer is
        reached."""
        if self.stream is not None and self.split is None and self.stream.takes(tokens):
            self.stream.begin()

    def __call__(self, compute: Compute, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return what `compute` makes of x [T, H], ids and weights [T, top_k] of the device, as [T, H] in x's dtype."""
        rows = self._rows.get((x.shape, ids.shape[1], x.dtype))
        if rows is None:
            rows = self._rows_for(x, ids, weights)
        copy, (x_in_ram, ids_in_ram, weights_in_ram, y) = self.link.copy, rows
        copy(x_in_ram, x)
        copy(ids_in_ram, ids)
        copy(weights_in_ram, weights)
        if self.split is None:
            self._work(compute, rows)
        else:
            self.split(partial(self._work, compute, rows))
        out = torch.empty_like(x)
        copy(out, y)
        return out

    def _work(self, compute: Compute, rows: _Rows) -> None:
        self.link.wait()
        self.timed(compute, *rows)

    def timed(self, compute: Compute, x: Tensor, ids: Tensor, weights: Tensor, y: Tensor) -> None:
        """Compute rows that are in RAM, and count the time."""
        begun = time.perf_counter()
        compute(x, ids, weights, y)
        self.seconds += time.perf_counter() - begun

    def _rows_for(self, x: Tensor, ids: Tensor, weights: Tensor) -> _Rows:
        """Return the rows of the buffers for a step of this size."""
        assert self.split is None or len(x) <= self._max_rows, "a recorded step is larger than its buffers"
        self.reserve(len(x))
        buffers = self._buffers_for(x, ids, weights)
        found = self._rows[x.shape, ids.shape[1], x.dtype] = _Rows(*(buffer[: len(x)] for buffer in buffers))
        return found

    def _buffers_for(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        """Return buffers for x, ids, weights and the result. Layers of one width share them: each result has been
        copied before the next layer's rows arrive."""
        key = x.shape[1], ids.shape[1]
        if key not in self._buffers:
            made = [self.link.buffer(self._max_rows, each.shape[1], each.dtype) for each in (x, ids, weights)]
            self._buffers[key] = *made, self.link.buffer(self._max_rows, x.shape[1], torch.float32)
        return self._buffers[key]


class FarExperts:
    """The matrices of all experts of a layer, in RAM or on disk."""

    __slots__ = ("_crossing", "_expert_bytes", "_few", "_has_few", "_spec", "experts", "records")
    stays_in_ram = True

    def __init__(self, experts: Experts, crossing: Crossing, spec: ModelSpec, records: Records | None = None) -> None:
        """experts: on the CPU. records: that they are in; None: they are elsewhere."""
        self.experts, self._crossing, self._spec, self.records = experts, crossing, spec, records
        self._few: FewRows | None = None
        self._has_few = True  # False once it is known that the native library cannot multiply with these weights
        in_ram = [each for each in (experts.gate_up, experts.down) if not isinstance(each, DiskMatrices)]
        self._expert_bytes = sum(each[0].nbytes for each in in_ram) if records is None else records.form.num_bytes

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Run each token's experts: x [T, H], ids and weights [T, top_k] on the device -> [T, H] on the device."""
        stream = self._crossing.stream
        if stream is not None and stream.takes(len(x)) and stream.has(self):
            return stream(self, x, ids, weights)
        return self._crossing(self._write_counted, x, ids, weights)

    def _write_counted(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> None:
        """Do `_write`, and count the bytes that it reads: a few rows that choose the same expert read it once."""
        self._write(x, ids, weights, out)
        self._crossing.read_bytes += len({*ids.flatten().tolist()} - {-1}) * self._expert_bytes

    def compute(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Do the same in RAM: -> [T, H] fp32."""
        out = torch.empty(x.shape, dtype=torch.float32, device="cpu")
        self._write(x, ids, weights, out)
        return out

    def described(self, writer: Writer, top_k: int, **routing: Any) -> NativeExperts:
        """Return the experts for the native library, which stay valid as long as the writer's memory. routing: further
        fields. Raises `NotSupportedNatively`."""
        gate_up, down = self.experts.gate_up, self.experts.down
        if not isinstance(gate_up, DiskMatrices) or not isinstance(down, DiskMatrices):
            return self.experts.described(writer, top_k, **routing)
        if self._few_rows(top_k) is None:
            raise NotSupportedNatively("experts on disk that the library cannot multiply with")
        writer.kinds |= {gate_up.form.kind, down.form.kind}
        return choices_of(writer, len(gate_up), top_k, **routing)

    def write(self, writer: Writer, chosen: int, top_k: int, source: Buffer, norm: Any) -> None:
        """Write the first matrices of the chosen experts. On disk: keep the rows that the experts read, and begin to
        read the experts, while the step goes on with parts beside them. chosen: address of `described`."""
        gate_up = self.experts.gate_up
        if not isinstance(gate_up, DiskMatrices):
            self.experts.write(writer, chosen, top_k, source, norm)
            return
        rows, width = writer.others["expert_rows"], matrix_shape(gate_up)[1]
        for buffer in (source, rows):
            buffer.widen(width)
        writer.copy(source, 0, rows, 0, width, norm)
        ids, _, _ = _choices(chosen)
        writer.call(lambda count: gate_up.begin(ids[:count].tolist()))

    def write_out(self, writer: Writer, chosen: int, target: Buffer, factor: float = 1.0) -> None:
        """Write the last matrices: added to the stream, or written to another buffer. On disk: let the host multiply
        with both."""
        if not isinstance(self.experts.gate_up, DiskMatrices):
            self.experts.write_out(writer, chosen, target, factor)
            return
        rows, sums = writer.others["expert_rows"], writer.others["expert_sums"]
        width, (ids, weights, scales_inputs) = matrix_shape(self.experts.down)[0], _choices(chosen)
        for buffer in (sums, target):
            buffer.widen(width)

        def compute(count: int) -> None:
            x, out = rows.values[:count, :width], sums.values[:count, :width]
            factors = weights[:count]
            if scales_inputs:
                x, factors = x * factors, torch.ones_like(factors)
            self._crossing.timed(self._write, x, ids[:count], factors, out)

        writer.call(compute)
        writer.plan(Op.ADD, sums, target, matrix=sizes(width), adds=target is writer.stream, factor=factor)

    def _write(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> None:
        """Do the same in RAM, to out [T, H] fp32. Rows of padding, whose ids are -1, are zeros and read nothing.

        Raises IndexError for ids of experts that there are not: the native library would read whatever lies there."""
        if self._write_few(x, ids, weights, out):
            return
        self._require_experts(int(ids.max()))
        with torch.inference_mode():
            real = (ids >= 0).any(1).nonzero()[:, 0]
            out.zero_()
            if len(real):
                out[real] = self._products(x[real].float(), ids[real], weights[real])

    def _products(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.empty_like(x)
        if self._write_few(x, ids, weights, out):
            return out
        if isinstance(self.experts.gate_up, DiskMatrices):
            self.experts.gate_up.prepare(ids)
        return self.experts(x, ids, weights)

    def _write_few(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> bool:
        """Write the results of a few rows. False: they are too many, or the native library cannot read them."""
        few, gate_up = self._few_rows(ids.shape[1]), self.experts.gate_up
        if few is None or not isinstance(gate_up, DiskMatrices):
            return few is not None and few.write(x, ids, weights, out)
        if len(x) > FEW_ROWS:
            return False
        rows = ids.tolist()
        self._require_experts(max(map(max, rows)))
        for first, end, experts in row_groups(rows, gate_up.cache.num_slots):
            few.place(experts, gate_up.cache.require(gate_up.layer, experts))
            if not few.write(x[first:end], ids[first:end], weights[first:end], out[first:end]):
                return False
        return True

    def _require_experts(self, highest: int) -> None:
        if highest >= (count := len(self.experts.gate_up)):
            raise IndexError(f"a token was routed to expert {highest} of {count}")

    def _few_rows(self, top_k: int) -> FewRows | None:
        """Return the native operations; None: the library cannot multiply with these weights."""
        if self._few is None and self._has_few:
            library = native()
            try:
                self._few = None if library is None else FewRows(self.experts, top_k, self._spec, library)
            except NotSupportedNatively:
                pass
            self._has_few = self._few is not None
        return self._few


def _choices(chosen: int) -> tuple[Tensor, Tensor, bool]:
    """Return the ids and the weights [MAX_ROWS, top_k] that a step's router writes, and whether the weights multiply
    what the experts read. chosen: address of its experts."""
    described = NativeExperts.from_address(chosen)
    count = MAX_ROWS * described.top_k
    ids, weights = (
        torch.frombuffer((kind * count).from_address(address), dtype=dtype).view(MAX_ROWS, -1)
        for kind, address, dtype in (
            (ctypes.c_int32, described.ids, torch.int32), (ctypes.c_float, described.weights, torch.float32)
        )
    )  # fmt: skip
    return ids, weights, bool(described.scales_inputs)


class FarMLP:
    """The feed-forward part of a dense model's layer in RAM: one expert that every token chooses."""

    __slots__ = ("part",)

    def __init__(self, part: FarExperts) -> None:
        self.part = part

    def __call__(self, x: Tensor, slot_mapping: Tensor | None = None) -> Tensor:
        """Map x [T, H] to [T, H]. With slot_mapping [T], padding rows (slot < 0) are zeros."""
        ids = torch.zeros((len(x), 1), dtype=torch.int32, device=x.device)
        if slot_mapping is not None:
            ids = ids.masked_fill_(slot_mapping[:, None] < 0, -1)
        return self.part(x, ids, torch.ones((len(x), 1), device=x.device))

    def write(self, writer: Writer, norm: Any) -> None:
        raise NotSupportedNatively("feed-forward parts that are elsewhere")

    def write_out(self, writer: Writer, target: Buffer, factor: float = 1.0, *, adds: bool = False) -> None:
        raise AssertionError("`write` refuses")


class _Group(NamedTuple):
    """Neighbouring experts of a layer that are copied together."""

    part: FarExperts
    first: int
    source: Tensor  # [n, bytes of a record] uint8 of the arena


class FarStream:
    """The experts of the layers in RAM on their way to the device, layer after layer, some of them at a time.

    A group is copied while the one before it is computed, without waiting for what the router chooses: a long prompt
    chooses nearly all experts. The device unpacks the bytes that the CPU multiplies with (kernels/moe/from_lanes.py).
    """

    stays_in_ram = True

    def __init__(
        self, parts: Sequence[FarExperts], crossing: Crossing, dtype: torch.dtype = torch.float32, top_k: int = 1
    ) -> None:
        """parts: whose records a device can unpack (`streamable`), in the order of their layers. dtype: of the device's
        rows. top_k: experts of a row."""
        assert crossing.arena is not None
        self.dtype, self._top_k = dtype, top_k
        self._arena, self._link, self.bytes, self.from_tokens = crossing.arena, crossing.link, 0, 0
        self._groups, self._starts = list[_Group](), dict[int, int]()
        largest = 0
        for part in parts:
            assert part.records is not None
            self._starts[id(part)] = len(self._groups)
            records, record = part.records.bytes, part.records.bytes.shape[1]
            size = staged_bytes(record, len(records)) // record
            largest = max(largest, size * record)
            self._groups += [_Group(part, i * size, group) for i, group in enumerate(records.split(size))]
        self._places = self._link.open_places(largest)
        self._at = self._next = 0  # the group that is read next, and the one that is copied next
        self.copies = True  # False: kernels run on whatever bytes there are, to be compiled

    @property
    def held_bytes(self) -> int:
        """Bytes of the device."""
        return sum(place.nbytes for place in self._places)

    @property
    def step_bytes(self) -> int:
        """Bytes that a step copies."""
        return sum(group.source.nbytes for group in self._groups)

    @property
    def form(self) -> str:
        """The form of the first layer's experts, in words that a record of measurements can be found by."""
        records = self._groups[0].part.records
        assert records is not None
        form = records.form
        return f"{len(records.bytes)} x {form.gate_up.kind} {form.down.kind} {form.num_bytes} top {self._top_k}"

    def takes(self, tokens: int) -> bool:
        """Return whether the device computes the experts of a step of `tokens` tokens. from_tokens 0: of none."""
        return 0 < self.from_tokens <= tokens

    def has(self, part: FarExperts) -> bool:
        return id(part) in self._starts

    def begin(self, group: int = 0) -> None:
        """Begin to copy from a group on, whatever has been copied before."""
        self._at = self._next = group
        self._fill()

    def __call__(self, part: FarExperts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Run each token's experts on the device: x [T, H], ids and weights [T, top_k] -> [T, H]."""
        assert part.records is not None
        start = self._starts[id(part)]
        if self._at != start or self._next == start:  # without `begin`: the check of a layer
            self.begin(start)
        form, experts = part.records.form, part.experts
        arriving = ArrivingExperts(x, ids, weights, len(part.records.bytes), experts.activation)
        while self._at < len(self._groups) and (group := self._groups[self._at]).part is part:
            place = self._at % PLACES
            self._link.await_copy(place)
            held = self._places[place][: group.source.numel()].view(group.source.shape)
            matrices, biases = list[ExpertWeights](), list[Tensor | None]()
            for matrix in (form.gate_up, form.down):
                shape = matrix.outputs, matrix.inputs
                matrices.append(from_lanes(held, matrix.kind, shape, matrix.places, x.dtype))
                biases.append(bias_of(held, matrix.outputs, matrix.places, x.dtype))
            self._link.release(place)
            self._at += 1
            self._fill()
            arriving.add(group.first, matrices[0], matrices[1], *biases)
        return arriving.sum()

    @contextmanager
    def rehearsed(self) -> Iterator[None]:
        """Run kernels on whatever bytes there are in the block, to compile them: copies are left out."""
        self.copies = False
        try:
            yield
        finally:
            self.copies = True

    def check(self, rows: int = 64) -> str:
        """Compare the device's products with the CPU's for one layer of each form. Return what differs; empty:
        nothing."""
        forms = dict[str, FarExperts]()
        for group in self._groups:
            assert group.part.records is not None
            forms.setdefault(repr(group.part.records.form), group.part)
        for part in forms.values():
            x, ids, weights = self._example(part, rows)
            wanted = part.compute(x, ids, weights)
            got = self(part, *(each.to(self._places[0].device) for each in (x.to(self.dtype), ids, weights)))
            error = float((got.float().cpu() - wanted).abs().max() / wanted.abs().max())
            if not error <= TOLERANCE:
                return (
                    f"the results differ by {error:.3g} of the largest value, where {TOLERANCE:g} is expected at most"
                )
        return ""

    def timed(self) -> tuple[dict[int, float], float]:
        """Return the seconds of the CPU for the experts of a layer by rows, and the seconds of their copy: of each the
        better of two."""
        part = self._groups[0].part
        cpu_s, copy_s = dict[int, float](), math.inf
        for _ in range(2):
            begun = time.perf_counter()
            for place, group in enumerate(each for each in self._groups if each.part is part):
                source = group.source.view(-1)
                target = self._places[place % PLACES][: len(source)]
                self._link.copy_ahead(place % PLACES, target, self._arena.pieces(source))
            self._link.finish_copies()
            copy_s = min(copy_s, time.perf_counter() - begun)
        for rows in TIMED_ROWS:
            given = self._example(part, rows)
            times = list[float]()
            for _ in range(2):
                begun = time.perf_counter()
                part.compute(*given)
                times.append(time.perf_counter() - begun)
            cpu_s[rows] = min(times)
            if cpu_s[rows] >= copy_s and len(cpu_s) > 1:  # more rows tell nothing more
                break
        return cpu_s, copy_s

    def _example(self, part: FarExperts, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return random rows in RAM and experts for them."""
        assert part.records is not None
        count, top_k = len(part.records.bytes), min(self._top_k, len(part.records.bytes))
        random = torch.Generator().manual_seed(rows)
        x = torch.randn((rows, part.records.form.gate_up.inputs), generator=random)
        ids = torch.rand((rows, count), generator=random).argsort(dim=1)[:, :top_k].int()
        return x, ids, torch.full((rows, top_k), 1 / top_k)

    def _fill(self) -> None:
        """Begin to copy the next groups to the buffers that are free."""
        while self._next < min(len(self._groups), self._at + PLACES):
            if self.copies:
                group, place = self._groups[self._next], self._next % PLACES
                source = group.source.view(-1)
                self._link.copy_ahead(place, self._places[place][: len(source)], self._arena.pieces(source))
                self.bytes += len(source)
            self._next += 1


def streamable(model_parts: Iterable[FarExperts]) -> list[FarExperts]:
    """Return the parts whose experts a device can unpack, in the order of their layers."""
    found = [
        (part.records.bytes.data_ptr(), part)
        for part in model_parts
        if part.records is not None
        and all(can_unpack(form.kind, form.places) for form in (part.records.form.gate_up, part.records.form.down))
    ]
    return [part for _, part in sorted(found, key=lambda each: each[0])]


class FewRows:
    """The products of up to FEW_ROWS rows with their experts, as two operations of the native library."""

    __slots__ = (
        "_address", "_described", "_experts", "_job", "_kept", "_operations", "_rows", "_run",
    )  # fmt: skip
    stays_in_ram = True

    def __init__(self, experts: Experts, top_k: int, spec: ModelSpec, library: Library) -> None:
        """Raises `NotSupportedNatively`."""
        writer = Writer(spec, (), lambda kind: None)
        self._experts, self._described = experts, experts.described(writer, top_k)
        chosen = ctypes.addressof(self._described)
        experts.write(writer, chosen, top_k, writer.stream, None)
        experts.write_out(writer, chosen, writer.part)
        self._operations, self._kept = writer.lowered(), writer.kept
        self._rows = (NativeRow * MAX_ROWS)()
        self._job = library.far_job(self._operations, chosen, ctypes.addressof(self._rows))
        self._job.hidden, self._job.most_rows = matrix_shape(experts.gate_up)[1], FEW_ROWS
        self._address, self._run = ctypes.addressof(self._job), library.run_far

    def write(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> bool:
        """Write the result of any number of rows, some of them padding, to out [n, H] fp32. False: they are too many
        without padding, or of types that the library does not read.

        Raises IndexError for an id of an expert that there is not, MemoryError."""
        job, kind = self._job, TYPES.get(x.dtype)
        if kind is None or ids.dtype != torch.int32 or weights.dtype != torch.float32:
            return False
        if not (x.is_contiguous() and ids.is_contiguous() and weights.is_contiguous() and out.is_contiguous()):
            return False
        job.type, job.count = kind, len(x)
        job.x, job.ids, job.weights, job.y = x.data_ptr(), ids.data_ptr(), weights.data_ptr(), out.data_ptr()
        self._run(self._address)
        outcome = job.outcome
        if outcome == JobOutcome.NO_SUCH_EXPERT:
            raise IndexError(f"a token was routed to expert {int(ids.max())} of {self._described.count}")
        if outcome == JobOutcome.NO_MEMORY:
            raise MemoryError(f"No memory for the buffers of experts for {len(x)} rows in the native library.")
        return bool(outcome == JobOutcome.DONE)

    def place(self, experts: Sequence[int], addresses: Sequence[int]) -> None:
        """Read these experts of a layer on disk from where their records are in RAM."""
        for weights, array in (
            (self._experts.gate_up, self._described.gate_up), (self._experts.down, self._described.down)
        ):  # fmt: skip
            assert isinstance(weights, DiskMatrices)
            matrices = (NativeMatrix * len(weights)).from_address(array)
            for expert, address in zip(experts, addresses, strict=True):
                weights.form.place(matrices[expert], address)
