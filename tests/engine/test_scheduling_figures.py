"""Bounds on the figures that tests/engine/scheduling_figures.py prints; docs/lab.md has the figures themselves."""

import pytest

from tests.engine.scheduling_figures import churn, wait


@pytest.mark.parametrize("num_streams", [0, 8])
@pytest.mark.parametrize(
    ("long_len", "budget", "cap"), [(100_000, 2048, 512), (30_000, 2048, 512), (16_000, 1024, 256)]
)
def test_a_short_prompt_is_answered_soon_behind_a_long_one(long_len, budget, cap, num_streams):
    got = wait(long_len, budget, cap, num_streams=num_streams)
    assert got.short <= 2
    beside_streams = 17  # while the short one decodes, its 16 tokens, the long one has the cap of a step
    assert got.long - got.alone <= (1 if num_streams else beside_streams)


def test_a_short_prompt_is_answered_soon_behind_three_long_ones():
    got = wait(30_000, 2048, 512, num_streams=8, num_long=3)
    assert got.short <= 2
    assert got.long - got.alone <= 1


def test_a_full_pool_computes_little_twice():
    """A pool for 16 whole requests; where every prompt enters that fits, the ratio is 1.46 after 1332 steps."""
    got = churn(16)
    assert got.ratio <= 1.15
    assert got.mean_running > 16
    assert got.steps <= 1750


def test_room_for_outputs_that_end_early_is_not_kept():
    """max_tokens is 4096 and an output has 64 tokens on average: as many run at a time as where every prompt enters."""
    got = churn(2, output_len=4096, mean_end=64)
    assert got.num_preemptions == 0
    assert got.mean_running >= 11.5  # 12.1
    assert got.steps <= 330  # 317
