"""Drafts on a GPU: how many a step may verify, and the lookup that proposes them behind each slot's tokens.

Drafts never leave the device before they are verified. The host reads, with a step's results, how many there are, and
their ids, since a grammar needs them.
A step with drafts is padded to one of a few widths, since each width has kernels and graphs of its own.
Does not know: how drafts are accepted (kernels/accept_drafts.py), graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from localllm.engine.step import DraftSupport, NewSlot, StepPlan
from localllm.kernels.prepare_step import SlotTokens
from localllm.kernels.propose_lookup import propose_lookup
from localllm.models.fit import LOGITS_ROWS
from localllm.runner.batch import Ints
from localllm.runner.host_drafts import Proposal
from localllm.runner.staging import StepShape
from localllm.runner.upload import to_host

log = logging.getLogger(__name__)

DRAFT_WIDTHS = (3, 7, 15)
"""Drafts of each row of a step, between which steps are padded: 4, 8 or 16 tokens a row. With a drafter see
`draft_widths`."""
MOST_DRAWS = 256
"""Most draws of a step with drafts."""


def draft_widths(num_drafts: int = 0) -> tuple[int, ...]:
    """Return the widths to which steps with drafts are padded. num_drafts: of a drafter with weights, which nearly
    always has that many, so that no draw of its steps is padding; lookup, which may find more, has the largest width.
    0: lookup alone."""
    return tuple(sorted({min(num_drafts, DRAFT_WIDTHS[-1]), DRAFT_WIDTHS[-1]})) if num_drafts else DRAFT_WIDTHS


def most_draws(max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """Return the most draws of a step with drafts: logits of as many rows as other steps have, or MOST_DRAWS."""
    return min(
        MOST_DRAWS, max(LOGITS_ROWS, max_num_seqs), max_num_seqs * (1 + DRAFT_WIDTHS[-1]), max_num_batched_tokens
    )


def draft_support(draws: int, widths: Sequence[int] = DRAFT_WIDTHS) -> DraftSupport:
    """Return what steps of these widths verify that draw at most as many tokens."""
    least, widths = widths[0], tuple(width for width in widths if width < draws)
    if not widths:
        return DraftSupport(why_none=f"a step of {draws} tokens does not hold {1 + least} of one request")
    return DraftSupport(widths[-1], draws, proposes=True, widths=widths)


def draft_shapes(sizes: Sequence[int], draws: int, widths: Sequence[int] = DRAFT_WIDTHS) -> list[StepShape]:
    """Return the shapes of steps with drafts for each width: `sizes` rows, or the most that fit `draws`. Widths below
    the smallest of DRAFT_WIDTHS have no more rows than that one: more graphs would not be worth their memory."""
    shapes: list[StepShape] = []
    for width in widths:
        most = draws // (1 + max(width, DRAFT_WIDTHS[0])) or int(width < draws)
        fitting = sorted({size for size in sizes if size < most} | ({most} if most and max(sizes) >= most else set()))
        shapes += [StepShape(rows, drafts=width) for rows in fitting]
    return shapes


def fitting_width(wanted: int, widths: Sequence[int]) -> int:
    """Return the width of a step whose rows have up to `wanted` drafts: the smallest of `widths`, ascending, that holds
    all of them; else the largest; else 0."""
    return next((width for width in widths if width >= wanted), max(widths, default=0))


def narrowed(plan: StepPlan, width: int) -> StepPlan:
    """Return the plan with at most `width` drafts of each row. A runner may verify fewer than planned."""
    rows = tuple(
        row._replace(num_drafts=width, num_scheduled_tokens=1 + width) if row.num_drafts > width else row
        for row in plan.rows
    )
    return replace(plan, rows=rows)


class LookupOnDevice:
    """Drafts by lookup in each slot's own text. R: rows of a padded step."""

    def __init__(self, tokens: SlotTokens, max_rows: int) -> None:
        device = tokens.token_ids.device
        self._tokens = tokens
        self._most = torch.zeros(len(tokens.known), dtype=torch.int32, device=device)
        self._most_on_host = [0] * len(tokens.known)
        self._matches = torch.zeros(max_rows, dtype=torch.int64, device=device)

    @property
    def most(self) -> Tensor:
        """[slots] int32: how many drafts each slot may have."""
        return self._most

    def enter(self, new: NewSlot) -> None:
        """Set how many drafts a slot may have. Drafts of its last request are invalid from its first step on."""
        if self._most_on_host[new.slot] != new.max_drafts:
            self._most_on_host[new.slot] = new.max_drafts
            self._most[new.slot].fill_(new.max_drafts)

    def launch(self, slots: Tensor) -> Tensor:
        """Put drafts behind the tokens of slots [R], -1: none. Returns [R, 1 + places] int32: how many, and which."""
        tokens = self._tokens
        return propose_lookup(slots, self._most, tokens.known, tokens.valid, tokens.token_ids, self._matches)


class DeviceProposals:
    """Drafts that are being copied to the host."""

    def __init__(self, proposed: Tensor, plan_rows: tuple[int, ...], places: Ints) -> None:
        """proposed [R, 1 + places]: see `LookupOnDevice.launch`; places [S]: each sampling row's index among the R."""
        self._proposed, self._rows = to_host(proposed), tuple(zip(plan_rows, places.tolist(), strict=True))

    def items(self) -> Iterable[tuple[int, Proposal]]:
        found = self._proposed.numpy()
        if (found[:, 0] < 0).any():
            warn_once("a drafter's logits are not numbers (NaN or infinity): it drafts nothing for such rows")
            np.maximum(found[:, 0], 0, out=found[:, 0])
        return [(row, Proposal(tuple(found[at, 1 : 1 + found[at, 0]].tolist()), False)) for row, at in self._rows]


@cache
def warn_once(why: str) -> None:
    log.warning(why)
