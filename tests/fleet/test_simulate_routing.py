"""Routing by expected cost against round robin and least loaded, on the three traces of scripts/simulate_routing."""

import random
import runpy

import pytest

from scripts.layout import ROOT

SIMULATOR = runpy.run_path(str(ROOT / "scripts" / "simulate_routing"))
REPLICAS, REQUESTS = 4, 800


@pytest.mark.parametrize("name", SIMULATOR["TRACES"])
def test_expected_cost_finds_prefixes_and_shortens_the_longest_waits(name: str) -> None:
    trace = SIMULATOR["make_trace"](name, REQUESTS, REPLICAS, 0.9)
    prefix, least, turns = (
        SIMULATOR["simulate"](trace, REPLICAS, policy) for policy in ("prefix", "least_loaded", "round_robin")
    )
    assert prefix.hit_rate > 0.9 * prefix.oracle_rate
    assert prefix.hit_rate > max(least.hit_rate, turns.hit_rate)
    assert prefix.ttft_p99_s < min(least.ttft_p99_s, turns.ttft_p99_s)
    assert min(prefix.shares) > 0.1 * REQUESTS / REPLICAS  # no replica is starved for prefixes


def test_conversations_compute_few_tokens_twice() -> None:
    """8 conversations of 6 turns over 2 replicas: by turns each replica computes the other's half again."""
    maker = SIMULATOR["Trace"](1)
    open_ones, trace, now_s = [maker.text(800) for _ in range(8)], [], 0.0
    for turn in range(6):
        for index in random.Random(turn).sample(range(8), 8):
            now_s += 0.5
            open_ones[index] = open_ones[index] + maker.text(600)
            trace.append(maker.asked(open_ones[index], now_s))
    computed = {policy: 1 - SIMULATOR["simulate"](trace, 2, policy).hit_rate for policy in ("prefix", "round_robin")}
    oracle = 1 - SIMULATOR["simulate"](trace, 2, "prefix").oracle_rate
    assert computed["prefix"] == pytest.approx(oracle)
    assert computed["prefix"] < computed["round_robin"]
