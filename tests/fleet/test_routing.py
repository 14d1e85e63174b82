"""The choice of a replica: by expected seconds, fair between equals, and bounded for hot prefixes."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.fleet.routing import PrefixMemory, ReplicaLoad, Router, cost_s


def first(router: Router, loads: list[ReplicaLoad], num_tokens: int = 1000) -> int:
    index, _ = router.order(list(enumerate(loads)), num_tokens)[0]
    router.chosen(index)
    return index


@given(st.integers(2, 9), st.integers(1, 60))
def test_equal_replicas_get_equal_shares(num_replicas: int, num_requests: int) -> None:
    router, queued = Router(num_replicas), [0] * num_replicas
    for _ in range(num_requests):
        queued[first(router, [ReplicaLoad(queued_tokens=each, running=each // 1000) for each in queued])] += 1000
    assert max(queued) - min(queued) <= 1000


@given(st.integers(2, 6), st.integers(1, 40))
def test_idle_replicas_take_turns(num_replicas: int, num_requests: int) -> None:
    """Requests one after the other, which leave nothing behind: no replica gets everything."""
    router = Router(num_replicas)
    shares = Counter(first(router, [ReplicaLoad()] * num_replicas) for _ in range(num_requests))
    counts = [shares[index] for index in range(num_replicas)]
    assert max(counts) - min(counts) <= 1


def test_speeds_that_differ_by_chance_do_not_decide() -> None:
    loads = [ReplicaLoad(prefill_tokens_per_s=rate) for rate in (1000.0, 1010.0, 990.0, 1040.0)]
    router = Router(4)
    assert {first(router, loads) for _ in range(4)} == {0, 1, 2, 3}


def test_the_longest_prefix_wins_on_idle_replicas() -> None:
    loads = [ReplicaLoad(), ReplicaLoad(hit_tokens=900), ReplicaLoad(hit_tokens=500)]
    assert [Router(3).order(list(enumerate(loads)), 1000)[0] for _ in range(3)] == [(1, "prefix")] * 3


def test_a_hot_prefix_spreads_once_its_replica_is_busy() -> None:
    """The replica with the prefix keeps its requests until computing the prefix elsewhere is quicker."""
    queued, hits, router = [0, 0], [900, 0], Router(2)
    chosen = []
    for _ in range(12):
        index = first(router, [ReplicaLoad(hit_tokens=hits[i], queued_tokens=queued[i]) for i in range(2)])
        queued[index] += 1000 - hits[index]
        hits[index] = 900
        chosen.append(index)
    assert chosen[:8] == [0] * 8
    assert 1 in chosen


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "hit_tokens": st.integers(0, 1000),
                "queued_tokens": st.integers(0, 50_000),
                "prefill_tokens_per_s": st.floats(10, 1e5),
                "running": st.integers(0, 200),
                "blocks_wait_s": st.floats(0, 10),
                "weight": st.floats(0.1, 10),
            }
        ).map(lambda each: ReplicaLoad(**each)),
        min_size=1,
        max_size=8,
    )
)
def test_the_choice_costs_nearly_the_least(loads: list[ReplicaLoad]) -> None:
    """So no replica queues while another one could answer sooner (P28)."""
    index = first(Router(len(loads)), loads)
    costs = [cost_s(load, 1000, 200.0) for load in loads]
    assert costs[index] <= min(costs) * 1.1 + 0.002 + 1e-9


def test_weight_is_a_replicas_speed() -> None:
    assert first(Router(2), [ReplicaLoad(), ReplicaLoad(weight=2.0)]) == 1
    assert cost_s(ReplicaLoad(weight=2.0), 1000, 200) == cost_s(ReplicaLoad(), 1000, 200) / 2


def test_full_replicas_and_missing_blocks_cost_time() -> None:
    idle, full = ReplicaLoad(), ReplicaLoad(running=64)
    assert cost_s(idle, 100, 200) < cost_s(full, 100, 200) < cost_s(ReplicaLoad(running=128), 100, 200)
    assert first(Router(2), [ReplicaLoad(blocks_wait_s=1.0), ReplicaLoad(queued_tokens=500)]) == 1


@pytest.mark.parametrize(("policy", "want"), [("round_robin", [0, 1, 0, 1]), ("least_loaded", [1, 1, 1, 1])])
def test_other_policies(policy: str, want: list[int]) -> None:
    router = Router(2, policy)  # type: ignore[arg-type]
    assert [first(router, [ReplicaLoad(running=3, hit_tokens=900), ReplicaLoad()]) for _ in range(4)] == want


def test_prefixes_are_remembered_up_to_a_bound() -> None:
    memory = PrefixMemory(most=3)
    memory.add([b"a", b"ab"], [1, 2])
    assert memory.hit_tokens([b"a", b"ab", b"abc"]) == 2
    assert memory.hit_tokens([b"x"]) == 0
    memory.add([b"y", b"yz"], [5, 6])  # ab is forgotten: it was used longest ago, and before its own prefix
    assert (memory.hit_tokens([b"a"]), memory.hit_tokens([b"a", b"ab"]), memory.hit_tokens([b"y", b"yz"])) == (1, 1, 6)


@given(st.lists(st.text("ab", min_size=1, max_size=6), max_size=12), st.integers(1, 20))
def test_bisection_finds_what_a_search_of_all_prefixes_finds(prompts: list[str], most: int) -> None:
    memory = PrefixMemory(most)
    for prompt in prompts:
        names = [prompt[:size].encode() for size in range(1, len(prompt) + 1)]
        want = max((size for size, name in enumerate(names, 1) if name in memory._tokens), default=0)
        assert memory.hit_tokens(names) == want
        memory.add(names, range(1, len(names) + 1))
