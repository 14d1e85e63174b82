"""A step's inputs against a walk by hand: the kernels in the interpreter and on a GPU, else their twin."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from localllm.kernels import prepare_step as prepare_module
from localllm.kernels.accept_drafts import accept_drafts
from localllm.kernels.launch import INTERPRETED
from localllm.kernels.paged_attention.device import Splitting, WorkLists, filled_list
from localllm.kernels.prepare_step import ROW_FIELDS, SHIFT_FIELD, SlotTokens, StepInputs, prepare_step

DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
SLOTS, WIDTH, BLOCK, GROUPS = 5, 40, 4, 2
BLOCKS = WIDTH // BLOCK
UNWRITTEN = -77


@dataclass
class Asked:
    """A row as the host stages it, and where it begins on the device."""

    slot: int  # -1: padding
    computed: int  # as the host says
    scheduled: int
    samples: bool
    adapter: int
    drafts: int  # -1: the host knows where the row begins
    known: int = 1  # tokens that the device knows of the slot
    valid: int = 0  # drafts behind them

    def begins(self) -> int:
        return self.computed if self.drafts < 0 else self.known - 1

    def num_tokens(self, draws: int) -> int:
        """Tokens that are not padding."""
        if self.slot < 0:
            return 0
        if draws == 1:
            return self.scheduled
        return 1 + (min(self.drafts, self.valid) if self.drafts >= 0 else 0)


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, list[Asked]]:
    """The draws of each row, and the rows."""
    draws = draw(st.sampled_from([1, 1, 2, 4, 8]))
    slots = draw(st.permutations(range(SLOTS)))[: draw(st.integers(1, SLOTS))]
    decodes = len(slots) if draws > 1 else draw(st.integers(0, len(slots)))
    rows = []
    for place, slot in enumerate(slots):
        decode = place < decodes
        known, valid = draw(st.integers(1, WIDTH - draws)), draw(st.integers(0, draws - 1))
        in_flight = decode and draw(st.booleans())
        # of drafts in flight the host knows only the most that may be accepted
        computed = known - 1 + (draw(st.integers(0, WIDTH - draws - known)) if in_flight else 0)
        drafts = draw(st.integers(0, draws - 1)) if in_flight else -1
        scheduled = draws if decode else draw(st.integers(1, known))
        rows.append(
            Asked(slot, computed if decode else known - scheduled, scheduled, draw(st.booleans()),
                  draw(st.integers(-1, 3)), drafts, known, valid)
        )  # fmt: skip
        if draw(st.integers(0, 4)) == 0:
            rows[-1] = Asked(-1, 0, draws if decode else 0, False, -1, -1)
    return draws, rows


def prepared(
    draws: int, rows: list[Asked], tokens: SlotTokens, tables: Tensor, updates: list[list[int]],
    work: WorkLists | None = None,
) -> StepInputs:  # fmt: skip
    starts = [sum(row.scheduled for row in rows[:place]) for place in range(len(rows))]
    used = sum(row.scheduled for row in rows)
    fields = torch.zeros(ROW_FIELDS, len(rows), dtype=torch.int32)
    columns = ("slot", "computed", "scheduled", "samples", "adapter", "drafts")
    slot, computed, scheduled, samples, adapter, drafts = (
        torch.tensor([int(getattr(row, name)) for row in rows]) for name in columns
    )
    for place, column in enumerate((slot, computed, scheduled, torch.tensor(starts), samples, adapter, drafts)):
        fields[place] = column
    fields[SHIFT_FIELD] = -torch.arange(len(rows))
    header = torch.tensor([len(updates), used], dtype=torch.int32)
    staged = torch.cat([header, fields.flatten(), torch.tensor(updates, dtype=torch.int32).flatten()])
    inputs = StepInputs.empty(len(rows), used + 3 * (draws == 1), BLOCKS, DEVICE, GROUPS, len(rows) * draws)
    for field in StepInputs.__dataclass_fields__:
        getattr(inputs, field).fill_(UNWRITTEN)
    longest = max(row.scheduled for row in rows)
    prepare_step(staged.to(DEVICE), tokens, tables, inputs, BLOCK, longest, work)
    return inputs


def slot_tokens(rows: list[Asked]) -> SlotTokens:
    ids = torch.arange(SLOTS * (WIDTH + 1), dtype=torch.int32).view(SLOTS, WIDTH + 1) + 1000
    known, valid = torch.zeros(SLOTS, dtype=torch.int64), torch.full((SLOTS,), 9, dtype=torch.int32)
    for row in rows:
        if row.slot >= 0:
            known[row.slot], valid[row.slot] = row.known, row.valid
    return SlotTokens(ids.to(DEVICE), known.to(DEVICE), valid.to(DEVICE))


def block_tables() -> Tensor:
    return torch.arange(1, 1 + GROUPS * SLOTS * BLOCKS, dtype=torch.int32, device=DEVICE).view(GROUPS, SLOTS, BLOCKS)


@settings(max_examples=50, deadline=None)
@given(steps())
def test_rows_begin_where_the_device_knows(step: tuple[int, list[Asked]]) -> None:
    """Prompts, decodes, padding, and rows whose drafts were in flight when the host staged them."""
    draws, rows = step
    tokens, tables = slot_tokens(rows), block_tables()
    free = [[group, slot, place, 900 + 10 * group + slot] for group in range(GROUPS) for slot in (0, 3)
            for place in (1, BLOCKS - 1)]  # fmt: skip
    valid = tokens.valid.tolist()
    inputs = prepared(draws, rows, tokens, tables, free)

    expected = block_tables()
    for group, slot, place, block in free:
        expected[group, slot, place] = block
    assert torch.equal(tables, expected)

    ids, positions, adapters = inputs.token_ids.tolist(), inputs.positions.tolist(), inputs.adapters.tolist()
    mapping, held = inputs.slot_mapping.tolist(), inputs.block_tables.tolist()
    at = 0
    for place, row in enumerate(rows):
        begin, count = row.begins(), row.num_tokens(draws)
        context = begin + count if row.slot >= 0 else 0
        assert inputs.context_lens[place] == context
        assert inputs.cu_seqlens_q[place] == at
        for offset in range(row.scheduled):
            real, position = offset < count, begin + offset
            assert positions[at + offset] == (position if real else 0)
            assert inputs.rotary[at + offset] == (position - place if real else 0)
            assert ids[at + offset] == (int(tokens.token_ids[row.slot, position]) if real else 0)
            for group in range(GROUPS):
                block = int(tables[group, row.slot, position // BLOCK]) if real else 0
                assert mapping[group][at + offset] == (block * BLOCK + position % BLOCK if real else -1)
            assert not real or adapters[at + offset] == row.adapter
        for group in range(GROUPS):
            used = -(-context // BLOCK)
            assert held[group][place][:used] == tables[group, row.slot, :used].tolist()
        for index in range(draws):
            drawn = row.slot >= 0 and row.samples and (draws == 1 or index < count)
            assert inputs.slots[place * draws + index] == (row.slot if drawn else -1)
            if drawn:
                first = context if draws == 1 else begin + 1
                assert inputs.lengths[place * draws + index] == first + index
        if row.slot >= 0:
            assert draws > 1 or inputs.last_tokens[place] == at + row.scheduled - 1  # not read with drafts
            valid[row.slot] = 0 if row.drafts < 0 else valid[row.slot]
        at += row.scheduled
    assert inputs.cu_seqlens_q[len(rows)] == at
    assert tokens.valid.tolist() == valid
    padding = slice(at, None)
    assert {*ids[padding], *positions[padding]} <= {0}
    assert {*adapters[padding], *mapping[0][padding], *mapping[1][padding]} <= {-1}


@pytest.mark.skipif(not INTERPRETED and DEVICE.type == "cpu", reason="only kernels read work lists")
@settings(max_examples=20, deadline=None)
@given(steps(), st.sampled_from([2, 256]))
def test_work_lists_are_those_of_the_lengths(step: tuple[int, list[Asked]], at_once: int) -> None:
    """As the plan kernel fills them, for layers with and without a window; also of more rows than are read at once."""
    draws, rows = step
    decodes = sum(row.scheduled == draws for row in rows) if draws == 1 else len(rows)
    rows = sorted(rows, key=lambda row: row.scheduled != draws)
    if not decodes:
        return
    ways = (Splitting(4, 0, 2, draws, 6, 5, 2), Splitting(8, 5, 1, draws, 3, 4, 7))
    work = WorkLists.empty(ways, decodes, DEVICE)
    work.buffer.fill_(UNWRITTEN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_module, "SPLIT_ROWS", at_once)
        inputs = prepared(draws, rows, slot_tokens(rows), block_tables(), [], work)
    lengths = [0 if row.slot < 0 else row.begins() + row.num_tokens(draws) for row in rows]
    assert inputs.context_lens.tolist() == lengths
    for way in ways:
        got, expected = work.of(way), filled_list(way, inputs.context_lens, decodes)
        assert got is not None
        assert got.split_starts.tolist() == expected.split_starts.tolist()
        used = got.items[:, 0] >= 0
        assert got.items[used].tolist() == expected.items[used].tolist()
        assert torch.equal(got.items[:, 0], expected.items[:, 0])
        assert not got.counters.any(), "the first layer begins at zero"


@pytest.mark.parametrize("width", [0, 3])
def test_a_step_that_is_staged_before_drafts_are_rejected(width: int) -> None:
    """Two steps in flight. Of two rows with three drafts, one has one right, the other has none: the second step
    was staged for 4 more tokens of each, and begins at the third and at the second."""
    rows = [Asked(1, 6, 4, True, 0, 3, 7, 3), Asked(4, 9, 4, True, 1, 3, 10, 3)]
    tokens, tables = slot_tokens(rows), block_tables()
    first = prepared(4, rows, tokens, tables, [])
    assert first.positions.tolist() == [6, 7, 8, 9, 9, 10, 11, 12]
    drawn = tokens.token_ids[[1, 4]][[[0], [1]], first.lengths.view(2, 4).cpu()].long()
    drawn[0, 1], drawn[1, 0] = 5, 6
    best = torch.zeros(2, 4, device=DEVICE)
    lengths, slots = first.lengths.view(2, 4), first.slots.view(2, 4)
    counts = accept_drafts(slots, lengths, tokens.token_ids, drawn, best, tokens.known, tokens.valid)
    assert counts.tolist() == [[2, 1], [3, 3]]

    tokens.valid[1] = 2  # a lookup found two more behind one of them
    again = [Asked(row.slot, row.computed + 4, 1 + width, True, row.adapter, width) for row in rows]
    second = prepared(1 + width, again, tokens, tables, [])
    real = [1, 1] if not width else [3, 1]
    assert second.context_lens.tolist() == [8 + real[0], 10 + real[1]]
    positions = second.positions[: 2 * (1 + width)].view(2, -1).tolist()
    ids = second.token_ids[: 2 * (1 + width)].view(2, -1).tolist()
    assert [positions[0][: real[0]], positions[1][:1]] == [[8, 9, 10][: real[0]], [10]]
    assert [ids[0][0], ids[1][0]] == [5, 6]
    assert second.lengths.view(2, -1)[:, 0].tolist() == [9, 11]
