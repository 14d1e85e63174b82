"""The engine's `Runner` in torch: a plan in, tokens out.

`forward` applies the plan, runs the model and its head; `sample` chooses tokens, leaves them on the device for the
next step, and starts their way to the host; `PendingStep.result` waits for them. On a CPU everything has happened
when a call returns; on CUDA only the launch has, and the caller may go on to the next step. Steps of a recorded shape
are replayed as one CUDA graph (graphs.py), others are launched kernel by kernel.
Does not know: why rows were scheduled, text, how weights were loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from localllm.engine.params import SamplingParams
from localllm.engine.step import PendingStep, RunnerStats, StepPlan
from localllm.errors import DeviceLost, StepFailed
from localllm.kernels.launch import num_compiles
from localllm.kernels.layer_kv import LayerKV
from localllm.models.fit import LOGITS_ROWS
from localllm.models.inputs import ForwardInputs
from localllm.models.spec import ModelSpec
from localllm.runner.batch import HostInputs, Ints, PromptSpan, SlotState, StepBatch
from localllm.runner.graphs import Capture, GraphLadder, ladder
from localllm.runner.kv_cache import KVCache
from localllm.runner.logprobs import LogprobTensors, token_logprobs
from localllm.runner.readback import Answer, Clock
from localllm.runner.sampler import sample
from localllm.runner.sampling import SamplingState
from localllm.runner.staging import StagedInputs, StepShape, row_places, shape_of
from localllm.runner.upload import to_device, to_host


class Model(Protocol):
    """What the runner asks of a model."""

    def forward(self, inputs: ForwardInputs, kv_cache: list[LayerKV]) -> Tensor: ...
    def compute_logits(self, hidden: Tensor) -> Tensor: ...


class TorchRunner:
    """One model on one device. Not thread-safe: the engine loop is the only caller.

    capture: how steps are recorded as graphs; None: every step is launched kernel by kernel. staged: whether a step's
    inputs are unpacked on the device; None: on a GPU.
    """

    def __init__(
        self, model: Model, spec: ModelSpec, kv: KVCache, *, max_num_seqs: int, max_num_batched_tokens: int,
        max_model_len: int, block_size: int, device: torch.device, capture: Capture | None = None,
        staged: bool | None = None,
    ) -> None:  # fmt: skip
        assert block_size == kv.block_size, (block_size, kv.block_size)
        self.num_blocks, self.block_size = kv.num_blocks, block_size
        self._model: Model | None = model
        self._kv: KVCache | None = kv
        self._device, self._max_num_batched_tokens = device, max_num_batched_tokens
        shapes = ladder(max_num_seqs, max_num_batched_tokens) if capture else []
        inputs: HostInputs | StagedInputs
        if staged or capture or device.type == "cuda":
            inputs = self._staged = StagedInputs(
                max_num_seqs=max_num_seqs, max_model_len=max_model_len, block_size=block_size, device=device,
                max_num_batched_tokens=max_num_batched_tokens, largest=_largest(shapes),
            )  # fmt: skip
        else:
            inputs = HostInputs(
                max_num_seqs=max_num_seqs, max_model_len=max_model_len, block_size=block_size, device=device
            )
        self._slots = SlotState(
            inputs, max_num_seqs=max_num_seqs, max_model_len=max_model_len, num_blocks=kv.num_blocks,
            block_size=block_size, vocab_size=spec.vocab_size,
        )  # fmt: skip
        self._sampling = SamplingState(max_num_seqs, spec.vocab_size, device)
        self._launched: _Launched | None = None
        self._graphs: GraphLadder | None = None
        if capture is not None:
            self._graph_logits = torch.zeros(_largest(shapes).rows, spec.vocab_size, device=device)
            self._graphs = GraphLadder(shapes, capture, self._recorded_step)
        self._num_replayed = self._num_launched = 0
        self._early_compiles = self._early_allocations = 0

    def needs_host_tokens(self, params: SamplingParams) -> bool:
        """Never: penalties, bad words and logprobs read the tokens on the device."""
        return False

    def forward(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self._max_num_batched_tokens, (plan.num_tokens, self._max_num_batched_tokens)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # kernels are launched on the calling thread's current device
        clock = Clock(self._device)
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
        clock = Clock(self._device)
        with _translated(plan), torch.inference_mode():
            if launched.batch is None:
                return Answer(plan, launched.clock, clock.stop())
            return self._sample(plan, launched, launched.batch, clock)

    def reset(self) -> None:
        self._launched = None
        for slot in self._slots.held():
            self._sampling.leave(slot)
        self._slots.clear()

    def close(self) -> None:
        self.reset()
        if self._graphs is not None:
            self._graphs.clear()
        self._model = self._kv = self._graphs = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    # ---- getting ready, and resting ----------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """What must have happened before the first request: kernels compiled, the first graphs recorded."""
        if self._graphs is not None:
            with torch.inference_mode():
                self._graphs.capture_first()
        self._early_compiles, self._early_allocations = num_compiles(), _device_allocations(self._device)

    def use_idle_time(self) -> bool:
        """Record one more graph while nobody waits; False when there is nothing left to do."""
        if self._graphs is None or self._graphs.is_complete:
            return False
        compiles, allocations = num_compiles(), _device_allocations(self._device)
        with torch.inference_mode():
            more = self._graphs.capture_next()
        self._early_compiles += num_compiles() - compiles  # what a capture needs is no one's delay
        self._early_allocations += _device_allocations(self._device) - allocations
        return more

    def stats(self) -> RunnerStats:
        return RunnerStats(
            replayed_steps=self._num_replayed,
            launched_steps=self._num_launched,
            captured_graphs=len(self._graphs) if self._graphs is not None else 0,
            late_compiles=num_compiles() - self._early_compiles,
            late_allocations=_device_allocations(self._device) - self._early_allocations,
        )

    # ---- the two halves ----------------------------------------------------------------------------------------------

    def _run(self, plan: StepPlan, clock: Clock) -> _Launched:
        batch = self._slots.batch(plan)
        if self._graphs is not None and not batch.prompt_spans:
            shape = self._graphs.shape_for(shape_of(batch))
            if shape is not None:
                return self._replay(plan, batch, shape, self._graphs, clock)
        self._num_launched += 1
        model, kv = self._loaded()
        inputs = self._slots.inputs.make(batch)
        hidden = model.forward(inputs, kv.layers)
        wanted = hidden.index_select(0, inputs.logits_indices)
        logits = None
        if len(batch.slots):
            index = batch.sample_index
            chosen = wanted if index is None else wanted.index_select(0, to_device(index, self._device))
            logits = model.compute_logits(chosen)
        return _Launched(plan.step_id, clock.stop(), batch, logits, wanted if batch.prompt_spans else None)

    def _replay(
        self, plan: StepPlan, batch: StepBatch, shape: StepShape, graphs: GraphLadder, clock: Clock
    ) -> _Launched:
        self._num_replayed += 1
        self._staged.stage(batch, shape)
        graphs.replay(shape)
        places = row_places(batch, shape)[batch.rows.samples]
        return _Launched(plan.step_id, clock.stop(), batch, self._logits_at(places) if len(places) else None)

    def _logits_at(self, places: Ints) -> Tensor:
        """Rows of the graphs' common output; a view where they are the first ones."""
        if places[-1] == len(places) - 1:
            return self._graph_logits[: len(places)]
        return self._graph_logits.index_select(0, to_device(places, self._device))

    def _recorded_step(self, shape: StepShape) -> Callable[[], None]:
        """What a graph of this shape does: from the staged buffer to the logits of every row."""
        logits = self._graph_logits[: shape.rows]

        def step() -> None:
            model, kv = self._loaded()
            inputs, buffers = self._staged.prepare(shape)
            hidden = model.forward(inputs, kv.layers)
            logits.copy_(model.compute_logits(hidden.index_select(0, buffers.last_tokens)))

        return step

    def _sample(self, plan: StepPlan, launched: _Launched, batch: StepBatch, clock: Clock) -> PendingStep:
        sampled, logprobs = None, None
        counts: tuple[tuple[int, int], ...] = ()
        if launched.logits is not None:
            asked = self._sampling.batch(batch.slots, batch.lengths)
            out = sample(launched.logits, asked, self._slots.inputs.token_ids)
            self._slots.inputs.record_sampled(batch.slots, batch.lengths, out.token_ids)
            self._slots.record_sampled(batch)
            sampled, counts = (to_host(out.token_ids), to_host(out.best)), asked.logprob_counts
            logprobs = None if out.logprobs is None else out.logprobs.to_host()
        prompts = tuple(self._score_prompt(span, launched.wanted) for span in batch.prompt_spans)
        return Answer(plan, launched.clock, clock.stop(), batch, sampled, logprobs, counts, prompts)

    def _score_prompt(self, span: PromptSpan, wanted: Tensor | None) -> list[LogprobTensors]:
        """A few rows of the head at a time: all positions of a long prompt would not fit."""
        assert wanted is not None
        model, _ = self._loaded()
        parts = []
        for done in range(0, span.count, LOGITS_ROWS):
            count = min(LOGITS_ROWS, span.count - done)
            logits = model.compute_logits(wanted[span.start + done : span.start + done + count])
            first = span.first_position + done + 1
            targets = self._slots.inputs.token_ids[span.slot, first : first + count].long()
            parts.append(token_logprobs(logits, targets, span.num_logprobs).to_host())
        return parts

    def _loaded(self) -> tuple[Model, KVCache]:
        assert self._model is not None, "the runner is closed"
        assert self._kv is not None, "the runner is closed"
        return self._model, self._kv


@dataclass(frozen=True, slots=True)
class _Launched:
    """Between `forward` and `sample`."""

    step_id: int
    clock: Clock
    batch: StepBatch | None = None
    logits: Tensor | None = None  # [S, V]
    wanted: Tensor | None = None  # [L, hidden] kept only for prompt_logprobs


def _largest(shapes: list[StepShape]) -> StepShape:
    """One that has room for the rows and for the tokens of each."""
    rows = max((shape.rows for shape in shapes), default=0)
    tokens = max((shape.tokens for shape in shapes), default=0)
    return StepShape(0, rows, tokens)


def _device_allocations(device: torch.device) -> int:
    """Times the allocator has asked the driver for memory: slow, and a wait for everything that is running."""
    return int(torch.cuda.memory_stats(device).get("num_device_alloc", 0)) if device.type == "cuda" else 0


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
        if _lost_the_device(error):
            raise DeviceLost(
                "The GPU has reported an error from which this process cannot recover.",
                f"{size} {_first_line(error)}",
                "localllm up starts again from nothing; localllm doctor looks at the driver.",
            ) from error
        raise StepFailed("The step failed on the device.", f"{size} {_first_line(error)}") from error


def _lost_the_device(error: RuntimeError) -> bool:
    """Errors of a CUDA kernel stick: every later call in this process fails with the same one."""
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
