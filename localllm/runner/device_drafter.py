"""Runs a drafter with weights on a GPU, behind each step of its model, without the host reading anything in between.

The pass behind a step has the step's shape: its tokens shifted by one, of which those that the device has accepted are
real. One pass of one token a row follows for each further draft. So a recorded step has all of it in its graph.

    prepare_pairs    the tokens that the step made known         kernels/prepare_drafts.py
    extend           their keys and values, and the hidden state of each row's newest token
    record_draft     puts a draft behind the known tokens
    step             the hidden state behind the draft

Rows whose drafts lookup has found draft nothing. Nothing is shifted onto a request's first token, so a draft model has
a pass of its own for it (`begin`). A request that begins behind a prefix hit runs one token before the hit's end again
(`Row.num_reread`), so that the shifted tokens continue the hit. A recurrent state cannot run a token again: there the
first token behind the hit has a pass of its own, too, with the features that are kept beside the state.
runner/drafter_steps.py does the same on a CPU, with as many tokens as there are.
Does not know: how the model's own step is computed and drawn (device_steps.py), how drafts are verified.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from localllm.engine.step import NewSlot
from localllm.kernels.launch import reads_lengths_on_device
from localllm.kernels.prepare_drafts import DraftRules, PairInputs, prepare_pairs, record_draft
from localllm.kernels.sampling.tables import SlotTables
from localllm.models.decoder.decoder import Taps
from localllm.models.drafters.drafter import DraftStep
from localllm.models.inputs import GroupInputs
from localllm.runner.batch import Ints, StepBatch
from localllm.runner.device_errors import is_device_loss
from localllm.runner.drafter_steps import OpenDrafter
from localllm.runner.sampler import Draws, IdExchange, draw_on_first, sample_on_device
from localllm.runner.sampling import SamplingFeatures
from localllm.runner.staging import StagedInputs, StepShape
from localllm.runner.upload import all_to_device

log = logging.getLogger(__name__)


class DrafterOnDevice:
    """A drafter over the slots of a runner. R: rows of a padded step, T: its tokens."""

    def __init__(
        self, opened: OpenDrafter, staged: StagedInputs, tables: SlotTables | None, most: Tensor,
        features_dtype: torch.dtype, features_size: int, max_model_len: int, *, has_states: bool = False,
        exchange: IdExchange | None = None,
    ) -> None:  # fmt: skip
        """tables: of the shard that draws. most: [slots] int32, drafts that a slot may have. features_size: of one tap.
        has_states: whether the model has recurrent states, which cannot run a token again. exchange: of the shards that
        hold the drafter; None: there is one."""
        self.exchange = exchange
        self._drafter, self._cache, self._main_group = opened.drafter, opened.kv.layers, opened.main_group
        self._num_groups, self._staged, self._tables, self._most = len(opened.kv.num_blocks), staged, tables, most
        self._rules = DraftRules(
            staged.block_size, opened.drafter.first_key, min(max_model_len, opened.drafter.spec.max_position),
            opened.num_drafts,
        )  # fmt: skip
        device, rows, tokens = staged.token_ids.device, staged.max_rows, staged.max_tokens
        self._pairs = PairInputs.empty(rows, max(rows, tokens), device)
        taps = self._drafter.taps
        self._features = torch.zeros(tokens, len(taps) * features_size, dtype=features_dtype, device=device)
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._token_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._best = torch.zeros(rows, device=device)
        self.has_failed = False
        self.num_drafts, self.num_reread = opened.num_drafts, 0 if has_states else 1  # see DraftSupport
        self._state_features = opened.state_features
        self._entries = np.zeros(len(most), np.int64)  # position at which the request of a slot has begun

    def enter(self, new: NewSlot) -> None:
        self._entries[new.slot] = 0 if self.num_reread else new.num_computed_tokens

    def taps(self, num_tokens: int) -> Taps | None:
        """Return what a step fills with the features of its tokens that the drafter reads; None: it reads none."""
        return Taps(self._drafter.taps, self._features[:num_tokens]) if self._drafter.taps else None

    def begins(self, batch: StepBatch) -> bool:
        """Return whether a step has first tokens that `begin` computes."""
        return len(self._entering(batch)) > 0

    def _entering(self, batch: StepBatch) -> Ints:
        """Return the indexes of the rows onto whose first token nothing is shifted."""
        rows, entries, rules = batch.rows, self._entries[batch.rows.slots], self._rules
        is_first = (rows.computed == entries) & (entries < rules.most_tokens) & (entries >= rules.first_key)
        return np.flatnonzero(is_first)

    def begin(self, batch: StepBatch) -> None:
        """Compute the first token of each row that begins there: nothing is shifted onto it."""
        chosen, rules = self._entering(batch), self._rules
        if not len(chosen):
            return
        states, size = batch.rows.states, rules.block_size
        slots, read = batch.rows.slots[chosen], np.zeros_like(chosen) if states is None else states[0, chosen]
        entries = self._entries[slots]
        at, positions, read_at = all_to_device([slots, entries, read], self._staged.token_ids.device)
        table = self._staged.tables[self._main_group, at]
        first = self._staged.token_ids[at, positions].long()
        places = table.gather(1, positions[:, None] // size)[:, 0].long() * size + positions % size
        features = None if self._state_features is None else self._state_features.index_select(0, read_at)
        step = self._row_step(len(slots), first, positions - rules.first_key, places, (positions + 1).int(), table)
        self._drafter.extend(replace(step, context_lens_host=tuple((entries + 1).tolist())), self._cache, features)

    def launch(self, shape: StepShape, proposed: Tensor, features: SamplingFeatures) -> None:
        """Compute the tokens behind a step of this shape, and draft. proposed [R, 1 + places] int32: what lookup has
        found. features: of the draws. Can be recorded."""
        staged, drafter, rules = self._staged, self._drafter, self._rules
        inputs, pairs = staged.part(shape), self._pairs.part(shape.rows, shape.tokens)
        table = inputs.block_tables[self._main_group]
        prepare_pairs(
            staged.slots_of_rows(shape), inputs, table, staged.slots, self._most, rules, pairs,
            shape.prefill_tokens or shape.num_draws,
        )  # fmt: skip
        if self._state_features is not None:
            last = self._features[: shape.tokens].index_select(0, pairs.last_tokens)
            for state in staged.written_states(shape):
                self._state_features.index_copy_(0, state, last)
        step = DraftStep(
            token_ids=pairs.token_ids, positions=pairs.positions, groups=self._groups(table, pairs.slot_mapping),
            context_lens=pairs.context_lens, cu_seqlens_q=inputs.cu_seqlens_q, logits_indices=pairs.last_tokens,
            num_decodes=shape.decodes, query_lens=staged.query_lens, decode_queries=shape.num_draws,
            context_lens_host=_on_host(pairs.context_lens), first_key=rules.first_key,
        )  # fmt: skip
        hidden = drafter.extend(step, self._cache, self._features[: shape.tokens] if drafter.taps else None)
        rows = self._pairs.part(shape.rows, shape.rows)
        out = self._token_ids[: shape.rows], self._best[: shape.rows]
        for place in range(rules.num_drafts):
            if place:
                one = self._row_step(
                    shape.rows, rows.token_ids, rows.positions, rows.slot_mapping, rows.context_lens, table
                )
                one = replace(one, context_lens_host=_on_host(rows.context_lens))
                hidden = drafter.step(one, self._cache, hidden)
            draw = partial(self._sample, drafter.logits(hidden), rows, features, out)
            token_ids, best = draw_on_first(self.exchange, shape.rows, draw)
            record_draft(token_ids, best, table, staged.slots, self._most, rules, rows, proposed, place)

    def _sample(self, logits: Tensor | None, rows: PairInputs, features: SamplingFeatures, out: Draws) -> Draws:
        assert logits is not None, "this shard draws"
        assert self._tables is not None, "this shard draws"
        drawn = sample_on_device(
            logits, rows.draft_slots, rows.lengths, self._tables, self._staged.token_ids, features, out=out
        )
        return drawn.token_ids, drawn.best

    def launch_unless_failed(self, batch: StepBatch, shape: StepShape, proposed: Tensor, how: SamplingFeatures) -> None:
        """Do `begin` and `launch`. A drafter that raises an error is used no more. If it is divided over shards, the
        error is raised: the others may wait for this one."""
        if self.has_failed:
            return
        try:
            self.begin(batch)
            self.launch(shape, proposed, how)
        except Exception as error:
            if is_device_loss(error) or self.exchange is not None:
                raise
            self.has_failed = True
            log.warning("the drafter failed and is not used any more", exc_info=error)

    def _row_step(
        self, rows: int, token_ids: Tensor, positions: Tensor, slots: Tensor, context: Tensor, table: Tensor
    ) -> DraftStep:
        """Return a pass over one token of each row."""
        starts = self._starts[: rows + 1]
        return DraftStep(
            token_ids=token_ids, positions=positions, groups=self._groups(table, slots), context_lens=context,
            cu_seqlens_q=starts, logits_indices=starts[:rows], num_decodes=rows, query_lens=(1,) * rows,
            context_lens_host=(), first_key=self._rules.first_key,
        )  # fmt: skip

    def _groups(self, table: Tensor, slot_mapping: Tensor) -> tuple[GroupInputs, ...]:
        return (GroupInputs(table, slot_mapping),) * self._num_groups


def _on_host(context_lens: Tensor) -> tuple[int, ...]:
    """Return the lengths for the plain-torch twins, which read them on the host."""
    return () if reads_lengths_on_device(context_lens) else tuple(context_lens.tolist())
