"""The engine's `Runner` in torch: executes plans and returns tokens.

`forward` applies the plan and runs the model and its head. `sample` chooses tokens, leaves them on the device for the
next step, and starts their copy to the host; `PendingStep.result` waits for the copy. On a CPU all work is done when a
call returns (host_steps.py); on CUDA only the launch is, and the caller may continue with the next step
(device_steps.py). This module has what both share: slots, errors, results.
Does not know: why rows were scheduled, text, how weights were loaded.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from localllm.engine.params import SamplingParams
from localllm.engine.step import (
    DraftSupport,
    GaveWay,
    KernelFallBack,
    NewSlot,
    PendingStep,
    Profiler,
    RunnerStats,
    StepPlan,
    TokenMasks,
)
from localllm.kernels.fused_epilogue import new_counters
from localllm.kernels.launch import DEFAULTS, LaunchOptions, launching_with
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.encoders.source import SourcePool
from localllm.models.fit import LOGITS_ROWS
from localllm.models.inputs import CausalModel
from localllm.models.layers.far import Crossing
from localllm.models.layers.group import Group
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.weights.parameters import far_bytes
from localllm.runner.batch import HostInputs, InputMaker, PromptSpan, SlotState, StepBatch
from localllm.runner.block_copies import block_copies
from localllm.runner.device_drafts import draft_widths, most_draws
from localllm.runner.device_errors import check_device, first_line, is_device_loss, translated
from localllm.runner.device_memory import empty_cache, make_current, use_cublas
from localllm.runner.device_steps import DeviceSteps
from localllm.runner.drafter_steps import OpenDrafter
from localllm.runner.edits import RowMasks
from localllm.runner.graphs import Capture, capture_shapes, largest_shape
from localllm.runner.host_drafts import Drafters, HostDrafts, Proposals
from localllm.runner.host_steps import Drawn, Forward, HostSteps
from localllm.runner.kv_cache import KVCache, StateCache, layer_caches
from localllm.runner.logprobs import LogprobTensors, token_logprobs
from localllm.runner.pictures import PictureEncoder
from localllm.runner.readback import Pace, PendingReadback, StepTimer
from localllm.runner.sampler import IdExchange
from localllm.runner.sampling import SamplingState
from localllm.runner.staging import StagedInputs, StepShape

log = logging.getLogger(__name__)

PLAIN = SamplingParams(temperature=0.0)


class TorchRunner:
    """One model on one device. Not thread-safe: the engine loop is the only caller.

    capture: how steps are recorded as graphs; None: every step is launched kernel by kernel. staged: whether a step's
    inputs are unpacked on the device; None: only on a GPU. launch_options: how the kernels of each step are launched.
    group: the shards of a tensor-parallel model, each with its own runner that gets the same calls; None: there is one.
    The first shard samples, and its results are the step's; all record its ids. samples: False for a pipeline
    stage that is not the last.
    """

    profiler: Profiler | None = None  # that of a ProfiledRunner (profiling.py)
    _encoder: PictureEncoder | SourcePool | None = None  # of a model that sees, or of an encoder-decoder
    _steps: HostSteps | DeviceSteps | None
    _thread: int | None = None  # the last calling thread
    _kernels: tuple[tuple[KernelFallBack, ...], str] = (), ""

    def __init__(
        self, model: CausalModel, spec: ModelSpec, kv: KVCache, *, max_num_seqs: int, max_num_batched_tokens: int,
        max_model_len: int, block_size: int, device: torch.device, capture: Capture | None = None,
        staged: bool | None = None, launch_options: LaunchOptions = DEFAULTS, group: Group | None = None,
        samples: bool = True, states: StateCache | None = None, drafter: OpenDrafter | None = None,
        has_drafts: bool = True,
    ) -> None:  # fmt: skip
        """states: of a model with recurrent layers. drafter: of a stage that samples. has_drafts: False if no step will
        have drafts; none is recorded."""
        assert block_size == kv.block_size, (block_size, kv.block_size)
        self.num_blocks, self.block_size, self.vocab_size = kv.num_blocks, block_size, spec.vocab_size
        self.num_stages, self._device, self._max_num_batched_tokens = 1, device, max_num_batched_tokens
        states = states or StateCache(spec, 0, device, torch.float32)
        cache = layer_caches(kv.layers, states)
        self._crossing, self._far_bytes = crossing_of(model), far_bytes(model)
        if self._crossing is not None:
            self._crossing.reserve(max_num_batched_tokens)
        staged = bool(capture) or device.type == "cuda" if staged is None else staged
        self._model: CausalModel | None = model
        self._samples, self._draws = samples, samples and (group is None or group.index == 0)
        self._sampling = SamplingState(max_num_seqs, spec.vocab_size, device, with_tables=staged and self._draws)
        keeper = model if states.num_places else None
        why_no_drafts = _why_off(has_drafts, launch_options, keeper, spec.implementation, staged=staged)
        drafter = None if why_no_drafts or drafter is None else replace(drafter, state_features=states.features)
        self._exchange = None if group is None or group.size == 1 else IdExchange(group, device)
        moves = states.num_places == 0 and samples and (group is None or group.size == 1)  # shards do not move
        self._copies = block_copies(kv, drafter) if moves else None
        self.block_bytes = self._copies.block_bytes if self._copies else ()
        inputs: InputMaker
        if staged:
            draws = 0 if why_no_drafts else most_draws(max_num_seqs, max_num_batched_tokens)
            elsewhere = 0 if samples or spec.drafter is None else spec.drafter.num_drafts  # in the last stage
            widths = draft_widths(elsewhere if drafter is None else drafter.num_drafts)
            shapes = _shapes(self._crossing, max_num_seqs, max_num_batched_tokens, draws, widths) if capture else []
            staging = StagedInputs(
                max_num_seqs=max_num_seqs, max_model_len=max_model_len, block_size=block_size, device=device,
                max_num_batched_tokens=max_num_batched_tokens, largest=largest_shape(shapes),
                num_groups=len(kv.num_blocks), has_states=states.num_places > 0, most_draws=draws, reads=kv.reads,
                ahead=0 if drafter is None else 1 + drafter.num_drafts, shifts=bool(spec.vision and spec.rope.sections),
            )  # fmt: skip
            self._steps = DeviceSteps(
                model, cache, staging, self._sampling, device, vocab_size=spec.vocab_size, shapes=shapes,
                capture=capture, is_alone=group is None, draws=self._draws, most_draws=draws,
                drafter=drafter if draws else None, widths=widths, exchange=self._exchange,
                has_drafter=bool(draws and (drafter or elsewhere)),
            )  # fmt: skip
            inputs = staging
        else:
            inputs = host = HostInputs(
                max_num_seqs=max_num_seqs, max_model_len=max_model_len, block_size=block_size, device=device,
                num_groups=len(kv.num_blocks),
            )  # fmt: skip
            is_lone = launch_options.deterministic and device.type == "cpu"  # a GPU's kernels see to it themselves
            self._steps = HostSteps(
                model, cache, host, self._sampling, device, deterministic=is_lone, sources=kv.sources,
                taps=() if drafter is None else drafter.drafter.taps,
            )  # fmt: skip
        self._inputs = inputs
        self._slots = SlotState(
            inputs, max_num_seqs=max_num_seqs, max_model_len=max_model_len, num_blocks=kv.num_blocks,
            block_size=block_size, vocab_size=spec.vocab_size, num_places=states.num_places, accepts_on_device=staged,
        )  # fmt: skip
        self._encoder = self._slots.sources = kv.sources
        self._drafters: Drafters | None = None
        self.drafts = DraftSupport(why_none=why_no_drafts) if why_no_drafts else self._steps.drafts
        if self.drafts.proposes and isinstance(inputs, HostInputs) and samples:
            self._drafters = self._host_drafts(inputs, drafter, max_num_seqs)
        elif self.drafts.proposes and isinstance(self._steps, DeviceSteps):
            self._drafters = self._steps
        self._launched: _ForwardedStep | None = None
        self._refused: dict[int, str] = {}  # slots whose parameters could not be set up, and why
        self._launch_options, self._pace = replace(launch_options, counters=new_counters(device)), Pace()

    def _host_drafts(self, inputs: HostInputs, drafter: OpenDrafter | None, max_num_seqs: int) -> HostDrafts:
        """Return the sources of drafts of host steps. Steps with a drafter run some tokens ahead, or again."""
        if drafter is None:
            return HostDrafts(inputs, self._slots)
        steps = drafter.steps(inputs, self._slots, self._sampling, max_num_seqs, self._exchange)
        reread = 1 if drafter.drafter.taps and drafter.state_features is None else 0
        self.drafts = self.drafts._replace(lookahead=drafter.num_drafts, num_reread=reread)
        return HostDrafts(inputs, self._slots, steps, drafter.num_drafts)

    def see_with(self, encoder: PictureEncoder) -> None:
        """Use the encoder of a model that sees, from the first step on."""
        self._encoder = encoder
        self._slots.see(encoder.rows, encoder.hidden_size)

    def forward(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self._max_num_batched_tokens, (plan.num_tokens, self._max_num_batched_tokens)
        with translated(plan), self._on_this_thread():
            timer = StepTimer(self._device)
            self._slots.apply(plan)
            if self._encoder is not None:
                self._encoder.apply(plan)
            for slot in plan.freed_slots:
                self._sampling.leave(slot)
                self._refused.pop(slot, None)
            if plan.moves and self._copies is not None:
                self._copies.apply(plan.moves)
            for new in plan.new_slots:
                if self._draws:
                    self._enter_sampling(new)
                if self._drafters is not None:
                    self._drafters.enter(new)
            width = 0
            if isinstance(self._steps, DeviceSteps):
                plan, width = self._steps.narrowed(plan)
            batch = self._slots.batch(plan, width) if plan.rows else None
            done, steps = None, self._loaded
            if batch is not None and isinstance(steps, DeviceSteps):
                done = steps.forward(batch, draws=plan.is_unmasked, proposes=plan.propose > 0)
            elif batch is not None and isinstance(steps, HostSteps):
                try:
                    done = steps.forward(batch, _give_way(plan.gives_way))
                except GaveWay:
                    self._slots.take_back(batch)
                    raise
            self._launched = _ForwardedStep(plan.step_id, timer.stop(), batch, done)

    def sample(self, plan: StepPlan, masks: TokenMasks | None = None) -> PendingStep:
        launched, self._launched = self._launched, None
        assert launched is not None, "sample() without its forward()"
        assert launched.step_id == plan.step_id, (launched.step_id, plan.step_id)
        with translated(plan), self._on_this_thread():
            timer = StepTimer(self._device)
            if launched.batch is None or launched.done is None:
                return PendingReadback(plan, launched.timer, timer.stop(), pace=self._pace)
            return self._sample(plan, launched.batch, launched.done, masks, launched.timer, timer)

    def warm_up(self, budget_s: float = 0.0) -> None:
        """Compile the kernels and record the first graphs, before the first request.

        budget_s: seconds to spend on recording further graphs.
        """
        stream = None if self._crossing is None else self._crossing.stream
        copying = nullcontext() if stream is None else stream.rehearsed()
        with torch.inference_mode(), launching_with(self._launch_options), copying:
            self._loaded.warm_up(budget_s)

    def step_s(self, *, replayed: bool) -> float | None:
        """Return the seconds that a decode step of one request takes, replayed or launched kernel by kernel; None if it
        is not recorded."""
        steps = self._loaded
        with translated(), self._on_this_thread():
            return steps.step_s(replayed=replayed) if isinstance(steps, DeviceSteps) else None

    def use_idle_time(self) -> bool:
        with translated(), self._on_this_thread():
            return self._loaded.use_idle_time()

    def tell_of_kernels(self, fall_backs: tuple[KernelFallBack, ...], check: str) -> None:
        """Have the statistics name the kernels that fell back, and what was compared at this start."""
        self._kernels = fall_backs, check

    def stats(self) -> RunnerStats:
        if self._steps is None:
            return RunnerStats()
        fall_backs, check = self._kernels
        row_s = 0.0 if self._encoder is None else self._encoder.row_s
        far_s, far_read = (0.0, 0) if self._crossing is None else (self._crossing.seconds, self._crossing.read_bytes)
        cache, stream = (None, None) if self._crossing is None else (self._crossing.cache, self._crossing.stream)
        read = (0, 0, 0) if cache is None else (cache.read_bytes, cache.reads, cache.hits)
        return self._steps.stats()._replace(
            fall_backs=fall_backs, kernel_check=check, picture_row_s=row_s, far_bytes=self._far_bytes, far_s=far_s,
            far_read_bytes=far_read, streamed_bytes=0 if stream is None else stream.bytes, disk_read_bytes=read[0],
            disk_reads=read[1], disk_hits=read[2],
        )  # fmt: skip

    def reset(self) -> None:
        """Forget every slot. Raises `DeviceLost` if the device no longer answers,
        which the failed step may not have reported."""
        self._forget_slots()
        check_device(self._device)

    def _forget_slots(self) -> None:
        self._launched = None
        self._refused.clear()
        if self._encoder is not None:
            self._encoder.clear()
        for slot in self._slots.held():
            self._sampling.leave(slot)
        self._slots.clear()

    @property
    def model(self) -> CausalModel:
        """The model, until the runner is closed."""
        assert self._model is not None, "the runner is closed"
        return self._model

    def close(self) -> None:
        """Release the model and all tensors. Idempotent."""
        if self._model is None:
            return
        self._forget_slots()
        self._model = self._steps = self._encoder = self._copies = None
        del self._sampling, self._slots, self._inputs
        empty_cache()

    # ---- answers -----------------------------------------------------------------------------------------------------

    def _sample(
        self, plan: StepPlan, batch: StepBatch, done: Forward, masks: TokenMasks | None, forward_timer: StepTimer,
        timer: StepTimer,
    ) -> PendingStep:  # fmt: skip
        drawn: Drawn | None = None
        proposed: Proposals = {}
        if len(batch.slots) and self._samples:  # a stage that does not sample gets the ids with the next plan
            drawn = self._draw(batch, done.logits, masks).to_host()
            self._slots.record_sampled(batch, drawn.accepted)
        if self._drafters is not None:
            self._drafters.extend(batch, done.features)
        if self._drafters is not None and drawn is not None and plan.propose:
            proposed = self._drafters.propose(batch, plan.propose)
        prompts = tuple(self._score_prompt(span, done.hidden) for span in batch.prompt_spans)
        refused = {i: self._refused[row.slot] for i, row in enumerate(plan.rows) if row.slot in self._refused}
        return PendingReadback(plan, forward_timer, timer.stop(), batch, drawn, prompts, refused, proposed, self._pace)

    def _draw(self, batch: StepBatch, logits: Tensor | None, masks: TokenMasks | None) -> Drawn:
        """Sample, or accept what the first shard has drawn. logits: None on the other shards."""
        steps = self._loaded
        if logits is None:
            assert self._exchange is not None, "a model of one shard has logits"
            drawn = steps.accept(batch, *self._exchange.receive(steps.num_draws(batch)))
        else:
            drawn = steps.sample(batch, logits, self._row_masks(batch, masks))
            if self._exchange is not None:
                self._exchange.send(drawn.token_ids, drawn.best)
        if isinstance(steps, HostSteps):
            steps.take_back(batch, drawn)
        return drawn

    def _row_masks(self, batch: StepBatch, masks: TokenMasks | None) -> RowMasks | None:
        """Map masks from rows of the plan and places in them to draws of the batch."""
        if masks is None:
            return None
        firsts, counts = (dict(zip(batch.plan_rows, of.tolist(), strict=True)) for of in (batch.firsts, batch.counts))
        places = masks.places or (0,) * len(masks.rows)
        kept = [i for i, row in enumerate(masks.rows) if places[i] < counts[row]]  # fewer drafts than were planned
        return RowMasks(np.array([firsts[masks.rows[i]] + places[i] for i in kept]), masks.bits[kept])

    def _score_prompt(self, span: PromptSpan, wanted: Tensor | None) -> list[LogprobTensors]:
        """Score prompt tokens, a few rows of the head at a time:
        the logits of a long prompt would not fit into memory."""
        assert wanted is not None
        parts = []
        for done in range(0, span.count, LOGITS_ROWS):
            count = min(LOGITS_ROWS, span.count - done)
            logits = self.model.compute_logits(wanted[span.start + done : span.start + done + count])
            if logits is None:  # another shard scores
                continue
            first = span.first_position + done + 1
            targets = self._inputs.token_ids[span.slot, first : first + count].long()
            parts.append(token_logprobs(logits, targets, [span.num_logprobs] * count).to_host())
        return parts

    def _enter_sampling(self, new: NewSlot) -> None:
        """Set up a request's sampling parameters. If that fails, the request runs as a greedy one until its error is
        read, since other requests may share the blocks that it fills."""
        try:
            self._sampling.enter(new)
        except Exception as error:
            if is_device_loss(error):
                raise
            log.exception("parameters could not be set up id=%s", new.request_id)
            self._refused[new.slot] = f"Its parameters could not be set up. {first_line(error)}"
            self._sampling.leave(new.slot)
            self._sampling.enter(replace(new, params=PLAIN, eos_token_ids=(), bad_words_token_ids=()))

    @contextmanager
    def _on_this_thread(self) -> Iterator[None]:
        """Set what depends on the calling thread, which another engine may have used before."""
        with torch.inference_mode(), launching_with(self._launch_options):
            self._make_current()
            yield

    def _make_current(self) -> None:
        """Make the device current on the calling thread, since kernels are launched on its current device.
        A thread's first call also sets up cuBLAS."""
        make_current(self._device)
        if self._device.type == "cuda" and self._thread != threading.get_ident():
            self._thread = threading.get_ident()
            use_cublas(self._device)

    @property
    def _loaded(self) -> HostSteps | DeviceSteps:
        assert self._steps is not None, "the runner is closed"
        return self._steps


def crossing_of(model: CausalModel) -> Crossing | None:
    """Return the way to a model's experts in RAM; None: all of it is on its device."""
    return getattr(model, "crossing", None)


def _give_way(asked: Callable[[], bool] | None) -> Callable[[], None] | None:
    """Return a function that raises `GaveWay` if it is asked for; None: the step cannot be taken back."""
    if asked is None:
        return None

    def check() -> None:
        if asked():
            raise GaveWay

    return check


def _shapes(crossing: Crossing | None, *sizes: Any) -> list[StepShape]:
    """Return the shapes worth recording. sizes: arguments of `capture_shapes`. In steps that copy experts to the device
    the host begins the copies, which a graph would not repeat."""
    shapes = capture_shapes(*sizes)
    if crossing is None or (stream := crossing.stream) is None:
        return shapes
    return [shape for shape in shapes if not stream.takes(shape.tokens)]


def _why_off(
    has_drafts: bool, options: LaunchOptions, keeper: CausalModel | None, implementation: str, *, staged: bool
) -> str:
    """Return why no step has drafts; empty if steps may have some. keeper: a model with states, which must follow the
    right drafts alone: a stage of a pipeline cannot, nor can transformers' code on a GPU."""
    is_own = implementation == "localllm"
    if keeper is not None and not isinstance(keeper, DecoderModel) and (staged or is_own):
        whose = "an earlier stage of a pipeline" if is_own else "transformers' code on a GPU"
        return f"a recurrent state of {whose} cannot take back a wrong guess"
    if "drafts" in options.avoids:
        return "the check of drafts failed on this GPU"
    return "" if has_drafts else "speculation is off"


@dataclass(frozen=True, slots=True)
class _ForwardedStep:
    """State between `forward` and `sample`."""

    step_id: int
    timer: StepTimer
    batch: StepBatch | None
    done: Forward | None
