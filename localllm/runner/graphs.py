"""CUDA graphs: a step's launches are recorded once per shape and replayed as one.

A step is padded to the smallest recorded shape that holds it. There are three kinds of shapes: decode shapes with a
number of one-token rows, the same with a number of drafts for each row, and mixed shapes, which add a few prefill rows
that share a number of tokens. Larger steps run without a graph: they keep the GPU busy for longer than their launches
take.

Capturing takes a fraction of a second per shape. The first few shapes are captured before the server reports that it is
ready. The others are captured part by part while the engine is idle or, if it never is, one part after every few steps
without a graph. All graphs share one memory pool. A shape that cannot be captured is skipped: its steps are launched
kernel by kernel. A step with layers that the host computes (models/layers/far.py) is several graphs with the host's
work between them.
Does not know: what is recorded; a `Capture` runs the function that it is given and returns a function that replays it.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Protocol

import torch

from localllm.errors import DeviceLost
from localllm.kernels.checks.table import kernel_of
from localllm.models.layers.far import Crossing
from localllm.models.layers.group import Group
from localllm.runner.device_drafts import DRAFT_WIDTHS, draft_shapes
from localllm.runner.device_memory import CaptureFailed, record
from localllm.runner.staging import StepShape

log = logging.getLogger(__name__)

PREFILL_TOKENS = {64: 8, 128: 8, 256: 16, 512: 32, 1024: 32, 2048: 32}  # tokens of a mixed shape: most prompts
MIXED_DECODES = (0, 8, 32, 128, 192, 256, 384, 512)  # beside them; the last is cut to the largest batch
MANY_DECODES, MANY_TOKENS = 192, (256, 512)  # from so many decodes on, only shapes with so many prompt tokens
FIRST_DECODES = (1, 2, 4, 8)  # captured before the server is ready
LEAST_FREE_BYTES = 256 * 1024**2  # free device memory below which no further graph is recorded
PREDICT_EVERY = 10  # graphs after which the memory of all further ones is predicted, again and again
STEPS_PER_CAPTURE = 64  # steps without a graph, under load, before one part of their shape is recorded

Replay = Callable[[], None]
Part = Hashable


class Capture(Protocol):
    """Runs `step` and records it. The returned function replays it on the current contents of its buffers."""

    def __call__(self, step: Callable[[], None]) -> Replay: ...


class CudaCapture:
    """Records torch.cuda.CUDAGraph objects over one shared pool, on a stream of its own (as capturing requires).

    Does not use `torch.cuda.graph`, which empties the allocator's cache at each capture: the next launched step would
    have to ask the driver for memory again. Raises `torch.OutOfMemoryError` while some memory is still left,
    `CaptureFailed` if no other step can be recorded either, and `DeviceLost`.
    """

    def __init__(self, device: torch.device, crossing: Crossing | None = None) -> None:
        """crossing: to layers that the host computes; None: there are none."""
        self._device, self._crossing = device, crossing
        self._pool = torch.cuda.graph_pool_handle()

    def has_memory(self) -> bool:
        """Return whether there is memory for another graph."""
        return self.spare_bytes() >= 0

    def spare_bytes(self) -> int:
        """Return the bytes that further graphs may take."""
        return int(torch.cuda.mem_get_info(self._device)[0]) - LEAST_FREE_BYTES

    def __call__(self, step: Callable[[], None]) -> Replay:
        if not self.has_memory():
            raise torch.OutOfMemoryError("too little memory for another graph")
        graph = torch.cuda.CUDAGraph()
        try:
            step()  # compiles kernels and fills caches, which must not happen while recording
            torch.cuda.synchronize(self._device)
            return record(graph, self._pool, self._device, step, self._crossing)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._require_device(error)
            raise

    def _require_device(self, error: Exception) -> None:
        """Raise `DeviceLost` if the device fails every call from now on."""
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError as lost:
            raise DeviceLost(
                "The GPU has reported an error from which this process cannot recover.",
                f"During the capture of a CUDA graph: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
                "Start again with localllm up; --enforce-eager runs without CUDA graphs.",
            ) from lost


class MeasuredCapture(Capture, Protocol):
    def has_memory(self) -> bool: ...


class AgreedCapture:
    """Records a step only if every rank of a group has memory for it.

    The ranks exchange tensors within a step, so that all of them must record the same steps in the same order, and
    stop at the same one. A rank that replayed a step while another launched it would exchange tensors of other sizes.
    """

    def __init__(self, capture: MeasuredCapture, group: Group, device: torch.device) -> None:
        """group: all ranks that exchange tensors, of all pipeline stages."""
        self._capture, self._group, self._device = capture, group, device

    def __call__(self, step: Callable[[], None]) -> Replay:
        """Record the step on all ranks, or raise on all: `CaptureFailed`, after which nothing more is recorded."""
        if not self._all(self._capture.has_memory()):
            raise CaptureFailed("a rank has too little memory for another graph")
        replay, failed = None, "another rank could not record this step"
        try:
            replay = self._capture(step)
        except DeviceLost:
            raise
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
        if not self._all(replay is not None) or replay is None:
            raise CaptureFailed(failed)
        return replay

    def _all(self, is_so: bool) -> bool:
        """Return whether something is so on all ranks."""
        count = self._group.sum_(torch.full((1,), float(is_so), device=self._device))
        return int(count.item()) == self._group.size


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Return 1, 2, 4, then every 8th to 128, every 16th to 512;
    the largest batch always included if it is at most 512."""
    sizes = [1, 2, 4, *range(8, 129, 8), *range(144, 513, 16)]
    return [size for size in sizes if size < max_num_seqs] + ([max_num_seqs] if max_num_seqs <= 512 else [])


def mixed_decodes(max_num_seqs: int) -> list[int]:
    """Return the numbers of decode rows of mixed shapes. The last holds any that can be beside a prompt, up to 512."""
    sizes = [size for size in MIXED_DECODES if size < max_num_seqs]
    return sizes + [max_num_seqs] * (sizes[-1] < min(max_num_seqs - 1, MIXED_DECODES[-1]))


def capture_shapes(
    max_num_seqs: int, max_num_batched_tokens: int, most_draws: int = 0, widths: Sequence[int] = DRAFT_WIDTHS
) -> list[StepShape]:
    """Return every shape worth recording: decode shapes, then mixed ones, smallest first, then those with drafts, of
    these widths and at most `most_draws` draws."""
    decodes = [StepShape(size) for size in decode_sizes(max_num_seqs)]
    mixed = [
        StepShape(beside, min(rows, max_num_seqs), tokens)
        for beside in mixed_decodes(max_num_seqs)
        for tokens, rows in PREFILL_TOKENS.items()
        if tokens + beside <= max_num_batched_tokens and (beside < MANY_DECODES or tokens in MANY_TOKENS)
    ]
    return decodes + mixed + draft_shapes(decode_sizes(max_num_seqs), most_draws, widths)


def largest_shape(shapes: Sequence[StepShape]) -> StepShape | None:
    """Return a shape with the most rows and the most tokens of all shapes."""
    if not shapes:
        return None
    return StepShape(0, max(shape.rows for shape in shapes), max(shape.tokens for shape in shapes))


class StepGraphs:
    """Recorded steps by shape. `parts(shape)` returns the functions to record for a shape, by name.

    A shape is used as soon as its first part is recorded; its other parts are launched until they are recorded.
    """

    def __init__(
        self, shapes: Sequence[StepShape], capture: Capture, parts: Callable[[StepShape], Mapping[Part, Replay]]
    ) -> None:
        narrow = min((shape.drafts for shape in shapes if shape.drafts), default=0)
        first = [
            shape
            for shape in shapes
            if not shape.prefill_rows and shape.decodes in FIRST_DECODES and shape.drafts in (0, narrow)
        ]
        rest = [shape for shape in shapes if shape not in first]
        # Largest first within each group: the pool then grows once, and smaller shapes fit into it.
        self._to_do = sorted(rest, key=_size) + sorted(first, key=_size)
        self._num_rest = len(rest)
        self.num_wanted = len(shapes)
        self.num_failed = 0  # shapes that could not be recorded
        self.failure = ""  # of the first of them
        self._capture, self._parts = capture, parts
        self._replays: dict[StepShape, dict[Part, Replay]] = {}
        self._decodes: dict[int, list[StepShape]] = {}  # by number of drafts
        self._mixed: list[StepShape] = []
        self._num_recorded = self._recorded_bytes = 0
        self._num_missed = 0  # steps without a graph since the last capture for such a step

    def __len__(self) -> int:
        return len(self._replays)

    @property
    def is_complete(self) -> bool:
        return not self._to_do

    def capture_first(self, budget_s: float = 0.0) -> None:
        """Record the shapes needed at the first request, then further ones for `budget_s` seconds."""
        while len(self._to_do) > self._num_rest and self.capture_next():
            pass
        until_s = time.monotonic() + budget_s
        while time.monotonic() < until_s and self.capture_next():
            pass

    def capture_next(self) -> bool:
        """Record one more part of a shape. Return False when all are recorded or no more can be."""
        if self._to_do:
            self._record_part(self._to_do[-1])
        return bool(self._to_do)

    def is_due(self, exact: StepShape) -> bool:
        """Count a step that no recorded shape holds. Return True if `capture_for` should record a part for it now."""
        if self._missing(exact) is None:
            return False
        self._num_missed += 1
        return self._num_missed >= STEPS_PER_CAPTURE

    def capture_for(self, exact: StepShape) -> None:
        """Record one part of the smallest unrecorded shape that holds a step."""
        self._num_missed = 0
        if (shape := self._missing(exact)) is not None:
            self._record_part(shape)

    def shape_for(self, exact: StepShape) -> StepShape | None:
        """Return the smallest recorded shape that holds a step;
        a pure decode step is never padded with prefill rows."""
        if exact.prefill_rows:
            return next((shape for shape in self._mixed if shape.holds(exact)), None)
        decodes = self._decodes.get(exact.drafts, [])
        place = bisect_left(decodes, exact.tokens, key=_size)
        return decodes[place] if place < len(decodes) else None

    def has(self, shape: StepShape, part: Part) -> bool:
        return part in self._replays.get(shape, {})

    def replay(self, shape: StepShape, part: Part) -> None:
        self._replays[shape][part]()

    def clear(self) -> None:
        self._replays.clear()
        self._decodes, self._mixed, self._to_do = {}, [], []

    def _missing(self, exact: StepShape) -> StepShape | None:
        fits = (s for s in self._to_do if s.holds(exact) and bool(s.prefill_rows) == bool(exact.prefill_rows))
        return min(fits, key=_size, default=None)

    def _fail(self, error: Exception, count: int) -> None:
        """Count shapes that are launched kernel by kernel from now on, and keep the first reason."""
        kernel = kernel_of(error)
        name = "" if kernel is None else f"{kernel.name}: "
        self.num_failed += count
        self.failure = self.failure or f"{name}{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"

    def _record_part(self, shape: StepShape) -> None:
        recorded = self._replays.get(shape, {})
        spare = self._spare_bytes()
        try:
            steps = self._parts(shape)
            part = next(part for part in steps if part not in recorded)
            replay = self._capture(steps[part])
        except DeviceLost:
            raise
        except (torch.OutOfMemoryError, CaptureFailed) as error:
            log.warning(
                "graphs stopped captured=%d wanted=%d at=%s reason=%r", len(self), self.num_wanted, shape, error
            )
            if isinstance(error, CaptureFailed):
                self._fail(error, len(self._to_do))
            self._to_do = []
        except Exception as error:
            self._fail(error, 1)
            log.warning("graph left out shape=%s reason=%r", shape, error)
            self._to_do.remove(shape)
        else:
            if not recorded:
                self._replays[shape] = recorded
                kind = self._mixed if shape.prefill_rows else self._decodes.setdefault(shape.drafts, [])
                insort(kind, shape, key=_size)
            recorded[part] = replay
            if len(recorded) == len(steps):
                self._to_do.remove(shape)
            self._count(spare)

    def _count(self, spare_before: int | None) -> None:
        """Add what a graph took. After each PREDICT_EVERY graphs, leave out the least useful shapes if all of those to
        come would not fit: recording stops where memory ends, and then the shapes that came last are missing."""
        spare = self._spare_bytes()
        if spare is None or spare_before is None:
            return
        self._num_recorded += 1
        self._recorded_bytes += max(0, spare_before - spare)
        if self._num_recorded % PREDICT_EVERY or not self._recorded_bytes:
            return
        each = self._recorded_bytes / self._num_recorded
        fitting, kept = int(max(0, spare) / each), set[StepShape]()
        for shape in sorted(self._to_do, key=_usefulness):
            fitting -= len(self._parts(shape)) - len(self._replays.get(shape, {}))
            if fitting < 0:
                break
            kept.add(shape)
        num_left_out = len(self._to_do) - len(kept)
        if num_left_out:
            log.warning(
                "graphs of %d of %d step shapes are left out: a graph takes %.1f MiB, and %.0f MiB are spare; "
                "a lower --gpu-memory-utilization leaves more",
                num_left_out, self.num_wanted, each / 2**20, max(0, spare) / 2**20,
            )  # fmt: skip
            self._num_rest = len([shape for shape in self._to_do[: self._num_rest] if shape in kept])
            self._to_do = [shape for shape in self._to_do if shape in kept]

    def _spare_bytes(self) -> int | None:
        """Return the memory that further graphs may take. None: it is unknown, or other ranks with other memory record
        with this one, and would leave out other shapes."""
        spare = getattr(self._capture, "spare_bytes", None)
        return None if spare is None else spare()


def _size(shape: StepShape) -> int:
    return shape.tokens


def _usefulness(shape: StepShape) -> tuple[bool, bool, int]:
    """Return a key that puts the most useful shapes first: decode steps, those with prompts, those with drafts."""
    return shape.drafts > 0, shape.prefill_rows > 0, shape.tokens
