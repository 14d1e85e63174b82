"""The texts about a tuning run, the same in a terminal and on a page.

Does not know: terminals, pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from localllm.models.fit.speed import round_speed, speed_in_words
from localllm.tuning.figures import Predicted, Trial
from localllm.tuning.goals import Goal
from localllm.tuning.run import TrialBegan, TuningResult
from localllm.tuning.search import BRIEF, FULL
from localllm.tuning.soak import SoakReport
from localllm.units import format_bytes, format_count, format_seconds

SHORT = {  # setting -> its name in a line of a terminal
    "max_num_seqs": "seqs", "max_num_batched_tokens": "tokens", "kv_cache_dtype": "kv", "max_model_len": "context",
    "gpu_memory_utilization": "share", "kv_cache_memory_bytes": "kv bytes", "enforce_eager": "eager",
    "speculative": "drafts", "kv_offloading_size": "kv ram", "n_cpu_moe": "layers in ram", "weights_on": "experts on",
    "expert_cache_gib": "expert cache",
}  # fmt: skip


LABELS = {
    "max_num_seqs": "Requests at a time", "max_num_batched_tokens": "Tokens per step",
    "kv_cache_dtype": "KV cache type", "max_model_len": "Context", "gpu_memory_utilization": "Share of the GPU",
    "kv_cache_memory_bytes": "KV cache size", "enforce_eager": "CUDA graphs",
    "speculative": "Drafts", "kv_offloading_size": "KV in RAM", "n_cpu_moe": "Layers in RAM",
    "weights_on": "Experts", "expert_cache_gib": "Expert cache",
}  # fmt: skip
"""Setting -> the head of its column."""


def setting_in_words(name: str, value: Any) -> str:
    """Return the value of a setting, for a column under `LABELS[name]`."""
    if name == "enforce_eager":
        return "off" if value else "on"
    if value is None or value == "auto" or (name == "expert_cache_gib" and not value):
        return "automatic"
    if name == "kv_cache_memory_bytes":
        return format_bytes(value)
    if name == "weights_on":
        return {"ram": "in RAM", "disk": "on disk"}[value]
    if name in ("kv_offloading_size", "expert_cache_gib"):
        return f"{value:g} GiB"
    if name == "gpu_memory_utilization":
        return f"{value:.0%}"
    return format_count(value) if isinstance(value, int) else str(value)


def settings_in_words(settings: Mapping[str, Any]) -> str:
    """Return settings as a line: `64 requests at a time, 2,048 tokens per step, KV cache type int8`."""
    counted = ("max_num_seqs", "max_num_batched_tokens")
    words = []
    for name, value in settings.items():
        shown, label = setting_in_words(name, value), LABELS[name]
        label = label if label[:2].isupper() else f"{label[:1].lower()}{label[1:]}"
        words.append(f"{shown} {label}" if name in counted and value is not None else f"{label} {shown}")
    return ", ".join(words)


def settings_in_short(settings: Mapping[str, Any]) -> str:
    shown = {
        SHORT[name]: "auto" if value is None or (name == "expert_cache_gib" and not value) else value
        for name, value in settings.items()
    }
    return " ".join(f"{name} {value}" for name, value in shown.items())


def load_in_words(began: TrialBegan) -> str:
    """Return what the load before a trial is expected to take: the model is loaded again, about 40 s. Empty: there is
    none."""
    return f"the model is loaded again, about {format_seconds(began.reload_s)}" if began.reload_s else ""


def each_in_words(trial: Trial) -> str:
    """Return the measured and the expected tokens/s of each answer while it is generated: 25 (expected 19 to 31).
    Empty: neither is known."""
    expected = expected_in_words(trial.predicted)
    tpot_s = trial.figures.tpot_p50_s if trial.figures is not None else None
    if not tpot_s:
        return expected
    seen = f"{round_speed(1 / tpot_s):,g}"
    return f"{seen} ({expected})" if expected else seen


def expected_in_words(predicted: Predicted | None) -> str:
    """Return the expected tokens/s of each answer: expected 19 to 31; empty: unknown."""
    each = None if predicted is None else predicted.each_tokens_per_s
    return "" if each is None else f"expected {speed_in_words(each).removesuffix(' tokens/s')}"


def soak_in_words(report: SoakReport) -> str:
    longest = f"longest {format_count(report.longest_tokens)} tokens"
    words = f"{report.finished} answered, {report.cancelled} cancelled on purpose, {longest}"
    return (
        f"{words}, no failure" if report.passed else f"{words}, {report.failures} failed: {report.why or 'no answer'}"
    )


def gain_in_words(result: TuningResult, start: str = "the planner's defaults") -> str:
    """Return a sentence on the pick's score and gain. Requires `result.pick`. start: what `result.start` is."""
    gain = drafts_gain(result)
    if gain is None:
        return _score_and_gain(result, start)
    share = f"{gain:+.0%}" if abs(gain) > result.noise else "no clear gain"
    return f"{_score_and_gain(result, start)}; drafts: {share} compared with the same settings without drafts"


def drafts_gain(result: TuningResult) -> float | None:
    """Return the relative gain of drafts in trials with the pick's settings; None if one of both was not measured."""
    if result.pick is None or result.pick.settings.get("speculative") != "auto":
        return None
    without = {**result.pick.settings, "speculative": "off"}
    for effort in (FULL, BRIEF):
        on, off = (
            [trial.score for trial in result.trials if trial.settings == settings and trial.effort == effort]
            for settings in (result.pick.settings, without)
        )
        scores = [[score for score in each if score is not None] for each in (on, off)]
        if all(scores):
            return fmean(scores[0]) / fmean(scores[1]) - 1
    return None


BUSY_NOISE = 0.3
"""Measurements that differ by more than this share tell of other work on the machine."""


def _score_and_gain(result: TuningResult, start: str) -> str:
    pick, goal = result.pick, result.goal
    assert pick is not None
    assert pick.score is not None
    score = f"{goal.in_words(pick.score)} measured"
    if result.start is None:
        return score
    noise = f"two measurements of the same settings differ by {result.noise:.0%}"
    if result.noise > BUSY_NOISE:
        noise = "the machine was busy: tune again when it is idle"
    if result.keeps_start and result.gain is None and result.soak is not None:
        return f"{score} with {start}: better settings failed the soak test"
    if result.keeps_start:
        alone = len({trial.flags for trial in result.trials if trial.was_measured}) < 2
        what = "no other settings could be measured" if alone else "no other settings are clearly better"
        return f"{score} with {start}: {what}" + ("" if alone or result.was_cancelled else f" ({noise})")
    if result.gain is None:
        return f"{score}: not compared with {start}"
    if result.is_clear:
        return f"{score}: {result.gain:+.0%} over {start} ({noise})"
    if result.start.figures is not None and pick.figures is not None:
        longer = f"context {format_count(pick.figures.context)} instead of {format_count(result.start.figures.context)}"
        return f"{score}: as fast as {start}, {longer} tokens ({noise})"
    return f"{score}: no measurable gain over {start} ({noise})"


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
    expected, tpot_s = pick.predicted.each_tokens_per_s, pick.figures.tpot_p50_s
    if expected is not None and tpot_s:
        rows.append(("speed of each answer", speed_in_words(expected), f"{round_speed(1 / tpot_s):,g} tokens/s"))
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
