"""Steps on a CPU: all work is done when a call returns, and only what is needed is computed.

A batch of a few requests with one token each is one call of the native library (models/lone_step.py), if the model has
such a step. Every other batch runs through torch. Both read and write the same KV cache.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from localllm.engine.step import RunnerStats
from localllm.kernels.huge_pages import collapse_huge_pages
from localllm.kernels.layer_kv import LayerKV
from localllm.models.inputs import CausalModel
from localllm.models.lone_step import MAX_ROWS, LoneStep, NoLoneStep, open_lone_step
from localllm.runner.batch import HostInputs, StepBatch
from localllm.runner.grammar_masks import RowMasks
from localllm.runner.logprobs import LogprobTensors
from localllm.runner.sampler import sample
from localllm.runner.sampling import SamplingState
from localllm.runner.upload import to_device, to_host

log = logging.getLogger(__name__)

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


@dataclass(frozen=True, slots=True)
class Drawn:
    """Sampled tokens of the batch's S sampling rows."""

    token_ids: Tensor  # [R] int64, R >= S
    best: Tensor  # [R] float32 largest processed logit: NaN, inf or -inf if unusable
    places: tuple[int, ...] | None = None  # [S] index of each sampling row among the R; None: all, in order
    logprobs: LogprobTensors | None = None
    logprob_rows: tuple[tuple[int, int, int], ...] = ()  # (sampling row, its row in `logprobs`, k)

    def to_host(self) -> Drawn:
        """Start the copy to the host; it is complete when the device's stream has reached this point."""
        logprobs = None if self.logprobs is None else self.logprobs.to_host()
        return replace(self, token_ids=to_host(self.token_ids), best=to_host(self.best), logprobs=logprobs)


class HostSteps:
    """Runs a batch without padding. Also works on a device whose steps are not staged."""

    def __init__(
        self,
        model: CausalModel,
        layers: list[LayerKV],
        inputs: HostInputs,
        sampling: SamplingState,
        device: torch.device,
    ) -> None:
        self._model, self._layers, self._inputs, self._sampling, self._device = model, layers, inputs, sampling, device
        self._lone = _lone_step(model, layers)
        self._num_launched = 0

    def forward(self, batch: StepBatch) -> Forward:
        self._num_launched += 1
        if self._lone is not None and is_lone(batch):
            return self._run_lone(self._lone, batch)
        inputs = self._inputs.make(batch)
        hidden = self._model.forward(inputs, self._layers)
        wanted = hidden.index_select(0, inputs.logits_indices)
        logits = None
        if len(batch.slots):
            index = batch.sample_index
            chosen = wanted if index is None else wanted.index_select(0, to_device(index, self._device))
            logits = self._model.compute_logits(chosen)
        return Forward(logits, wanted if batch.prompt_spans else None)

    def _run_lone(self, lone: LoneStep, batch: StepBatch) -> Forward:
        """Run the batch natively. Rows that do not sample are computed with the others."""
        rows = batch.rows
        logits = lone.forward(self._inputs.decode_rows(rows), samples=bool(len(batch.slots)))
        if not len(batch.slots):
            return Forward(None, None)
        return Forward(logits if rows.samples.all() else logits[torch.from_numpy(rows.samples)], None)

    def sample(self, batch: StepBatch, logits: Tensor, masks: RowMasks | None = None) -> Drawn:
        asked = self._sampling.batch(batch.slots, batch.lengths)
        out = sample(logits, asked, self._inputs.token_ids, masks)
        self._inputs.record_sampled(batch.slots, batch.lengths, out.token_ids)
        rows = tuple((row, place, k) for place, (row, k) in enumerate(asked.logprob_counts))
        return Drawn(out.token_ids, out.best, None, out.logprobs, rows)

    def use_idle_time(self) -> bool:
        """Move weights to huge pages for a few milliseconds. Return False when none is left."""
        return collapse_huge_pages(IDLE_S)

    def warm_up(self, budget_s: float = 0.0) -> None:
        """No-op: nothing is compiled on a CPU."""

    def stats(self) -> RunnerStats:
        return RunnerStats(launched_steps=self._num_launched)


def is_lone(batch: StepBatch) -> bool:
    """Return whether a native step can run the batch: a few rows of one token each, with nothing but their logits
    wanted."""
    rows = batch.rows
    few = len(rows.slots) <= MAX_ROWS and rows.starts[-1] == len(rows.slots)
    return bool(few) and not batch.prompt_spans and batch.embeds is None


def _lone_step(model: CausalModel, layers: list[LayerKV]) -> LoneStep | None:
    try:
        lone = open_lone_step(model, layers)
    except NoLoneStep as reason:
        log.info("decode steps run through torch: %s", reason)
        return None
    log.info("decode steps of up to %d requests run natively", MAX_ROWS)
    return lone
