"""The search on hundreds of made-up machines: how near the best is its pick, and at what share of the grid's price?

    python -m tests.tuning.landscapes [400]

A machine is a landscape over one of three spaces, as they are on CPUs and GPUs: a hill somewhere, settings that count
each for itself, or a hill with trials that are refused. Run it before and after a change of tuning/search.py.
"""

import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product

from localllm.tuning.search import FULL, Axis, Outcome, Point, Space, search

FULL_S = 10.0  # of a point of height 1: what a trial in full takes
OPENING = 0.5  # what it costs to open an engine
SHARE = 0.3  # of the grid's price, what may be spent
SEQS, TOKENS, KV = Axis("seqs", (16, 64)), Axis("tokens", (128, 256, 512, 1024, 2048)), Axis("kv", ("auto", "int8"))
SPACES: tuple[tuple[Space, Point], ...] = (
    (Space((SEQS, TOKENS, KV)), (1, 3, 0)),
    (Space((Axis("seqs", (2, 4, 8, 16, 32, 64)), TOKENS, KV)), (5, 3, 0)),
    (
        Space(
            (Axis("seqs", (16, 64, 256)), TOKENS, KV, Axis("share", (0.9, 0.95, 0.98)), Axis("eager", (False, True)))
        ),
        (2, 2, 0, 0, 0),
    ),
)
BEFORE, NOISES = (0, 1, 2, 3), (0.005, 0.03)  # in full trials; relative

Height = Callable[[Point], float | None]
"""How good a point is; None where it is refused."""


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
            return Outcome(None, OPENING)
        work_s = FULL_S * effort / height
        if deadline_s is not None and work_s > deadline_s:
            return Outcome(None, OPENING + deadline_s)
        factor = 1 + self.source.gauss(0, self.noise if effort == FULL else 1.5 * self.noise)
        return Outcome(height * max(0.5, factor), OPENING + work_s, work_s)

    def grid_s(self, space: Space) -> float:
        heights = [self.height(point) for point in space.points()]
        return sum(OPENING + (FULL_S / height if height is not None else 0) for height in heights)

    def best(self, space: Space) -> float:
        return max(height for point in space.points() if (height := self.height(point)) is not None)


def landscapes(space: Space, count: int) -> Iterator[Height]:
    """The same ones at each call."""
    source = random.Random(7)
    sizes = [len(axis.values) for axis in space.axes]
    for _ in range(count):
        top, steep = tuple(source.randrange(size) for size in sizes), source.choice([0.02, 0.05, 0.15, 0.4])
        least = source.choice([0.7, 0.9])
        factors = [[source.uniform(least, 1) for _ in range(size)] for size in sizes]
        refused = {point for point in space.points() if source.random() < 0.15}
        yield source.choice([hill(top, steep), _product(factors), _with_refusals(hill(top, steep), refused)])


def hill(top: Point, steep: float = 0.15) -> Height:
    return lambda point: 0.02 + 0.98 * math.exp(-steep * sum((a - b) ** 2 for a, b in zip(point, top, strict=True)))


def _product(factors: list[list[float]]) -> Height:
    return lambda point: math.prod(each[index] for each, index in zip(factors, point, strict=True))


def _with_refusals(height: Height, refused: set[Point]) -> Height:
    return lambda point: None if point in refused else height(point)


def searched(space: Space, start: Point, height: Height, noise: float, seed: int, before: int) -> tuple[float, float]:
    """The pick over the best, and the price over the grid's, `before` full trials' worth of it spent already."""
    best = Landscape(height).best(space)
    land = Landscape(lambda point: here / best if (here := height(point)) is not None else None, noise, seed)
    found = search(space, start, land.measure, seed=seed, share=SHARE, before_s=before * FULL_S)
    picked = land.height(found.ranking[0]) if found.ranking else 0.0
    assert picked is not None
    return picked, (found.spent_s + before * FULL_S) / land.grid_s(space)


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 400
    print("| points | spent before | noise | within 5 % of the best | mean of the best | mean price | over a third |")
    print("| --: | --: | --: | --: | --: | --: | --: |")
    for (space, start), before, noise in product(SPACES, BEFORE, NOISES):
        seen = [searched(space, start, each, noise, n, before) for n, each in enumerate(landscapes(space, count))]
        picks, prices = [pick for pick, _ in seen], [price for _, price in seen]
        print(
            f"| {space.size} | {before} | {noise:.1%} | {sum(pick >= 0.95 for pick in picks) / count:.1%} "
            f"| {statistics.fmean(picks):.3f} | {statistics.fmean(prices):.3f} "
            f"| {sum(price > 1 / 3 for price in prices) / count:.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
