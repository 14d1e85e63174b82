"""What the runner remembers of every slot, and one step's `ForwardInputs` made of it.

Token ids live on the device, one row per slot. A prompt is written there when its request enters, a sampled token as
soon as it is sampled; the next step gathers its inputs from the same rows. So a step can be launched before the host
has read the last one's tokens. Lengths and block tables live on the host, in numpy: the host knows them beforehand.
Does not know: layers, sampling parameters, why a plan is as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localllm.engine.step import NewSlot, Row, StepPlan
from localllm.models.inputs import ForwardInputs
from localllm.runner.upload import all_to_device, to_device

Ints = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Consecutive prompt positions whose logits are wanted for prompt_logprobs."""

    plan_row: int
    slot: int
    first_position: int  # its logits score the token at first_position + 1
    start: int  # of its rows within `logits_indices`
    count: int
    num_logprobs: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One plan as tensors, and the way back. B: requests; S: of those, the ones that sample."""

    inputs: ForwardInputs
    plan_rows: tuple[int, ...]  # [S] place in the plan of each sampling row
    slots: Ints  # [S] int64
    lengths: Ints  # [S] int64       tokens known: the position that is sampled now
    sample_index: Tensor | None  # [S] int64 rows of `logits_indices` to sample from; None: all
    prompt_spans: tuple[PromptSpan, ...]


class SlotState:
    """Persistent rows, one per slot. `apply` changes who holds them, `build_inputs` reads them."""

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, num_blocks: int, block_size: int, vocab_size: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.max_model_len, self.block_size, self.num_blocks = max_model_len, block_size, num_blocks
        self._vocab_size, self._device = vocab_size, device
        max_blocks = -(-max_model_len // block_size)
        self.token_ids = to_device(np.zeros((max_num_seqs, max_model_len + 1), np.int32), device)
        self._block_table = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._num_blocks_held = np.zeros(max_num_seqs, np.int64)
        self._num_tokens = np.zeros(max_num_seqs, np.int64)  # known: given or sampled here
        self._num_computed = np.zeros(max_num_seqs, np.int64)
        self._prompt_len = np.zeros(max_num_seqs, np.int64)
        self._prompt_logprobs = np.full(max_num_seqs, -1, np.int64)
        self._holder: list[str | None] = [None] * max_num_seqs

    def clear(self) -> None:
        """Nobody holds a slot. Buffers stay: whoever enters overwrites what it reads."""
        self._holder = [None] * len(self._holder)

    def held(self) -> list[int]:
        return [slot for slot, holder in enumerate(self._holder) if holder is not None]

    # ---- who holds what ----------------------------------------------------------------------------------------------

    def apply(self, plan: StepPlan) -> None:
        """Freed slots, then new ones, then the rows' new blocks."""
        for slot in plan.freed_slots:
            assert self._holder[slot] is not None, f"slot {slot} freed and not held"
            self._holder[slot] = None
        for new in plan.new_slots:
            self._enter(new)
        for row in plan.rows:
            assert self._holder[row.slot] == row.request_id, f"slot {row.slot} belongs to {self._holder[row.slot]}"
            if row.new_block_ids:
                self._add_blocks(row.slot, row.new_block_ids)

    def _enter(self, new: NewSlot) -> None:
        slot, n = new.slot, len(new.token_ids)
        assert self._holder[slot] is None, f"slot {slot} given to {new.request_id} and held by {self._holder[slot]}"
        assert 1 <= new.prompt_len <= n <= self.max_model_len, (new.prompt_len, n, self.max_model_len)
        assert new.num_computed_tokens < n, "nothing left to compute"
        ids = np.array(new.token_ids, np.int32)  # a copy: the request's own array goes on growing
        assert ids.min() >= 0, "negative token id"
        assert ids.max() < self._vocab_size, f"token id {ids.max()} outside the vocabulary"
        self.token_ids[slot, :n] = to_device(ids, self._device)
        self._holder[slot] = new.request_id
        self._num_tokens[slot], self._prompt_len[slot] = n, new.prompt_len
        self._num_computed[slot], self._num_blocks_held[slot] = new.num_computed_tokens, 0
        asked = new.params.prompt_logprobs
        self._prompt_logprobs[slot] = -1 if asked is None else asked
        if new.block_ids:
            self._add_blocks(slot, new.block_ids)

    def _add_blocks(self, slot: int, block_ids: tuple[int, ...]) -> None:
        held = self._num_blocks_held[slot]
        assert min(block_ids) > 0, f"the null block is handed out: {block_ids}"
        assert max(block_ids) < self.num_blocks, f"blocks {block_ids} of {self.num_blocks}"
        self._block_table[slot, held : held + len(block_ids)] = block_ids
        self._num_blocks_held[slot] = held + len(block_ids)

    def record_sampled(self, slots: Ints, lengths: Ints, sampled: Tensor) -> None:
        """The sampled ids [S] become the tokens at positions `lengths`, on the device."""
        index = all_to_device([slots, lengths], self._device)
        self.token_ids.index_put_((index[0], index[1]), sampled.int())
        self._num_tokens[slots] = lengths + 1

    # ---- one step ----------------------------------------------------------------------------------------------------

    def build_inputs(self, plan: StepPlan) -> StepBatch:
        """plan.rows must not be empty. Advances what is computed: the plan is about to run."""
        computed, scheduled = _column(plan.rows, 2), _column(plan.rows, 3)
        order = np.argsort(scheduled != 1, kind="stable")  # rows of one token first, else the plan's order
        slots, computed, scheduled = _column(plan.rows, 0)[order], computed[order], scheduled[order]
        samples = np.fromiter((row.samples for row in plan.rows), bool, len(plan.rows))[order]
        context = computed + scheduled
        self._check(plan, slots, computed, context, samples)
        self._num_computed[slots] = context

        starts = np.zeros(len(slots) + 1, np.int64)  # of each request in the flat batch
        np.cumsum(scheduled, out=starts[1:])
        spans, wanted = self._wanted_logits(slots, computed, scheduled, starts, samples, order)
        ends = starts[1:][samples] - 1  # the last token of each sampling row
        sample_index = np.searchsorted(wanted, ends) if len(wanted) > len(ends) else None
        return StepBatch(
            self._forward_inputs(slots, computed, scheduled, context, starts, wanted),
            tuple(order[samples].tolist()),
            slots[samples],
            context[samples],
            None if sample_index is None else to_device(sample_index, self._device),
            spans,
        )

    def _check(self, plan: StepPlan, slots: Ints, computed: Ints, context: Ints, samples: Ints) -> None:
        known = self._num_tokens[slots]
        assert len(np.unique(slots)) == len(slots), "a slot twice in one step"
        assert not any(row.draft_token_ids for row in plan.rows), "this runner verifies no drafts"
        assert (context > computed).all(), "a row without tokens"
        assert (computed == self._num_computed[slots]).all(), (computed, self._num_computed[slots])
        assert (context <= known).all(), "a position is scheduled before its token exists"
        assert (context[samples] == known[samples]).all(), "a row samples before its last known token"
        assert (context <= self._num_blocks_held[slots] * self.block_size).all(), "a position without a block"

    def _wanted_logits(
        self, slots: Ints, computed: Ints, scheduled: Ints, starts: Ints, samples: Ints, order: Ints
    ) -> tuple[tuple[PromptSpan, ...], Ints]:
        """Flat positions whose logits are wanted, ascending: ends of sampling rows, prompts with prompt_logprobs."""
        ends = starts[1:][samples] - 1
        counts = np.minimum(scheduled, self._prompt_len[slots] - 1 - computed)
        asking = np.flatnonzero((self._prompt_logprobs[slots] >= 0) & (counts > 0))
        if not len(asking):
            return (), ends
        ranges = [np.arange(starts[i], starts[i] + counts[i]) for i in asking]
        wanted = np.unique(np.concatenate([ends, *ranges]))
        spans = tuple(
            PromptSpan(int(order[i]), int(slots[i]), int(computed[i]), int(np.searchsorted(wanted, starts[i])),
                       int(counts[i]), int(self._prompt_logprobs[slots[i]]))
            for i in asking
        )  # fmt: skip
        return spans, wanted

    def _forward_inputs(
        self, slots: Ints, computed: Ints, scheduled: Ints, context: Ints, starts: Ints, wanted: Ints
    ) -> ForwardInputs:
        positions = np.arange(starts[-1]) - np.repeat(starts[:-1] - computed, scheduled)
        slot_of_token = np.repeat(slots, scheduled)
        blocks = self._block_table[slot_of_token, positions // self.block_size].astype(np.int64)
        slot_mapping = blocks * self.block_size + positions % self.block_size
        width = int(-(-context.max() // self.block_size))
        longs = all_to_device([positions, slot_mapping, wanted, slot_of_token], self._device)
        ints = all_to_device([context.astype(np.int32), starts.astype(np.int32)], self._device)
        return ForwardInputs(
            token_ids=self.token_ids[longs[3], longs[0]].long(),
            positions=longs[0],
            slot_mapping=longs[1],
            block_table=to_device(self._held_blocks(slots, context, width), self._device),
            context_lens=ints[0],
            cu_seqlens_q=ints[1],
            logits_indices=longs[2],
            num_decodes=int((scheduled == 1).sum()),
            query_lens=tuple(scheduled.tolist()),
            context_lens_host=tuple(context.tolist()),
        )

    def _held_blocks(self, slots: Ints, context: Ints, width: int) -> Ints:
        """[B, width] the null block where a row's context has ended: a slot's former holder leaves its ids behind."""
        used = -(-context // self.block_size)
        return np.where(np.arange(width) < used[:, None], self._block_table[slots, :width], 0).astype(np.int32)


def _column(rows: tuple[Row, ...], index: int) -> Ints:
    return np.fromiter((row[index] for row in rows), np.int64, len(rows))
