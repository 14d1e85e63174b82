"""Steps on a GPU: copied in one transfer, unpacked there, and replayed as graphs if a recorded shape holds them.

A step without prompts is one graph, from the staged buffer to the sampled tokens, recorded in several variants
(`FEATURE_SETS`), so that unused features cost nothing; with drafts it also proposes the next ones. Steps with a mask or
with logprobs replay a graph up to the logits, and so do steps with prompts, whose forward pass takes longer than the
host needs to launch the rest. Steps larger than every shape are launched kernel by kernel on the same buffers.
On a CPU everything works the same with a `Capture` that records nothing; tests use that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from localllm.engine.step import DraftSupport, NewSlot, RunnerStats, StepPlan
from localllm.kernels.accept_drafts import accept_drafts
from localllm.kernels.launch import num_compiles
from localllm.kernels.layer_cache import LayerCache
from localllm.kernels.prepare_step import StepInputs
from localllm.kernels.propose_lookup import MOST_DRAFTS
from localllm.kernels.sampling.draw import DrawRecord
from localllm.kernels.sampling.logprobs import ROOMS
from localllm.models.decoder.decoder import TappedModel
from localllm.models.fit import LOGITS_ROWS
from localllm.models.inputs import CausalModel
from localllm.runner.batch import Ints, StepBatch
from localllm.runner.device_drafter import DrafterOnDevice
from localllm.runner.device_drafts import (
    DRAFT_WIDTHS,
    DeviceProposals,
    LookupOnDevice,
    draft_shapes,
    draft_support,
    fitting_width,
    narrowed,
)
from localllm.runner.drafter_steps import OpenDrafter
from localllm.runner.edits import RowMasks
from localllm.runner.graphs import Capture, Part, StepGraphs
from localllm.runner.host_steps import Drawn, Forward
from localllm.runner.logprobs import token_logprobs
from localllm.runner.sampler import IdExchange, Sampled, sample, sample_on_device
from localllm.runner.sampler_chain import ChainRow
from localllm.runner.sampling import SamplingFeatures, SamplingState
from localllm.runner.staging import StagedInputs, StepShape, draw_places, given_on, row_places, shape_of
from localllm.runner.upload import to_device, warm_pinned

QUIET_S = 0.05  # seconds without a step before idle time is used
TIMED_STEPS = 9
SIZES_END = 1024  # all steps of at least this many tokens use the same kernels
PAUSE_S = 0.001  # seconds that an arriving request may have to wait
FORWARD, DRAFT = "forward", "draft"
FEATURE_SETS = (
    SamplingFeatures(),
    SamplingFeatures(filters=True),
    SamplingFeatures(filters=True, edits=True),
)  # each variant also serves the ones before it


class DeviceSteps:
    """The buffers that graphs share, and the two halves of a step on them. R: rows of the padded step."""

    def __init__(
        self, model: CausalModel, layers: Sequence[LayerCache | None], inputs: StagedInputs, sampling: SamplingState,
        device: torch.device, *, vocab_size: int, shapes: list[StepShape], capture: Capture | None,
        is_alone: bool = True, draws: bool = True, most_draws: int = 0, drafter: OpenDrafter | None = None,
        widths: Sequence[int] = DRAFT_WIDTHS, exchange: IdExchange | None = None, has_drafter: bool = False,
    ) -> None:  # fmt: skip
        """is_alone: False if other ranks record with this one. draws: False if another rank samples. most_draws: of a
        step with drafts; 0: none has any. drafter: with weights; None: drafts come from lookup alone. widths: of steps
        with drafts, ascending. exchange: of the shards that hold the drafter; None: there is one.
        has_drafter: whether this or a later pipeline stage has a drafter: all of them record the same parts."""
        self._model, self._layers, self._staged, self._sampling, self._device = model, layers, inputs, sampling, device
        rows = inputs.max_rows
        self._vocab_size, self._is_alone = vocab_size, is_alone
        most = max((shape.rows * shape.num_draws for shape in shapes), default=0)
        self._logits = torch.zeros(most, vocab_size, device=device) if draws else None
        size = -(-inputs.max_draws // 4) * 4  # so that each part is aligned
        drawn = torch.zeros(size * 12 + rows * 16, dtype=torch.uint8, device=device)  # one copy brings it to the host
        longs = drawn[: size * 8 + rows * 16].view(torch.int64)
        self._token_ids, self._counts = longs[:size], longs[size:]
        self._best = drawn[size * 8 + rows * 16 :].view(torch.float32)
        self._most_draws, self._widths = most_draws, widths
        # A drafter's pass is in each variant, and is recorded once more by itself: there are as many graphs as without.
        self._has_drafter = has_drafter
        self._feature_sets = FEATURE_SETS[1:] if has_drafter else FEATURE_SETS
        self._lookup = LookupOnDevice(inputs.slots, rows) if most_draws else None
        self._proposed = torch.zeros(rows, 1 + MOST_DRAFTS, dtype=torch.int32, device=device)
        self._fits = np.ones(inputs.max_num_seqs, bool)  # slots whose lists fit into tables, as all ranks know
        self._drafter = None if drafter is None else self._open_drafter(drafter, exchange)
        # Over shards a drafter's pass is in no variant: it begins when all shards know the ids that one has drawn.
        self._drafts_at_once = drafter is not None and exchange is None
        self._graphs = StepGraphs(shapes, capture, self._parts) if capture else None
        self._shape = StepShape(0)  # of the last launched step
        self._replayed = False
        self._drawn: SamplingFeatures | None = None  # what the last step's graph has sampled with
        self._num_replayed = self._num_launched = 0
        self._early_compiles = self._early_allocations = self._graph_bytes = 0
        self._last_step_s = -math.inf

    # ---- drafts ------------------------------------------------------------------------------------------------------

    def _open_drafter(self, opened: OpenDrafter, exchange: IdExchange | None) -> DrafterOnDevice:
        model, tables = cast("TappedModel", self._model), self._sampling.tables
        assert self._lookup is not None, "a step without drafts has a drafter"
        size, length = model.spec.hidden_size, self._staged.token_ids.shape[1] - 1
        return DrafterOnDevice(
            opened, self._staged, tables, self._lookup.most, model.dtype, size, length,
            has_states=self._staged.has_states, exchange=exchange,
        )  # fmt: skip

    @property
    def drafts(self) -> DraftSupport:
        support = draft_support(self._most_draws, self._widths)
        if self._drafter is None or not support.most:
            return support
        return support._replace(lookahead=self._drafter.num_drafts, num_reread=self._drafter.num_reread)

    def enter(self, new: NewSlot) -> None:
        self._fits[new.slot] = self._sampling.fits(new)
        if self._lookup is not None:
            self._lookup.enter(new)
        if self._drafter is not None:
            self._drafter.enter(new)

    def narrowed(self, plan: StepPlan) -> tuple[StepPlan, int]:
        """Return the plan with no more drafts than its step can have, and the width of the step: the drafts of each row
        with padding. A step with rows that `_sample_any` samples has no drafts, nor has one with a prompt."""
        wanted = max((row.num_drafts for row in plan.rows), default=0)
        if not wanted:
            return plan, 0
        slots = np.array([row.slot for row in plan.rows])
        is_plain = all(
            row.samples and row.num_scheduled_tokens == 1 + row.num_drafts and not row.num_reread for row in plan.rows
        )
        width = self._width(len(slots), wanted) if is_plain and self._fits[slots].all() else 0
        return narrowed(plan, width), width

    def _width(self, rows: int, wanted: int) -> int:
        """Return the width of a step whose rows have up to `wanted` drafts. Where steps are recorded it is a recorded
        one: a step of another width would be launched kernel by kernel."""
        shapes = {width: StepShape(rows, drafts=width) for width in self._widths}
        fitting = [width for width, shape in shapes.items() if rows * shape.num_draws <= self._most_draws]
        best = fitting_width(wanted, fitting)
        if self._graphs is None or not best or self._recorded_for(shapes[best]) is not None:
            return best
        return fitting_width(wanted, [width for width in fitting if self._graphs.shape_for(shapes[width])])

    def extend(self, batch: StepBatch, features: Tensor | None) -> None:
        """Launch the drafter behind the tokens that this step accepts, unless its graph has done so. It runs behind
        each step, since blocks that the step has filled may be shared."""
        shape, drafter = self._shape, self._drafter
        if drafter is None or (self._drawn is not None and self._drafts_at_once):
            return
        proposed = self._proposed[: shape.rows]
        proposed.copy_(self._look_up(shape))
        if self._replayed and self._graphs is not None and self._graphs.has(shape, DRAFT):
            drafter.begin(batch)
            self._graphs.replay(shape, DRAFT)
        else:
            drafter.launch_unless_failed(batch, shape, proposed, FEATURE_SETS[-1])

    def propose(self, batch: StepBatch, most: int) -> DeviceProposals:
        """Launch the lookup behind the tokens that this step accepts, unless a drafter has. It finds as many drafts
        as a slot may have, whatever `most` is, so that every step launches the same."""
        shape = self._shape
        has_proposed = self._drafter is not None or (self._drawn is not None and shape.drafts > 0)
        proposed = self._proposed[: shape.rows] if has_proposed else self._look_up(shape)
        return DeviceProposals(proposed, batch.plan_rows, row_places(batch, shape)[batch.rows.samples])

    def _look_up(self, shape: StepShape) -> Tensor:
        assert self._lookup is not None, "a step without drafts proposes some"
        return self._lookup.launch(self._staged.part(shape).slots.view(-1, shape.num_draws)[:, 0])

    # ---- the two halves ----------------------------------------------------------------------------------------------

    def forward(self, batch: StepBatch, *, draws: bool = False, proposes: bool = False) -> Forward:
        """draws: whether the step's tokens may be drawn at once, since `sample` will get no masks. proposes: whether
        drafts are proposed behind them."""
        self._last_step_s = time.monotonic()
        exact = shape_of(batch)
        given = batch.embeds, batch.rotary, batch.source
        launched = batch.prompt_spans or any(each is not None for each in given)
        recorded = self._recorded_for(exact) if not launched else None
        self._shape, self._replayed, self._drawn = recorded or exact, recorded is not None, None
        self._staged.stage(batch, self._shape)
        if recorded is not None and self._graphs is not None:
            self._num_replayed += 1
            if self._drafter is not None:
                draws = draws and not self._drafter.begins(batch)
            elif not proposes and recorded.drafts:
                draws = False
            if draws:
                self._drawn = self._recorded_draw(batch, recorded)
            self._graphs.replay(recorded, FORWARD if self._drawn is None else self._drawn)
            return Forward(None if self._logits is None else self._logits[: recorded.rows * recorded.num_draws], None)
        self._num_launched += 1
        hidden, last = self._run(exact, given_on(batch, self._device))
        wanted = hidden.index_select(0, to_device(batch.wanted, self._device)) if batch.prompt_spans else None
        return Forward(self._model.compute_logits(last) if len(batch.slots) else None, wanted)

    def sample(self, batch: StepBatch, logits: Tensor, masks: RowMasks | None = None) -> Drawn:
        places = draw_places(batch, self._shape)
        features = self._sampling.features(batch.slots)
        if features is None:
            return self._sample_any(batch, logits, places, masks)
        if self._drawn is not None:
            assert masks is None, "masks for a step whose tokens are drawn"
            draws, rows = self._shape.rows * self._shape.num_draws, self._shape.rows
            out, counts = Sampled(self._token_ids[:draws], self._best[:draws], None), self._counts[: 2 * rows]
        else:
            bitmask = None if masks is None else to_device(masks.for_rows(places, len(logits)), self._device)
            chains = self._sampling.chains(batch.slots, batch.lengths, places) if features.chains else ()
            out, counts = self._draw(self._staged.part(self._shape), logits, features, bitmask, chains)
        asked = self._sampling.num_logprobs(batch.slots) if features.logprobs else np.full(len(places), -1)
        scored = tuple((draw, int(places[draw]), int(k)) for draw, k in enumerate(asked) if k >= 0)
        return Drawn(
            out.token_ids, out.best, tuple(places.tolist()), out.logprobs, scored, counts=counts.view(2, -1)
        )  # fmt: skip

    def num_draws(self, batch: StepBatch) -> int:
        """Return the draws of the step that was launched last, with padding."""
        return self._shape.rows * self._shape.num_draws

    def accept(self, batch: StepBatch, token_ids: Tensor, best: Tensor) -> Drawn:
        """Accept what another shard has drawn. token_ids, best: [num_draws], see `Drawn`."""
        counts = self._accept(self._staged.part(self._shape), token_ids, best)
        if self._shape.drafts:
            self._staged.advance_states(self._shape, counts[0])
        return Drawn(token_ids, best, tuple(draw_places(batch, self._shape).tolist()), counts=counts)

    def _recorded_draw(self, batch: StepBatch, shape: StepShape) -> SamplingFeatures | None:
        """Return the variant whose graph draws the step's tokens, too; None if there is none for what rows ask for."""
        features = self._sampling.features(batch.slots) if len(batch.slots) else None
        if features is None or self._graphs is None:
            return None
        kind = next((kind for kind in self._feature_sets if kind.covers(features)), None)
        return kind if kind is not None and self._graphs.has(shape, kind) else None

    def _run(self, shape: StepShape, given: dict[str, Any] | None = None) -> tuple[Tensor, Tensor]:
        """Run the model. Return the hidden states of all tokens, and of those behind which a token is drawn: each row's
        last one, or all in a step with drafts. given: of the step's prompts (staging.py, given_on)."""
        inputs, buffers = self._staged.prepare(shape)
        if given:
            inputs = replace(inputs, **given)
        taps = None if self._drafter is None else self._drafter.taps(shape.tokens)
        if taps is None:
            hidden = self._model.forward(inputs, self._layers)
        else:
            hidden = cast("TappedModel", self._model).forward(inputs, self._layers, taps=taps)
        if shape.drafts or not shape.prefill_rows:  # without prompts each row has one token
            return hidden, hidden
        return hidden, hidden.index_select(0, buffers.last_tokens)

    def _draw(
        self, buffers: StepInputs, logits: Tensor, features: SamplingFeatures, bitmask: Tensor | None = None,
        chains: Sequence[ChainRow] = (),
    ) -> tuple[Sampled, Tensor]:  # fmt: skip
        """Sample into the buffers of the step's ids and best logits, and accept the draws.
        Also returns [2, R] int64: see accept_drafts."""
        assert self._sampling.tables is not None
        tokens, tables = self._staged.slots, self._sampling.tables
        out = self._token_ids[: len(logits)], self._best[: len(logits)]
        counts = self._counts[: 2 * len(buffers.context_lens)].view(2, -1)
        record = DrawRecord(tokens, counts) if buffers.num_draws == 1 else None
        drawn = sample_on_device(
            logits, buffers.slots, buffers.lengths, tables, tokens.token_ids, features, bitmask, out, record, chains
        )
        if record:
            return drawn, counts
        accepted = self._accept(buffers, drawn.token_ids, drawn.best, counts)
        rows = len(buffers.context_lens)
        self._staged.advance_states(StepShape(rows, drafts=buffers.num_draws - 1), accepted[0])
        return drawn, accepted

    def _accept(self, buffers: StepInputs, token_ids: Tensor, best: Tensor, counts: Tensor | None = None) -> Tensor:
        by_row, tokens = (-1, buffers.num_draws), self._staged.slots
        return accept_drafts(
            buffers.slots.view(by_row), buffers.lengths.view(by_row), tokens.token_ids, token_ids.view(by_row),
            best.view(by_row), tokens.known, tokens.valid, counts,
        )  # fmt: skip

    def _sample_any(self, batch: StepBatch, logits: Tensor, places: Ints, masks: RowMasks | None) -> Drawn:
        """Sample rows whose lists do not fit into the tables, by the CPU's method with lists made for this batch.

        places [S]: the rows' indexes in `logits`. The method needs lengths on the host: where earlier drafts of a
        request may have been accepted since, the host waits for the device.
        """
        at, lengths = to_device(places, self._device), batch.lengths
        bounds = None if batch.rows.are_bounds is None else batch.rows.are_bounds[batch.rows.samples]
        if bounds is not None and bounds.any():
            lengths = np.where(bounds, self._staged.slots.known.cpu().numpy()[batch.slots], lengths)
        asked = self._sampling.batch(batch.slots, lengths)
        out = sample(logits.index_select(0, at), asked, self._staged.token_ids, masks)
        ids, best = (column.new_zeros(len(logits)).index_copy_(0, at, column) for column in (out.token_ids, out.best))
        counts = self._accept(self._staged.part(self._shape), ids, best)
        scored = tuple((row, place, k) for place, (row, k) in enumerate(asked.logprob_counts))
        return Drawn(ids, best, tuple(places.tolist()), out.logprobs, scored, counts=counts)

    # ---- graphs ------------------------------------------------------------------------------------------------------

    def _recorded_for(self, exact: StepShape) -> StepShape | None:
        """Return the shape to replay, or None.
        Under constant load, missing shapes are recorded here, a part at a time."""
        if self._graphs is None:
            return None
        recorded = self._graphs.shape_for(exact)
        if recorded is None and self._graphs.is_due(exact):
            with self._uncounted():
                self._graphs.capture_for(exact)
            recorded = self._graphs.shape_for(exact)
        return recorded

    def _parts(self, shape: StepShape) -> dict[Part, Callable[[], None]]:
        """Return the functions to record for a shape: the forward pass up to the logits, and without prompts the same
        with each variant of sampling.

        Each runs once before it is recorded, on padding: the buffers may still hold a finished step, whose slots and
        blocks now belong to other requests.
        """
        self._staged.stage_padding(shape)
        logits = None if self._logits is None else self._logits[: shape.rows * shape.num_draws]

        def forward() -> None:
            _, last = self._run(shape)
            self._model.compute_logits(last, logits)

        def draw(features: SamplingFeatures) -> Callable[[], None]:
            def step() -> None:
                forward()
                if logits is None:  # all shards record the same parts, since those with an exchange must meet
                    return
                self._draw(self._staged.part(shape), logits, features)
                if shape.drafts or self._drafts_at_once:
                    self._proposed[: shape.rows].copy_(self._look_up(shape))
                if self._drafter is not None and self._drafts_at_once:
                    self._drafter.launch(shape, self._proposed[: shape.rows], features)

            return step

        def draft() -> None:
            if self._drafter is not None:
                self._drafter.launch(shape, self._proposed[: shape.rows], FEATURE_SETS[-1])

        parts: dict[Part, Callable[[], None]] = {FORWARD: forward}
        if self._has_drafter:  # behind a step with masks, logprobs or a prompt
            parts[DRAFT] = draft
        return parts if shape.prefill_rows else parts | {features: draw(features) for features in self._feature_sets}

    def warm_up(self, budget_s: float = 0.0) -> None:
        """Compile every kernel, and record the shapes needed at the first request."""
        self._launch_every_kernel()
        if self._graphs is not None:
            with self._uncounted():
                self._graphs.capture_first(budget_s)
        self._early_compiles, self._early_allocations = num_compiles(), _device_allocations(self._device)

    def _launch_every_kernel(self) -> None:
        """Launch the model, its head and each variant of sampling in every size that has its own kernel."""
        staged = self._staged
        most = staged.max_batched_tokens
        for tokens in [*kernel_sizes(min(most, SIZES_END)), most]:
            hidden, _ = self._padding_step(StepShape(0, 1, tokens))
            self._model.compute_logits(hidden[:LOGITS_ROWS])
        for shape in draft_shapes([1, staged.max_num_seqs], self._most_draws, self._widths):
            _, last = self._padding_step(shape)
            logits = self._model.compute_logits(last)
            if logits is not None:
                for filters in (False, True):
                    self._draw(staged.part(shape), logits, SamplingFeatures(filters))
            self._look_up(shape)
            for rows in kernel_sizes(shape.tokens):
                self._model.compute_logits(last[:rows])
        if most > 1 and staged.max_num_seqs > 1:
            self._padding_step(StepShape(1, 1, 1))  # beside a prompt, attention of a decode row has rotated heads
        shape = StepShape(staged.max_num_seqs)
        _, last = self._padding_step(shape)
        for rows in kernel_sizes(shape.rows):
            self._model.compute_logits(last[:rows])
        logits = self._model.compute_logits(last)
        if logits is None:
            draws = staged.part(shape)
            self._accept(draws, torch.zeros_like(draws.slots), torch.zeros(shape.rows, device=self._device))
            return
        for k in ROOMS:
            token_logprobs(logits[:1], staged.token_ids[0, :1].long(), [k])
        bits = np.full((shape.rows, -(-self._vocab_size // 32)), -1, np.int32)
        for bitmask in (None, to_device(bits, self._device)):
            for filters in (False, True):
                self._draw(staged.part(shape), logits, SamplingFeatures(filters, edits=True, logprobs=True), bitmask)
        warm_pinned(max(bits.nbytes, staged.token_ids[0].nbytes), self._device)

    def _padding_step(self, shape: StepShape) -> tuple[Tensor, Tensor]:
        self._staged.stage_padding(shape)
        done = self._run(shape)
        if self._drafter is not None:
            for features in FEATURE_SETS[1:]:
                self._drafter.launch(shape, self._proposed[: shape.rows], features)
        return done

    def step_s(self, *, replayed: bool) -> float | None:
        """Return the median of TIMED_STEPS forward passes of one token, each until the device has ended it; None if
        that step is not recorded. The first one is not counted."""
        shape = StepShape(1)
        graphs = self._graphs
        if graphs is None or not graphs.has(shape, FORWARD):
            return None
        launch = self._parts(shape)[FORWARD]
        seconds = []
        for _ in range(1 + TIMED_STEPS):
            begun = time.perf_counter()
            graphs.replay(shape, FORWARD) if replayed else launch()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            seconds.append(time.perf_counter() - begun)
        return median(seconds[1:])

    def use_idle_time(self) -> bool:
        """Record one more part of a shape. Return False when nothing is left to record.

        Requests often arrive in groups, so nothing is recorded right after a step: the next one would have to wait.
        Ranks record together, so that the caller of all of them decides when.
        """
        if self._graphs is None or self._graphs.is_complete:
            return False
        if self._is_alone and time.monotonic() - self._last_step_s < QUIET_S:
            time.sleep(PAUSE_S)
            return True
        with self._uncounted():
            return self._graphs.capture_next()

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        """Exclude a capture's compiles and allocations from the late ones,
        and count the device memory that it takes."""
        compiles, allocations, free = num_compiles(), _device_allocations(self._device), _free_bytes(self._device)
        yield
        self._early_compiles += num_compiles() - compiles
        self._early_allocations += _device_allocations(self._device) - allocations
        self._graph_bytes += free - _free_bytes(self._device)

    def stats(self) -> RunnerStats:
        return RunnerStats(
            replayed_steps=self._num_replayed,
            launched_steps=self._num_launched,
            captured_graphs=len(self._graphs) if self._graphs is not None else 0,
            wanted_graphs=self._graphs.num_wanted if self._graphs is not None else 0,
            failed_graphs=self._graphs.num_failed if self._graphs is not None else 0,
            graph_failure=self._graphs.failure if self._graphs is not None else "",
            graph_bytes=max(0, self._graph_bytes),
            late_compiles=num_compiles() - self._early_compiles,
            late_allocations=_device_allocations(self._device) - self._early_allocations,
        )


def kernel_sizes(most: int) -> list[int]:
    """Return row counts up to `most` that together use each kernel: kernels are compiled for ranges wider than the
    distance between two of these counts, a quarter of a power of two."""
    steps = (
        count for start in (4 << i for i in range(most.bit_length())) for count in range(start, 2 * start, start // 4)
    )
    return [count for count in (1, 2, 3, *steps) if count < most] + [most]


def _device_allocations(device: torch.device) -> int:
    """Return how often the allocator has asked the driver for memory: slow, and it waits for all running work."""
    return int(torch.cuda.memory_stats(device).get("num_device_alloc", 0)) if device.type == "cuda" else 0


def _free_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0
