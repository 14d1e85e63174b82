"""Trials on a model whose weights stay loaded: open an engine with some settings, run a load, measure, close it.

Only for settings that put experts elsewhere are the weights loaded again.
Settings that do not fit, run out of memory or fail give a normal result. Only a lost device raises: after it no trial
is possible in this process.
Does not know: which settings are tried, and why (search.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from localllm.config.settings import PLACEMENT, Settings
from localllm.engine.client import EngineClient
from localllm.errors import ConfigError, DeviceLost, DoesNotFit, LocalLLMError, StepFailed, UnsupportedOption
from localllm.machine.bandwidth import with_kept_speeds
from localllm.machine.hardware import Hardware, process_bytes, read_hardware
from localllm.models.fit import plan_memory
from localllm.models.fit.speed import predict_each
from localllm.serving.build import build_engine
from localllm.serving.compute import clear_tracebacks, release_cached_memory
from localllm.serving.guard import Agreement, agreement
from localllm.serving.phases import OnPhase, Phase
from localllm.serving.reopen import BareModel, close_engine, load_again, open_engine
from localllm.serving.served import ServedModel
from localllm.tuning.drive import Cancelled, DeadlineExceeded, LoadMonitor, MemoryRanLow, drive, running
from localllm.tuning.figures import Fate, LoadMetrics, Predicted, Trial, figures_of
from localllm.tuning.goals import Goal, over_budget
from localllm.tuning.workload import DEFAULT_VOCAB_SIZE, PromptSource, Workload, WorkloadRequest, own_text

if TYPE_CHECKING:
    from localllm.models.fit import MemoryPlan
    from localllm.models.fit.far import CheckpointBytes

GUARD_PROMPTS, GUARD_PROMPT_LEN, GUARD_ANSWER_LEN = 6, 48, 24
WARM_UP = WorkloadRequest(tuple(range(1, 9)), 4)

Stop = Callable[[], bool]


class TrialRunner:
    """A model's weights, and the settings that all trials share. Not thread-safe: one trial at a time."""

    def __init__(self, bare: BareModel, settings: Settings) -> None:
        """settings: of the load; each trial replaces some fields of the engine's."""
        self.bare, self.settings, self.config = bare, settings, settings.engine
        self.reload_s = bare.served.load_s  # of the last load
        self.hardware: Hardware = bare.executor.as_if_not_loaded(with_kept_speeds(read_hardware()))

    @classmethod
    def load(cls, settings: Settings, on_phase: OnPhase = lambda phase: None) -> TrialRunner:
        """Load a model. Raises what a load raises, and `WrongTask` for a model that does not generate text."""
        # Load in a thread that ends with the load: libgomp keeps the workers of a thread that has computed, and
        # with two teams the engine's workers would sleep instead of spinning.
        with ThreadPoolExecutor(1, "localllm-loader") as loader:
            bare = loader.submit(_load, settings, on_phase).result()
        return cls(bare, settings)

    @property
    def vocab_size(self) -> int:
        return min(DEFAULT_VOCAB_SIZE, self.bare.served.spec.vocab_size)

    @cached_property
    def text_ids(self) -> Sequence[int]:
        """Tokens of the text that goals with repeated prompts use."""
        return self.bare.served.tokenizer.encode(own_text(), add_special_tokens=False)

    def plan(self, settings: Mapping[str, Any]) -> MemoryPlan:
        """Return the memory plan of an engine with these settings. Raises `DoesNotFit`, `ConfigError`."""
        config, served = replace(self.config, **settings), self.bare.served
        if self.bare.has_placed(config):
            return self.bare.plan(config, self.hardware)
        config = replace(config, device=served.plan.device, dtype=served.plan.dtype)
        resident, in_files = self._count_resident
        return plan_memory(config, served.spec, in_files, self.hardware, resident_bytes=resident)

    @cached_property
    def _count_resident(self) -> tuple[CheckpointBytes, int]:
        """The bytes of the weights wherever they are, and in the files."""
        from localllm.models.fit.checkpoint import count_resident_for
        from localllm.models.formats.registry import Headers

        headers = Headers(self.bare.served.path)
        return count_resident_for(self.config, headers.path, self.bare.served.spec, headers), headers.stored_bytes

    def is_placed(self, settings: Mapping[str, Any]) -> bool:
        """Return whether a trial with these settings needs no other load."""
        return self.bare.has_placed(replace(self.config, **settings))

    def expected_reload_s(self, plan: MemoryPlan) -> float:
        """Return the seconds that a load with this plan will take: as long as the last one, and the time to write
        the file of experts where that is new."""
        far, speed = plan.far, self.hardware.speeds.disk
        writes = far is not None and far.disk is not None and self.bare.served.plan.far is None
        return self.reload_s + (far.disk.file_bytes / speed if writes and speed and far and far.disk else 0.0)

    def place(self, settings: Mapping[str, Any], should_stop: Stop = lambda: False) -> float:
        """Load the model again if its experts are not where these settings put them, and return the seconds.

        Raises what a load raises, and `Cancelled`; the next call for other settings loads them.
        """
        if self.is_placed(settings):
            return 0.0

        def stop_if_asked(phase: Phase) -> None:
            if should_stop():
                raise Cancelled("The load was cancelled.")

        started_s = time.perf_counter()
        config = replace(self.config, **{name: settings[name] for name in PLACEMENT if name in settings})
        with ThreadPoolExecutor(1, "localllm-loader") as loader:  # as in `load`
            work = partial(load_again, self.bare, replace(self.settings, engine=config), stop_if_asked)
            loader.submit(work).result()
        self.reload_s = time.perf_counter() - started_s
        return self.reload_s

    def open(self, settings: Mapping[str, Any]) -> ServedModel:
        """Open an engine with these settings; the caller drives it and calls `close_engine`. Raises as `plan` and
        `place` do."""
        self.place(settings)
        return open_engine(self.bare, replace(self.config, **settings))

    def agreement(self, base: Mapping[str, Any], changed: Mapping[str, Any], seed: int = 0) -> Agreement:
        """Compare the answers under two settings. Raises what opening either engine raises."""
        source = PromptSource(seed, self.vocab_size)
        prompts = [source.prompt(GUARD_PROMPT_LEN) for _ in range(GUARD_PROMPTS)]

        def opened(settings: Mapping[str, Any]) -> AbstractAsyncContextManager[EngineClient]:
            return running(self.open(settings))

        return agreement(partial(opened, base), partial(opened, changed), prompts, GUARD_ANSWER_LEN)

    def refusal(self, settings: Mapping[str, Any], goal: Goal, floor: int) -> tuple[Predicted | None, Fate | None, str]:
        """Return a trial's prediction, and the fate and reason if arithmetic already rules the trial out."""
        try:
            plan = self.plan(settings)
        except (DoesNotFit, ConfigError) as error:
            return None, "does not fit", str(error)
        predicted = Predicted(
            plan.total_bytes, plan.kv_bytes, plan.max_model_len, plan.num_kv_tokens,
            predict_each(plan, self.hardware, min(goal.streams, plan.max_num_seqs)),
        )  # fmt: skip
        if why := over_budget(goal.limits, plan.total_bytes):
            return predicted, "over a limit", why
        if plan.max_model_len < floor:
            return predicted, "over a limit", f"its context of {plan.max_model_len} is below the minimum of {floor}"
        return predicted, None, ""

    def run(
        self,
        number: int,
        settings: Mapping[str, Any],
        goal: Goal,
        *,
        effort: float = 1.0,
        floor: int = 0,
        seed: int = 0,
        deadline_s: float | None = None,
        should_stop: Stop = lambda: False,
    ) -> Trial:
        """Run one trial. floor: the shortest acceptable context. deadline_s: time limit of the load alone.

        Raises `Cancelled` when `should_stop` returns True, and `DeviceLost`; other `LocalLLMError`s are part of the
        result.
        """
        started_s = time.perf_counter()
        predicted, fate, why = self.refusal(settings, goal, floor)
        trial = Trial(number, dict(settings), effort, fate or "measured", why, predicted)
        if fate is None:
            trial = self._measured(trial, goal, seed, deadline_s, should_stop)
        return replace(trial, cost_s=time.perf_counter() - started_s)

    def _measured(self, trial: Trial, goal: Goal, seed: int, deadline_s: float | None, should_stop: Stop) -> Trial:
        started_s = time.perf_counter()
        try:
            trial = replace(trial, reload_s=self.place(trial.settings, should_stop))
            figures = self._figures(trial, goal, seed, deadline_s, should_stop)
        except (Cancelled, DeviceLost):
            raise
        except (LocalLLMError, MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
            clear_tracebacks(error)  # its frames hold the engine's tensors
            if not self.is_placed(trial.settings):
                trial = replace(trial, reload_s=time.perf_counter() - started_s)
            return replace(trial, fate=fate_of(error), why=str(error).splitlines()[0])
        finally:
            release_cached_memory()
        if why := goal.limits.broken_by(figures):
            return replace(trial, fate="over a limit", why=why, figures=figures)
        return replace(trial, figures=figures, score=goal.score(figures))

    def _figures(self, trial: Trial, goal: Goal, seed: int, deadline_s: float | None, should_stop: Stop) -> LoadMetrics:
        held_bytes = process_bytes()
        model = self.open(trial.settings)
        workload = goal.workload(
            trial.effort, model.plan.max_model_len, seed=seed, vocab_size=self.vocab_size,
            text_ids=self.text_ids if goal.repeats else (),
        )  # fmt: skip
        monitor = LoadMonitor(model.plan.device, should_stop, deadline_s)
        figures = asyncio.run(_run(model, workload, goal.streams, monitor))
        if model.plan.device != "cpu":
            return figures
        grown_bytes = figures.peak_bytes - held_bytes  # during the trial: the interpreter and libraries do not count
        return replace(figures, peak_bytes=self.bare.weights_bytes + grown_bytes)


def _load(settings: Settings, on_phase: OnPhase) -> BareModel:
    if settings.engine.nodes > 1:
        what, why = "--nodes cannot be combined with tuning.", "A trial reads the memory of one machine."
        raise UnsupportedOption(what, why, "Leave --nodes out.", param="nodes")
    if settings.engine.data_parallel_size > 1 or settings.engine.prefill_replicas:
        what, why = "Several replicas cannot be tuned.", "A trial runs one engine."
        hint = "Leave --data-parallel-size and --prefill-replicas out."
        raise UnsupportedOption(what, why, hint, param="data_parallel_size")
    served = build_engine(settings, on_phase)
    try:
        served.require("generate")
    except LocalLLMError:
        served.close()
        raise
    return close_engine(served)


async def _run(model: ServedModel, workload: Workload, streams: int, monitor: LoadMonitor) -> LoadMetrics:
    async with running(model) as client:
        await drive(client, [WARM_UP], 1, LoadMonitor(model.plan.device))
        before = client.stats()
        started_s = time.perf_counter()
        times = await drive(client, workload.requests, streams, monitor)
        duration_s = time.perf_counter() - started_s
        preemptions = client.stats().num_preemptions - before.num_preemptions
    return figures_of(times, duration_s, monitor.peak_bytes, preemptions, model.plan.max_model_len)


def fate_of(error: BaseException) -> Fate:
    if isinstance(error, DeadlineExceeded):
        return "given up"
    if isinstance(error, DoesNotFit):
        return "does not fit"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError | MemoryRanLow) or type(cause).__name__ == "OutOfMemoryError":
            return "out of memory"
        cause = cause.__cause__
    is_memory = isinstance(error, StepFailed) and "memory" in error.what
    return "out of memory" if is_memory else "failed"
