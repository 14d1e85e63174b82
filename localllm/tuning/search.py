"""The search for good settings, as policy over a `measure` function that returns a point's score or a refusal.

    probe     the planner's guess, brief and in full: shows what a trial costs here
    scatter   points spread over the space, brief: climbing alone cannot leave a local maximum
    climb     from the best point along one axis after another, then along two at once; then from the next best
    finals    the best few in full, in turn and repeatedly, so that a machine that slows down slows all of them alike

Each stage has a time budget, given as a share of the cost of measuring the whole grid in full. A brief trial that
takes much longer than the best one is stopped early: it does the same work. A point replaces the start only if it is
clearly better: by more than repeated measurements differ, and better than everything that the start has measured.
Otherwise the tie-breaker decides, and then the start wins.
The same measurements and the same seed give the same search.
Does not know: engines, clocks, what a setting means.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

BRIEF, FULL = 0.25, 1.0
SMALL_SPACE = 6  # a space of up to this many points is measured completely
LEAST_NOISE = 0.01  # relative; lower bound of the assumed noise
MOST_NOISE = 0.025  # upper bound: a tie-breaker may not cost more than this
HOPELESS, GRACE_S = 1.6, 0.5  # stop a brief trial at this many times the best work time, plus some seconds of grace
PROBES = 3  # points to measure to learn the cost of a trial, if the start does not work
CLIMBS = 6
FINALISTS = 3
FINALS_SHARE = 0.35  # share of the budget, after the probe

Point = tuple[int, ...]
"""The index of the chosen value on each axis."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One setting and the values to try, ordered so that neighbours behave alike."""

    name: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Space:
    """All combinations of the axes' values."""

    axes: tuple[Axis, ...]

    @property
    def size(self) -> int:
        return math.prod(len(axis.values) for axis in self.axes)

    def points(self) -> list[Point]:
        return list(product(*(range(len(axis.values)) for axis in self.axes)))

    def settings(self, point: Point) -> dict[str, Any]:
        return {axis.name: axis.values[index] for axis, index in zip(self.axes, point, strict=True)}

    def point(self, settings: Mapping[str, Any]) -> Point:
        """Return the point nearest to these settings: the same value if the axis has it, else the closest number."""
        return tuple(_nearest(axis.values, settings[axis.name]) for axis in self.axes)

    def step(self, point: Point, moves: Mapping[int, int]) -> Point | None:
        """Return the point that many values further along some axes; None if it is outside the space."""
        moved = tuple(index + moves.get(i, 0) for i, index in enumerate(point))
        inside = all(0 <= index < len(axis.values) for axis, index in zip(self.axes, moved, strict=True))
        return moved if inside else None


def _nearest(values: Sequence[Any], wanted: Any) -> int:
    if wanted in values or isinstance(wanted, str | bool) or wanted is None:
        return values.index(wanted) if wanted in values else 0
    distances = [abs(value - wanted) if isinstance(value, int | float) else math.inf for value in values]
    return distances.index(min(distances))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one measurement. Scores are positive, and larger is better."""

    score: float | None  # None: refused, or stopped early
    cost_s: float  # time of the whole trial
    work_s: float = 0.0  # time of its workload alone, which is the same work for all points at the same effort
    tie: float = 0.0  # decides between scores within the noise; larger is better


Measure = Callable[[Point, float, float | None], Outcome]
"""(point, effort, deadline in seconds of work) -> outcome. A point that does not work is an outcome, not an exception.
"""


@dataclass(frozen=True, slots=True)
class SearchRanking:
    """The ranked points, best first; empty: none works."""

    ranking: tuple[Point, ...]
    noise: float  # relative difference between repeated measurements, the largest of the first and of the start counts
    spent_s: float
    gain: float | None = None  # relative gain of the first over the start; None: not both were measured in full
    is_clear: bool = False  # the gain is more than the measurements differ by themselves


@dataclass(slots=True)
class _PointScores:
    """The measurements of one point."""

    brief: list[float] = field(default_factory=list)
    full: list[float] = field(default_factory=list)
    tie: float = 0.0
    refused: bool = False

    def score(self, effort: float) -> float:
        """Return the mean score at that effort, else at the other (not comparable); -inf if it does not work."""
        scores = (self.full or self.brief) if effort == FULL else (self.brief or self.full)
        return statistics.fmean(scores) if scores and not self.refused else -math.inf


def _spread(values: Sequence[float]) -> float:
    """Return the relative difference between the largest and the smallest value; 0 for a single value."""
    return (max(values) - min(values)) / statistics.fmean(values)


def is_clearly_better(mine: Sequence[float], its: Sequence[float], noise: float) -> bool:
    """Return whether all of these scores are above the others, by more than the noise and than either differ."""
    gain = statistics.fmean(mine) / statistics.fmean(its) - 1
    return min(mine) > max(its) and gain > max(noise, _spread(mine), _spread(its))


def search(
    space: Space,
    start: Point,
    measure: Measure,
    *,
    seed: int = 0,
    share: float = 0.25,
    before_s: float = 0.0,
    should_stop: Callable[[], bool] = lambda: False,
) -> SearchRanking:
    """Return the best points of the space.

    share: the most to spend, as a share of the cost of the whole grid; `before_s` of it is already spent. The probe and
    one full measurement of the best point run even if they exceed it.
    """
    return _Search(space, start, measure, random.Random(seed), share, before_s, should_stop).run()


class _Stopped(Exception):
    """The caller asked to stop."""


class _Search:
    def __init__(
        self,
        space: Space,
        start: Point,
        measure: Measure,
        source: random.Random,
        share: float,
        before_s: float,
        should_stop: Callable[[], bool],
    ) -> None:
        self.space, self.start, self.source, self.share, self.before_s = space, start, source, share, before_s
        self._measure, self._should_stop = measure, should_stop
        self.known: dict[Point, _PointScores] = {}
        self.spent_s, self.best_work_s = 0.0, math.inf
        self.unit_s = 0.0  # what one full trial costs
        self.noise, self.patience = LEAST_NOISE, HOPELESS

    def run(self) -> SearchRanking:
        try:
            if self.space.size <= SMALL_SPACE:
                for point in self.space.points():
                    self._try(point, FULL)
                self._finals(math.inf)
            else:
                self._probe()
                budget_s = self.share * self.space.size * self.unit_s - self.before_s
                self._explore(self.spent_s + (1 - FINALS_SHARE) * (budget_s - self.spent_s))
                self._finals(budget_s - self.spent_s)
        except _Stopped:
            pass
        return self._found()

    # ---- stages ------------------------------------------------------------------------------------------------------

    def _probe(self) -> None:
        """Measure the start, which shows the cost of a trial.
        If it does not work, try others until a few have worked.
        """
        for point in [self.start, *self._spread_points(self.space.size)]:
            if self._try(point, BRIEF) > -math.inf and (point == self.start or len(self._best(BRIEF)) >= PROBES):
                break
        for best in self._best(BRIEF)[:1]:
            brief = self.known[best].score(BRIEF)
            self.unit_s = self._measure_in_full(best)
            if self.known[best].full:
                full = self.known[best].full[0]
                self.patience = HOPELESS * (1 + abs(full - brief) / max(full, brief))

    def _explore(self, until_s: float) -> None:
        count, half_s = max(3, round(self.space.size / 8)), (self.spent_s + until_s) / 2
        for point in self._spread_points(count):
            if self.spent_s < half_s and point not in self.known:
                self._try(point, BRIEF)
        climbed: set[Point] = set()
        for _ in range(CLIMBS):
            hills = [point for point in self._best(BRIEF) if point not in climbed]
            if hills:
                self._climb(hills[0], until_s, climbed)

    def _climb(self, here: Point, until_s: float, climbed: set[Point]) -> None:
        """Climb until no neighbour is better. Keep moving along an axis as long as it helps."""
        climbed.add(here)
        moving = True
        while moving and self.spent_s < until_s:
            moving = False
            for moves in self._directions():
                there = self.space.step(here, moves)
                while there is not None and self.spent_s < until_s:
                    if self._brief_score(there) <= self._brief_score(here) * (1 + LEAST_NOISE / 2):
                        break
                    here, there, moving = there, self.space.step(there, moves), True
                    climbed.add(here)

    def _directions(self) -> Iterator[dict[int, int]]:
        """Yield steps along one axis, then along two at once: some settings help only together."""
        axes = range(len(self.space.axes))
        for axis in axes:
            yield from ({axis: 1}, {axis: -1})
        for one, other in combinations(axes, 2):
            for a, b in ((1, 1), (-1, -1), (1, -1), (-1, 1)):
                yield {one: a, other: b}

    def _finals(self, budget_s: float) -> None:
        """Measure the finalists in full, in as many rounds as the budget allows, together with the start."""
        finalists = self._best(BRIEF)[:FINALISTS]
        while len(finalists) > 1 and budget_s < len(finalists) * self.unit_s:
            finalists.pop()
        for point in finalists:
            if not self.known[point].full:
                budget_s -= self._measure_in_full(point)
        if self.start not in finalists and self.start in self._best(BRIEF):
            finalists.append(self.start)
        while budget_s >= len(finalists) * self.unit_s and finalists:
            if min(len(self.known[point].full) for point in finalists) >= 3:
                return
            for point in finalists:
                budget_s -= self._measure_in_full(point)

    def _measure_in_full(self, point: Point) -> float:
        before_s = self.spent_s
        self._try(point, FULL)
        return self.spent_s - before_s

    # ---- one point ---------------------------------------------------------------------------------------------------

    def _brief_score(self, point: Point) -> float:
        """Return the brief score of a point; measure it if unknown."""
        known = self.known.get(point)
        return known.score(BRIEF) if known is not None else self._try(point, BRIEF)

    def _try(self, point: Point, effort: float) -> float:
        if self._should_stop():
            raise _Stopped
        deadline_s = None
        if effort == BRIEF and math.isfinite(self.best_work_s):
            deadline_s = self.patience * self.best_work_s + GRACE_S
        outcome = self._measure(point, effort, deadline_s)
        self.spent_s += outcome.cost_s
        known = self.known.setdefault(point, _PointScores())
        if outcome.score is None:
            known.refused = True
            return -math.inf
        known.tie = outcome.tie
        (known.brief if effort == BRIEF else known.full).append(outcome.score)
        if effort == BRIEF:
            self.best_work_s = min(self.best_work_s, outcome.work_s)
        return known.score(effort)

    def _spread_points(self, count: int) -> list[Point]:
        """Return `count` points, each as far as possible from the start and the previous ones."""
        left = [point for point in self.space.points() if point != self.start]
        self.source.shuffle(left)
        chosen: list[Point] = []
        near = {point: self._distance(point, self.start) for point in left}
        while near and len(chosen) < min(count, 24):
            furthest = max(near, key=lambda point: near[point])
            chosen.append(furthest)
            del near[furthest]
            for point in near:
                near[point] = min(near[point], self._distance(point, furthest))
        return chosen

    def _distance(self, one: Point, other: Point) -> float:
        """Return the squared distance, with every axis scaled to length one."""
        spans = [max(1, len(axis.values) - 1) for axis in self.space.axes]
        return math.fsum(((a - b) / span) ** 2 for a, b, span in zip(one, other, spans, strict=True))

    # ---- the answer --------------------------------------------------------------------------------------------------

    def _best(self, effort: float) -> list[Point]:
        """Return all points that work, best first."""
        working = [point for point, known in self.known.items() if known.score(effort) > -math.inf]
        return sorted(working, key=lambda point: -self.known[point].score(effort))

    def _found(self) -> SearchRanking:
        self._estimate_noise()
        in_full = [point for point in self._best(FULL) if self.known[point].full]
        others = [point for point in self._best(FULL) if not self.known[point].full]
        ranking = self._start_before_its_equals(self._break_ties(in_full) + self._break_ties(others))
        start = self.known.get(self.start)
        gain, noise, is_clear = None, self.noise, False
        if start is not None and start.full and ranking and self.known[ranking[0]].full:
            gain = self.known[ranking[0]].score(FULL) / start.score(FULL) - 1
            noise, is_clear = self._noise_beside_start(ranking[0]), self._is_clearly_better(ranking[0])
        return SearchRanking(tuple(ranking), noise, self.spent_s, gain, is_clear)

    def _start_before_its_equals(self, ranking: list[Point]) -> list[Point]:
        """Return the ranking with the start before every point that neither is clearly better nor wins a tie."""
        start = self.known.get(self.start)
        if start is None or not start.full or self.start not in ranking:
            return ranking
        least = start.score(FULL) * (1 - min(self.noise, MOST_NOISE))

        def wins_tie(known: _PointScores) -> bool:
            return bool(known.full) and known.tie > start.tie and known.score(FULL) >= least

        before = ranking[: ranking.index(self.start)]
        better = [point for point in before if wins_tie(self.known[point]) or self._is_clearly_better(point)]
        return better + [self.start] + [point for point in ranking if point != self.start and point not in better]

    def _noise_beside_start(self, point: Point) -> float:
        """Return the noise of a comparison with the start: repeated measurements of these two points may differ by more
        than measurements of other points.
        """
        return max(self.noise, _spread(self.known[point].full), _spread(self.known[self.start].full))

    def _is_clearly_better(self, point: Point) -> bool:
        """Return whether the point beats the start beyond doubt. All full measurements of the point must be better than
        all of the start, and their mean better than the start's brief ones as well.
        """
        mine, its = self.known[point], self.known[self.start]
        if not mine.full or not its.full or statistics.fmean(mine.full) <= max(its.brief, default=0.0):
            return False
        return is_clearly_better(mine.full, its.full, self.noise)

    def _estimate_noise(self) -> None:
        """Set the noise to the median difference between repeated full measurements of a point.

        If no point was measured twice, use how differently the points' scores changed from brief to full.
        """
        working = [known for known in self.known.values() if known.full and not known.refused]
        spreads = [_spread(known.full) for known in working if len(known.full) > 1]
        if not spreads:
            changes = [known.score(FULL) / known.score(BRIEF) for known in working if known.brief]
            spreads = [_spread(changes)] if len(changes) > 1 else []
        self.noise = max(LEAST_NOISE, statistics.median(spreads)) if spreads else LEAST_NOISE

    def _break_ties(self, points: list[Point]) -> list[Point]:
        """Rank the points. Those within the noise of the best come first, in the order of the tie-breaker; among equal
        tie-breakers the start wins.
        """
        if not points:
            return []
        best = self.known[points[0]].score(FULL)
        band = min(self.noise, MOST_NOISE)
        tied = [point for point in points if self.known[point].score(FULL) >= best * (1 - band)]
        tied.sort(key=lambda point: (-self.known[point].tie, point != self.start, -self.known[point].score(FULL)))
        return tied + points[len(tied) :]
