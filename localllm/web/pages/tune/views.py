"""Views of the tuning wizard: its four steps, and the saved profiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from localllm.web.pages.frame.views import ErrorNotice, Fact, LoadPhase, Shell, View, view

Step = Literal["goal", "limits", "run", "result"]
ProfileState = Literal["matches", "differs", "other"]


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


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """A saved profile."""

    file: str
    model: str
    name: str
    goal: str
    date: str
    score: str
    settings: str
    state: ProfileState
    fits: str  # whether a start on this machine would use it, in words
    is_applied: bool
    can_apply: bool
    key: tuple[Fact, ...]


@view("tune/_plans.html")
class ProfileTable(View):
    """All profiles, the newest first."""

    rows: tuple[ProfileRow, ...]


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
class LimitFields:
    """The limits, as they were typed."""

    max_ttft: str = ""
    max_tpot: str = ""
    min_context: str = ""
    max_memory: str = ""
    people: str = ""


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
