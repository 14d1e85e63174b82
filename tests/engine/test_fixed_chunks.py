"""Fixed chunks: every position is computed in the same row of the same length, whatever else runs.

The model made of memory notes for each position which row wrote it. Whoever reads it later checks that the row is the
one that a lone request would have written it in.
"""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from localllm.engine.prefill import chunk_length, num_sharable_tokens, whole_chunks
from localllm.engine.step import Row
from tests.draws import draws
from tests.engine.harness import BLOCK_SIZE, SmallEngine, make_engine
from tests.engine.walk import EngineMachine
from tests.fake_runner import FakeRunner, _Slot, expected_output

CHUNK = 2 * BLOCK_SIZE


class RowsNoted(FakeRunner):
    """Notes for each place of the cache from which position to which its row went."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._rows: dict[int, tuple[int, int]] = {}

    def _write(self, slot: _Slot, row: Row) -> None:
        super()._write(slot, row)
        start, end = row.num_computed_tokens, row.num_computed_tokens + row.num_scheduled_tokens
        for position in range(start, end):
            self._rows[self._cache_slot(slot, 0, position)] = (start, end)
        self._check_rows(slot, end)

    def _check_rows(self, slot: _Slot, end: int) -> None:
        start = 0
        while start < end:
            stop = start + 1 if start >= slot.prompt_len else min(start - start % CHUNK + CHUNK, slot.prompt_len)
            for position in range(start, stop):
                assert self._rows[self._cache_slot(slot, 0, position)] == (start, stop), f"{slot.request_id} {position}"
            start = stop


def make(**config: Any) -> SmallEngine:
    given = {"max_num_seqs": 4, "max_num_batched_tokens": CHUNK + 4, "fixed_chunk": CHUNK, "vocab_size": 4, **config}
    return make_engine(runner_type=RowsNoted, **given)  # type: ignore[arg-type]


def prompt_of(stem: int, length: int) -> list[int]:
    return [(stem * 7 + i) % 4 for i in range(length)]


class Walk(EngineMachine):
    """Requests come, run, are preempted and aborted in any order."""

    @initialize(
        depth=st.sampled_from([1, 2]),
        num_blocks=st.sampled_from([12, 16, 60]),
        budget=st.sampled_from([CHUNK + 4, 2 * CHUNK + 3, 64]),
        cap=st.sampled_from([0, 2, CHUNK, 20]),
        policy=st.sampled_from(["fcfs", "priority"]),
        caching=st.sampled_from([True, True, False]),
        reserve=st.sampled_from([0.0, 0.6]),
    )
    def build(self, depth, num_blocks, budget, cap, policy, caching, reserve):
        self.engine = make(
            depth=depth, num_blocks=num_blocks, max_num_batched_tokens=budget, long_prefill_token_threshold=cap,
            policy=policy, enable_prefix_caching=caching, output_reserve=reserve,
        )  # fmt: skip

    @rule(
        stem=st.integers(0, 1),
        length=st.sampled_from([1, 3, 7, 8, 9, 15, 16, 17, 24, 25, 30]),
        max_tokens=st.integers(1, 9),
        priority=st.integers(0, 2),
        scored=st.sampled_from([False, False, False, True]),
    )
    def add(self, stem, length, max_tokens, priority, scored):
        prompt = prompt_of(stem, length)
        if len(prompt) + max_tokens > (self.engine.scheduler.ledger.main_pool.capacity - 1) * BLOCK_SIZE:
            return
        name = f"r{len(self.asked)}"
        self.asked[name] = (prompt, max_tokens)
        scores = {"prompt_logprobs": 1} if scored else {}
        self.engine.add(name, prompt, max_tokens=max_tokens, priority=priority, **scores)


Walk.TestCase.settings = draws(60, stateful_step_count=40)
TestWalk = Walk.TestCase


@given(start=st.integers(0, 300), prompt_len=st.integers(1, 300), chunk=st.sampled_from([8, 128]))
def test_chunks_end_at_multiples_and_at_the_prompts_end(start: int, prompt_len: int, chunk: int) -> None:
    end = start + chunk_length(start, prompt_len, chunk)
    assert end > start
    if start >= prompt_len:
        assert end == start + 1
    else:
        assert end == prompt_len or end % chunk == 0
        assert end <= start - start % chunk + chunk
    assert num_sharable_tokens(prompt_len, chunk) % chunk == 0
    assert 0 <= prompt_len - num_sharable_tokens(prompt_len, chunk) < chunk


def test_a_chunk_that_does_not_fit_waits_and_a_shorter_one_behind_it_runs() -> None:
    assert whole_chunks([8, 8, 3, 1], 12) == [8, 0, 3, 1]
    assert whole_chunks([8], 7) == [0]


def test_a_whole_chunk_is_found_again_and_a_part_of_one_is_not() -> None:
    """17 tokens have two full chunks; of 15, one block of the second chunk is full and must be computed anew."""
    engine = make()
    engine.add("first", prompt_of(0, 17), max_tokens=2)
    engine.run()
    for name, length, hits in (("same", 17, 16), ("shorter", 15, 8), ("equal to two chunks", 16, 8)):
        request = engine.add(name, prompt_of(0, length), max_tokens=1)
        engine.run()
        assert request.num_cached_tokens == hits, name


def test_what_was_generated_is_computed_again_as_a_prompt() -> None:
    """A later prompt with an answer in it: the answer was computed token by token, and is not shared."""
    engine = make()
    engine.add("turn", prompt_of(0, 8), max_tokens=20)
    answer = engine.run()["turn"]
    request = engine.add("next", [*prompt_of(0, 8), *answer], max_tokens=1)
    engine.run()
    assert request.num_cached_tokens == 8


def test_a_preempted_request_replays_its_answer_token_by_token() -> None:
    engine = make(num_blocks=12, output_reserve=0.0)
    for index in range(3):
        engine.add(f"r{index}", prompt_of(index, 9), max_tokens=16)
    engine.run()
    assert engine.scheduler.recorder.num_preemptions
    for index in range(3):
        assert engine.tokens[f"r{index}"] == expected_output(prompt_of(index, 9), 16, vocab_size=4)


def test_a_prompt_is_not_starved_by_streams_or_by_shorter_prompts() -> None:
    """Each step has room for the oldest prompt's chunk, whatever decodes and whatever comes."""
    dice = random.Random(3)
    engine = make(num_blocks=200, long_prefill_token_threshold=2)
    for index in range(2):
        engine.add(f"stream {index}", [1], max_tokens=60)
    engine.loop.step()
    long = engine.add("long", prompt_of(1, 50), max_tokens=1)
    for index in range(7):
        engine.add(f"short {index}", [dice.randrange(4) for _ in range(5)], max_tokens=1)
        engine.loop.step()
    assert long.first_token_s is not None


def test_a_step_without_room_for_a_chunk_is_refused() -> None:
    with pytest.raises(AssertionError, match="no room"):
        make(max_num_batched_tokens=CHUNK + 3)
