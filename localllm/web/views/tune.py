"""Views of the wizard: four steps, and the plans that were kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from localllm.web.views.shared import ErrorNotice, Fact, Phase, Shell, View

Step = Literal["goal", "limits", "run", "result"]
PlanState = Literal["matches", "differs", "other"]


@dataclass(frozen=True, slots=True)
class StepMark:
    """One of the four, as the head of each page shows them."""

    title: str
    state: Literal["done", "current", "ahead"]
    url: str = ""  # empty: it cannot be gone to


@dataclass(frozen=True, slots=True)
class Steps(View):
    """Where one is."""

    template: ClassVar[str] = "tune/_steps.html"
    marks: tuple[StepMark, ...]


@dataclass(frozen=True, slots=True)
class GoalCard(View):
    """A goal to choose."""

    template: ClassVar[str] = "tune/_goal.html"
    name: str
    what: str  # who it is for
    best: str  # what is made as large as possible
    load: str  # what stands for the use
    url: str
    icon: str  # path data, strokes in a box of 20 by 20


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A profile that was kept."""

    file: str
    model: str
    name: str
    goal: str
    date: str
    score: str
    settings: str
    state: PlanState
    fits: str  # whether a start here would use it, in words
    is_applied: bool
    can_apply: bool
    key: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class Plans(View):
    """All profiles, the newest first."""

    template: ClassVar[str] = "tune/_plans.html"
    rows: tuple[PlanRow, ...]


@dataclass(frozen=True, slots=True)
class GoalPage(View):
    """`/tune`."""

    template: ClassVar[str] = "tune/goal.html"
    shell: Shell
    steps: Steps
    model: str  # the one that would be tuned; empty: none is there
    models: tuple[str, ...]  # those there are to choose from
    goals: tuple[GoalCard, ...]
    plans: Plans
    under_way: str = ""  # the goal that is being tuned for right now
    has_result: bool = False


@dataclass(frozen=True, slots=True)
class Effort:
    """How much time may be spent."""

    name: str
    title: str
    what: str
    is_chosen: bool = False


@dataclass(frozen=True, slots=True)
class LimitFields:
    """As they were typed."""

    max_ttft: str = ""
    max_tpot: str = ""
    min_context: str = ""
    max_memory: str = ""
    people: str = ""


@dataclass(frozen=True, slots=True)
class LimitsPage(View):
    """`/tune/limits`."""

    template: ClassVar[str] = "tune/limits.html"
    shell: Shell
    steps: Steps
    model: str
    goal: GoalCard
    typed: LimitFields
    efforts: tuple[Effort, ...]
    asks_people: bool
    own_limit: str  # what the goal limits by itself; empty: nothing
    comfortable: str  # the context it wants where nothing is said
    longest: str  # context that the model can count
    open_requests: int
    drain: str  # how long they may go on
    error: ErrorNotice | None = None


@dataclass(frozen=True, slots=True)
class TrialRow:
    """One trial; `why` where it was refused, figures where it was measured."""

    number: int
    settings: str
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


@dataclass(frozen=True, slots=True)
class Trials(View):
    """All trials, the newest first."""

    template: ClassVar[str] = "tune/_trials.html"
    rows: tuple[TrialRow, ...]
    unit: str
    measured: int
    refused: int


@dataclass(frozen=True, slots=True)
class Progress(View):
    """Where the run is, and how to end it."""

    template: ClassVar[str] = "tune/_progress.html"
    model: str
    goal: str
    phases: tuple[Phase, ...]
    now: str  # one line
    elapsed_s: float
    left_s: float | None  # None: not known yet
    fraction: float | None
    is_cancelled: bool


@dataclass(frozen=True, slots=True)
class Best(View):
    """The best so far."""

    template: ClassVar[str] = "tune/_best.html"
    score: str  # empty: nothing was measured yet
    settings: str
    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """A trial in the plot, in its box."""

    x: float
    y: float
    kind: str  # other, pareto, pick
    label: str


@dataclass(frozen=True, slots=True)
class ParetoRow:
    """The same as text."""

    number: int
    rate: str
    ttft: str
    context: str
    settings: str
    is_pick: bool = False


@dataclass(frozen=True, slots=True)
class Scatter(View):
    """Speed against what it costs. The line joins the trials that nothing beats."""

    template: ClassVar[str] = "tune/_scatter.html"
    points: tuple[Point, ...]
    line: str  # "x,y x,y ..."
    title: str
    x_title: str
    x_low: str
    x_high: str
    y_low: str
    y_high: str
    rows: tuple[ParetoRow, ...]


@dataclass(frozen=True, slots=True)
class RunPage(View):
    """`/tune/run`."""

    template: ClassVar[str] = "tune/run.html"
    shell: Shell
    steps: Steps
    progress: Progress
    best: Best
    scatter: Scatter
    trials: Trials


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure, twice."""

    name: str
    one: str
    other: str


@dataclass(frozen=True, slots=True)
class Found:
    """The pick, with what can be done with it."""

    settings: str
    gain: str
    predicted: tuple[Comparison, ...]  # predicted, measured
    before: tuple[Comparison, ...]  # pick, the planner's guess; empty: it is the guess
    soak: str
    soak_passed: bool | None  # None: there was none
    flags: str
    toml: str
    name: str  # under which it would be kept
    kept_as: str
    is_applied: bool


@dataclass(frozen=True, slots=True)
class ResultPage(View):
    """`/tune/result`."""

    template: ClassVar[str] = "tune/result.html"
    shell: Shell
    steps: Steps
    model: str
    goal: str
    verdict: str
    notes: tuple[str, ...]
    found: Found | None
    scatter: Scatter
    trials: Trials
    failure: ErrorNotice | None = None  # why there is no pick
    error: ErrorNotice | None = None  # what was asked last and did not work
