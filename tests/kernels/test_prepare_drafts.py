"""The inputs of a drafter's passes: the kernels, in the interpreter or on a GPU, against their definition."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from localllm.kernels.launch import INTERPRETED
from localllm.kernels.prepare_drafts import (
    DraftRules,
    PairInputs,
    prepare_pairs,
    prepare_pairs_reference,
    record_draft,
    record_draft_reference,
)
from localllm.kernels.prepare_step import SlotTokens, StepInputs

DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
BY_KERNEL = INTERPRETED or DEVICE.type == "cuda"
SLOTS, LENGTH, BLOCK = 6, 40, 4
BLOCKS = LENGTH // BLOCK


class Step:
    """A step whose draws are accepted: some rows draw several times, others are chunks of prompts, others padding."""

    def __init__(self, draw: st.DataObject, device: torch.device) -> None:
        ask = draw.draw
        draws = ask(st.sampled_from([1, 1, 4]))
        slots = ask(st.permutations(range(SLOTS)))[: ask(st.integers(1, SLOTS))]
        rows = len(slots)
        self.rules = DraftRules(BLOCK, ask(st.integers(0, 1)), ask(st.sampled_from([LENGTH, 21])), 3)
        known, valid = torch.zeros(SLOTS, dtype=torch.int64), torch.zeros(SLOTS, dtype=torch.int32)
        table = torch.zeros(rows, BLOCKS, dtype=torch.int32)
        starts, positions, context, drawing = [0], list[int](), list[int](), list[int]()
        for row, slot in enumerate(slots):
            count = draws if draws > 1 else ask(st.integers(1, 5))
            first, samples = ask(st.integers(0, LENGTH - 6)), draws > 1 or ask(st.booleans())
            if ask(st.integers(0, 4)) == 0:
                slots[row], first, samples = -1, 0, False
            accepted = ask(st.integers(1, draws)) if draws > 1 else count
            known[slot], valid[slot] = first + accepted + (draws > 1), ask(st.sampled_from([0, 0, 2]))
            if draws == 1:
                known[slot] = first + count + 1
            held = ask(st.integers(-(-(first + count) // BLOCK), BLOCKS))
            table[row, :held] = torch.arange(1, 1 + held) + 10 * row
            positions += range(first, first + count)
            context.append(0 if slots[row] < 0 else first + count)
            drawing += [slots[row] if samples else -1] * draws
            starts.append(starts[-1] + count)
        padding = ask(st.integers(0, 3)) if draws == 1 else 0
        inputs = StepInputs.empty(rows, starts[-1] + padding, BLOCKS, torch.device("cpu"), 1, rows * draws)
        inputs.positions[: len(positions)] = torch.tensor(positions)
        inputs.context_lens.copy_(torch.tensor(context)), inputs.cu_seqlens_q.copy_(torch.tensor(starts))
        inputs.slots.copy_(torch.tensor(drawing))
        ids = torch.arange(SLOTS * (LENGTH + 1), dtype=torch.int32).view(SLOTS, -1) + 1000
        fields = (getattr(inputs, name).to(device) for name in StepInputs.__dataclass_fields__)
        self.inputs, self.longest = StepInputs(*fields), max(b - a for a, b in pairwise(starts))
        self.staged, self.table = torch.tensor(slots, dtype=torch.int32).to(device), table.to(device)
        self.slots = SlotTokens(ids.to(device), known.to(device), valid.to(device))
        self.most = torch.tensor([ask(st.integers(0, 4)) for _ in range(SLOTS)], dtype=torch.int32).to(device)
        numbers = [1.0, 1.0, 1.0, torch.nan, -torch.inf, torch.inf]
        self.best = torch.tensor([[ask(st.sampled_from(numbers)) for _ in range(rows)] for _ in range(3)]).to(device)

    def run(self, *, by_kernel: bool) -> list[Tensor]:
        """Return all that three drafts behind the step write."""
        slots = SlotTokens(*(tensor.clone() for tensor in self.slots))
        rows, tokens = len(self.staged), len(self.inputs.token_ids)
        pairs = PairInputs(*(each.fill_(-77) for each in PairInputs.empty(rows, tokens, DEVICE)))
        proposed = torch.zeros(rows, 17, dtype=torch.int32, device=DEVICE)
        first, then = (prepare_pairs, record_draft) if by_kernel else (prepare_pairs_reference, record_draft_reference)
        given_ = self.staged, self.inputs, self.table, slots, self.most, self.rules, pairs
        first(*given_, self.longest) if by_kernel else first(*given_)  # type: ignore[call-arg]
        seen = [tensor.clone() for tensor in pairs]
        row_pass = pairs.part(rows, rows)
        for place in range(3):
            drawn = torch.arange(rows, device=DEVICE) + 100 * (place + 1)
            then(drawn, self.best[place], self.table, slots, self.most, self.rules, row_pass, proposed, place)
            real = row_pass.draft_slots >= 0
            seen += [tensor.clone() for tensor in row_pass[:6]] + [row_pass.lengths * real]
        return [*seen, *slots, proposed]


@pytest.mark.skipif(not BY_KERNEL, reason="compares the kernels with their definition")
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_kernels_match_their_definition(draw: st.DataObject) -> None:
    step = Step(draw, DEVICE)
    for ours, wanted in zip(step.run(by_kernel=True), step.run(by_kernel=False), strict=True):
        assert ours.tolist() == wanted.tolist()


def test_tokens_move_by_one_and_drafts_follow_them() -> None:
    """By hand: of three drafts one was right; a chunk of a prompt; a row whose newest token has no block."""
    inputs = StepInputs.empty(3, 12, 3, DEVICE, 1, 12)
    inputs.positions.copy_(torch.tensor([5, 6, 7, 8, 0, 1, 2, 3, 7, 8, 9, 10]))
    inputs.cu_seqlens_q.copy_(torch.tensor([0, 4, 8, 12])), inputs.context_lens.copy_(torch.tensor([9, 4, 11]))
    inputs.slots.copy_(torch.tensor([2] * 4 + [-1] * 4 + [0] * 4))
    ids = torch.arange(3 * 13, dtype=torch.int32, device=DEVICE).view(3, 13)
    slots = SlotTokens(ids, torch.tensor([9, 0, 8], device=DEVICE), torch.zeros(3, dtype=torch.int32, device=DEVICE))
    table = torch.tensor([[1, 2, 0], [3, 4, 0], [5, 6, 0]], dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([2, 1, 0], dtype=torch.int32, device=DEVICE)
    rules, pairs = DraftRules(4, 1, 12, 2), PairInputs.empty(3, 12, DEVICE)
    most = torch.full((3,), 9, dtype=torch.int32, device=DEVICE)
    prepare_pairs(rows, inputs, table, slots, most, rules, pairs, 4)
    assert pairs.token_ids.tolist() == [32, 33, 0, 0, 14, 15, 16, 17, 8, 0, 0, 0]
    assert pairs.positions.tolist() == [5, 6, 0, 0, 0, 1, 2, 3, 7, 0, 0, 0]
    assert pairs.slot_mapping.tolist() == [10, 11, -1, -1, 13, 14, 15, 16, -1, -1, -1, -1]
    assert pairs.context_lens.tolist() == [8, 5, 9]
    assert pairs.last_tokens.tolist()[:2] == [1, 7]
    assert pairs.draft_slots.tolist() == [2, -1, -1]
    proposed = torch.zeros(3, 17, dtype=torch.int32, device=DEVICE)
    best = torch.ones(3, device=DEVICE)
    one = pairs.part(3, 3)
    record_draft(torch.tensor([70, 71, 72], device=DEVICE), best, table, slots, most, rules, one, proposed, 0)
    assert (slots.token_ids[2, 8], slots.valid.tolist()) == (70, [0, 0, 1])
    assert one.draft_slots.tolist() == [-1, -1, -1], "the draft's place has no block, so no other one follows"
    assert proposed[:, :2].tolist() == [[1, 70], [0, 0], [0, 0]]
