"""Checks of what all kernels rely on, with kernels of their own: early launches, graphs, the tensor memory accelerator.

An early launch is wrong if a kernel reads before the previous one has written. LINKS kernels in a row each add 1 to the
same numbers; each waits, lets the next one start, and some store late, so that a kernel which does not wait reads old
numbers. Recorded as a graph, the same must hold at every replay.
Does not know: what is served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from localllm.kernels.checks.case import Case, Subject, equal_to
from localllm.kernels.launch import (
    INTERPRETED,
    TensorDescriptor,
    early_launch,
    prefetch_rows,
    tl,
    triton,
    wait_for_inputs,
)

LINKS, REPLAYS = 64, 20
SLOW_LINK = 8  # every eighth kernel stores late
SPIN_NS = 20_000
NUMBERS = 1 << 20  # 4 MB of fp32: more than the chip writes at once
BLOCK = 1024
TILE = (64, 128)
MATRIX = (100, 200)  # its last tile is partly outside


def early_launch_cases(subject: Subject) -> Iterator[Case]:
    """Yield the chain, launched kernel by kernel."""
    numbers = 4096 if INTERPRETED else NUMBERS
    links = 8 if INTERPRETED else LINKS

    def run() -> list[Tensor]:
        x = torch.zeros(numbers, device=subject.device)
        _chain(x, links)
        return [x]

    yield Case("a chain of kernels", run, equal_to(lambda: [torch.full((numbers,), float(links))]))


def graph_cases(subject: Subject) -> Iterator[Case]:
    """Yield the chain, recorded and replayed. Without anything that records there is nothing to check."""
    record = subject.record
    if record is None:
        return
    numbers, links = (4096, 8) if INTERPRETED else (NUMBERS, LINKS)

    def run() -> list[Tensor]:
        x = torch.zeros(numbers, device=subject.device)
        replay: Callable[[], None] = record(lambda: _chain(x, links))
        x.zero_()
        for _ in range(REPLAYS):
            replay()
        return [x]

    yield Case("a recorded chain of kernels", run, equal_to(lambda: [torch.full((numbers,), float(links * REPLAYS))]))


def _chain(x: Tensor, links: int) -> None:
    pdl = early_launch(x.device)
    on_nvidia = x.is_cuda and torch.version.hip is None
    for link in range(links):
        late = SPIN_NS if on_nvidia and link % SLOW_LINK == SLOW_LINK - 1 else 0
        _add_in_turn_kernel[(x.numel() // BLOCK,)](
            x, BLOCK=BLOCK, SPIN_NS=late, PREFETCHES=on_nvidia and link % 2 == 1, **pdl
        )


def tma_cases(subject: Subject) -> Iterator[Case]:
    """Yield a load of a matrix's last tile, and of two matrices' in one, as gated products load gate and up."""
    rows, columns = MATRIX
    first_row, first_column = 64, 128
    for depth in (1, 2):
        whole = subject.random(depth, rows, columns, dtype=torch.float16)

        def run(whole: Tensor = whole, depth: int = depth) -> list[Tensor]:
            out = torch.full((depth * TILE[0], TILE[1]), float("nan"), dtype=whole.dtype, device=whole.device)
            source = whole if depth > 1 else whole[0]
            block = [depth, *TILE] if depth > 1 else list(TILE)
            tile = TensorDescriptor(source, list(source.shape), list(source.stride()), block)
            _load_tile_kernel[(1,)](
                out, tile, first_row, first_column, DEPTH=depth, ROWS=TILE[0], COLUMNS=TILE[1], num_warps=4
            )
            return [out]

        def right(whole: Tensor = whole, depth: int = depth) -> list[Tensor]:
            out = torch.zeros(depth, *TILE, dtype=whole.dtype)
            out[:, : rows - first_row, : columns - first_column] = whole[:, first_row:, first_column:].cpu()
            return [out.view(-1, TILE[1])]

        yield Case(f"the last tile of {'a matrix' if depth == 1 else 'two matrices'}", run, equal_to(right))


@triton.jit
def _add_in_turn_kernel(
    x_ptr, BLOCK: tl.constexpr, SPIN_NS: tl.constexpr, PREFETCHES: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Add 1 to BLOCK numbers, after the previous kernel has."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PREFETCHES:
        prefetch_rows(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, 2) * (BLOCK // 2), 0, BLOCK // 2, 16)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + at)
    if SPIN_NS:
        end = tl.extra.cuda.globaltimer() + SPIN_NS
        while tl.extra.cuda.globaltimer() < end:
            pass
    tl.store(x_ptr + at, x + 1)


@triton.jit
def _load_tile_kernel(
    out_ptr, tile, first_row, first_column, DEPTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Copy one tile, loaded by the tensor memory accelerator."""
    if DEPTH == 1:
        x = tile.load([first_row, first_column])
    else:
        x = tl.reshape(tile.load([0, first_row, first_column]), [DEPTH * ROWS, COLUMNS])
    at = tl.arange(0, DEPTH * ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out_ptr + at, x)
