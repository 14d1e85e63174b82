"""The output of `tune`: a live table of trials at a terminal, otherwise a line per event, and a summary at the end.

Every figure is marked as predicted or measured; failed trials stay visible.
Does not know: how trials are chosen and measured.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from localllm.serving.phases import Phase
from localllm.terminal import print_table
from localllm.tuning.figures import Trial
from localllm.tuning.run import BestChanged, Event, PhaseBegan, SoakEnded, TrialBegan, TrialEnded, TuningResult
from localllm.tuning.words import (
    each_in_words,
    gain_in_words,
    load_in_words,
    predicted_and_measured,
    settings_in_short,
    soak_in_words,
)
from localllm.units import format_bytes, format_count, format_rate, format_seconds

SHOWN = 12  # number of last trials shown
COLUMNS = ("", "settings", "trial", "score", "TTFT", "per token", "tok/s each", "tok/s", "planned", "measured")


class TuneOutput(Protocol):
    """Displays the events of a run."""

    def phase(self, phase: Phase) -> None: ...
    def event(self, event: Event) -> None: ...


def output_for(as_json: bool) -> AbstractContextManager[TuneOutput]:
    """Return what displays the run. With --json, progress goes to standard error."""
    if sys.stdout.isatty() and not as_json:
        return _live(Console(highlight=False))
    return _lines(sys.stderr if as_json else sys.stdout)


@contextmanager
def _lines(out: TextIO) -> Iterator[TuneOutput]:
    yield TuneLines(out)


@contextmanager
def _live(console: Console) -> Iterator[TuneOutput]:
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        yield TuneTable(live)


class TuneLines:
    """Prints a line for each event."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def phase(self, phase: Phase) -> None:
        if phase.done:
            self._say(f"{phase.name}: {phase.detail}")

    def event(self, event: Event) -> None:
        match event:
            case PhaseBegan(name, detail):
                self._say(f"{name}: {detail}")
            case TrialBegan() if loads := load_in_words(event):
                self._say(f"trial {event.number}: {loads}")
            case TrialEnded(trial):
                self._say("  ".join(cell for cell in row(trial) if cell))
            case BestChanged(trial):
                self._say(f"best so far: {trial.flags}")
            case SoakEnded(_, report):
                self._say(f"soak: {soak_in_words(report)}")

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)


class TuneTable:
    """Shows the best trial, the last trials and the current phase."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._trials: list[Trial] = []
        self._best: Trial | None = None
        self._now = ""

    def phase(self, phase: Phase) -> None:
        self._now = f"{phase.name}  {phase.detail}"
        self._draw()

    def event(self, event: Event) -> None:
        match event:
            case PhaseBegan(name, detail):
                self._now = f"{name}  {detail}"
                if name == "search":
                    self._live.console.print(self._now, markup=False)
            case TrialBegan(number, settings, _, predicted):
                planned = f" · {format_bytes(predicted.total_bytes)} planned" if predicted else ""
                loads = f" · {words}" if (words := load_in_words(event)) else ""
                self._now = f"trial {number}  {settings_in_short(settings)}{planned}{loads}"
            case TrialEnded(trial):
                self._trials.append(trial)
            case BestChanged(trial):
                self._best = trial
            case SoakEnded(_, report):
                self._live.console.print(f"soak  {soak_in_words(report)}", markup=False)
        self._draw()

    def _draw(self) -> None:
        table = Table(*COLUMNS, title=self._now, title_justify="left", box=None, pad_edge=False)
        if self._best is not None:
            table.add_row(*row(self._best), style="bold green")
        for trial in self._trials[-SHOWN:]:
            table.add_row(*row(trial), style=None if trial.was_measured else "dim")
        self._live.update(table)


def row(trial: Trial) -> tuple[str, ...]:
    """Return a trial's cells. All figures are measured, except the planned memory and what is named as expected."""
    planned = format_bytes(trial.predicted.total_bytes) if trial.predicted else ""
    head = (f"{trial.number}", settings_in_short(trial.settings), "full" if trial.effort == 1 else "brief")
    figures = trial.figures
    if figures is None or trial.score is None:
        return (*head, trial.fate, trial.why[:60], "", each_in_words(trial), "", planned, "")
    ttft = format_seconds(figures.ttft_p50_s) if figures.ttft_p50_s is not None else ""
    tpot = format_seconds(figures.tpot_p50_s) if figures.tpot_p50_s is not None else ""
    speed = format_rate(figures.output_tokens_per_s, "")
    each, held = each_in_words(trial), format_bytes(figures.peak_bytes)
    return (*head, f"{trial.score:.1f}", ttft, tpot, each, speed.strip(), planned, held)


# ---- the end ---------------------------------------------------------------------------------------------------------


def summary(result: TuningResult, out: TextIO) -> None:
    """Print the best settings, their predicted and measured figures, and the alternatives."""
    goal = result.goal
    tried = sum(trial.was_measured for trial in result.trials)
    ended = "Cancelled after" if result.was_cancelled else "Tuned in"
    print(
        f"\n{ended} {format_seconds(result.seconds)} for {goal.name}: {len(result.trials)} trials, {tried} measured, "
        f"of {result.grid_size} combinations"
        + (f"; {format_seconds(result.reload_s)} for loads that moved experts" if result.reload_s else ""),
        file=out,
    )
    for value, agreement in result.agreements.items():
        print(f"KV cache in {value}: {agreement}", file=out)
    if result.pick is None:
        return
    print(f"\nPick    {result.pick.flags or 'the defaults'}\n        {gain_in_words(result)}", file=out)
    print("\nPredicted and measured", file=out)
    print_table(predicted_and_measured(result), out)
    if len(result.pareto) > 1:
        print("\nAlternatives: no other trial is better in speed, time to first token and context at once", file=out)
        rows = [("tok/s", "TTFT", "context", "settings")] + [_pareto_row(trial) for trial in result.pareto]
        print_table(rows, out)


def _pareto_row(trial: Trial) -> tuple[str, str, str, str]:
    figures = trial.figures
    assert figures is not None
    ttft = format_seconds(figures.ttft_p50_s) if figures.ttft_p50_s is not None else "-"
    return f"{figures.output_tokens_per_s:.1f}", ttft, format_count(figures.context), settings_in_short(trial.settings)
