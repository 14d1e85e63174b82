"""The engine's `Runner` in torch: a plan in, tokens out.

`forward` applies the plan, runs the model and its head; `sample` chooses tokens, leaves them on the device for the
next step, and starts their way to the host; `PendingStep.result` waits for them. On a CPU everything has happened
when a call returns; on CUDA only the launch has, and the caller may go on to the next step.
Does not know: why rows were scheduled, text, how weights were loaded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from localllm.engine.params import SamplingParams
from localllm.engine.step import PendingStep, RowResult, StepPlan, StepResult, StepTimings, TokenLogprobs
from localllm.errors import StepFailed
from localllm.models.fit import LOGITS_ROWS
from localllm.models.inputs import ForwardInputs
from localllm.models.spec import ModelSpec
from localllm.runner.batch import PromptSpan, SlotState, StepBatch
from localllm.runner.kv_cache import KVCache
from localllm.runner.logprobs import LogprobTensors, as_results, token_logprobs
from localllm.runner.sampler import sample
from localllm.runner.sampling import SamplingBatch, SamplingState

NOT_A_NUMBER = "The model's output for this request is not a number (NaN or infinity)."
NOTHING_LEFT = "No token is left to choose: this request's own constraints rule out every one."


class Model(Protocol):
    """What the runner asks of a model."""

    def forward(self, inputs: ForwardInputs, kv_cache: list[tuple[Tensor, Tensor]]) -> Tensor: ...
    def compute_logits(self, hidden: Tensor) -> Tensor: ...


class TorchRunner:
    """One model on one device. Not thread-safe: the engine loop is the only caller."""

    def __init__(
        self, model: Model, spec: ModelSpec, kv: KVCache, *, max_num_seqs: int, max_num_batched_tokens: int,
        max_model_len: int, block_size: int, device: torch.device,
    ) -> None:  # fmt: skip
        assert block_size == kv.block_size, (block_size, kv.block_size)
        self.num_blocks, self.block_size = kv.num_blocks, block_size
        self._model: Model | None = model
        self._kv: KVCache | None = kv
        self._device, self._max_num_batched_tokens = device, max_num_batched_tokens
        self._slots = SlotState(
            max_num_seqs=max_num_seqs, max_model_len=max_model_len, num_blocks=kv.num_blocks, block_size=block_size,
            vocab_size=spec.vocab_size, device=device,
        )  # fmt: skip
        self._sampling = SamplingState(max_num_seqs, spec.vocab_size, device)
        self._launched: _Launched | None = None

    def needs_host_tokens(self, params: SamplingParams) -> bool:
        """Never: penalties, bad words and logprobs read the tokens on the device."""
        return False

    def forward(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self._max_num_batched_tokens, (plan.num_tokens, self._max_num_batched_tokens)
        clock = _Clock(self._device)
        with _translated(plan), torch.inference_mode():
            self._slots.apply(plan)
            for slot in plan.freed_slots:
                self._sampling.leave(slot)
            for new in plan.new_slots:
                self._sampling.enter(new)
            self._launched = self._run(plan, clock) if plan.rows else _Launched(plan.step_id, clock.stop())

    def sample(self, plan: StepPlan) -> PendingStep:
        launched, self._launched = self._launched, None
        assert launched is not None, "sample() without its forward()"
        assert launched.step_id == plan.step_id, (launched.step_id, plan.step_id)
        clock = _Clock(self._device)
        with _translated(plan), torch.inference_mode():
            if launched.batch is None:
                return _Pending(plan, None, None, None, (), launched.clock, clock.stop())
            return self._sample(plan, launched, launched.batch, clock)

    def reset(self) -> None:
        self._launched = None
        for slot in self._slots.held():
            self._sampling.leave(slot)
        self._slots.clear()

    def close(self) -> None:
        self.reset()
        self._model = self._kv = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    # ---- the two halves ----------------------------------------------------------------------------------------------

    def _run(self, plan: StepPlan, clock: _Clock) -> _Launched:
        assert self._model is not None, "the runner is closed"
        assert self._kv is not None, "the runner is closed"
        batch = self._slots.build_inputs(plan)
        hidden = self._model.forward(batch.inputs, self._kv.layers)
        wanted = hidden.index_select(0, batch.inputs.logits_indices)
        logits = None
        if len(batch.slots):
            chosen = wanted if batch.sample_index is None else wanted.index_select(0, batch.sample_index)
            logits = self._model.compute_logits(chosen)
        return _Launched(plan.step_id, clock.stop(), batch, logits, wanted if batch.prompt_spans else None)

    def _sample(self, plan: StepPlan, launched: _Launched, batch: StepBatch, clock: _Clock) -> PendingStep:
        asked, sampled, logprobs = None, None, None
        if launched.logits is not None:
            asked = self._sampling.batch(batch.slots, batch.lengths)
            out = sample(launched.logits, asked, self._slots.token_ids)
            self._slots.record_sampled(batch.slots, batch.lengths, out.token_ids)
            sampled = _Copied(out.token_ids.to("cpu", non_blocking=True), out.best.to("cpu", non_blocking=True))
            logprobs = None if out.logprobs is None else out.logprobs.to_host()
        prompts = tuple(self._score_prompt(span, launched.wanted) for span in batch.prompt_spans)
        return _Pending(plan, batch, asked, sampled, prompts, launched.clock, clock.stop(), logprobs)

    def _score_prompt(self, span: PromptSpan, wanted: Tensor | None) -> list[LogprobTensors]:
        """A few rows of the head at a time: all positions of a long prompt would not fit."""
        assert wanted is not None
        assert self._model is not None
        parts = []
        for done in range(0, span.count, LOGITS_ROWS):
            count = min(LOGITS_ROWS, span.count - done)
            logits = self._model.compute_logits(wanted[span.start + done : span.start + done + count])
            first = span.first_position + done + 1
            targets = self._slots.token_ids[span.slot, first : first + count].long()
            parts.append(token_logprobs(logits, targets, span.num_logprobs).to_host())
        return parts


# ---- what is on its way ----------------------------------------------------------------------------------------------


class _Clock:
    """Seconds from now to `stop`: of the host on a CPU, of the device's stream on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else None
        self._started = time.perf_counter()
        self._stopped = self._started
        if self._events:
            self._events[0].record()

    def stop(self) -> _Clock:
        self._stopped = time.perf_counter()
        if self._events:
            self._events[1].record()
        return self

    def wait(self) -> None:
        """Until the device has come to `stop`."""
        if self._events:
            self._events[1].synchronize()

    def seconds(self) -> float:
        if self._events:
            return float(self._events[0].elapsed_time(self._events[1])) / 1e3
        return self._stopped - self._started


@dataclass(frozen=True, slots=True)
class _Launched:
    """Between `forward` and `sample`."""

    step_id: int
    clock: _Clock
    batch: StepBatch | None = None
    logits: Tensor | None = None  # [S, V]
    wanted: Tensor | None = None  # [L, hidden] kept only for prompt_logprobs


@dataclass(frozen=True, slots=True)
class _Copied:
    token_ids: Tensor  # [S] int64 on the host once the clock has been waited for
    best: Tensor  # [S] float32


@dataclass(frozen=True, slots=True)
class _Pending:
    """`PendingStep`: tensors on their way to the host, and how to tell them in the plan's words."""

    plan: StepPlan
    batch: StepBatch | None
    asked: SamplingBatch | None
    sampled: _Copied | None
    prompts: tuple[list[LogprobTensors], ...]
    forward_clock: _Clock
    sample_clock: _Clock
    logprobs: LogprobTensors | None = None

    def result(self) -> StepResult:
        with _translated(self.plan):
            self.sample_clock.wait()
            results = [RowResult()] * len(self.plan.rows)
            if self.batch is not None:
                self._tell_samples(self.batch, results)
                self._tell_prompts(self.batch, results)
            timings = StepTimings(self.forward_clock.seconds(), self.sample_clock.seconds())
            return StepResult(self.plan.step_id, tuple(results), timings)

    def _tell_samples(self, batch: StepBatch, results: list[RowResult]) -> None:
        if self.sampled is None:
            return
        logprobs = self._logprobs_by_row()
        ids, best = self.sampled.token_ids.tolist(), self.sampled.best.tolist()
        for row, (place, token_id, largest) in enumerate(zip(batch.plan_rows, ids, best, strict=True)):
            if math.isfinite(largest):
                results[place] = RowResult((token_id,), logprobs.get(row, ()))
            else:
                results[place] = RowResult(error=NOTHING_LEFT if largest == -math.inf else NOT_A_NUMBER)

    def _logprobs_by_row(self) -> dict[int, tuple[TokenLogprobs, ...]]:
        if self.logprobs is None or self.asked is None:
            return {}
        rows, counts = zip(*self.asked.logprob_counts, strict=True)
        told = as_results(self.logprobs, list(counts))
        return {row: (entry,) for row, entry in zip(rows, told, strict=True)}

    def _tell_prompts(self, batch: StepBatch, results: list[RowResult]) -> None:
        for span, parts in zip(batch.prompt_spans, self.prompts, strict=True):
            told = [entry for part in parts for entry in as_results(part, [span.num_logprobs] * len(part.token_ids))]
            if any(math.isnan(entry.logprobs[0]) for entry in told):
                results[span.plan_row] = RowResult(error=NOT_A_NUMBER)
            elif results[span.plan_row].error is None:
                results[span.plan_row] = results[span.plan_row]._replace(prompt_logprobs=tuple(told))


@contextmanager
def _translated(plan: StepPlan) -> Iterator[None]:
    """torch's exceptions as ours. Assertions pass: they are our own mistakes and want their traceback."""
    size = f"The step held {plan.num_tokens} tokens of {len(plan.rows)} requests."
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise StepFailed(
            "The step ran out of memory.",
            f"{size} {_first_line(error)}",
            "Lower --gpu-memory-utilization, --max-num-batched-tokens or --max-num-seqs.",
        ) from error
    except RuntimeError as error:
        raise StepFailed("The step failed on the device.", f"{size} {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
