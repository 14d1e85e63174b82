"""CUDA graphs: a step's launches recorded once per shape and replayed as one.

A step is padded to the smallest recorded shape that holds it. The ladder has two parts: decode shapes, of so many
rows with one token each, and mixed shapes, which add a few prefill rows that share so many tokens. Larger steps run
without a graph: they keep the GPU busy for longer than their launches take.

Capturing takes a fraction of a second per shape. The first few are captured before the server says it is ready, the
others one at a time while the engine rests. All share one memory pool.
Does not know: what is recorded; a `Capture` runs the function that it is given and returns how to run it again.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import torch

from localllm.runner.staging import StepShape

log = logging.getLogger(__name__)

PREFILL_ROWS = 8  # of a mixed shape
PREFILL_TOKENS = (64, 128, 256, 512, 1024, 2048)
MIXED_DECODES = (0, 8, 32, 128)
FIRST_DECODES = (1, 2, 4, 8)  # captured before ready
LEAST_FREE_BYTES = 256 * 1024**2  # on the device, else no further graph is recorded

Replay = Callable[[], None]
Part = Hashable


class Capture(Protocol):
    """Runs `step` and records it; the answer runs it again on whatever its buffers then hold."""

    def __call__(self, step: Callable[[], None]) -> Replay: ...


class CudaCapture:
    """torch.cuda.CUDAGraph over one shared pool, on a stream of its own as capturing demands.

    Not through `torch.cuda.graph`, which empties the allocator's cache at each capture: the next launched step would
    have to ask the driver for memory again. Raises `torch.OutOfMemoryError` while there is still some left.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, step: Callable[[], None]) -> Replay:
        if torch.cuda.mem_get_info(self._device)[0] < LEAST_FREE_BYTES:
            raise torch.OutOfMemoryError("too little memory is left for another graph")
        step()  # compiles kernels, fills caches: nothing of that may happen while recording
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                step()
            except BaseException:
                with suppress(RuntimeError):  # the capture is void: ending it says so once more
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay


def decode_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, then every 8th to 128, every 16th to 512; the largest batch itself always."""
    sizes = [1, 2, 4, *range(8, 129, 8), *range(144, 513, 16)]
    return [size for size in sizes if size < max_num_seqs] + ([max_num_seqs] if max_num_seqs <= 512 else [])


def ladder(max_num_seqs: int, max_num_batched_tokens: int) -> list[StepShape]:
    """Every shape worth recording, smallest first."""
    decodes = [StepShape(size) for size in decode_sizes(max_num_seqs)]
    mixed = [
        StepShape(beside, min(PREFILL_ROWS, max_num_seqs), tokens)
        for beside in MIXED_DECODES
        for tokens in PREFILL_TOKENS
        if beside < max_num_seqs and tokens + beside <= max_num_batched_tokens
    ]
    return decodes + mixed


def largest(shapes: Sequence[StepShape]) -> StepShape | None:
    """One that has room for the rows and for the tokens of each."""
    if not shapes:
        return None
    return StepShape(0, max(shape.rows for shape in shapes), max(shape.tokens for shape in shapes))


class GraphLadder:
    """Recorded steps by shape. `parts(shape)` names what there is to record of a shape and gives what does it."""

    def __init__(
        self, shapes: Sequence[StepShape], capture: Capture, parts: Callable[[StepShape], Mapping[Part, Replay]]
    ) -> None:
        first = [shape for shape in shapes if not shape.prefill_rows and shape.decodes in FIRST_DECODES]
        rest = [shape for shape in shapes if shape not in first]
        # Largest first within each part: the pool then grows once and the smaller ones fit into what it has.
        self._to_do = sorted(rest, key=_size) + sorted(first, key=_size)
        self._num_first = len(first)
        self._capture, self._parts = capture, parts
        self._replays: dict[StepShape, dict[Part, Replay]] = {}
        self._decodes: list[StepShape] = []
        self._mixed: list[StepShape] = []

    def __len__(self) -> int:
        return len(self._replays)

    @property
    def is_complete(self) -> bool:
        return not self._to_do

    def capture_first(self) -> None:
        """What has to be there when the first request comes."""
        for _ in range(self._num_first):
            self.capture_next()

    def capture_next(self) -> bool:
        """Record one more shape; False when all are there, or when memory for more is lacking."""
        if not self._to_do:
            return False
        shape = self._to_do.pop()
        try:
            self._replays[shape] = {part: self._capture(step) for part, step in self._parts(shape).items()}
        except torch.OutOfMemoryError:
            log.warning("graphs stopped captured=%d reason=out-of-memory at=%s", len(self), shape)
            self._to_do = []
            return False
        part = self._mixed if shape.prefill_rows else self._decodes
        insort(part, shape, key=_size)
        return bool(self._to_do)

    def shape_for(self, exact: StepShape) -> StepShape | None:
        """The smallest recorded shape that holds a step; a pure decode step is never padded with prefill rows."""
        if exact.prefill_rows:
            return next((shape for shape in self._mixed if shape.holds(exact)), None)
        place = bisect_left(self._decodes, exact.decodes, key=_size)
        return self._decodes[place] if place < len(self._decodes) else None

    def replay(self, shape: StepShape, part: Part) -> None:
        self._replays[shape][part]()

    def clear(self) -> None:
        self._replays.clear()
        self._decodes, self._mixed, self._to_do = [], [], []


def _size(shape: StepShape) -> int:
    return shape.tokens
