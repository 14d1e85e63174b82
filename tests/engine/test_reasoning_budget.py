"""A bound of reasoning in the engine: however steps are made, it ends in the same place, and costs nothing before."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.text.reasoning_budget import ReasoningBudget, ReasoningMarks
from tests.draws import draws
from tests.engine.harness import EveryOther, check_invariants, make_engine
from tests.fake_runner import expected_output

LETTERS = b"abcde"
MARKS = ReasoningMarks(b"a", b"bc", (1, 2), lambda token_id: LETTERS[token_id : token_id + 1])
AGAIN = ReasoningMarks(b"a", b"bc", (1, 2, 3), MARKS.token_bytes, again=True, barred_ids=(0,))


def bounded(tokens, is_inside, marks, length):
    return ReasoningBudget(marks, tokens, is_inside=is_inside, inner=length and EveryOther(length))


@draws(40)
@given(
    seed=st.integers(0, 10_000),
    depth=st.sampled_from([1, 2, 3]),
    budget=st.sampled_from([3, 8, 64]),
    num_blocks=st.sampled_from([12, 20, 80]),
    caching=st.booleans(),
)
def test_output_never_depends_on_how_it_was_scheduled(seed, depth, budget, num_blocks, caching):
    """Chunk size, neighbours, prefix cache, preemption and depth leave no trace."""
    rng = random.Random(seed)
    engine = make_engine(
        depth=depth, num_blocks=num_blocks, vocab_size=5, max_num_batched_tokens=budget, max_num_seqs=6,
        enable_prefix_caching=caching,
    )  # fmt: skip
    asked = {}
    for index in range(rng.randint(2, 8)):
        prompt = [rng.randrange(5) for _ in range(rng.randint(1, 20))]
        how = rng.randint(0, 6), rng.random() < 0.6, rng.choice([MARKS, AGAIN]), rng.choice([None, None, 12])
        asked[f"r{index}"] = (prompt, rng.randint(1, 16), how)
        engine.add(f"r{index}", prompt, max_tokens=asked[f"r{index}"][1], grammar=bounded(*how))
        for _ in range(rng.randint(0, 3)):
            engine.loop.step()
            check_invariants(engine)
    engine.run()
    for name, (prompt, max_tokens, how) in asked.items():
        assert engine.tokens[name] == expected_output(prompt, max_tokens, vocab_size=5, grammar=bounded(*how))
        tokens, is_inside, _, length = how
        got = bytes(engine.tokens[name])
        if is_inside and length is None and bytes((1, 2)) not in got[:tokens]:
            assert got[tokens : tokens + 2] == bytes((1, 2))[: max(0, max_tokens - tokens)]


@pytest.mark.parametrize("depth", [2, 3])
def test_steps_wait_for_masks_only_where_the_end_may_be_forced(depth):
    engine = make_engine(depth=depth, vocab_size=5)
    engine.add("a", [3, 4, 3], max_tokens=20, grammar=bounded(10, True, MARKS, None))
    rows = []
    sample = engine.loop.runner.sample
    engine.loop.runner.sample = lambda plan, masks: (rows.append(masks), sample(plan, masks))[1]
    engine.run()
    binding = [index for index, made in enumerate(rows) if made is not None]
    tokens = engine.tokens["a"]
    end = next(i for i in range(19) if tokens[i : i + 2] == [1, 2])
    if end == 10:
        assert set(range(10, 12)) <= set(binding)
    assert all(10 - depth < index < 12 + depth for index in binding)
    assert engine.scheduler.recorder.degraded_steps == 0


def test_choices_reason_each_for_itself_and_a_preempted_one_goes_on_counting():
    engine = make_engine(depth=2, vocab_size=5, num_blocks=12, max_num_batched_tokens=16, output_reserve=0.0)
    for index in range(4):
        engine.add(f"r{index}", [index, 4, 3, 2, 1, 3], max_tokens=14, grammar=bounded(5, True, MARKS, None))
    engine.run()
    assert engine.scheduler.recorder.num_preemptions > 0
    for index in range(4):
        expected = expected_output([index, 4, 3, 2, 1, 3], 14, vocab_size=5, grammar=bounded(5, True, MARKS, None))
        assert engine.tokens[f"r{index}"] == expected
