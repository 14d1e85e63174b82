"""The remaining time of a tuning run: an estimate and an upper bound. The search may stop earlier.

Does not know: what the search tries next.
"""

from __future__ import annotations

from dataclasses import dataclass

from localllm.tuning.run import PhaseBegan, SoakEnded, TuningRun
from localllm.tuning.search import FINALISTS, FULL, SMALL_SPACE


@dataclass(frozen=True, slots=True)
class RemainingTime:
    """Time that the search and the soak took and will take; the phases before them are short."""

    spent_s: float
    left_s: float

    @property
    def fraction(self) -> float:
        return self.spent_s / (self.spent_s + self.left_s) if self.spent_s + self.left_s else 0.0


def remaining_time(run: TuningRun, soaking_s: float = 0.0) -> RemainingTime | None:
    """Return the times, or None before the size of the search is known. soaking_s: time since the soak began."""
    if run.searched is None:
        return None
    full = [trial.cost_s for trial in run.trials if trial.effort == FULL and trial.was_measured]
    unit_s = full[0] if full else run.options.trial_s + 1
    size = run.searched.size
    budget_s = unit_s * (run.options.share * size if size > SMALL_SPACE else size + 2 * FINALISTS)
    spent_s = sum(trial.cost_s for trial in run.trials)
    soaks = any(isinstance(event, PhaseBegan) and event.name == "soak" for event in run.events)
    soaked = any(isinstance(event, SoakEnded) for event in run.events)
    search_left_s = 0.0 if soaks else max(0.0, budget_s - spent_s)
    soak_left_s = 0.0 if soaked else max(0.0, run.options.soak_s - soaking_s)
    return RemainingTime(spent_s + soaking_s, search_left_s + soak_left_s)
