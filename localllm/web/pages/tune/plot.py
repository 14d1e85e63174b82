"""Plot trials: tokens per second against time to first token, or against context if the goal is a long context.

Does not know: templates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from localllm.tuning.figures import LoadMetrics, Trial, best_measurements, pareto
from localllm.tuning.words import settings_in_words
from localllm.units import format_count, format_rate, format_seconds
from localllm.web.pages.frame.views import View, view


@dataclass(frozen=True, slots=True)
class Point:
    """A trial in the plot; coordinates are in the plot's box."""

    x: float
    y: float
    kind: str  # other, pareto, pick
    label: str


@dataclass(frozen=True, slots=True)
class ParetoRow:
    """A Pareto-optimal trial, as text."""

    number: int
    rate: str
    ttft: str
    context: str
    settings: str
    is_pick: bool = False


@view("tune/_scatter.html")
class Scatter(View):
    """Speed against its cost. The line joins the Pareto-optimal trials."""

    points: tuple[Point, ...]
    line: str  # "x,y x,y ..."
    title: str
    x_title: str
    x_low: str
    x_high: str
    y_low: str
    y_high: str
    rows: tuple[ParetoRow, ...]
    legend: tuple[tuple[str, str], ...]  # kind and words of the points that are there


WIDTH, HEIGHT, EDGE = 480, 260, 14
LEGEND = (("pareto", "no other trial beats it in speed, time to first token and context at once"), ("other", "others"))


def scatter(trials: Sequence[Trial], pick: Trial | None, *, by_context: bool, pick_is: str) -> Scatter:
    """Return the plot. For each set of settings it shows the most reliable trial: a brief one says
    little about speed. pick_is: words for the pick in the legend.
    """
    measured = best_measurements(trials)
    best = pareto(measured)
    x_of: Callable[[LoadMetrics], float] = (
        (lambda f: float(f.context)) if by_context else (lambda f: f.ttft_p50_s or 0.0)
    )
    figures = [trial.figures for trial in measured if trial.figures is not None]
    xs, ys = [x_of(each) for each in figures], [each.output_tokens_per_s for each in figures]

    def place(figures: LoadMetrics) -> tuple[float, float]:
        x = _share(x_of(figures), xs) * (WIDTH - 2 * EDGE) + EDGE
        y = HEIGHT - EDGE - _share(figures.output_tokens_per_s, ys) * (HEIGHT - 2 * EDGE)
        return round(x, 1), round(y, 1)

    numbers = {trial.number for trial in best}
    points = []
    for trial in measured:
        assert trial.figures is not None
        is_pick = pick is not None and trial.settings == pick.settings
        kind = "pick" if is_pick else "pareto" if trial.number in numbers else "other"
        points.append(Point(*place(trial.figures), kind, f"Trial {trial.number}: {_in_words(trial.figures)}"))
    points.sort(key=lambda point: ("other", "pareto", "pick").index(point.kind))  # draw the pick last
    kinds = {point.kind for point in points}
    line = " ".join(f"{x},{y}" for x, y in sorted(place(trial.figures) for trial in best if trial.figures))
    write = format_count if by_context else format_seconds
    return Scatter(
        points=tuple(points),
        line=line if len(best) > 1 else "",
        title="Speed against context" if by_context else "Speed against time to first token",
        x_title="tokens of context" if by_context else "time to first token",
        x_low=write(min(xs)) if xs else "",
        x_high=write(max(xs)) if len(measured) > 1 else "",
        y_low=format_rate(min(ys)) if len(measured) > 1 else "",
        y_high=format_rate(max(ys)) if ys else "",
        rows=tuple(_row(trial, pick) for trial in best),
        legend=tuple((kind, words) for kind, words in (("pick", pick_is), *LEGEND) if kind in kinds),
    )


def _share(value: float, values: Sequence[float]) -> float:
    low, high = min(values), max(values)
    return (value - low) / (high - low) if high > low else 0.5


def _in_words(figures: LoadMetrics) -> str:
    ttft = f", {format_seconds(figures.ttft_p50_s)} time to first token" if figures.ttft_p50_s is not None else ""
    return f"{format_rate(figures.output_tokens_per_s)}{ttft}, context {format_count(figures.context)}"


def _row(trial: Trial, pick: Trial | None) -> ParetoRow:
    figures = trial.figures
    assert figures is not None
    return ParetoRow(
        trial.number,
        format_rate(figures.output_tokens_per_s),
        format_seconds(figures.ttft_p50_s) if figures.ttft_p50_s is not None else "–",
        format_count(figures.context),
        settings_in_words(trial.settings) or "the defaults",
        pick is not None and trial.settings == pick.settings,
    )
