"""A layer's routed experts in RAM, computed by the CPU, while everything else of the model is on a GPU.

    FarExperts    stands for `Experts` in a mixture: takes rows of the device, returns rows of the device
    Crossing      the way of those rows to RAM and back; one for all layers of a model
    RamLink       the copies of that way

Where RAM does not hold them either, they are on disk (disk.py), and the model may be on the CPU as well.
The host waits at each such layer until the device has done everything before it. A CUDA graph cannot wait for the
host, so a recorded step is cut into segments at the crossings (runner/graphs.py), and the host computes between them.

The bits of a row's result depend on the row alone for up to MAX_ROWS rows in a step: the native library reads an expert
once for all rows that chose it, multiplies each as if it were alone, and adds a row's experts in the order of its
choices. More rows are multiplied expert by expert.
Does not know: which layers these are (models/fit/far.py), graphs.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from localllm.kernels.cpu.native.library import Library, native
from localllm.kernels.cpu.native.structures import MAX_ROWS, NativeMatrix, NativeRow
from localllm.models.layers.disk import DiskMatrices, ExpertCache
from localllm.models.layers.moe import Experts, matrix_shape
from localllm.models.layers.native_writer import NotSupportedNatively, Writer
from localllm.models.spec.model_spec import ModelSpec

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps x [n, H], ids and weights [n, top_k], all in RAM, to [n, H] fp32."""


class RamLink:
    """Copies between a device and RAM, in the order of the device's work."""

    __slots__ = ("_device",)
    stays_in_ram = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

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


class Crossing:
    """The buffers in RAM between a model's layers on a device and its experts in RAM. Not thread-safe: they hold one
    step."""

    __slots__ = ("_buffers", "_max_rows", "cache", "link", "seconds", "split")
    stays_in_ram = True

    def __init__(self, link: RamLink, cache: ExpertCache | None = None) -> None:
        """cache: of the experts that are on disk; None: all of them are in RAM."""
        self.link, self.cache = link, cache
        self.split: Callable[[Callable[[], None]], None] | None = None
        """Takes the host's work while a step is recorded, in place of doing it."""
        self.seconds = 0.0  # that the host has computed
        self._max_rows = 0
        self._buffers: dict[tuple[int, int], tuple[Tensor, ...]] = {}

    def reserve(self, max_rows: int) -> None:
        """Make room for steps of `max_rows` rows. Not while recorded steps are in use: they keep the old buffers."""
        if max_rows > self._max_rows:
            self._max_rows, self._buffers = max_rows, {}

    def __call__(self, compute: Compute, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return what `compute` makes of x [T, H], ids and weights [T, top_k] of the device, as [T, H] in x's dtype."""
        sent = x, ids, weights
        assert self.split is None or len(x) <= self._max_rows, "a recorded step is larger than its buffers"
        self.reserve(len(x))
        buffers = self._buffers_for(x, ids, weights)
        rows = [buffer[: len(x)] for buffer in buffers]
        for buffer, values in zip(rows, sent, strict=False):
            self.link.copy(buffer, values)
        work = partial(self._work, compute, rows)
        work() if self.split is None else self.split(work)
        out = torch.empty_like(x)
        self.link.copy(out, rows[-1])
        return out

    def _work(self, compute: Compute, rows: list[Tensor]) -> None:
        x, ids, weights, out = rows
        self.link.wait()
        begun = time.perf_counter()
        out.copy_(compute(x, ids, weights))
        self.seconds += time.perf_counter() - begun

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

    __slots__ = ("_crossing", "_few", "_has_few", "_spec", "experts")
    stays_in_ram = True

    def __init__(self, experts: Experts, crossing: Crossing, spec: ModelSpec) -> None:
        """experts: on the CPU."""
        self.experts, self._crossing, self._spec = experts, crossing, spec
        self._few: FewRows | None = None
        self._has_few = True  # False once it is known that the native library cannot multiply with these weights

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Run each token's experts: x [T, H], ids and weights [T, top_k] on the device -> [T, H] on the device."""
        return self._crossing(self.compute, x, ids, weights)

    def compute(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Do the same in RAM: -> [T, H] fp32. Rows of padding, whose ids are -1, are zeros and read nothing.

        Raises IndexError for ids of experts that there are not: the native library would read whatever lies there."""
        if int(ids.max()) >= (count := len(self.experts.gate_up)):
            raise IndexError(f"a token was routed to expert {int(ids.max())} of {count}")
        with torch.inference_mode():
            real = (ids >= 0).any(1).nonzero()[:, 0]
            out = torch.zeros(x.shape, dtype=torch.float32)
            if len(real):
                out[real] = self._products(x[real].float(), ids[real], weights[real])
            return out

    def _products(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        gate_up, few = self.experts.gate_up, self._few_rows(ids.shape[1]) if len(x) <= MAX_ROWS else None
        if few is None:
            if isinstance(gate_up, DiskMatrices):
                gate_up.prepare(ids)
            return self.experts(x, ids, weights)
        if not isinstance(gate_up, DiskMatrices):
            return few(x, ids, weights)
        outs = []
        for first, end, experts in _row_groups(ids.tolist(), gate_up.cache.num_slots):
            few.place(experts, gate_up.cache.require(gate_up.layer, experts))
            outs.append(few(x[first:end], ids[first:end], weights[first:end]).clone())
        return torch.cat(outs)

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


def _row_groups(ids: list[list[int]], most: int) -> Iterator[tuple[int, int, list[int]]]:
    """Yield neighbouring rows that choose at most `most` distinct experts, more than one row does: the first, the one
    after the last, and their experts."""
    first, chosen = 0, dict[int, None]()
    for row, own in enumerate(ids):
        if len(more := chosen | dict.fromkeys(own)) > most:
            yield first, row, list(chosen)
            first, more = row, dict.fromkeys(own)
        chosen = more
    yield first, len(ids), list(chosen)


class FewRows:
    """The products of up to MAX_ROWS rows with their experts, as two operations of the native library."""

    __slots__ = ("_buffers", "_described", "_experts", "_kept", "_library", "_operations", "_rows")
    stays_in_ram = True

    def __init__(self, experts: Experts, top_k: int, spec: ModelSpec, library: Library) -> None:
        """Raises `NotSupportedNatively`."""
        if matrix_shape(experts.gate_up)[0] != 2 * matrix_shape(experts.down)[1]:
            raise NotSupportedNatively("experts without a gate")
        writer = Writer(spec, (), lambda kind: None)
        self._experts, self._described = experts, experts.described(writer, top_k)
        chosen = ctypes.addressof(self._described)
        experts.write(writer, chosen, top_k, None)
        experts.write_out(writer, chosen, writer.part)
        self._library, self._operations, self._kept = library, writer.lowered(), writer.kept
        self._buffers = writer.stream.values, writer.part.values
        self._rows = (NativeRow * MAX_ROWS)()

    def place(self, experts: Sequence[int], addresses: Sequence[int]) -> None:
        """Read these experts of a layer on disk from where their records are in RAM."""
        for weights, array in (
            (self._experts.gate_up, self._described.gate_up), (self._experts.down, self._described.down)
        ):  # fmt: skip
            assert isinstance(weights, DiskMatrices)
            matrices = (NativeMatrix * len(weights)).from_address(array)
            for expert, address in zip(experts, addresses, strict=True):
                weights.form.place(matrices[expert], address)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [n, H] fp32, ids [n, top_k] int32, weights [n, top_k] fp32 -> [n, H] fp32, valid until the next call."""
        stream, out = self._buffers
        count, hidden = x.shape
        stream[:count, :hidden] = x
        ids, weights = ids.int().contiguous(), weights.float().contiguous()
        self._described.ids, self._described.weights = ids.data_ptr(), weights.data_ptr()
        self._library.run_step(self._operations, self._rows, count)
        return out[:count, :hidden]
