"""The one tuning run of this server, shared by all pages, and the result of the last one.

The manager lends the model for the duration of the run. The run has a thread of its own; its events arrive through the
event loop. A run belongs to the server: a page that opens later sees all of it.
Does not know: HTTP, templates.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Literal

from localllm.config.settings import Settings
from localllm.errors import LocalLLMError, RequestError
from localllm.serving.manager import ModelManager
from localllm.serving.profiles import Profile, save_profile
from localllm.serving.reopen import BareModel
from localllm.tuning.figures import Trial
from localllm.tuning.goals import Goal
from localllm.tuning.profile import profile_of
from localllm.tuning.run import (
    BestChanged,
    Event,
    PhaseBegan,
    RemainingTime,
    TrialBegan,
    TrialEnded,
    TuneOptions,
    TuningResult,
    remaining_time,
)
from localllm.tuning.run import TuningRun as Run
from localllm.tuning.space import fixed_by
from localllm.tuning.trial import TrialRunner
from localllm.web.pages.tune.saved_profiles import apply_profile

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0  # refresh interval of the elapsed time on the page
Stage = Literal["waiting", "running", "ended"]


class TuningUnderWay(RequestError):
    """Another run is in progress; two runs would disturb each other's measurements."""

    status, code = 409, "tuning_under_way"


class NothingTuned(RequestError):
    """There is no result to save, apply or export."""

    status, code = 409, "nothing_tuned"


@dataclass(slots=True)
class Job:
    """One run, from the wait for running requests to its result."""

    model: str
    asked: str  # the model, as named to `localllm up`
    goal: Goal
    options: TuneOptions
    started_s: float
    stage: Stage = "waiting"
    ended_s: float | None = None
    cancelled: bool = False
    run: Run | None = None  # set during the run; it holds the weights
    phases: list[tuple[PhaseBegan, float]] = field(default_factory=list)  # with the start time of each
    under_way: TrialBegan | None = None
    trials: list[Trial] = field(default_factory=list)
    best: Trial | None = None
    result: TuningResult | None = None
    profile: Profile | None = None  # of the recommended settings; not saved yet
    saved_as: str = ""  # the name it was saved under
    is_applied: bool = False
    error: LocalLLMError | None = None

    @property
    def is_over(self) -> bool:
        return self.stage == "ended"

    @property
    def seconds(self) -> float:
        return (self.ended_s or time.monotonic()) - self.started_s

    def remaining_time(self) -> RemainingTime | None:
        if self.run is None:
            return None
        soaking = next((began_s for phase, began_s in self.phases if phase.name == "soak"), None)
        return remaining_time(self.run, time.monotonic() - soaking if soaking is not None else 0.0)

    def note(self, event: Event) -> None:
        self.stage = "running"
        match event:
            case PhaseBegan():
                self.phases.append((event, time.monotonic()))
                self.under_way = None
            case TrialBegan():
                self.under_way = event
            case TrialEnded(trial):
                self.trials.append(trial)
                self.under_way = None
            case BestChanged(trial):
                self.best = trial


class Wizard:
    """Starts, follows and ends runs; applies and saves their results."""

    def __init__(self, manager: ModelManager) -> None:
        self.manager = manager
        self.job: Job | None = None
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    @property
    def running(self) -> Job | None:
        return self.job if self.job is not None and not self.job.is_over else None

    def start(self, model: str, goal: Goal, options: TuneOptions) -> Job:
        """Start a run. Raises `TuningUnderWay`, `ModelNotLoaded`; later errors are stored in the job."""
        if self.running is not None:
            why = f"{self.running.model} is being tuned for {self.running.goal.name}."
            raise TuningUnderWay("A tuning run is under way.", why, "Open /tune/run to follow or cancel it.")
        entry = self.manager.register.require(model)
        asked = entry.settings.engine.model if entry.settings is not None else entry.name
        self.job = Job(entry.name, asked, goal, options, time.monotonic())
        self._task = asyncio.create_task(self._run_job(self.job), name="tune")
        return self.job

    def cancel(self) -> None:
        """Cancel the run; finished measurements are kept. Without a run this does nothing."""
        job = self.running
        if job is None or self._task is None:
            return
        job.cancelled = True
        if job.run is not None:
            job.run.cancel()
        elif job.stage == "waiting":
            self._task.cancel()
        self._notify()

    async def follow(self) -> AsyncIterator[Job]:
        """Yield the job whenever it changes, and once a second for the clock; end with the job."""
        while (job := self.job) is not None:
            yield job
            if job.is_over:
                return
            changed = self._changed
            try:
                async with asyncio.timeout(LOOK_EVERY_S):
                    await changed.wait()
            except TimeoutError:
                pass

    async def save(self, name: str, *, apply: bool) -> Profile:
        """Save the recommended settings as a profile. `apply`: also reload the model with it now and at every later
        start.

        Raises `NothingTuned`, `ConfigError` for an invalid name, and the errors of reloading a model; nothing is saved
        then.
        """
        job = self.job
        if job is None or job.profile is None:
            raise NothingTuned("There are no settings to save.", "The last run found no settings.", "Tune again.")
        profile = replace(job.profile, name=name or job.profile.name, applied=apply)
        if apply:
            await apply_profile(self.manager, self.manager.register.require(job.model), profile, job.model)
        else:
            await asyncio.to_thread(save_profile, profile, job.model)
        job.saved_as, job.is_applied = profile.name, apply
        return profile

    # ---- a run -------------------------------------------------------------------------------------------------------

    async def _run_job(self, job: Job) -> None:
        """Run the job. Raises only `CancelledError`."""
        loop = asyncio.get_running_loop()

        def tell(event: Event) -> None:
            """Forward an event from the run's thread."""
            loop.call_soon_threadsafe(self._note, job, event)

        def work(bare: BareModel, settings: Settings) -> None:
            runner = TrialRunner(bare, replace(settings, engine=replace(settings.engine, profile="none")))
            options = replace(job.options, fixed=fixed_by(settings), running=bare.served.tuned)
            job.run = Run(runner, job.goal, options, tell)
            if job.cancelled:
                job.run.cancel()
            job.result = result = job.run.start()
            if result.pick is not None:
                job.profile = profile_of(result, runner, result.goal.name, applied=False)

        def stop() -> None:
            job.cancelled = True
            if job.run is not None:
                job.run.cancel()

        try:
            await self.manager.lending.lend(job.model, work, stop)
        except asyncio.CancelledError:
            job.cancelled = True
            raise
        except LocalLLMError as error:
            job.error = error
        except Exception as error:
            log.exception("tuning failed")
            job.error = LocalLLMError("The run failed.", f"{type(error).__name__}: {error}", "The log has the details.")
        finally:
            job.run, job.stage, job.ended_s = None, "ended", time.monotonic()
            self._notify()

    def _note(self, job: Job, event: Event) -> None:
        job.note(event)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
