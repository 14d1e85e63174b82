"""Runs a drafter with weights on a CPU: keeps its keys and values up to date, and draws drafts from its logits.

After each step of the model, `extend` computes what the drafter keeps of the tokens that the step made known. Then
`propose` draws: the first draft from the hidden state of the newest token, each further one after another pass. A draft
is drawn by the sampler of its slot, with the slot's parameters, seed and position, so it is the token that the model
draws there if both have the same logits. A grammar is not applied: the model's draw has its mask.

The drafter's keys and values are in the model's blocks. A pair of a feature and a token needs the feature of the token
before it. Three cases follow from that:

    a row that begins after a prefix hit   the model runs one token before the row again (`Row.num_reread`); a model
                                           with recurrent states cannot, and keeps the feature with the state
    the newest token                       the scheduler gives its position a block with the row before it
    drafts that turned out wrong           their keys and values are overwritten by those of the accepted tokens

A drafter that fails, or whose logits are not numbers, is used no more; answers do not depend on it. Of a drafter that
is divided over shards, the first shard draws, and sends each draft to the others. An error in its layers is then an
error of the step, as in the model's own layers: other shards may be waiting for this one.
Does not know: where else drafts come from (host_drafts.py), how many are worth it (engine/speculation.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from localllm.models.drafters.drafter import Drafter, DraftStep
from localllm.runner.batch import HostInputs, Ints, SlotState, StepBatch, StepRows
from localllm.runner.kv_cache import KVCache
from localllm.runner.sampler import Draws, IdExchange, draw_on_first, sample
from localllm.runner.sampling import SamplingState

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenDrafter:
    """A loaded drafter with its own KV cache, for a runner to open."""

    drafter: Drafter
    kv: KVCache
    num_drafts: int  # most drafts at a time
    main_group: int = 0  # the model's KV group whose blocks it shares
    state_features: Tensor | None = None
    """[places, features] of the last token of each recurrent state (`StateCache`). None: the model has no such states,
    or the drafter reads none."""

    def steps(
        self, inputs: HostInputs, slots: SlotState, sampling: SamplingState, max_num_seqs: int,
        exchange: IdExchange | None = None,
    ) -> DrafterSteps:  # fmt: skip
        return DrafterSteps(self, inputs, slots, sampling, max_num_seqs, exchange)


class DrafterSteps:
    """A drafter and its keys and values, over the slots of a runner."""

    def __init__(
        self, opened: OpenDrafter, inputs: HostInputs, slots: SlotState, sampling: SamplingState, max_num_seqs: int,
        exchange: IdExchange | None = None,
    ) -> None:  # fmt: skip
        """exchange: of the shards that hold the drafter; None: there is one."""
        self._drafter, self._cache, self._main_group = opened.drafter, opened.kv.layers, opened.main_group
        self._num_groups, self._state_features = len(opened.kv.num_blocks), opened.state_features
        self._inputs, self._slots, self._sampling, self._exchange = inputs, slots, sampling, exchange
        self._kept = np.zeros(max_num_seqs, np.int64)  # first tokens of each slot that have the drafter's K and V
        self._hidden: dict[int, Tensor] = {}  # [1, hidden] of each slot's newest token
        self.has_failed = False

    @property
    def taps(self) -> tuple[int, ...]:
        return self._drafter.taps

    def enter(self, slot: int, num_computed_tokens: int) -> None:
        """Begin a request. num_computed_tokens: found in the prefix cache, with the drafter's keys and values."""
        self._kept[slot] = max(num_computed_tokens, self._drafter.first_key)
        self._hidden.pop(slot, None)

    def extend(self, batch: StepBatch, features: Tensor | None) -> None:
        """Compute the tokens that a step of the model made known. features: [T, features] of the step's T tokens."""
        if self.has_failed:
            return
        self._hidden.clear()
        try:
            self._extend(batch.rows, features)
        except Exception as error:
            if self._exchange is not None:
                raise
            self._fail(f"{type(error).__name__}: {error}", error)

    def propose(self, most: Mapping[int, int]) -> dict[int, Ints]:
        """Return drafts behind the known tokens of slots, at most `most` for each of them. int32"""
        if self.has_failed:
            return {}
        try:
            return self._propose(most)
        except Exception as error:
            if self._exchange is not None:
                raise
            self._fail(f"{type(error).__name__}: {error}", error)
            return {}

    def _fail(self, why: str, error: Exception | None = None) -> None:
        log.warning("the drafter failed and is not used any more: %s", why, exc_info=error)
        self.has_failed = True
        self._hidden.clear()

    # ---- after a step of the model -----------------------------------------------------------------------------------

    def _extend(self, rows: StepRows, features: Tensor | None) -> None:
        first = self._kept[rows.slots]
        known = self._slots.num_known_of(rows.slots)
        newest = np.minimum(known, rows.context + 1)  # a prompt's chunk ends before the token behind it, which is known
        wanted = np.minimum(newest, self._drafter.spec.max_position)
        end = np.minimum(wanted, self._slots.num_places_of(rows.slots))
        chosen = np.flatnonzero(end > first)
        order = chosen[np.argsort(end[chosen] - first[chosen] > 1, kind="stable")]
        if len(order):
            slots = rows.slots[order]
            step = self._step(slots, first[order], end[order])
            hidden = self._drafter.extend(step, self._cache, self._features(rows, order, first, end, features))
            self._kept[slots] = end[order]
            for place, row in enumerate(order.tolist()):
                if end[row] == known[row]:
                    self._hidden[int(rows.slots[row])] = hidden[place : place + 1]
        if features is not None and self._state_features is not None and rows.states is not None:
            last = rows.starts[:-1] + newest - 2 - rows.computed
            for places in rows.states[1:]:
                self._state_features[places[places > 0]] = features[last[places > 0]]

    def _features(self, rows: StepRows, order: Ints, first: Ints, end: Ints, features: Tensor | None) -> Tensor | None:
        """Return the feature of the token before each token of the pass, [T, features]."""
        if features is None:
            return None
        parts = []
        for row in order.tolist():
            begin, past = (int(place - 1 - rows.computed[row]) for place in (first[row], end[row]))
            if begin == -1 and self._state_features is not None and rows.states is not None:  # behind a prefix hit
                read = int(rows.states[0, row])
                parts.append(self._state_features[read : read + 1].clone())
                begin = 0
            assert begin >= 0, "the feature before a token is of an earlier step"
            start = int(rows.starts[row])
            parts.append(features[start + begin : start + past])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    # ---- drafts ------------------------------------------------------------------------------------------------------

    def _propose(self, most: Mapping[int, int]) -> dict[int, Ints]:
        asked = np.array([slot for slot in most if slot in self._hidden], np.int64)
        found: dict[int, list[int]] = {int(slot): [] for slot in asked}
        if not len(asked):
            return {}
        known = self._slots.num_known_of(asked)
        room = self._slots.num_places_of(asked) - known + 1  # a draft needs a place if another one follows
        room = np.minimum(room, self._drafter.spec.max_position - known + 1)
        limits = np.minimum([most[int(slot)] for slot in asked], room)
        hidden, place = torch.cat([self._hidden[int(slot)] for slot in asked]), 0
        while True:
            going = np.flatnonzero(limits > place)
            if not len(going):
                return {slot: np.array(drafts, np.int32) for slot, drafts in found.items()}
            if len(going) < len(asked):
                asked, known, limits = asked[going], known[going], limits[going]
                hidden = hidden[torch.from_numpy(going)]
            drawn, usable = self._draw(asked, known + place, hidden)
            if drawn is None:
                return {}
            limits = np.where(usable, limits, 0)
            for slot, token in zip(asked[usable].tolist(), drawn[usable].tolist(), strict=True):
                found[slot].append(token)
                count = self._slots.num_known(slot)
                self._inputs.write_tokens(slot, count + place, np.array([token], np.int32), count)
            place += 1
            going = np.flatnonzero(limits > place)
            if not len(going):
                continue
            asked, known, limits = asked[going], known[going], limits[going]
            step = self._step(asked, known + place - 1, known + place)
            hidden = self._drafter.step(step, self._cache, hidden[torch.from_numpy(going)])

    def _draw(self, slots: Ints, lengths: Ints, hidden: Tensor) -> tuple[Ints | None, Ints]:
        """Return the drawn tokens and which of them are tokens; None if the logits are not numbers."""
        draw = partial(self._sample, slots, lengths, self._drafter.logits(hidden))
        ids, best = (each.numpy() for each in draw_on_first(self._exchange, len(slots), draw))
        if (np.isnan(best) | (best == np.inf)).any():
            self._fail("its logits are not numbers (NaN or infinity)")
            return None, np.empty(0, bool)
        return ids, np.isfinite(best)

    def _sample(self, slots: Ints, lengths: Ints, logits: Tensor | None) -> Draws:
        """Draw. Where other shards wait for the draws, an error counts as logits that are not numbers."""
        assert logits is not None, "this shard draws"
        try:
            drawn = sample(logits, self._sampling.batch(slots, lengths), self._inputs.token_ids)
        except Exception as error:
            if self._exchange is None:
                raise
            log.warning("a draft could not be drawn", exc_info=error)
            return torch.zeros(len(slots), dtype=torch.int64), torch.full((len(slots),), torch.nan)
        return drawn.token_ids, drawn.best

    def _step(self, slots: Ints, first: Ints, end: Ints) -> DraftStep:
        """Return the inputs of a pass over tokens first .. end - 1 of each slot. Rows of one token come first."""
        counts = end - first
        starts = np.zeros(len(slots) + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        none = np.zeros(len(slots), np.int64)
        rows = StepRows(slots, first, counts, starts, none > 0, none > 0, none - 1, none)
        made = self._inputs.make(StepBatch(rows, starts[1:] - 1, (), none[:0], none[:0], none[:0], ()))
        groups = (made.groups[self._main_group],) * self._num_groups
        first_key = self._drafter.first_key
        return replace(made, positions=made.positions - first_key, groups=groups, first_key=first_key)
