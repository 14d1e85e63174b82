"""How a step's prefill tokens are divided: nothing is wasted, the oldest keeps its half, short prompts pass."""

from hypothesis import given
from hypothesis import strategies as st

from localllm.engine.prefill import prefill_shares
from tests.draws import draws

WANTED = st.lists(st.integers(1, 3000), min_size=1, max_size=12)
BUDGET = st.integers(1, 2500)


@draws(500)
@given(wanted=WANTED, budget=BUDGET, data=st.data())
def test_shares_fit_the_budget_and_leave_nothing_over(wanted, budget, data):
    classes = sorted(data.draw(st.lists(st.integers(0, 2), min_size=len(wanted), max_size=len(wanted))))
    shares = prefill_shares(wanted, classes, budget)
    assert all(0 <= share <= want for share, want in zip(shares, wanted, strict=True))
    assert sum(shares) == min(budget, sum(wanted))
    assert shares[0] >= min(wanted[0], budget - budget // 2)
    for i, share in enumerate(shares):
        if share:  # whoever is more urgent has at least half of what is left, or all that it wants
            urgent = [j for j in range(len(wanted)) if classes[j] < classes[i]]
            assert all(shares[j] == wanted[j] for j in urgent)


@draws(300)
@given(wanted=st.lists(st.integers(1000, 1999), min_size=1, max_size=9), budget=BUDGET)
def test_prompts_of_like_length_are_served_in_order(wanted, budget):
    left, expected = budget, []
    for want in wanted:
        expected.append(min(want, left))
        left -= expected[-1]
    assert prefill_shares(wanted, [0] * len(wanted), budget) == expected


def test_a_prompt_that_ends_in_this_step_leaves_nothing_to_those_behind_before_it_is_served():
    assert prefill_shares([2000, 20, 20], [0, 0, 0], 2048) == [2000, 20, 20]
    assert prefill_shares([2040, 20, 20], [0, 0, 0], 2048) == [2040, 8, 0]


def test_shares_by_example():
    assert prefill_shares([100_000, 20], [0, 0], 2048) == [2028, 20]
    assert prefill_shares([100_000, 90_000, 20], [0, 0, 0], 2048) == [2028, 0, 20]
    assert prefill_shares([100_000, 40_000, 15_000, 20], [0] * 4, 2048) == [1024, 512, 492, 20]
    assert prefill_shares([100_000, 20], [0, 1], 2048) == [2048, 0]
