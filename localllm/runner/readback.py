"""Copies a step's results to the host and converts them to a `StepResult`.

Sampled ids and the rows' largest logits are copied through pinned memory; the host waits for them in `result`, one or
two steps after their launch.
Does not know: models, sampling.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from localllm.engine.step import RowResult, StepPlan, StepResult, StepTimings, TokenLogprobs
from localllm.runner.batch import StepBatch
from localllm.runner.device_errors import translated
from localllm.runner.host_drafts import Proposals
from localllm.runner.host_steps import Drawn
from localllm.runner.logprobs import LogprobTensors, as_results

NOT_A_NUMBER = "The model's output for this request is not a number (NaN or infinity)."
NOTHING_LEFT = "This request's constraints exclude every token."


SHORT_S = 0.6e-3  # the host polls for the end of steps that take less: to wake it up takes 20 to 60 us
POLLED_S = 1e-3  # then it sleeps: something else is on the device


class StepTimer:
    """Measures the time from construction to `stop`: host time on a CPU, time of the device's stream on CUDA."""

    def __init__(self, device: torch.device) -> None:
        # A blocking event lets the host sleep while it waits; spinning would hold a core and the driver's lock.
        on_gpu = device.type == "cuda"
        self._events = [torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2)] if on_gpu else None
        self._started = time.perf_counter()
        self._stopped = self._started
        if self._events:
            self._events[0].record()

    def stop(self) -> StepTimer:
        self._stopped = time.perf_counter()
        if self._events:
            self._events[1].record()
        return self

    def wait(self, *, polls: bool = False) -> None:
        """Wait until the device has reached `stop`; if `polls`, do not sleep at first."""
        if not self._events:
            return
        until = time.perf_counter() + POLLED_S
        while polls and not self._events[1].query() and time.perf_counter() < until:
            time.sleep(0)  # other threads may run
        self._events[1].synchronize()

    def seconds(self) -> float:
        if self._events:
            return float(self._events[0].elapsed_time(self._events[1])) / 1e3
        return self._stopped - self._started


@dataclass(slots=True)
class Pace:
    """The duration of a runner's last step."""

    last_s: float = math.inf


@dataclass(frozen=True, slots=True)
class PendingReadback:
    """`PendingStep` of a fully launched step."""

    plan: StepPlan
    forward_timer: StepTimer
    sample_timer: StepTimer
    batch: StepBatch | None = None
    drawn: Drawn | None = None  # being copied to the host
    prompts: tuple[list[LogprobTensors], ...] = ()
    refused: Mapping[int, str] = field(default_factory=dict)  # rows of the plan whose result must not be used, and why
    proposed: Proposals = field(default_factory=dict)  # drafts behind rows of the plan
    pace: Pace = field(default_factory=Pace)

    def result(self) -> StepResult:
        with translated(self.plan):  # kernel errors are reported when the host waits
            return self._result()

    def _result(self) -> StepResult:
        self.sample_timer.wait(polls=self.pace.last_s < SHORT_S)
        results = [RowResult()] * len(self.plan.rows)
        if self.batch is not None:
            if self.drawn is not None:
                _sample_results(self.batch, self.drawn, results)
            for row, (drafts, are_predicted) in self.proposed.items():
                results[row] = results[row]._replace(
                    num_proposed=len(drafts), proposed=drafts, are_predicted=are_predicted
                )
            self._prompt_results(self.batch, results)
        for row, why in self.refused.items():
            results[row] = RowResult(error=why)
        timings = StepTimings(self.forward_timer.seconds(), self.sample_timer.seconds())
        self.pace.last_s = timings.forward_s + timings.sample_s
        return StepResult(self.plan.step_id, tuple(results), timings)

    def _prompt_results(self, batch: StepBatch, results: list[RowResult]) -> None:
        for span, parts in zip(batch.prompt_spans, self.prompts, strict=True):
            entries = [entry for part in parts for entry in as_results(part, [span.num_logprobs] * len(part.token_ids))]
            if any(math.isnan(entry.logprobs[0]) for entry in entries):
                results[span.plan_row] = RowResult(error=NOT_A_NUMBER, fault="model")
            elif results[span.plan_row].error is None:
                results[span.plan_row] = results[span.plan_row]._replace(prompt_logprobs=tuple(entries))


def _sample_results(batch: StepBatch, drawn: Drawn, results: list[RowResult]) -> None:
    logprobs = _logprobs_by_draw(drawn)
    ids, best = drawn.token_ids.tolist(), drawn.best.tolist()
    places = range(len(ids)) if drawn.places is None else drawn.places
    rows = zip(batch.plan_rows, batch.firsts.tolist(), *drawn.row_counts(batch), strict=True)
    for plan_row, first, accepted, checked in rows:
        draws = range(first, first + accepted)
        place = places[first]
        if math.isfinite(best[place]):
            scores = tuple([logprobs[draw] for draw in draws]) if first in logprobs else ()
            tokens = tuple([ids[places[draw]] for draw in draws])
            results[plan_row] = RowResult(tokens, scores, num_checked=checked)
        elif best[place] == -math.inf:
            results[plan_row] = RowResult(error=NOTHING_LEFT, fault="request")
        else:
            results[plan_row] = RowResult(error=NOT_A_NUMBER, fault="model")


def _logprobs_by_draw(drawn: Drawn) -> dict[int, TokenLogprobs]:
    if drawn.logprobs is None:
        return {}
    counts = [-1] * len(drawn.logprobs.ranks)
    for _, place, k in drawn.logprob_rows:
        counts[place] = k
    entries = as_results(drawn.logprobs, counts)
    return {draw: entries[place] for draw, place, _ in drawn.logprob_rows}
