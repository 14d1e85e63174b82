"""A plan becomes exactly the inputs that its rows describe, in the model's order and back."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from localllm.engine.params import SamplingParams
from localllm.engine.step import NewSlot, Row, StepPlan
from localllm.kernels.launch import INTERPRETED
from localllm.models.inputs import ForwardInputs
from localllm.runner.batch import HostInputs, SlotState, StepBatch
from localllm.runner.staging import StagedInputs, StepShape, row_places
from tests.draws import draws

BLOCK, SLOTS, MAX_LEN = 8, 6, 64
CPU = torch.device("cpu")
FIXTURE_IS_A_WORD = [HealthCheck.function_scoped_fixture]  # nothing in it that one example could leave to the next


@pytest.fixture(params=["host", "staged"])
def maker(request: pytest.FixtureRequest) -> str:
    """On a CPU and, with its device played by one, on a GPU."""
    return str(request.param)


def state_of(maker: str) -> SlotState:
    asked: dict[str, Any] = {"max_num_seqs": SLOTS, "max_model_len": MAX_LEN, "block_size": BLOCK, "device": CPU}
    inputs = HostInputs(**asked) if maker == "host" else StagedInputs(**asked, max_num_batched_tokens=SLOTS * MAX_LEN)
    return SlotState(inputs, max_num_seqs=SLOTS, max_model_len=MAX_LEN, num_blocks=(100,), block_size=BLOCK,
                     vocab_size=1000)  # fmt: skip


def new_slot(
    slot: int, length: int, cached_blocks: int = 0, prompt_logprobs: int | None = None, adapter: int = -1
) -> NewSlot:
    ids = [100 * slot + i for i in range(length)]
    params = SamplingParams(temperature=0.0, prompt_logprobs=prompt_logprobs)
    return NewSlot(slot, f"r{slot}", ids, length, params, (tuple(10 * slot + 1 + i for i in range(cached_blocks)),),
                   cached_blocks * BLOCK, adapter=adapter)  # fmt: skip


def row_of(new: NewSlot, count: int) -> Row:
    end = new.num_computed_tokens + count
    held = len(new.block_ids[0])
    blocks = (tuple(10 * new.slot + 1 + i for i in range(held, -(-end // BLOCK))),)
    return Row(
        new.slot, new.request_id, new.num_computed_tokens, count, blocks if blocks[0] else (), end == len(new.token_ids)
    )


def run(state: SlotState, plan: StepPlan) -> tuple[StepBatch, ForwardInputs]:
    state.apply(plan)
    batch = state.batch(plan)
    return batch, state.inputs.make(batch)


requests = st.tuples(
    st.integers(1, 60), st.integers(0, 3), st.integers(1, 60), st.sampled_from([None, 0, 2]), st.integers(-1, 2)
)


@draws(10 if INTERPRETED else 100, suppress_health_check=FIXTURE_IS_A_WORD)
@given(st.lists(requests, min_size=1, max_size=SLOTS), st.randoms(use_true_random=False))
def test_inputs_say_what_the_plan_says(
    maker: str, asked: list[tuple[int, int, int, int | None, int]], random: object
) -> None:
    slots = random.sample(range(SLOTS), len(asked))  # type: ignore[attr-defined]
    news, rows = [], []
    for slot, (length, cached, count, logprobs, adapter) in zip(slots, asked, strict=True):
        new = new_slot(slot, length, min(cached, (length - 1) // BLOCK), logprobs, adapter)
        news.append(new)
        rows.append(row_of(new, min(count, length - new.num_computed_tokens)))
    state = state_of(maker)
    plan = StepPlan(1, tuple(rows), tuple(news))
    batch, inputs = run(state, plan)

    ones = [i for i, r in enumerate(rows) if r.num_scheduled_tokens == 1]
    assert inputs.num_decodes == len(ones)
    ones.sort(key=lambda i: rows[i].num_computed_tokens < news[i].prompt_len - 1)  # rows that generate come first
    order = ones + [i for i, r in enumerate(rows) if r.num_scheduled_tokens != 1]
    first = [row.num_computed_tokens for row in rows]
    flat = [(i, p) for i in order for p in range(first[i], first[i] + rows[i].num_scheduled_tokens)]
    assert inputs.token_ids.tolist() == [news[i].token_ids[p] for i, p in flat]
    assert inputs.positions.tolist() == [p for _, p in flat]
    assert inputs.groups[0].slot_mapping.tolist() == [
        (10 * slots[i] + 1 + p // BLOCK) * BLOCK + p % BLOCK for i, p in flat
    ]
    adapters = [news[i].adapter for i, _ in flat]
    assert (adapters if inputs.adapters is None else inputs.adapters.tolist()) == adapters
    assert inputs.adapters is not None or set(adapters) == {-1}
    assert list(inputs.adapters_host) == [news[i].adapter for i in order]
    contexts = [rows[i].num_computed_tokens + rows[i].num_scheduled_tokens for i in order]
    assert inputs.context_lens.tolist() == list(inputs.context_lens_host) == contexts
    assert list(inputs.query_lens) == [rows[i].num_scheduled_tokens for i in order]
    assert inputs.cu_seqlens_q.tolist() == [0, *np.cumsum(inputs.query_lens).tolist()]
    for table, i, context in zip(inputs.groups[0].block_table.tolist(), order, contexts, strict=True):
        used = -(-context // BLOCK)  # what lies behind is not read: the null block, or whatever was there
        assert table[:used] == [10 * slots[i] + 1 + b for b in range(used)]
        assert maker == "staged" or table[used:] == [0] * (len(table) - used)

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
    for i, (_, _, _, logprobs, _) in enumerate(asked):
        scored = [(i, p) for j, p in flat if j == i and p + 1 < len(news[i].token_ids)]
        assert spans.get(i, []) == (scored if logprobs is not None else [])


def test_dtypes_are_those_of_the_contract(maker: str) -> None:
    state = state_of(maker)
    new = new_slot(1, 5)
    plan = StepPlan(1, (row_of(new, 5),), (new,))
    _, inputs = run(state, plan)
    longs = (inputs.token_ids, inputs.positions, inputs.groups[0].slot_mapping, inputs.logits_indices)
    assert all(tensor.dtype == torch.int64 for tensor in longs)
    assert all(t.dtype == torch.int32 for t in (inputs.groups[0].block_table, inputs.context_lens, inputs.cu_seqlens_q))


def test_sampled_token_is_the_next_input(maker: str) -> None:
    state = state_of(maker)
    news = (new_slot(0, 5), new_slot(3, 8))
    plan = StepPlan(1, (row_of(news[0], 5), row_of(news[1], 8)), news)
    batch, _ = run(state, plan)
    state.inputs.token_ids[batch.slots, batch.lengths] = torch.tensor([777, 888], dtype=torch.int32)
    state.record_sampled(batch)
    again = StepPlan(2, (Row(3, "r3", 8, 1, ((39,),), True), Row(0, "r0", 5, 1, (), True)))
    _, inputs = run(state, again)
    assert inputs.token_ids.tolist() == [888, 777]
    assert inputs.groups[0].slot_mapping.tolist() == [39 * BLOCK, 1 * BLOCK + 5]


def test_a_stage_that_does_not_sample_takes_ids_from_the_plan(maker: str) -> None:
    """Of three rows one is new, and one continues its prompt: their ids are known."""
    state = state_of(maker)
    news = (new_slot(0, 5), new_slot(3, 8), new_slot(4, 20))
    run(state, StepPlan(1, (row_of(news[0], 5), row_of(news[1], 8), Row(4, "r4", 0, 8, ((41,),), False)), news))
    late = new_slot(2, 3)
    rows = (Row(3, "r3", 8, 1, ((39,),), True), Row(0, "r0", 5, 1, (), True), Row(4, "r4", 8, 2, ((42,),), False),
            row_of(late, 3))  # fmt: skip
    _, inputs = run(state, StepPlan(2, rows, (late,), known_token_ids=((3, (888,)), (0, (777,)))))
    assert inputs.token_ids.tolist() == [888, 777, 408, 409, 200, 201, 202]
    _, inputs = run(state, StepPlan(3, (Row(0, "r0", 6, 1, (), True),), known_token_ids=((0, (0,)),)))
    assert inputs.token_ids.tolist() == [0]


def test_the_stage_that_samples_needs_no_ids_of_the_plan(maker: str) -> None:
    state, writes = state_of(maker), []
    new = new_slot(0, 5)
    batch, _ = run(state, StepPlan(1, (row_of(new, 5),), (new,)))
    state.inputs.token_ids[batch.slots, batch.lengths] = 777
    state.record_sampled(batch)
    state.inputs.write_tokens = lambda *given: writes.append(given)  # type: ignore[method-assign]
    _, inputs = run(state, StepPlan(2, (Row(0, "r0", 5, 1, (), True),), known_token_ids=((0, (777,)),)))
    assert inputs.token_ids.tolist() == [777]
    assert not writes


@pytest.mark.parametrize("ids", [(1000,), (-1,), (1, 2), ()])
def test_impossible_ids_of_another_stage_are_our_mistake(maker: str, ids: tuple[int, ...]) -> None:
    state = state_of(maker)
    new = new_slot(0, 5)
    run(state, StepPlan(1, (row_of(new, 5),), (new,)))
    with pytest.raises(AssertionError):
        run(state, StepPlan(2, (Row(0, "r0", 5, 1, (), True),), known_token_ids=((0, ids),)))


def test_a_reused_slot_shows_nothing_of_its_former_holder(maker: str) -> None:
    state = state_of(maker)
    long, short = new_slot(2, 40), new_slot(2, 3)
    plan = StepPlan(1, (row_of(long, 40),), (long,))
    run(state, plan)
    other = new_slot(1, 40)
    plan = StepPlan(2, (row_of(short, 3), row_of(other, 40)), (short, other), (2,))
    _, inputs = run(state, plan)
    assert inputs.groups[0].block_table[0, 0] == 21
    assert maker == "staged" or inputs.groups[0].block_table[0].tolist() == [21, 0, 0, 0, 0]
    assert inputs.context_lens.tolist() == [3, 40]


@pytest.mark.parametrize(
    ("rows", "freed", "news"),
    [
        ((Row(0, "r0", 3, 1, (), True),), (), ()),                      # position 3 has no token yet
        ((Row(0, "r0", 1, 2, (), True),), (), ()),                      # position 0 was never computed
        ((Row(0, "r0", 0, 3, (), False), Row(0, "r0", 0, 3, (), False)), (), ()),
        ((Row(0, "stranger", 0, 3, (), True),), (), ()),
        ((Row(0, "r0", 0, 2, (), True),), (), ()),                      # samples before its last token
        ((Row(0, "r0", 0, 3, ((0,),), True),), (), ()),                    # the null block
        ((Row(0, "r0", 0, 3, ((100,),), True),), (), ()),                  # beyond the pool
        ((Row(0, "r0", 0, 3, (), True, (5,)),), (), ()),                # drafts
        ((), (1,), ()),                                                 # frees an empty slot
        ((), (), (new_slot(0, 3),)),                                    # enters a held slot
        ((), (), (NewSlot(1, "x", [1000], 1, SamplingParams(), (), 0),)),
        ((), (), (NewSlot(1, "x", [-1], 1, SamplingParams(), (), 0),)),
        ((), (), (NewSlot(1, "x", [1], 1, SamplingParams(), ((1,),), 8),)),
    ],
)  # fmt: skip
def test_an_impossible_plan_is_our_mistake(maker: str, rows: tuple[Row, ...], freed: tuple[int, ...],
                                           news: tuple[NewSlot, ...]) -> None:  # fmt: skip
    state = state_of(maker)
    first = new_slot(0, 3)
    state.apply(StepPlan(1, (Row(0, "r0", 0, 3, ((1,),), True),), (first,)))
    with pytest.raises(AssertionError):
        run(state, StepPlan(2, rows, news, freed))


def test_new_blocks_of_a_failed_step_do_not_reach_the_next() -> None:
    """The kernel writes a step's blocks in no order: of two for one place either could win."""
    state = state_of("staged")
    failed = new_slot(0, 20)
    state.apply(StepPlan(1, (Row(0, "r0", 0, 20, ((7, 8, 9),), True),), (failed,)))
    state.clear()  # before anything was sent
    again = new_slot(0, 20)
    _, inputs = run(state, StepPlan(2, (Row(0, "r0", 0, 20, ((3, 4, 5),), True),), (again,)))
    assert inputs.groups[0].block_table[0, :3].tolist() == [3, 4, 5]
    assert isinstance(state.inputs, StagedInputs)
    assert state.inputs._staged[0] == 3  # as many as this step brought


def test_each_group_has_its_own_blocks(maker: str) -> None:
    """Of the second group two blocks are before the window of a request that enters."""
    asked: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": MAX_LEN, "block_size": BLOCK, "device": CPU}
    inputs = (
        HostInputs(**asked, num_groups=2) if maker == "host"
        else StagedInputs(**asked, max_num_batched_tokens=4 * MAX_LEN, num_groups=2)
    )  # fmt: skip
    state = SlotState(inputs, max_num_seqs=4, max_model_len=MAX_LEN, num_blocks=(50, 20), block_size=BLOCK,
                      vocab_size=1000)  # fmt: skip
    new = NewSlot(2, "r2", list(range(29)), 29, SamplingParams(), ((41, 42, 43), (0, 0, 13)), 3 * BLOCK)
    _, made = run(state, StepPlan(1, (Row(2, "r2", 24, 5, ((44,), (9,)), True),), (new,)))
    assert [group.block_table[0, :4].tolist() for group in made.groups] == [[41, 42, 43, 44], [0, 0, 13, 9]]
    assert [group.slot_mapping[:5].tolist() for group in made.groups] == [
        [block * BLOCK + i for i in range(5)] for block in (44, 9)
    ]
    with pytest.raises(AssertionError, match="of 20"):
        state.apply(StepPlan(2, (Row(2, "r2", 29, 1, ((45,), (20,)), True),)))
    with pytest.raises(AssertionError, match="unlike numbers"):
        state.apply(StepPlan(2, (Row(2, "r2", 29, 1, ((45,), (6, 7)), True),)))


def test_two_blocks_for_one_place_are_our_mistake() -> None:
    state = state_of("staged")
    new = new_slot(0, 3)
    plan = StepPlan(1, (row_of(new, 3),), (new,))
    state.inputs.add_blocks(0, 0, ((7,),))
    with pytest.raises(AssertionError, match="two blocks for one place"):
        run(state, plan)


# ---- padded to a shape -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [StepShape(2, 1, 20), StepShape(4, 3, 32), StepShape(8, 8, 128)])
def test_padding_changes_no_real_row_and_reads_nothing(shape: StepShape) -> None:
    asked: dict[str, Any] = {"max_num_seqs": SLOTS, "max_model_len": MAX_LEN, "block_size": BLOCK, "device": CPU}
    staged = StagedInputs(**asked, max_num_batched_tokens=64, largest=StepShape(0, 16, 160))
    state = SlotState(staged, max_num_seqs=SLOTS, max_model_len=MAX_LEN, num_blocks=(100,), block_size=BLOCK,
                      vocab_size=1000)  # fmt: skip
    news = (new_slot(4, 9, 1), new_slot(1, 20), new_slot(2, 1))
    plan = StepPlan(1, (row_of(news[0], 1), row_of(news[1], 12), row_of(news[2], 1)), news)
    state.apply(plan)
    batch = state.batch(plan)
    staged.stage(batch, shape)
    inputs, buffers = staged.prepare(shape)

    assert len(inputs.token_ids) == shape.tokens
    assert row_places(batch, shape).tolist() == [0, 1, shape.decodes]
    prompt = slice(shape.decodes, shape.decodes + 12)
    assert inputs.token_ids[:2].tolist() == [408, 200]
    assert inputs.token_ids[prompt].tolist() == [100 + i for i in range(12)]
    assert inputs.positions[prompt].tolist() == list(range(12))
    assert inputs.groups[0].slot_mapping[prompt].tolist() == [(11 + i // BLOCK) * BLOCK + i % BLOCK for i in range(12)]
    padding = torch.ones(shape.tokens, dtype=torch.bool)
    padding[:2] = padding[prompt] = False
    assert set(inputs.groups[0].slot_mapping[padding].tolist()) <= {-1}
    assert set(inputs.token_ids[padding].tolist()) <= {0}
    assert inputs.context_lens.tolist() == [9, 1] + [0] * (shape.decodes - 2) + [12] + [0] * (shape.prefill_rows - 1)
    used = shape.decodes + 12
    assert inputs.cu_seqlens_q.tolist() == [*range(shape.decodes + 1), *[used] * shape.prefill_rows]
    assert buffers.slots.tolist() == [4, 2] + [-1] * (shape.rows - 2)  # the chunk does not sample
    assert buffers.last_tokens[:2].tolist() == [0, 1]
    assert buffers.last_tokens[shape.decodes] == used - 1


def test_more_new_blocks_than_one_buffer_holds() -> None:
    staged = StagedInputs(max_num_seqs=2, max_model_len=MAX_LEN, block_size=BLOCK, max_num_batched_tokens=8, device=CPU)
    state = SlotState(staged, max_num_seqs=2, max_model_len=MAX_LEN, num_blocks=(100,), block_size=BLOCK,
                      vocab_size=1000)  # fmt: skip
    news = (new_slot(0, 62, 7), new_slot(1, 62, 7))
    state.apply(StepPlan(1, (row_of(news[0], 1), row_of(news[1], 1)), news))
    assert sum(map(len, staged._updates)) > staged._max_updates
    plan = StepPlan(2, (Row(0, "r0", 56, 1, (), False), Row(1, "r1", 56, 1, (), False)))
    _, inputs = run(state, plan)
    assert inputs.groups[0].block_table.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8], [11, 12, 13, 14, 15, 16, 17, 18]]
