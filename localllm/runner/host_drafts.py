"""Proposes drafts behind the tokens of each slot on a CPU: by lookup where it finds any, else by a drafter.

A lookup takes what followed when the end of the text occurred before (prompt lookup, n-gram speculation). Of all
earlier places where the longest possible end of the text occurs, the latest is taken, and the tokens behind it are the
drafts: never more than the length of the match, since a short match is rarely right for long. Nothing is stored between
two calls: comparing a few thousand numbers takes microseconds.
Does not know: how a drafter runs (drafter_steps.py), how drafts are verified (host_steps.py).
Idea: prompt lookup decoding (Saxena 2023); matches as long as possible as in SAM decoding (Hu et al. 2024,
arXiv:2411.10666).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from localllm.engine.step import NewSlot
from localllm.runner.batch import HostInputs, Ints, SlotState, StepBatch
from localllm.runner.drafter_steps import DrafterSteps

NO_DRAFTS: Ints = np.empty(0, np.int32)
LEAST_MATCH = 3
"""Shortest end of the text that is looked up. Shorter ones occur by chance too often."""
LONGEST_MATCH = 64
"""Matches of this length or more are equally good."""


class Proposal(NamedTuple):
    """Drafts behind a row's tokens."""

    token_ids: tuple[int, ...]
    are_predicted: bool  # from the prediction that came with the request


class Proposals(Protocol):
    """Drafts by row of the plan. Those of a device are read when its step is done."""

    def items(self) -> Iterable[tuple[int, Proposal]]: ...


class Drafters(Protocol):
    """The sources of drafts of every slot."""

    def enter(self, new: NewSlot) -> None:
        """Set up a slot, in place of its last request."""

    def extend(self, batch: StepBatch, features: Tensor | None) -> None:
        """Let a drafter with weights read what a step made known, whether drafts are wanted or not: blocks that the
        step has filled may be shared."""

    def propose(self, batch: StepBatch, most: int) -> Proposals:
        """Put at most `most` drafts behind each sampling row's tokens. Return them by row of the plan."""


class HostDrafts:
    """The sources of drafts of every slot: its own text, and the prediction that came with its request."""

    def __init__(
        self, inputs: HostInputs, slots: SlotState, drafter: DrafterSteps | None = None, num_drafts: int = 0
    ) -> None:
        """drafter: None: lookup alone. num_drafts: most drafts of the drafter at a time."""
        self._inputs, self._slots = inputs, slots
        self._drafter, self._num_drafts = drafter, num_drafts
        self._most: dict[int, int] = {}  # of slots that may have drafts
        self._predicted: dict[int, Ints] = {}

    def enter(self, new: NewSlot) -> None:
        """Set up a slot, in place of its last request."""
        self._most.pop(new.slot, None)
        self._predicted.pop(new.slot, None)
        if self._drafter is not None:
            self._drafter.enter(new.slot, new.num_computed_tokens)
        if new.max_drafts:
            self._most[new.slot] = new.max_drafts
            if new.prediction_token_ids:
                self._predicted[new.slot] = np.array(new.prediction_token_ids, np.int32)

    def extend(self, batch: StepBatch, features: Tensor | None) -> None:
        if self._drafter is not None:
            self._drafter.extend(batch, features)

    def propose(self, batch: StepBatch, most: int) -> dict[int, Proposal]:
        """Put at most `most` drafts behind each sampling row's tokens. Return them by row of the plan."""
        proposed, missing = {}, {}
        for plan_row, slot in zip(batch.plan_rows, batch.slots[batch.firsts].tolist(), strict=True):
            allowed = min(most, self._most.get(slot, 0), self._slots.max_model_len - self._slots.num_known(slot))
            if allowed > 0:
                drafts, are_predicted = self._find_predicted(slot, allowed), True
                if not len(drafts):
                    drafts, are_predicted = self._find(slot, allowed), False
                if not len(drafts) and self._drafter is not None:
                    missing[slot] = plan_row, min(allowed, self._num_drafts)
                proposed[plan_row] = self._put(slot, drafts, are_predicted=are_predicted)
        if self._drafter is not None and missing:
            for slot, drafts in self._drafter.propose({slot: count for slot, (_, count) in missing.items()}).items():
                proposed[missing[slot][0]] = self._put(slot, drafts)
        return proposed

    def _put(self, slot: int, drafts: Ints, *, are_predicted: bool = False) -> Proposal:
        self._slots.add_drafts(slot, drafts)
        return Proposal(tuple(drafts.tolist()), are_predicted)

    def _find_predicted(self, slot: int, most: int) -> Ints:
        predicted = self._predicted.get(slot)
        if predicted is None:
            return NO_DRAFTS
        return find_predicted(self._tokens(slot)[self._slots.prompt_len(slot) :], predicted, most)

    def _find(self, slot: int, most: int) -> Ints:
        return find_drafts(self._tokens(slot), most)

    def _tokens(self, slot: int) -> Ints:
        return self._inputs.known_tokens(slot, self._slots.num_known(slot))


# ---- lookup ---------------------------------------------------------------------------------------------------------


def find_drafts(token_ids: Ints, most: int, least: int = LEAST_MATCH) -> Ints:
    """Return up to `most` tokens that may follow a text. token_ids [n] int32; least: shortest match."""
    end, length = longest_match(token_ids, token_ids[:-1], least)
    return token_ids[end : end + min(most, length)]


def find_predicted(output_ids: Ints, predicted_ids: Ints, most: int) -> Ints:
    """Return up to `most` tokens that may follow an output, as a predicted text has them.

    output_ids [n], predicted_ids [m] int32. An output that is the beginning of the prediction goes on as it does.
    """
    n = len(output_ids)
    if n < len(predicted_ids) and n <= LEAST_MATCH and (output_ids == predicted_ids[:n]).all():
        return predicted_ids[n : n + most]
    end, length = longest_match(output_ids, predicted_ids, LEAST_MATCH)
    return predicted_ids[end : end + (most if length else 0)]


def longest_match(token_ids: Ints, text: Ints, least: int) -> tuple[int, int]:
    """Find the longest end of `token_ids`, of at least `least` and at most `LONGEST_MATCH` tokens, in `text`.

    Returns the place behind the latest one, and its length; (0, 0) if none is found. `text` may be the beginning of
    `token_ids`, where the match then ends before the last token.
    """
    limit = min(LONGEST_MATCH, len(token_ids), len(text))
    if limit < least:
        return 0, 0
    last = token_ids[::-1]  # last[i]: the token i places before the end
    ends = np.flatnonzero(text[least - 1 :] == last[0]) + least  # places behind the matches that are left
    for place in range(1, least):
        ends = ends[text[ends - 1 - place] == last[place]]
    end, length = 0, 0
    while len(ends):
        end = int(ends[-1])
        least, length = max(least, length + 1), _common_length(text[:end], last, limit)
        if length == limit:
            break
        ends = ends[ends > length]  # only a longer match is better than the latest one
        for place in (length, *range(least, length)):
            ends = ends[text[ends - 1 - place] == last[place]]
            if not len(ends):
                break
    return end, length


def _common_length(text: Ints, last: Ints, limit: int) -> int:
    """Return for how many tokens the end of a text agrees with a reversed one, at most `limit`."""
    width = min(limit, len(text))
    differs = text[::-1][:width] != last[:width]
    place = int(differs.argmax())
    return place if differs[place] else width
