"""Steps on a CPU: all work is done when a call returns, and only what is needed is computed.

A few requests with one token each, or one and drafts, are one call of the native library
(models/decoder/native_program.py), if the model has such a step. Everything else runs through torch. Both read and
write the same KV cache. `parts_of` decides which requests are computed together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from localllm.engine.step import DraftSupport, RunnerStats
from localllm.kernels.cpu.native.structures import FEW_ROWS
from localllm.kernels.huge_pages import HugePages
from localllm.kernels.layer_cache import LayerCache, LayerKV, state_of
from localllm.models.decoder.decoder import TappedModel, Taps
from localllm.models.decoder.native_program import NativeProgram, NotSupportedNatively, open_native_program
from localllm.models.encoders.source import SourcePool
from localllm.models.inputs import CausalModel, ForwardInputs
from localllm.models.weights.parameters import has_only_float32, held_memory
from localllm.runner.batch import HostInputs, Ints, StepBatch, StepRows
from localllm.runner.edits import RowMasks
from localllm.runner.kv_cache import StateCopies
from localllm.runner.logprobs import LogprobTensors, joined
from localllm.runner.sampler import sample
from localllm.runner.sampling import SamplingState
from localllm.runner.upload import parts_to_host, to_device

log = logging.getLogger(__name__)

TORCH_DRAFTS, TORCH_TOKENS = 15, 32
"""Most drafts of a row, and most tokens of a step with drafts, without native steps."""
IDLE_S = 0.004  # seconds of idle-time work that an arriving request may have to wait for


class ReopenableModel(CausalModel, Protocol):
    """The model's interface for opening an engine."""

    max_model_len: int

    def table_bytes(self, max_model_len: int) -> int: ...
    def serve_context(self, max_model_len: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Forward:
    """Results of a forward pass for sampling and for prompt logprobs."""

    logits: Tensor | None  # [S, V] float32, or [R, V] for the R rows of a padded device step
    # None: no row samples, or another shard draws
    hidden: Tensor | None  # [L, hidden] at the batch's `wanted` positions, for prompt logprobs
    features: Tensor | None = None  # [T, features] of the step's tokens, for a drafter that reads them

    def kept(self) -> Forward:
        """Return results that outlive the next call of the native step."""
        return self if self.logits is None else replace(self, logits=self.logits.clone())


@dataclass(frozen=True, slots=True)
class Drawn:
    """Sampled tokens of the batch's S sampling rows: D draws, one of each row unless it has drafts."""

    token_ids: Tensor  # [R] int64, R >= D
    best: Tensor  # [R] float32 largest processed logit: NaN, inf or -inf if unusable
    places: tuple[int, ...] | None = None  # [D] index of each draw among the R; None: all, in order
    logprobs: LogprobTensors | None = None
    logprob_rows: tuple[tuple[int, int, int], ...] = ()  # (draw, its row in `logprobs`, k)
    accepted: Ints | None = None  # [S] how many of a row's draws count, from the first one on; None: one of each
    counts: Tensor | None = None  # [2, rows of the padded step] accepted draws, verified drafts; None: host steps

    def row_counts(self, batch: StepBatch) -> tuple[list[int], list[int]]:
        """Return for each sampling row how many of its draws count, and how many drafts were verified."""
        if self.counts is not None and self.places is not None:
            width = len(self.token_ids) // self.counts.shape[1]
            rows = np.array(self.places)[batch.firsts] // width
            kept, checked = self.counts.numpy()[:, rows].tolist()
            return kept, checked
        kept = np.ones_like(batch.counts) if self.accepted is None else self.accepted
        return kept.tolist(), (batch.counts - 1).tolist()

    def to_host(self) -> Drawn:
        """Start the copy to the host; it is complete when the device's stream has reached this point."""
        logprobs = None if self.logprobs is None else self.logprobs.to_host()
        brought = parts_to_host(self.token_ids, self.best, *([] if self.counts is None else [self.counts]))
        counts = brought[2] if len(brought) > 2 else None
        return replace(self, token_ids=brought[0], best=brought[1], logprobs=logprobs, counts=counts)


class HostSteps:
    """Runs a batch without padding. Also works on a device whose steps are not staged."""

    def __init__(
        self,
        model: CausalModel,
        layers: Sequence[LayerCache | None],
        inputs: HostInputs,
        sampling: SamplingState,
        device: torch.device,
        *,
        deterministic: bool = False,
        taps: tuple[int, ...] = (),
        sources: SourcePool | None = None,
    ) -> None:
        """deterministic: compute and sample each request so that no bit depends on the others. taps: features that
        each step returns for a drafter. sources: of an encoder-decoder."""
        self._model, self._layers, self._inputs, self._sampling, self._device = model, layers, inputs, sampling, device
        self._taps = taps
        self._lone, self._decode_steps = _lone_step(model, layers, () if sources is None else sources.layers)
        self._native = NativeSteps()
        if self._lone is not None:
            self._native = NativeSteps(self._lone.most_rows, self._lone.rounds)
            if taps:
                self._lone.tap(taps)
        self._huge_pages = HugePages(held_memory(model) if device.type == "cpu" else ())
        self._deterministic, self._num_launched = deterministic, 0
        self._before: StateCopies | None = None  # states of the step's rows with drafts

    def forward(self, batch: StepBatch, before_layer: Callable[[], None] | None = None) -> Forward:
        """before_layer: see `ForwardInputs`."""
        self._num_launched += 1
        rows = batch.rows
        if rows.states is not None and rows.drafts.any():
            self._before = StateCopies(self._layers, rows.states[0, rows.drafts > 0])
        parts = parts_of(batch.rows, self._native, is_deterministic=self._deterministic)
        if len(parts) == 1:
            return self._forward(batch, parts[0], before_layer)
        batches = [batch.part(part.rows) for part in parts]
        done = [self._forward(each, part, before_layer).kept() for each, part in zip(batches, parts, strict=True)]
        order = in_order(parts)
        return _joined([done[place] for place in order], [len(batches[place].wanted) for place in order])

    def _forward(self, batch: StepBatch, part: Part, before_layer: Callable[[], None] | None) -> Forward:
        if part.is_native:
            assert self._lone is not None
            return self._run_lone(self._lone, batch)
        inputs = self._inputs.make(batch)
        if before_layer is not None:
            inputs = replace(inputs, before_layer=before_layer)
        hidden, features = self._hidden(inputs)
        wanted = hidden.index_select(0, inputs.logits_indices)
        logits = None
        if len(batch.slots):
            index = batch.sample_index
            chosen = wanted if index is None else wanted.index_select(0, to_device(index, self._device))
            logits = self._model.compute_logits(chosen)
        return Forward(logits, wanted if batch.prompt_spans else None, features)

    def _hidden(self, inputs: ForwardInputs) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states [T, hidden] of the step, and the features that a drafter reads."""
        if not self._taps:
            return self._model.forward(inputs, self._layers), None
        model = cast("TappedModel", self._model)  # features are those of localllm's own layers
        size = len(self._taps) * model.spec.hidden_size
        features = torch.empty(len(inputs.token_ids), size, dtype=model.dtype, device=self._device)
        return model.forward(inputs, self._layers, taps=Taps(self._taps, features)), features

    def _run_lone(self, lone: NativeProgram, batch: StepBatch) -> Forward:
        """Run the batch natively. Rows that do not sample are computed with the others."""
        rows = batch.rows
        inputs = self._inputs.decode_rows(rows)._replace(source=batch.source)
        logits = lone.forward(inputs, samples=bool(len(batch.slots)))
        features = lone.features() if self._taps else None
        if not len(batch.slots):
            return Forward(None, None, features)
        return Forward(logits if rows.samples.all() else logits[torch.from_numpy(rows.draws)], None, features)

    def sample(self, batch: StepBatch, logits: Tensor, masks: RowMasks | None = None) -> Drawn:
        slots, lengths = batch.slots, batch.lengths
        if self._deterministic:
            rows = [slice(row, row + 1) for row in range(len(slots))]
            drawn = _joined_draws(
                [self._sample(slots[row], lengths[row], logits[row], masks and masks.part(row)) for row in rows]
            )
        else:
            drawn = self._sample(slots, lengths, logits, masks)
        return self._accept(batch, drawn)

    def num_draws(self, batch: StepBatch) -> int:
        """Return the draws of the step that was computed last."""
        return len(batch.slots)

    def accept(self, batch: StepBatch, token_ids: Tensor, best: Tensor) -> Drawn:
        """Accept what another shard has drawn. token_ids, best: [num_draws], see `Drawn`."""
        return self._accept(batch, Drawn(token_ids, best))

    def _accept(self, batch: StepBatch, drawn: Drawn) -> Drawn:
        if batch.has_drafts:
            drawn = replace(drawn, accepted=self._accepted(batch, drawn))
        self._inputs.record_sampled(batch.slots, batch.lengths, drawn.token_ids)
        return drawn

    def take_back(self, batch: StepBatch, drawn: Drawn) -> None:
        """Let recurrent states come after the accepted tokens alone. A row with a wrong draft gets its state before the
        step back, and runs its right tokens again. All shards must call this once they know the draws."""
        rows, before, self._before = batch.rows, self._before, None
        if before is None or drawn.accepted is None:
            return
        kept = rows.scheduled.copy()
        kept[rows.samples] -= batch.counts - drawn.accepted  # the rejected drafts
        is_wrong = kept < rows.scheduled
        if not is_wrong.any():
            return
        assert rows.states is not None
        before.restore(np.flatnonzero(is_wrong[rows.drafts > 0]), rows.states[1, is_wrong])
        again, none = rows.begun_again(np.flatnonzero(is_wrong), kept[is_wrong]), np.empty(0, np.int64)
        for part in parts_of(again, self._native, is_deterministic=self._deterministic):
            some = again.part(part.rows)
            if part.is_native:
                assert self._lone is not None
                self._lone.forward(self._inputs.decode_rows(some), samples=False)
            else:
                self._hidden(self._inputs.make(StepBatch(some, none, (), none, none, none, ())))

    def _accepted(self, batch: StepBatch, drawn: Drawn) -> Ints:
        """Return how many tokens of each row are accepted: those drawn while the drafts before them were right. A draft
        is right if it is the token that was drawn at its position, whatever the parameters of the draw."""
        right = self._inputs.are_drafts(batch.slots, batch.lengths, drawn.token_ids.numpy())
        return count_accepted(right, torch.isfinite(drawn.best).numpy(), batch.counts)

    def _sample(self, slots: Ints, lengths: Ints, logits: Tensor, masks: RowMasks | None) -> Drawn:
        """Draw one token a row. What a row's parameters look back on is in the table, right drafts included."""
        asked = self._sampling.batch(slots, lengths)
        out = sample(logits, asked, self._inputs.token_ids, masks)
        rows = tuple((row, place, k) for place, (row, k) in enumerate(asked.logprob_counts))
        return Drawn(out.token_ids, out.best, None, out.logprobs, rows)

    @property
    def drafts(self) -> DraftSupport:
        """Tokens of a native step are computed alike, known or guessed. Torch's products of several rows round narrow
        weights' activations otherwise than those of one row, so drafts would change what is drawn."""
        if self._device.type != "cpu":
            return DraftSupport(why_none=f"the model is on {self._device}")
        if self._lone is not None:
            return DraftSupport(FEW_ROWS - 1, FEW_ROWS, proposes=True)
        if self._deterministic:
            return DraftSupport(why_none="requests are computed token by token in deterministic mode")
        if has_only_float32(self._model):
            copies_states = any(map(state_of, self._layers))  # of each row with drafts, so there are few rows
            most = (FEW_ROWS - 1, FEW_ROWS) if copies_states else (TORCH_DRAFTS, TORCH_TOKENS)
            return DraftSupport(*most, proposes=True)
        return DraftSupport(
            why_none=f"torch rounds steps of several tokens otherwise, and {self._decode_steps.rstrip('.')}"
        )

    def use_idle_time(self) -> bool:
        """Move weights to huge pages for a few milliseconds. Return False when none is left."""
        return self._huge_pages.make(IDLE_S)

    def warm_up(self, budget_s: float = 0.0) -> None:
        """No-op: nothing is compiled on a CPU."""

    def stats(self) -> RunnerStats:
        return RunnerStats(launched_steps=self._num_launched, decode_steps=self._decode_steps)


def count_accepted(right: Ints, usable: Ints, counts: Ints) -> Ints:
    """Return [S] how many draws of each row are accepted, at least 1.

    right, usable: [D] bool, whether a draw is the draft at its position, and is a token at all. The last draw of a row
    has no draft to compare. A row ends before an unusable draw, which becomes the first one of a later step.
    """
    accepted, first = np.ones_like(counts), 0
    for row, count in enumerate(counts.tolist()):
        for place in range(first, first + count - 1):
            if not (right[place] and usable[place + 1]):
                break
            accepted[row] += 1
        first += count
    return accepted


def _joined(parts: Sequence[Forward], counts: Sequence[int]) -> Forward:
    """Return the results of consecutive parts of a batch as the results of one. counts: wanted positions of each part.
    The hidden states of parts that no request scores are 0."""
    logits = [part.logits for part in parts if part.logits is not None]
    tapped = [part.features for part in parts if part.features is not None]
    features = torch.cat(tapped) if tapped else None
    like = next((part.hidden for part in parts if part.hidden is not None), None)
    if like is None:
        return Forward(torch.cat(logits) if logits else None, None, features)
    hidden = [
        like.new_zeros(count, like.shape[1]) if part.hidden is None else part.hidden
        for part, count in zip(parts, counts, strict=True)
    ]
    return Forward(torch.cat(logits) if logits else None, torch.cat(hidden), features)


def _joined_draws(rows: Sequence[Drawn]) -> Drawn:
    """Return the draws of the batch from the draws of each row."""
    token_ids, best = torch.cat([row.token_ids for row in rows]), torch.cat([row.best for row in rows])
    asking = [(i, row.logprobs, row.logprob_rows[0][2]) for i, row in enumerate(rows) if row.logprobs is not None]
    counts = tuple((row, place, k) for place, (row, _, k) in enumerate(asking))
    return Drawn(token_ids, best, None, joined([tensors for _, tensors, _ in asking]) if asking else None, counts)


def _lone_step(
    model: CausalModel, layers: Sequence[LayerCache | None], sources: Sequence[LayerKV]
) -> tuple[NativeProgram | None, str]:
    """Return the native step and a line about it, or None and why there is none."""
    try:
        lone = open_native_program(model, layers, sources)
        told = f"decode steps of up to {lone.most_rows} requests run natively"
    except NotSupportedNatively as reason:
        lone, told = None, f"decode steps run through torch: {reason}"
    log.info(told)
    return lone, told


class NativeSteps(NamedTuple):
    """The limits of the native steps of a model."""

    most_tokens: int = 0  # of one step; 0: the model has none
    rounds: bool = False  # whether its bits differ from torch's by more than the last ones


class Part(NamedTuple):
    """Consecutive rows of a step that are computed together."""

    rows: slice
    is_native: bool


def parts_of(rows: StepRows, native: NativeSteps, *, is_deterministic: bool) -> list[Part]:
    """Return the parts of a step in the order in which they are computed: the rule about what a row's arithmetic
    depends on.

        a native step   up to `most_tokens` of requests that generate; a token's bits do not depend on other requests,
                        nor on whether the tokens before it were known or guessed
        prompts         and whatever a native step does not take, together: through torch, whose bits depend on all rows

    If weights have fewer than 32 bits, products of many rows also round activations to fewer bits than a native step
    does. A step with both kinds of rows is therefore computed in two parts, and a stream receives the same tokens while
    a neighbour's prompt is read. That reads the weights twice, so float32 weights, where only last bits differ, do not
    do it. In deterministic mode every prompt's chunk is a part of its own, and so is every request that a native step
    does not take. Chunks come first, since a later row may use the blocks that they fill.
    """
    count, generating = len(rows.slots), rows.num_generating
    if is_deterministic:
        chunks = [Part(slice(row, row + 1), is_native=False) for row in range(generating, count)]
        return chunks + _generating_parts(rows, generating, native.most_tokens)
    fits = 0 < rows.starts[generating] <= native.most_tokens
    if generating == count:
        return [Part(slice(0, count), is_native=bool(fits))]
    if fits and native.rounds:
        return [Part(slice(generating, count), is_native=False), Part(slice(0, generating), is_native=True)]
    return [Part(slice(0, count), is_native=False)]


def _generating_parts(rows: StepRows, count: int, most_tokens: int) -> list[Part]:
    """Return the first `count` rows in as few native steps as take them, or one by one."""
    parts, first = list[Part](), 0
    for row in range(1, count + 1):
        if row == count or rows.starts[row + 1] - rows.starts[first] > most_tokens:
            parts.append(Part(slice(first, row), bool(rows.starts[row] - rows.starts[first] <= most_tokens)))
            first = row
    return parts


def in_order(parts: list[Part]) -> list[int]:
    """Return the indexes of the parts in the order of their rows."""
    return sorted(range(len(parts)), key=lambda index: parts[index].rows.start)
