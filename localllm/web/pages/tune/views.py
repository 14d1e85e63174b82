"""The tuning wizard: its four steps, made from a run and its trials.

Does not know: HTTP, how a run works (wizard.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

from localllm.errors import LocalLLMError, UnsupportedOption
from localllm.serving.entry import ModelEntry
from localllm.tuning.figures import Trial, flags_of
from localllm.tuning.goals import Goal
from localllm.tuning.profile import as_flags, as_toml
from localllm.tuning.run import FLOOR_SHARE, TuneOptions, TuningResult
from localllm.tuning.space import fixed_by, placements_of
from localllm.tuning.words import (
    LABELS,
    each_in_words,
    expected_in_words,
    gain_in_words,
    load_in_words,
    nothing_worked,
    predicted_and_measured,
    setting_in_words,
    settings_in_words,
    soak_in_words,
)
from localllm.units import format_bytes, format_count, format_rate, format_seconds
from localllm.web.pages.frame.errors import notice
from localllm.web.pages.frame.views import ErrorNotice, Fact, LoadPhase, Shell, View, view
from localllm.web.pages.tune.forms import LimitFields
from localllm.web.pages.tune.plot import Scatter, scatter
from localllm.web.pages.tune.saved_profiles import ProfileTable
from localllm.web.pages.tune.wizard import Job

Step = Literal["goal", "limits", "run", "result"]


@dataclass(frozen=True, slots=True)
class StepMark:
    """One of the four steps, as shown at the top of each page."""

    title: str
    state: Literal["done", "current", "ahead"]
    url: str = ""  # empty: the step cannot be opened


@view("tune/_steps.html")
class WizardSteps(View):
    """The four steps, with the current one marked."""

    marks: tuple[StepMark, ...]


@view("tune/_goal.html")
class GoalCard(View):
    """One goal to choose."""

    name: str
    what: str  # who the goal is for
    best: str  # the value that tuning maximises
    load: str  # the load that simulates this use
    url: str
    icon: str  # SVG path data: strokes in a 20 by 20 box


@view("tune/goal.html")
class GoalPage(View):
    """`/tune`."""

    shell: Shell
    steps: WizardSteps
    model: str  # the model to tune; empty: there is none
    models: tuple[str, ...]  # the models to choose from
    goals: tuple[GoalCard, ...]
    plans: ProfileTable
    under_way: str = ""  # the goal of the current run
    has_result: bool = False


@dataclass(frozen=True, slots=True)
class Effort:
    """The time that a run may take."""

    name: str
    title: str
    what: str
    is_chosen: bool = False


@dataclass(frozen=True, slots=True)
class PlacesOffer:
    """The choice to try other places of the experts."""

    places: str
    cost: str
    is_chosen: bool


@view("tune/limits.html")
class LimitsPage(View):
    """`/tune/limits`."""

    shell: Shell
    steps: WizardSteps
    model: str
    goal: GoalCard
    typed: LimitFields
    efforts: tuple[Effort, ...]
    asks_people: bool
    own_limit: str  # the goal's default limit, in words; empty: none
    context_note: str  # the context that tuning requires if the field is empty, and the model's limit
    open_requests: int
    drain: str  # how long running requests may take to finish
    places: PlacesOffer | None = None  # None: no experts are in RAM beside a GPU or on disk
    error: ErrorNotice | None = None


@dataclass(frozen=True, slots=True)
class TrialRow:
    """One trial: `why` is set if it was refused, the figures if it was measured."""

    number: int
    settings: tuple[str, ...]  # a value for each head of the table
    effort: str
    kind: str  # measured, refused, under-way
    fate: str
    why: str
    score: str
    ttft: str
    tpot: str
    each: str  # tokens/s of each answer: measured, and expected
    rate: str
    planned: str
    measured: str
    is_best: bool = False


@view("tune/_trials.html")
class TrialTable(View):
    """All trials, the newest first."""

    rows: tuple[TrialRow, ...]
    heads: tuple[tuple[str, str], ...]  # of the settings' columns: words, flag
    unit: str
    measured: int
    refused: int
    best_is: str = "best"  # the tag of the best trial


@view("tune/_progress.html")
class RunProgress(View):
    """The progress of the run, with a button to cancel it."""

    model: str
    goal: str
    phases: tuple[LoadPhase, ...]
    now: str  # one line
    elapsed_s: float
    left_s: float | None  # None: not known yet
    fraction: float | None
    is_cancelled: bool


@view("tune/_best.html")
class Best(View):
    """The best trial so far."""

    score: str  # empty: nothing has been measured yet
    settings: str
    facts: tuple[Fact, ...]


@view("tune/run.html")
class RunPage(View):
    """`/tune/run`."""

    shell: Shell
    steps: WizardSteps
    progress: RunProgress
    best: Best
    scatter: Scatter
    trials: TrialTable


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two values of one quantity."""

    name: str
    one: str
    other: str


@dataclass(frozen=True, slots=True)
class RecommendedSettings:
    """The recommended settings, with the actions on them."""

    title: str
    advice: Literal["apply", "keep"]  # keep: these settings run already, or are not known to be better
    settings: str  # in words
    gain: str
    predicted: tuple[Comparison, ...]  # predicted, measured
    before: tuple[Comparison, ...]  # recommended, running now; empty: they are the same
    soak: str
    soak_passed: bool | None  # None: there was no soak test
    flags: str
    toml: str
    name: str  # the name to save the profile under
    saved_as: str
    is_applied: bool


@view("tune/result.html")
class ResultPage(View):
    """`/tune/result`."""

    shell: Shell
    steps: WizardSteps
    model: str
    goal: str
    verdict: str
    notes: tuple[str, ...]
    found: RecommendedSettings | None
    scatter: Scatter
    trials: TrialTable
    failure: ErrorNotice | None = None  # why there is no recommendation
    error: ErrorNotice | None = None  # the error of the last action


BEST = {
    "chat": "answers per minute for one user",
    "agents": "turns per minute",
    "throughput": "output tokens per second",
    "long-context": "the context length, as long as the wait for the first token stays within its limit",
    "share": "answers per minute for each concurrent user",
    "edit": "answers per minute for one user, with drafts or without",
}

ICONS = {
    "chat": "M3 4.5h14v9H9l-3.5 3v-3H3z",
    "agents": "M6 3.5h8v5H6zM3 12h5v4.5H3zM12 12h5v4.5h-5zM10 8.5V10M5.5 12V10h9v2",
    "throughput": "M3 5h9M3 10h14M3 15h11M15 3.5 17.5 5 15 6.5",
    "long-context": "M5 3h8l3 3v11H5zM8 8h5M8 11h5M8 14h3",
    "share": "M7 9a2.6 2.6 0 1 0 0-5.2A2.6 2.6 0 0 0 7 9zM2.5 16.5c0-3 2-4.5 4.5-4.5s4.5 1.5 4.5 4.5"
    "M13.5 9.5a2 2 0 1 0 0-4M14 12c2 .2 3.5 1.6 3.5 4",
    "edit": "M4 16l.8-3.6L13.4 3.8l2.8 2.8-8.6 8.6zM11.5 5.7l2.8 2.8M10.5 16H16",
}

TITLES = {
    "calibrate": "Measuring one round", "guard": "Checking the 8-bit KV cache", "search": "Trials", "soak": "Soak test",
    "placement": "Other places of the experts",
}  # fmt: skip

RUNS_NOW = "what runs now"
SHOWN = 200  # trials shown, the last ones; this limits the size of the page


def goal_card(goal: Goal, model: str) -> GoalCard:
    streams = f"{goal.streams} requests" if goal.streams > 1 else "One request"
    load = f"{streams} at a time; tokens of each: {goal.lengths}"
    if goal.fills_context:
        load = "One prompt that fills 90 % of the context"
    url = f"/tune/limits?goal={goal.name}" + (f"&model={quote(model, safe='')}" if model else "")
    return GoalCard(goal.name, goal.what, BEST[goal.name], load, url, ICONS[goal.name])


def steps(here: str, *, runs: bool = False, ended: bool = False, goal: str = "") -> WizardSteps:
    """Return the step marks. Earlier steps are links; later ones are, too, if they have something to show."""
    urls = {
        "goal": "/tune",
        "limits": f"/tune/limits?goal={goal}" if goal else "",
        "run": "/tune/run" if runs else "",
        "result": "/tune/result" if ended else "",
    }
    order = list(urls)
    at = order.index(here)
    return WizardSteps(
        tuple(
            StepMark(name.capitalize(), "done" if i < at else "current" if i == at else "ahead", url if i != at else "")
            for i, (name, url) in enumerate(urls.items())
        )
    )


def context_note(goal: Goal, longest: int | None) -> str:
    """Return which context tuning requires if the user sets none, and the model's own limit. longest: that limit; None:
    unknown.
    """
    limit = f"The model supports at most {format_count(longest)}." if longest is not None else ""
    if not goal.comfortable_context:
        return limit
    share = f"{FLOOR_SHARE:.0%} of the longest context that fits here"
    if longest is None or longest > goal.comfortable_context:
        share = f"{format_count(goal.comfortable_context)}, or {share} if that is less"
    return f"If empty, at least {share}. {limit}".strip()


def places_offer(entry: ModelEntry | None, chosen: bool | None) -> PlacesOffer | None:
    """Return the choice to try other places of the experts, and what it costs; None: there are none. chosen: in the
    form; None: chosen by itself where no setting of the user says where experts are."""
    served = entry.served if entry is not None else None
    if entry is None or served is None or entry.settings is None or served.plan.far is None:
        return None
    engine, fixed = entry.settings.engine, fixed_by(entry.settings)
    try:
        places = placements_of(
            served.plan, engine, fixed, served.tuned, "on", is_mixture=served.spec.mixture is not None
        )
    except UnsupportedOption:
        return None
    each_s, most_s = served.load_s, TuneOptions().reload_s
    words = "; ".join(
        settings_in_words({name: value for name, value in each.items() if places.loaded[name] != value})
        for each in places.others
    )
    cost = (
        f"Each loads {entry.name} again, which took {format_seconds(each_s)} last time: about "
        f"{format_seconds(min(most_s, (len(places.others) + 1) * each_s))} for all of them and the way back, and "
        f"{most_s / 60:g} min at most."
    )
    return PlacesOffer(
        f"{words[0].upper()}{words[1:]}", cost, not fixed.intersection(places.loaded) if chosen is None else chosen
    )


def tunable(models: Sequence[ModelEntry]) -> list[str]:
    """Return the models that generate text."""
    return [each.name for each in models if each.card is not None and each.card.spec.task == "generate"]


# ---- during the run
# ---------------------------------------------------------------------------------------------------


def progress(job: Job) -> RunProgress:
    seen = job.remaining_time()
    return RunProgress(
        model=job.model,
        goal=job.goal.name,
        phases=_phases(job),
        now=_status_line(job),
        elapsed_s=job.seconds,
        left_s=seen.left_s if seen is not None else None,
        fraction=seen.fraction if seen is not None else None,
        is_cancelled=job.cancelled,
    )


def _phases(job: Job) -> tuple[LoadPhase, ...]:
    """Return each phase once; a second soak test follows if the first one failed."""
    latest = {phase.name: phase.detail for phase, _ in job.phases}
    order = list(latest)
    if not order:
        return (LoadPhase("Waiting for running requests", detail="new requests are refused until the run ends"),)
    return tuple(LoadPhase(TITLES[name], name != order[-1], None, latest[name]) for name in order)


def _status_line(job: Job) -> str:
    if job.cancelled:
        return "Cancelling. Finished measurements are kept."
    if job.under_way is not None:
        loads = f"; {words}" if (words := load_in_words(job.under_way)) else ""
        return f"Trial {job.under_way.number}: {settings_in_words(job.under_way.settings)}{loads}"
    if not job.phases:
        return f"Waiting until {job.model} has finished its running requests"
    return TITLES[job.phases[-1][0].name]


def best(job: Job) -> Best:
    trial = job.best
    if trial is None or trial.score is None:
        return Best("", "", ())
    return Best(job.goal.in_words(trial.score), settings_in_words(trial.settings), facts_of(trial))


def facts_of(trial: Trial) -> tuple[Fact, ...]:
    return tuple(Fact(name, value) for name, value in _figures(trial).items())


def _figures(trial: Trial) -> dict[str, str]:
    figures = trial.figures
    if figures is None:
        return {}
    return {
        "Time to first token": _seconds(figures.ttft_p50_s),
        "Time per token": _seconds(figures.tpot_p50_s),
        "Output": format_rate(figures.output_tokens_per_s),
        "Memory": f"{format_bytes(figures.peak_bytes)} at most",
        "Context": f"{format_count(figures.context)} tokens",
    }


def _seconds(seconds: float | None) -> str:
    return format_seconds(seconds) if seconds is not None else "–"


def trials(job: Job) -> TrialTable:
    """Return all trials, newest first, with the current one on top."""
    best = (job.result.pick if job.result is not None else None) or job.best
    began = job.under_way
    tried = [trial.settings for trial in job.trials[-SHOWN:]] + ([began.settings] if began is not None else [])
    names = tuple(dict.fromkeys(name for settings in tried for name in settings))
    rows = [_row(job.goal, trial, best, names) for trial in reversed(job.trials[-SHOWN:])]
    if began is not None and not job.is_over:
        planned = format_bytes(began.predicted.total_bytes) if began.predicted else ""
        effort = _effort(began.effort)
        cells = _cells(began.settings, names)
        each = expected_in_words(began.predicted)
        rows.insert(0, TrialRow(began.number, cells, effort, "under-way", "", "", "", "", "", each, "", planned, ""))
    measured = sum(trial.was_measured for trial in job.trials)
    heads = tuple((LABELS[name], flags_of({name: "…"})) for name in names)
    best_is = RUNS_NOW if job.result is not None and job.result.keeps_start else "best"
    return TrialTable(tuple(rows), heads, job.goal.unit, measured, len(job.trials) - measured, best_is)


def _cells(settings: Mapping[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    return tuple(setting_in_words(name, settings[name]) if name in settings else "–" for name in names)


def _effort(effort: float) -> str:
    return "full" if effort == 1 else "brief"


def _row(goal: Goal, trial: Trial, best: Trial | None, names: Sequence[str]) -> TrialRow:
    figures = trial.figures
    is_best = best is not None and trial.number == best.number
    return TrialRow(
        number=trial.number,
        settings=_cells(trial.settings, names),
        effort=_effort(trial.effort),
        kind="measured" if trial.was_measured else "refused",
        fate=trial.fate,
        why=trial.why,
        score=goal.in_words(trial.score).removesuffix(goal.unit).strip() if trial.score is not None else "",
        ttft=_seconds(figures.ttft_p50_s) if figures is not None else "",
        tpot=_seconds(figures.tpot_p50_s) if figures is not None else "",
        each=each_in_words(trial),
        rate=format_rate(figures.output_tokens_per_s, "").strip() if figures is not None else "",
        planned=format_bytes(trial.predicted.total_bytes) if trial.predicted is not None else "",
        measured=format_bytes(figures.peak_bytes) if figures is not None else "",
        is_best=is_best,
    )


def plot(job: Job) -> Scatter:
    pick = job.result.pick if job.result is not None else job.best
    pick_is = RUNS_NOW if job.result is not None and job.result.keeps_start else "best for the goal"
    return scatter(job.trials, pick, by_context=job.goal.fills_context, pick_is=pick_is)


# ---- the result ------------------------------------------------------------------------------------------------------


def verdict(job: Job) -> str:
    result = job.result
    if result is None:
        return f"The run for {job.goal.name} ended after {format_seconds(job.seconds)} without a result."
    tried = sum(trial.was_measured for trial in result.trials)
    ended = "Cancelled after" if result.was_cancelled else "Tuned in"
    words = f"{ended} {format_seconds(result.seconds)} for {result.goal.name}: {len(result.trials)} trials"
    words = f"{words}, {tried} measured, of {result.grid_size} combinations."
    return f"{words} {format_seconds(result.reload_s)} were for loads that moved experts." if result.reload_s else words


def notes(job: Job) -> tuple[str, ...]:
    result = job.result
    if result is None:
        return ()
    found = [f"Measured with requests of {result.goal.lengths}."] if not result.goal.fills_context else []
    found += [f"KV cache in {value}: {agreement}." for value, agreement in result.agreements.items()]
    return tuple(found)


def failure(job: Job) -> ErrorNotice | None:
    """Return why there is no recommendation."""
    if job.error is not None:
        return notice(job.error)
    if job.result is None:
        return ErrorNotice("The run was cancelled.", "No trial had finished.", "The model serves as before.")
    if job.result.pick is None:
        why = nothing_worked(job.result) or "The run was cancelled before any trial finished."
        return notice(LocalLLMError("No settings reached the goal.", why, "Try wider limits, or another goal."))
    return None


def recommendation(job: Job) -> RecommendedSettings | None:
    result, profile = job.result, job.profile
    if result is None or result.pick is None or profile is None:
        return None
    pick = result.pick
    title, advice = _advice(result)
    return RecommendedSettings(
        title=title,
        advice=advice,
        settings=settings_in_words(pick.settings) or "the defaults",
        gain=gain_in_words(result, RUNS_NOW),
        predicted=tuple(Comparison(name.capitalize(), *both) for name, *both in predicted_and_measured(result)),
        before=_compared_with_running(result),
        soak=soak_in_words(result.soak) if result.soak is not None else "There was no soak test.",
        soak_passed=result.soak.passed if result.soak is not None else None,
        flags=as_flags(job.asked, pick.settings),
        toml=as_toml(job.asked, pick.settings),
        name=job.saved_as or profile.name,
        saved_as=job.saved_as,
        is_applied=job.is_applied,
    )


def _advice(result: TuningResult) -> tuple[str, Literal["apply", "keep"]]:
    """Return the title of the recommendation, and what to do. Requires `result.pick`."""
    if result.keeps_start and result.gain is None and result.soak is not None:
        return "Better settings failed the soak test. What runs now passed it.", "keep"
    if result.keeps_start:
        return "No setting is clearly better. What runs now is as good.", "keep"
    if result.gain is None:
        return "The best trial. It was not compared with what runs now.", "keep"
    return "Recommended settings", "apply"


def _compared_with_running(result: TuningResult) -> tuple[Comparison, ...]:
    pick, start = result.pick, result.start
    if pick is None or start is None or start.settings == pick.settings:
        return ()
    mine, its = _figures(pick), _figures(start)
    scores = [result.goal.in_words(trial.score) for trial in (pick, start) if trial.score is not None]
    first = [Comparison("Score", *scores)] if len(scores) == 2 else []
    return (*first, *(Comparison(name, mine[name], its.get(name, "–")) for name in mine))
