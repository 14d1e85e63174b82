"""The search on landscapes whose best point is known: near it, at a third of the grid's price, whatever refuses."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from localllm.tuning.search import FULL, Axis, Found, Outcome, Point, Space, search

SPACE = Space(
    (
        Axis("seqs", (2, 4, 8, 16, 32, 64)),
        Axis("tokens", (128, 256, 512, 1024, 2048)),
        Axis("kv", ("auto", "int8")),
    )
)
START = (5, 3, 0)
OPENING = 0.05  # of a full trial: what it costs to open an engine

Height = Callable[[Point], float | None]


@dataclass
class Landscape:
    """Answers as a machine does: noisy, less so in full; a slow point takes long."""

    height: Height
    noise: float = 0.0
    seed: int = 0
    asked: list[tuple[Point, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.source = random.Random(self.seed)

    def measure(self, point: Point, effort: float, deadline_s: float | None) -> Outcome:
        self.asked.append((point, effort))
        height = self.height(point)
        if height is None:
            return Outcome(None, OPENING, why="out of memory")
        work_s = effort / height
        if deadline_s is not None and work_s > deadline_s:
            return Outcome(None, OPENING + deadline_s, why="given up")
        factor = 1 + self.source.gauss(0, self.noise if effort == FULL else 1.5 * self.noise)
        return Outcome(height * max(0.5, factor), OPENING + work_s, work_s)

    def grid_s(self) -> float:
        heights = [self.height(point) for point in SPACE.points()]
        return sum(OPENING + (FULL / height if height is not None else 0) for height in heights)

    def best(self) -> float:
        return max(height for point in SPACE.points() if (height := self.height(point)) is not None)


def hill(top: Point, steep: float = 0.15) -> Height:
    return lambda point: math.exp(-steep * sum((a - b) ** 2 for a, b in zip(point, top, strict=True)))


def ridge(point: Point) -> float:
    """Many sequences only help together with large steps."""
    return math.exp(-0.8 * (point[0] - point[1]) ** 2 - 0.05 * (point[0] - 2) ** 2)


def plateau(point: Point) -> float:
    """More sequences help until the memory's bandwidth is used up, as they do; the cache's type costs a little."""
    return min(1.0, 0.15 * 2 ** (point[0] / 1.5)) * (0.9 if point[2] else 1.0) * (0.85 + 0.03 * point[1])


def cliff(point: Point) -> float | None:
    """The best ones stand right before those that run out of memory."""
    return None if point[0] + point[1] > 6 else hill((5, 4, 0), 0.1)(point)


def two_hills(point: Point) -> float:
    return max(0.8 * hill((5, 4, 0), 0.4)(point), hill((0, 0, 1), 0.25)(point))


def needs_small_cache(point: Point) -> float | None:
    return None if not point[2] else plateau(point)


LANDSCAPES = {
    "hill": hill((2, 1, 0)), "far hill": hill((0, 0, 1)), "ridge": ridge, "plateau": plateau, "cliff": cliff,
    "two hills": two_hills, "needs the small cache": needs_small_cache, "flat": lambda point: 1.0,
}  # fmt: skip


def run(land: Landscape, seed: int = 0) -> Found:
    return search(SPACE, START, land.measure, seed=seed)


@pytest.mark.parametrize("name", LANDSCAPES)
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_the_pick_is_near_the_best_at_a_third_of_the_price(name: str, noise: float) -> None:
    for seed in range(10):
        land = Landscape(LANDSCAPES[name], noise, seed)
        found = run(land, seed)
        height = land.height(found.ranking[0])
        assert height is not None
        assert height >= 0.95 * land.best(), (seed, found.ranking[:3])
        assert found.spent_s <= land.grid_s() / 3, seed
