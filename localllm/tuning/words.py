"""The texts about a tuning run, the same in a terminal and on a page.

Does not know: terminals, pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from localllm.tuning.figures import Trial
from localllm.tuning.goals import Goal
from localllm.tuning.run import TuningResult
from localllm.tuning.soak import SoakReport
from localllm.units import format_bytes, format_count

SHORT = {
    "max_num_seqs": "seqs", "max_num_batched_tokens": "tokens", "kv_cache_dtype": "kv", "max_model_len": "context",
    "gpu_memory_utilization": "share", "kv_cache_memory_bytes": "kv bytes", "enforce_eager": "eager",
}  # fmt: skip


def settings_in_short(settings: Mapping[str, Any]) -> str:
    shown = {SHORT[name]: "auto" if value is None else value for name, value in settings.items()}
    return " ".join(f"{name} {value}" for name, value in shown.items())


def soak_in_words(report: SoakReport) -> str:
    longest = f"longest {format_count(report.longest_tokens)} tokens"
    words = f"{report.finished} answered, {report.cancelled} cancelled, {longest}"
    return (
        f"{words}, no failure" if report.passed else f"{words}, {report.failures} failed: {report.why or 'no answer'}"
    )


def gain_in_words(result: TuningResult) -> str:
    """Return a sentence on the pick's score and gain. Requires `result.pick`."""
    pick, goal = result.pick, result.goal
    assert pick is not None
    assert pick.score is not None
    score = f"{goal.in_words(pick.score)} measured"
    if result.start is None or result.start.settings == pick.settings:
        return f"{score}: the planner's default settings"
    if result.gain is None:
        return score
    noise = f"two measurements of the same settings differ by {result.noise:.0%}"
    if not result.is_gain_real:
        return f"{score}: no measurable gain over the planner's defaults ({noise})"
    return f"{score}: {result.gain:+.0%} over the planner's defaults ({noise})"


def predicted_and_measured(result: TuningResult) -> Sequence[tuple[str, str, str]]:
    """Return rows of name, predicted value and measured value. Requires `result.pick`."""
    pick, goal = result.pick, result.goal
    assert pick is not None
    assert pick.figures is not None
    assert pick.predicted is not None
    rows = [("memory", format_bytes(pick.predicted.total_bytes), f"{format_bytes(pick.figures.peak_bytes)} at most")]
    if result.soak is not None:
        rows[0] = (*rows[0][:2], f"{rows[0][2]} under the goal's load")
        rows.append(
            ("context", format_count(pick.predicted.context), f"{format_count(result.soak.longest_tokens)} in the soak")
        )
    brief = [trial for trial in result.trials if trial.settings == pick.settings and trial.effort < 1 and trial.score]
    if brief and pick.effort == 1:
        rows.append(
            (goal.unit, _number(goal, brief[-1]) + " in a brief trial", _number(goal, pick) + " in a full trial")
        )
    return rows


def _number(goal: Goal, trial: Trial) -> str:
    assert trial.score is not None
    return goal.in_words(trial.score).removesuffix(goal.unit).strip()


def nothing_worked(result: TuningResult) -> str:
    """Return the first reasons why there is no pick."""
    whys = list(dict.fromkeys(f"{trial.fate}: {trial.why}" for trial in result.trials if not trial.was_measured))
    if result.soak is not None and not result.soak.passed:
        whys.insert(0, f"The soak failed: {result.soak.why}")
    return "; ".join(whys[:3])
