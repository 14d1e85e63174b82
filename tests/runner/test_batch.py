"""A plan becomes exactly the inputs that its rows describe, in the model's order and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.engine.params import SamplingParams
from localllm.engine.step import NewSlot, Row, StepPlan
from localllm.runner.batch import SlotState, StepBatch

BLOCK, SLOTS, MAX_LEN = 8, 6, 64


def state_of() -> SlotState:
    return SlotState(max_num_seqs=SLOTS, max_model_len=MAX_LEN, num_blocks=100, block_size=BLOCK, vocab_size=1000,
                     device=torch.device("cpu"))  # fmt: skip


def new_slot(slot: int, length: int, cached_blocks: int = 0, prompt_logprobs: int | None = None) -> NewSlot:
    ids = [100 * slot + i for i in range(length)]
    params = SamplingParams(temperature=0.0, prompt_logprobs=prompt_logprobs)
    return NewSlot(slot, f"r{slot}", ids, length, params, tuple(10 * slot + 1 + i for i in range(cached_blocks)),
                   cached_blocks * BLOCK)  # fmt: skip


def row_of(new: NewSlot, count: int) -> Row:
    end = new.num_computed_tokens + count
    held = len(new.block_ids)
    blocks = tuple(10 * new.slot + 1 + i for i in range(held, -(-end // BLOCK)))
    return Row(new.slot, new.request_id, new.num_computed_tokens, count, blocks, end == len(new.token_ids))


def run(state: SlotState, plan: StepPlan) -> StepBatch:
    state.apply(plan)
    return state.build_inputs(plan)


requests = st.tuples(st.integers(1, 60), st.integers(0, 3), st.integers(1, 60), st.sampled_from([None, 0, 2]))


@settings(deadline=None, max_examples=100)
@given(st.lists(requests, min_size=1, max_size=SLOTS), st.randoms(use_true_random=False))
def test_inputs_say_what_the_plan_says(asked: list[tuple[int, int, int, int | None]], random: object) -> None:
    slots = random.sample(range(SLOTS), len(asked))  # type: ignore[attr-defined]
    news, rows = [], []
    for slot, (length, cached, count, logprobs) in zip(slots, asked, strict=True):
        new = new_slot(slot, length, min(cached, (length - 1) // BLOCK), logprobs)
        news.append(new)
        rows.append(row_of(new, min(count, length - new.num_computed_tokens)))
    state = state_of()
    plan = StepPlan(1, tuple(rows), tuple(news))
    batch = run(state, plan)
    inputs = batch.inputs

    order = [i for i, r in enumerate(rows) if r.num_scheduled_tokens == 1]
    assert inputs.num_decodes == len(order)
    order += [i for i, r in enumerate(rows) if r.num_scheduled_tokens != 1]
    first = [row.num_computed_tokens for row in rows]
    flat = [(i, p) for i in order for p in range(first[i], first[i] + rows[i].num_scheduled_tokens)]
    assert inputs.token_ids.tolist() == [news[i].token_ids[p] for i, p in flat]
    assert inputs.positions.tolist() == [p for _, p in flat]
    assert inputs.slot_mapping.tolist() == [(10 * slots[i] + 1 + p // BLOCK) * BLOCK + p % BLOCK for i, p in flat]
    contexts = [rows[i].num_computed_tokens + rows[i].num_scheduled_tokens for i in order]
    assert inputs.context_lens.tolist() == list(inputs.context_lens_host) == contexts
    assert list(inputs.query_lens) == [rows[i].num_scheduled_tokens for i in order]
    assert inputs.cu_seqlens_q.tolist() == [0, *np.cumsum(inputs.query_lens).tolist()]
    for table, i, context in zip(inputs.block_table.tolist(), order, contexts, strict=True):
        used = -(-context // BLOCK)
        assert table == [10 * slots[i] + 1 + b for b in range(used)] + [0] * (len(table) - used)

    sampling = [i for i in order if rows[i].samples]
    assert list(batch.plan_rows) == sampling
    assert batch.slots.tolist() == [slots[i] for i in sampling]
    assert batch.lengths.tolist() == [len(news[i].token_ids) for i in sampling]
    wanted = inputs.logits_indices
    assert wanted.tolist() == sorted(set(wanted.tolist()))
    chosen = wanted if batch.sample_index is None else wanted[batch.sample_index]
    assert [flat[t] for t in chosen.tolist()] == [(i, len(news[i].token_ids) - 1) for i in sampling]
    spans = {
        span.plan_row: [flat[t] for t in wanted[span.start : span.start + span.count].tolist()]
        for span in batch.prompt_spans
    }
    for i, (_, _, _, logprobs) in enumerate(asked):
        scored = [(i, p) for j, p in flat if j == i and p + 1 < len(news[i].token_ids)]
        assert spans.get(i, []) == (scored if logprobs is not None else [])


def test_dtypes_are_those_of_the_contract() -> None:
    state = state_of()
    new = new_slot(1, 5)
    plan = StepPlan(1, (row_of(new, 5),), (new,))
    inputs = run(state, plan).inputs
    longs = (inputs.token_ids, inputs.positions, inputs.slot_mapping, inputs.logits_indices)
    assert all(tensor.dtype == torch.int64 for tensor in longs)
    assert all(t.dtype == torch.int32 for t in (inputs.block_table, inputs.context_lens, inputs.cu_seqlens_q))


def test_sampled_token_is_the_next_input() -> None:
    state = state_of()
    news = (new_slot(0, 5), new_slot(3, 8))
    plan = StepPlan(1, (row_of(news[0], 5), row_of(news[1], 8)), news)
    batch = run(state, plan)
    state.record_sampled(batch.slots, batch.lengths, torch.tensor([777, 888]))
    again = StepPlan(2, (Row(3, "r3", 8, 1, (39,), True), Row(0, "r0", 5, 1, (), True)))
    inputs = run(state, again).inputs
    assert inputs.token_ids.tolist() == [888, 777]
    assert inputs.slot_mapping.tolist() == [39 * BLOCK, 1 * BLOCK + 5]


def test_a_reused_slot_shows_nothing_of_its_former_holder() -> None:
    state = state_of()
    long, short = new_slot(2, 40), new_slot(2, 3)
    plan = StepPlan(1, (row_of(long, 40),), (long,))
    run(state, plan)
    other = new_slot(1, 40)
    plan = StepPlan(2, (row_of(short, 3), row_of(other, 40)), (short, other), (2,))
    inputs = run(state, plan).inputs
    assert inputs.block_table[0].tolist() == [21, 0, 0, 0, 0]
    assert inputs.context_lens.tolist() == [3, 40]


@pytest.mark.parametrize(
    ("rows", "freed", "news"),
    [
        ((Row(0, "r0", 3, 1, (), True),), (), ()),                      # position 3 has no token yet
        ((Row(0, "r0", 1, 2, (), True),), (), ()),                      # position 0 was never computed
        ((Row(0, "r0", 0, 3, (), False), Row(0, "r0", 0, 3, (), False)), (), ()),
        ((Row(0, "stranger", 0, 3, (), True),), (), ()),
        ((Row(0, "r0", 0, 2, (), True),), (), ()),                      # samples before its last token
        ((Row(0, "r0", 0, 3, (0,), True),), (), ()),                    # the null block
        ((Row(0, "r0", 0, 3, (100,), True),), (), ()),                  # beyond the pool
        ((Row(0, "r0", 0, 3, (), True, (5,)),), (), ()),                # drafts
        ((), (1,), ()),                                                 # frees an empty slot
        ((), (), (new_slot(0, 3),)),                                    # enters a held slot
        ((), (), (NewSlot(1, "x", [1000], 1, SamplingParams(), (), 0),)),
        ((), (), (NewSlot(1, "x", [-1], 1, SamplingParams(), (), 0),)),
        ((), (), (NewSlot(1, "x", [1], 1, SamplingParams(), (1,), 8),)),
    ],
)  # fmt: skip
def test_an_impossible_plan_is_our_mistake(rows: tuple[Row, ...], freed: tuple[int, ...],
                                           news: tuple[NewSlot, ...]) -> None:  # fmt: skip
    state = state_of()
    first = new_slot(0, 3)
    state.apply(StepPlan(1, (Row(0, "r0", 0, 3, (1,), True),), (first,)))
    with pytest.raises(AssertionError):
        run(state, StepPlan(2, rows, news, freed))
