"""The geometry of small plots: sparklines, stacked bars, the block map.

Bars have coordinates from 0 to 100, sparklines a 120 by 32 box, so templates need no arithmetic.
Does not know: the engine, templates.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from localllm.web.pages.frame.views import View, view


@view("dashboard/_sparkline.html")
class Sparkline(View):
    """The history of a value. Coordinates are in a 120 by 32 box; a gap in the samples starts another line."""

    title: str
    span: str  # the period from the left edge to now
    lines: tuple[str, ...]  # one "x,y x,y ..." per line
    areas: tuple[str, ...]  # SVG path data of the area below each line
    now: str
    low: str
    high: str
    samples: tuple[tuple[str, str], ...] = ()  # (how long ago, value), newest first: the plot as text


@dataclass(frozen=True, slots=True)
class PoolCell:
    """One cell of the pool map."""

    x: int
    y: int
    kind: str  # seq-0 to seq-5, used, cached, free


@dataclass(frozen=True, slots=True)
class StepColumn:
    """One step in the plot of the last steps, in a 120 by 40 box: the prefill bar is on top of the decode bar."""

    x: float
    width: float
    decode_y: float
    decode_height: float
    prefill_y: float
    prefill_height: float


WIDTH, HEIGHT, PAD = 120.0, 32.0, 2.0

POINTS = 240
"""Most points of a sparkline."""

ROWS = 10
"""Rows of the table with the same values."""

STEPS, STEPS_HEIGHT = 60, 40.0
COLUMNS, MAX_CELLS = 32, 256
COLOURS = 6


@dataclass(frozen=True, slots=True)
class Span:
    """The time range of sparklines."""

    key: str  # as used in URLs
    title: str
    seconds: float
    gap_s: float  # samples further apart are not joined: nothing was recorded in between

    @property
    def bucket_s(self) -> float:
        """Samples closer together than this become one point."""
        return self.seconds / POINTS


MINUTE, FIVE_MINUTES, HOUR = Span("1m", "1 min", 60, 2), Span("5m", "5 min", 300, 15), Span("1h", "1 h", 3600, 40)
SPANS = (MINUTE, FIVE_MINUTES, HOUR)


def sparkline(
    title: str,
    samples: Sequence[tuple[float, float]],
    print_value: Callable[[float], str],
    *,
    span: Span = MINUTE,
    top: float | None = None,
) -> Sparkline:
    """Return the plot of the last (time, value) pairs; `top` fixes the upper end of the scale."""
    samples = _thinned(samples, span)
    values = [value for _, value in samples] or [0.0]
    end = samples[-1][0] if samples else 0.0
    high = max(*values, 0.0, 1e-9) if top is None else top
    runs = [_points(run, end, high, span) for run in _runs(samples, span.gap_s)]
    lines = tuple(" ".join(f"{x:.1f},{y:.1f}" for x, y in run) for run in runs)
    told = samples[:: -(math.ceil(len(samples) / ROWS) or 1)]
    return Sparkline(
        title=title,
        span=span.title,
        lines=lines,
        areas=tuple(
            f"M{run[0][0]:.1f} {HEIGHT:g}L{line}L{run[-1][0]:.1f} {HEIGHT:g}Z"
            for run, line in zip(runs, lines, strict=True)
        ),
        now=print_value(values[-1]),
        low=print_value(min(values)),
        high=print_value(max(values)),
        samples=tuple((_ago(end - taken_s), print_value(value)) for taken_s, value in told),
    )


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _thinned(samples: Sequence[tuple[float, float]], span: Span) -> list[tuple[float, float]]:
    """Return the samples of the span. If they are too dense to draw, each bucket becomes its mean, at
    its newest time.
    """
    if not samples:
        return []
    within = [sample for sample in samples if sample[0] >= samples[-1][0] - span.seconds]
    buckets = groupby(within, lambda sample: sample[0] // span.bucket_s)
    held = [list(bucket) for _, bucket in buckets]
    return [(bucket[-1][0], sum(value for _, value in bucket) / len(bucket)) for bucket in held]


def _runs(samples: Sequence[tuple[float, float]], gap_s: float) -> list[list[tuple[float, float]]]:
    """Return the samples, split at gaps."""
    runs: list[list[tuple[float, float]]] = [list(samples[:1])] if samples else []
    for before, sample in pairwise(samples):
        if sample[0] - before[0] > gap_s:
            runs.append([])
        runs[-1].append(sample)
    return runs


def _points(run: Sequence[tuple[float, float]], end: float, high: float, span: Span) -> list[tuple[float, float]]:
    return [
        (
            WIDTH * max(0.0, 1 - (end - taken_s) / span.seconds),
            HEIGHT - PAD - (HEIGHT - 2 * PAD) * min(1.0, value / high),
        )
        for taken_s, value in run
    ]


def step_columns(held: Sequence[tuple[int, int]]) -> tuple[StepColumn, ...]:
    """Return a column per step from (prefill tokens, decode tokens), the newest at the right; the fullest step reaches
    the top.
    """
    held = held[-STEPS:]
    top = max((prefill + decode for prefill, decode in held), default=0) or 1
    width = WIDTH / STEPS
    columns = []
    for place, (prefill, decode) in enumerate(held, start=STEPS - len(held)):
        low, high = STEPS_HEIGHT * decode / top, STEPS_HEIGHT * prefill / top
        sizes = (width * 0.8, STEPS_HEIGHT - low, low, STEPS_HEIGHT - low - high, high)
        columns.append(StepColumn(round(place * width, 2), *(round(size, 2) for size in sizes)))
    return tuple(columns)


def colours(request_ids: Sequence[str]) -> dict[str, str]:
    """Return a colour class for each request, used in the map and the table: chosen by hash, or a free one if two would
    share it.
    """
    chosen: dict[str, str] = {}
    taken: set[int] = set()
    for request_id in request_ids:
        first = zlib.crc32(request_id.encode())
        free = (colour % COLOURS for colour in range(first, first + COLOURS) if colour % COLOURS not in taken)
        colour = next(free, first % COLOURS)
        taken.add(colour)
        chosen[request_id] = f"seq-{colour}"
    return chosen


def pool_map(
    used: int, cached: int, free: int, owners: Sequence[tuple[str, int]]
) -> tuple[tuple[PoolCell, ...], int, int, int]:
    """Return the cells in order of owner, columns, rows, and the number of blocks per cell.

    Blocks shared through the prefix cache have several owners, so each owner gets a share of the used cells.
    """
    total = used + cached + free
    blocks_per_cell = max(1, math.ceil(total / MAX_CELLS))
    count = math.ceil(total / blocks_per_cell)
    used_cells = min(count, math.ceil(used / blocks_per_cell))
    free_cells = min(count - used_cells, free // blocks_per_cell)
    kinds = _owned(used_cells, owners) + ["cached"] * (count - used_cells - free_cells) + ["free"] * free_cells
    cells = tuple(PoolCell(index % COLUMNS, index // COLUMNS, kind) for index, kind in enumerate(kinds))
    return cells, COLUMNS, math.ceil(count / COLUMNS), blocks_per_cell


def _owned(cells: int, owners: Sequence[tuple[str, int]]) -> list[str]:
    held = sum(blocks for _, blocks in owners)
    if not held:
        return ["used"] * cells
    kinds: list[str] = []
    seen = 0
    for kind, blocks in owners:
        seen += blocks
        kinds += [kind] * (round(cells * seen / held) - len(kinds))
    return kinds
