"""A tuning run, from a goal to settings, and its remaining time, without terminal or page.

    run = TuningRun(trial_runner, goal, options, on_event=show)
    run.start()                 # blocks for minutes; a page calls it in a thread of its own
    run.cancel()                # from any thread: stops the current trial and keeps what was measured
    run.events                  # all events so far, for a page opened late; `on_event` is called with each new one
    run.result                  # None until the run has ended or was cancelled

Events are frozen values, sent on the thread that runs; a web page posts them to its event loop. They are

    PhaseBegan        calibrate, guard, search, soak, placement, each with one line of detail
    TrialBegan        a trial's settings and the values predicted for it
    TrialEnded        the same `Trial`, with its figures or the reason why it has none
    BestChanged       a trial that beats all before it
    SoakEnded         the soak of a pick; another one follows if it did not pass
    RunEnded          the `TuningResult`

The runner holds the weights of an engine that was closed (serving/reopen.py), so no requests are served meanwhile.
After the run no engine is open on the weights, and `open_engine` serves again, with the new or the old settings.
Experts are moved last, as that takes a load each: the best settings are measured again with the experts in other
places, and once more where they were before another place is recommended. The run may end with the experts elsewhere.
Does not know: terminals, HTTP, where profiles are stored.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from localllm.config.settings import PLACEMENT
from localllm.errors import DeviceLost, LocalLLMError
from localllm.serving.compute import clear_tracebacks, release_cached_memory
from localllm.serving.guard import Agreement
from localllm.serving.profiles import key_of
from localllm.tuning.drive import Cancelled
from localllm.tuning.figures import Predicted, Trial, pareto
from localllm.tuning.goals import Goal
from localllm.tuning.kept_places import KeptPlaces
from localllm.tuning.search import (
    BRIEF,
    FINALISTS,
    FULL,
    GRACE_S,
    HOPELESS,
    LEAST_NOISE,
    SMALL_SPACE,
    Axis,
    Outcome,
    Point,
    SearchRanking,
    Space,
    is_clearly_better,
    search,
)
from localllm.tuning.soak import SoakReport, soak
from localllm.tuning.space import NO_PLACEMENTS, AskedPlaces, Placements, placements_of, space_of, start_of, with_values
from localllm.tuning.trial import TrialRunner
from localllm.units import format_seconds

FLOOR_SHARE = 0.95  # share of the longest possible context to require, if a goal's comfortable context is longer
CALIBRATE_SCALE = 1 / 8  # scale of the goal's lengths
CALIBRATIONS = 2  # two, as the first is often slower
LONGEST_TRIAL_S = 600.0
SOAKS = 4  # most candidates to soak: the next best is tried when one does not pass


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """The time to spend, and the settings to leave alone."""

    trial_s: float = 12.0  # approximate length of a full trial
    soak_s: float = 20.0  # 0: no soak
    share: float = 0.3  # of the time that measuring the whole grid takes; includes the phases before the search
    placements: AskedPlaces = "off"  # places of experts to try, as of `placements_of`
    reload_s: float = 600.0  # the most for the loads that these take, the one back included
    seed: int = 0
    fixed: frozenset[str] = frozenset()  # fields of EngineConfig that the user set
    running: Mapping[str, Any] = field(
        default_factory=dict
    )  # of a profile that the model runs with: the start has them

    @classmethod
    def quick(cls, **others: Any) -> TuneOptions:
        return cls(trial_s=3.0, soak_s=5.0, **others)


@dataclass(frozen=True, slots=True)
class PhaseBegan:
    name: Literal["calibrate", "guard", "search", "soak", "placement"]
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TrialBegan:
    number: int
    settings: Mapping[str, Any]
    effort: float
    predicted: Predicted | None
    reload_s: float = 0.0  # expected of the load before it


@dataclass(frozen=True, slots=True)
class TrialEnded:
    trial: Trial


@dataclass(frozen=True, slots=True)
class BestChanged:
    trial: Trial


@dataclass(frozen=True, slots=True)
class SoakEnded:
    settings: Mapping[str, Any]
    report: SoakReport


@dataclass(frozen=True, slots=True)
class TuningResult:
    """The result of a run. `pick` None: no settings worked, or the run was cancelled before a measurement."""

    goal: Goal  # with the lengths that were used
    pick: Trial | None  # the last full trial of the recommended settings; those of `start` if none is clearly better
    start: Trial | None  # what runs without this run's result: the planner's guess, or the profile in use
    trials: tuple[Trial, ...]  # in the order in which they ran, failed ones included
    pareto: tuple[Trial, ...]
    noise: float
    gain: float | None  # relative gain of the pick over the start; None: not both were measured in full
    is_clear: bool  # the gain is more than repeated measurements differ
    soak: SoakReport | None
    agreements: Mapping[str, Agreement]  # of the checked values of kv_cache_dtype
    grid_size: int
    seconds: float
    was_cancelled: bool = False
    reload_s: float = 0.0  # of the seconds, for loads that moved experts

    @property
    def keeps_start(self) -> bool:
        """Return whether no other settings are recommended than those that run."""
        return self.pick is not None and self.start is not None and self.pick.settings == self.start.settings

    def to_dict(self) -> dict[str, Any]:
        facts = asdict(replace(self, goal=replace(self.goal, score=None)))  # type: ignore[arg-type]
        facts["goal"] = self.goal.name
        facts["lengths"], facts["unit"] = self.goal.lengths, self.goal.unit
        return facts


@dataclass(frozen=True, slots=True)
class RunEnded:
    result: TuningResult


Event = PhaseBegan | TrialBegan | TrialEnded | BestChanged | SoakEnded | RunEnded


@dataclass(frozen=True, slots=True)
class MovedExperts:
    """Settings that put the experts elsewhere, and are better than all with the experts where they were loaded."""

    pick: Trial | None
    soak: SoakReport | None
    scores: tuple[float, ...]  # of full trials
    gain: float | None = None  # over the start; None: it was not measured in full

    @property
    def score(self) -> float:
        return statistics.fmean(self.scores)


@dataclass(slots=True)
class TuningRun:
    """One run; the module's docstring shows its use."""

    runner: TrialRunner
    goal: Goal
    options: TuneOptions = TuneOptions()
    on_event: Callable[[Event], None] = lambda event: None
    events: list[Event] = field(default_factory=list)
    result: TuningResult | None = None
    trials: list[Trial] = field(default_factory=list)
    agreements: dict[str, Agreement] = field(default_factory=dict)
    searched: Space | None = None  # the search space, without what the guard removed
    places: Placements = NO_PLACEMENTS
    kept: KeptPlaces | None = None  # what earlier runs measured of them; None: there are none to try
    _cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        self._cancelled.set()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def start(self) -> TuningResult:
        """Run all phases. Raises `DoesNotFit` when not even the planner's guess fits, and `DeviceLost`."""
        started_s = time.perf_counter()
        space, start = self.space()
        found, soaked, pick, moved = None, None, None, None
        try:
            self._calibrate(start)
            self.searched = space = self._without_lossy_cache(space, start)
            found = self._search(space, start, time.perf_counter() - started_s)
            pick, soaked = self._soak_best(space, found)
            moved = self._move_experts(space, start, pick, found.noise)
            if moved is not None:
                pick, soaked = moved.pick, moved.soak
        except Cancelled:
            pick = self._best_of([trial for trial in self.trials if trial.effort == FULL]) or self._best_of(self.trials)
        self.result = self._result(found, pick, soaked, start, space, time.perf_counter() - started_s, moved)
        self._emit(RunEnded(self.result))
        return self.result

    # ---- stages ------------------------------------------------------------------------------------------------------

    def space(self) -> tuple[Space, dict[str, Any]]:
        """Return the search space, and in it what runs now: the profile in use, else the planner's guess."""
        config, served = self.runner.config, self.runner.bare.served
        running = self.options.running
        plan = self.runner.plan({name: running[name] for name in PLACEMENT if name in running})
        self.goal = self.goal if plan.device == "cpu" else self.goal.on_gpu()
        self.places = placements_of(
            plan, config, self.options.fixed, running, self.options.placements,
            is_mixture=served.spec.mixture is not None,
        )  # fmt: skip
        if self.places.others:
            key = key_of(served.path, config, self.runner.hardware, served.plan.device)
            self.kept = KeptPlaces.of(key, self.goal.name, self.places.loaded)
        space = space_of(self.goal, plan, config, self.options.fixed, served.spec.max_position)
        space, guess = with_values(space, running), start_of(space, plan, config)
        start = {name: running.get(name, value) for name, value in guess.items()} | dict(self.places.loaded)
        space = Space((*space.axes, *(Axis(name, (value,)) for name, value in self.places.loaded.items())))
        return space, space.settings(space.point(start))

    def _calibrate(self, start: Mapping[str, Any]) -> None:
        """Measure how long a round takes on this machine, and scale the goal's lengths to it."""
        if self.goal.fills_context:
            return
        self._emit(PhaseBegan("calibrate", f"{self.goal.name}: {self.goal.what}"))
        short = replace(self.goal, limits=type(self.goal.limits)()).with_scaled_lengths(CALIBRATE_SCALE)
        trials = [
            self.runner.run(
                0, start, short, effort=BRIEF, should_stop=self._cancelled.is_set, deadline_s=LONGEST_TRIAL_S,
                seed=self.options.seed + 1,
            )
            for _ in range(CALIBRATIONS)
        ]  # fmt: skip
        if seen := [trial.figures for trial in trials if trial.figures is not None]:
            self.goal = self.goal.cut_to_context(seen[0].context)
            round_s = min(figures.duration_s for figures in seen) / CALIBRATE_SCALE
            self.goal = self.goal.scaled_to(round_s, self.options.trial_s)

    def _without_lossy_cache(self, space: Space, start: Mapping[str, Any]) -> Space:
        """Remove the KV caches from the space that change answers. Checked once, before the search."""
        axis = next((axis for axis in space.axes if axis.name == "kv_cache_dtype"), None)
        if axis is None:
            return space
        kept = [axis.values[0]]
        for value in axis.values[1:]:
            self._emit(PhaseBegan("guard", f"does a KV cache in {value} give the same output?"))
            try:
                found = self.runner.agreement({**start, axis.name: "auto"}, {**start, axis.name: value})
                self.agreements[value] = found
                kept += [value] if found.is_enough else []
            except DeviceLost:
                raise
            except (LocalLLMError, MemoryError, RuntimeError) as error:  # the guess fails; the search will report it
                clear_tracebacks(error)
            finally:
                release_cached_memory()
        left = (replace(axis, values=tuple(kept)),) if len(kept) > 1 else ()
        return Space((*(each for each in space.axes if each is not axis), *left))

    def _search(self, space: Space, start: Mapping[str, Any], before_s: float) -> SearchRanking:
        floor = self.floor(space)
        detail = f"{space.size} combinations · {self.goal.lengths}" if not self.goal.fills_context else ""
        self._emit(PhaseBegan("search", detail or f"{space.size} combinations"))

        def measure(point: Point, effort: float, deadline_s: float | None) -> Outcome:
            if self.goal.fills_context:  # a longer prompt is more work, so times cannot be compared
                deadline_s = None
            trial = self.trial(space.settings(point), effort, floor, deadline_s)
            work_s = trial.figures.duration_s if trial.figures is not None else 0.0
            context = trial.figures.context if trial.figures is not None else 0
            return Outcome(trial.score, trial.cost_s, work_s, tie=float(context))

        found = search(
            space, space.point(start), measure, seed=self.options.seed, share=self.options.share,
            before_s=before_s, should_stop=self._cancelled.is_set,
        )  # fmt: skip
        if self.is_cancelled:
            raise Cancelled("The run was cancelled.")
        return found

    def _soak_best(self, space: Space, found: SearchRanking) -> tuple[Trial | None, SoakReport | None]:
        """Return the best settings that pass the soak, and the soak's report."""
        report = None
        for point in found.ranking[:SOAKS]:
            settings = space.settings(point)
            report = self._soaked(settings)
            if report is None or report.passed:
                return self._last_of(settings), report
        return None, report

    def _move_experts(
        self, space: Space, start: Mapping[str, Any], pick: Trial | None, noise: float
    ) -> MovedExperts | None:
        """Measure the best settings with the experts in other places. Return the best place if it is clearly better.

        The quickest prediction is tried first. A place that seems better is measured twice and soaked while the model
        is loaded so; at the end the former best is measured once more, since the machine may have changed meanwhile.
        """
        if not self.places.others:
            return None
        base, floor = (start if pick is None else pick.settings), self.floor(space)
        count, each = len(self.places.others), format_seconds(self.runner.reload_s)
        self._emit(PhaseBegan("placement", f"{count} to try; each loads the model again, which took {each} last time"))
        best: MovedExperts | None = None
        for settings in sorted(({**base, **each} for each in self.places.others), key=self._hope, reverse=True):
            if not self._may_load(settings, floor):
                continue
            to_beat = best.score if best is not None else 0.0 if pick is None else pick.score or 0.0
            deadline_s = None
            if pick is not None and pick.figures is not None and not self.goal.fills_context:
                deadline_s = HOPELESS * pick.figures.duration_s + GRACE_S
            scores = list[float]()
            while len(scores) < 2:
                score = self.trial(settings, FULL, floor, deadline_s).score
                if score is None or score <= to_beat:
                    break
                scores.append(score)
            report = self._soaked(settings) if len(scores) == 2 else None
            if len(scores) == 2 and (report is None or report.passed):
                best = MovedExperts(self._last_of(settings), report, tuple(scores))
        if best is None or pick is None:
            return best
        self.trial(pick.settings, FULL, floor)  # loads the model as before
        if not is_clearly_better(best.scores, self._full_scores(pick.settings), max(noise, LEAST_NOISE)):
            return None
        before = self._full_scores(start)
        return replace(best, gain=best.score / statistics.fmean(before) - 1 if before else None)

    def _hope(self, settings: Mapping[str, Any]) -> float:
        """Return the predicted tokens/s, or the context if the goal is a long one; -1: unknown, or it does not fit."""
        predicted, fate, _ = self.runner.refusal(settings, self.goal, 0)
        if predicted is None or fate is not None:
            return -1.0
        if self.goal.fills_context:
            return predicted.context
        return -1.0 if predicted.each_tokens_per_s is None else statistics.fmean(predicted.each_tokens_per_s)

    def _may_load(self, settings: Mapping[str, Any], floor: int) -> bool:
        """Return whether there is time for the load that these settings need, and for one back, and whether no earlier
        run found them hopeless. If not, the trial is reported as not tried. Settings that do not fit need no load:
        their trial says so."""
        predicted, fate, _ = self.runner.refusal(settings, self.goal, floor)
        if fate is not None or self.runner.is_placed(settings):
            return True
        spent_s, limit_s = sum(trial.reload_s for trial in self.trials), self.options.reload_s
        need_s = self._expected_load_s(settings) + self.runner.reload_s
        known = None if self.kept is None else self.kept.get(settings)
        if (
            known is not None
            and known.ratio is not None
            and known.ratio < 1 / HOPELESS
            and self.options.placements == "auto"
        ):
            why = f"on {known.date[:10]} it reached {known.ratio:.0%} of the score; --placements on measures it again"
        elif spent_s + need_s > limit_s:
            why = (
                f"loading the model so and back takes about {format_seconds(need_s)}; "
                f"{format_seconds(limit_s - spent_s)} of {format_seconds(limit_s)} are left for loads"
            )
        else:
            return True
        self.trials.append(Trial(len(self.trials) + 1, dict(settings), FULL, "not tried", why, predicted))
        self._emit(TrialEnded(self.trials[-1]))
        return False

    def _expected_load_s(self, settings: Mapping[str, Any]) -> float:
        """Return the seconds of the load that these settings need: as an earlier run measured, else as predicted."""
        known = None if self.kept is None else self.kept.get(settings)
        return self.runner.expected_reload_s(self.runner.plan(settings)) if known is None else known.load_s

    def _soaked(self, settings: Mapping[str, Any]) -> SoakReport | None:
        """Return the report of a soak; None: the run has none."""
        if not self.options.soak_s:
            return None
        self._emit(PhaseBegan("soak", f"{self.options.soak_s:.0f} s under the heaviest load"))
        report = soak(
            self.runner, settings, self.options.soak_s, seed=self.options.seed, should_stop=self._cancelled.is_set
        )
        self._emit(SoakEnded(settings, report))
        return report

    def _full_scores(self, settings: Mapping[str, Any]) -> list[float]:
        own = (trial.score for trial in self.trials if trial.settings == settings and trial.effort == FULL)
        return [score for score in own if score is not None]

    # ---- one trial ---------------------------------------------------------------------------------------------------

    def trial(
        self, settings: Mapping[str, Any], effort: float = 1.0, floor: int = 0, deadline_s: float | None = None
    ) -> Trial:
        """Run one trial, report it and keep it."""
        number = len(self.trials) + 1
        predicted, fate, _ = self.runner.refusal(settings, self.goal, floor)
        loads = fate is None and not self.runner.is_placed(settings)
        self._emit(TrialBegan(number, settings, effort, predicted, self._expected_load_s(settings) if loads else 0.0))
        trial = self.runner.run(
            number, settings, self.goal, effort=effort, floor=floor, seed=self.options.seed,
            deadline_s=min(deadline_s or LONGEST_TRIAL_S, self._patience_s()), should_stop=self._cancelled.is_set,
        )  # fmt: skip
        before = self._best_of(self.trials)
        self.trials.append(trial)
        self._emit(TrialEnded(trial))
        if self.kept is not None and trial.reload_s:
            first = self._full_scores({**settings, **self.places.loaded})
            ratio = trial.score / statistics.fmean(first) if trial.score is not None and first else None
            self.kept.put(settings, trial.reload_s, 0.0 if trial.fate == "given up" else ratio)
        if trial.score is not None and (before is None or trial.score > (before.score or 0)):
            self._emit(BestChanged(trial))
        return trial

    def _patience_s(self) -> float:
        """Return the time limit of a trial: a little above the limit on TTFT, for goals that fill the context."""
        limit = self.goal.limits.max_ttft_s
        return 1.2 * limit + 5 if self.goal.fills_context and limit is not None else LONGEST_TRIAL_S

    def floor(self, space: Space) -> int:
        """Return the shortest acceptable context.

        That is the user's minimum, else the goal's comfortable context, or `FLOOR_SHARE` of the longest that any
        settings allow if that is less.
        """
        if self.goal.limits.min_context is not None:
            return self.goal.limits.min_context
        if self.goal.fills_context:
            return 0
        longest = 0
        for point in space.points():
            try:
                longest = max(longest, self.runner.plan(space.settings(point)).max_model_len)
            except LocalLLMError:
                continue
            if longest >= self.goal.comfortable_context:
                return self.goal.comfortable_context
        return int(FLOOR_SHARE * longest)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _last_of(self, settings: Mapping[str, Any]) -> Trial | None:
        """Return the best evidence for these settings: the last full trial, else the last brief one."""
        own = [trial for trial in self.trials if trial.settings == settings and trial.was_measured]
        return max(own, key=lambda trial: (trial.effort, trial.number), default=None)

    def _best_of(self, trials: Sequence[Trial]) -> Trial | None:
        measured = [trial for trial in trials if trial.was_measured]
        return max(measured, key=lambda trial: trial.score or 0.0, default=None)

    def _result(
        self, found: SearchRanking | None, pick: Trial | None, soaked: SoakReport | None, start: Mapping[str, Any],
        space: Space, seconds: float, moved: MovedExperts | None,
    ) -> TuningResult:  # fmt: skip
        is_first = found is not None and pick is not None and found.ranking[:1] == (space.point(pick.settings),)
        return TuningResult(
            goal=self.goal,
            pick=pick,
            start=self._last_of(start),
            trials=tuple(self.trials),
            pareto=tuple(pareto(self.trials)),
            noise=found.noise if found is not None else 0.0,
            gain=moved.gain if moved is not None else found.gain if found is not None and is_first else None,
            is_clear=moved is not None or (found is not None and is_first and found.is_clear),
            soak=soaked,
            agreements=self.agreements,
            grid_size=space.size * (1 + len(self.places.others)),
            seconds=seconds,
            was_cancelled=self.is_cancelled,
            reload_s=sum(trial.reload_s for trial in self.trials),
        )

    def _emit(self, event: Event) -> None:
        self.events.append(event)
        self.on_event(event)


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
    tried = [trial.settings for trial in run.trials]
    moves = sum(all(not place.items() <= each.items() for each in tried) for place in run.places.others)
    loads_s = min(run.options.reload_s, (moves + 1) * run.runner.reload_s) if moves else 0.0
    soaks = any(isinstance(event, PhaseBegan) and event.name == "soak" for event in run.events)
    soaked = any(isinstance(event, SoakEnded) for event in run.events)
    search_left_s = 0.0 if soaks else max(0.0, budget_s - spent_s)
    soak_left_s = 0.0 if soaked else max(0.0, run.options.soak_s - soaking_s)
    return RemainingTime(spent_s + soaking_s, search_left_s + soak_left_s + moves * unit_s + loads_s)
