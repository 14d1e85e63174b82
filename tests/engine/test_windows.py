"""KV groups with windows: what requests hold, what is given back, what the prefix cache finds, over a model of memory.

The fake model reads every position inside each group's window through its own block table, and raises when it finds
anything but the request's own prefix; the harness checks before each step that a request still holds what it reads.
"""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from localllm.engine.loop import EngineLoop
from localllm.engine.memory.block_names import BlockHasher
from localllm.engine.memory.block_pool import NULL_BLOCK
from localllm.engine.memory.cache_manager import CacheManager
from localllm.engine.memory.ledger import Hit, Ledger
from localllm.engine.scheduler import Scheduler
from localllm.engine.scheduler_config import SchedulerConfig
from localllm.models.spec.model_spec import held_blocks, main_group
from tests.draws import draws
from tests.engine.harness import BLOCK_SIZE, SmallEngine, make_engine, make_request
from tests.engine.walk import EngineMachine
from tests.fake_runner import FakeRunner, expected_output, first_seen

NAMES = [bytes([place]) for place in range(40)]


class Walk(EngineMachine):
    """Requests come, run, share prefixes, are preempted and aborted in any order."""

    @initialize(
        windows=st.sampled_from(
            [(None, 6), (None, 1), (7,), (None, 9, 17), (13, None), (5, 21), (None, -12), (-8,), (-5, None)]
        ),
        depth=st.sampled_from([1, 2]),
        num_stages=st.sampled_from([1, 1, 1, 2]),
        main=st.sampled_from([14, 24, 80]),
        spare=st.sampled_from([0, 3, 60]),
        budget=st.sampled_from([5, 16, 64]),
        policy=st.sampled_from(["fcfs", "priority"]),
        caching=st.sampled_from([True, True, True, False]),
        fixed_chunk=st.sampled_from([0, 0, 8]),
    )
    def build(self, windows, depth, num_stages, main, spare, budget, policy, caching, fixed_chunk):
        budget = max(budget, fixed_chunk + 4)
        least = [main if w is None else 1 + held_blocks(10**6, w, BLOCK_SIZE, budget) + spare for w in windows]
        self.most = (main - 2) * BLOCK_SIZE
        self.engine = make_engine(
            windows=windows, num_blocks=tuple(least), depth=depth if num_stages == 1 else num_stages,
            num_stages=num_stages, max_num_batched_tokens=budget, max_num_seqs=4, policy=policy,
            enable_prefix_caching=caching, fixed_chunk=fixed_chunk, vocab_size=4, output_reserve=0.0,
        )  # fmt: skip

    @rule(
        stem=st.integers(0, 1),
        length=st.sampled_from([1, 3, 4, 8, 9, 16, 25, 33, 48, 70]),
        max_tokens=st.integers(1, 30),
        priority=st.integers(0, 2),
    )
    def add(self, stem, length, max_tokens, priority):
        if length + max_tokens > self.most:
            return
        name = f"r{len(self.asked)}"
        prompt = [(stem * 7 + i) % 4 for i in range(length)]
        self.asked[name] = (prompt, max_tokens)
        self.engine.add(name, prompt, max_tokens=max_tokens, priority=priority)


Walk.TestCase.settings = draws(80, stateful_step_count=30)
TestWalk = Walk.TestCase


# ---- one request -----------------------------------------------------------------------------------------------------


def held(engine: SmallEngine, name: str) -> tuple[int, ...]:
    return engine.scheduler.requests[name].num_held_blocks


@pytest.mark.parametrize("window", [1, 4, 5, 8, 11, -5, -8])
def test_a_decoding_request_holds_its_window_and_no_more(window: int) -> None:
    engine = make_engine(windows=(None, window), num_blocks=64, max_num_batched_tokens=32)
    engine.add("r", range(30), max_tokens=60)
    engine.loop.step()
    while "r" in engine.scheduler.requests:
        engine.loop.step()
        if "r" in engine.scheduler.requests and engine.plans[-1].num_tokens == 1:
            assert held(engine, "r")[1] <= held_blocks(10**6, window, BLOCK_SIZE)
    assert engine.tokens["r"] == expected_output(list(range(30)), 60)


def test_guesses_that_are_wrong_find_their_window_again() -> None:
    engine = make_engine(windows=(None, 2), num_blocks=64, drafter=lambda request: (1, 2, 3, 0, 1), vocab_size=4)
    engine.add("r", [0, 1, 2, 3] * 5, max_tokens=50)
    assert engine.run()["r"] == expected_output([0, 1, 2, 3] * 5, 50, vocab_size=4)


def test_a_lone_request_that_no_windowed_group_can_hold_ends_with_an_error() -> None:
    engine = make_engine(windows=(None, 40), num_blocks=(64, 6), max_num_batched_tokens=16)
    engine.add("large", range(60))
    engine.add("small", range(9), max_tokens=4)
    engine.run()
    assert engine.endings["large"][0].error is not None
    assert engine.tokens["small"] == expected_output(list(range(9)), 4)


# ---- the prefix cache ------------------------------------------------------------------------------------------------


def ledger_with(windows: tuple[int | None, ...], named: dict[int, set[int]]) -> Ledger:
    """A ledger in which each group has named these places of one chain, all free."""
    ledger = Ledger((64,) * len(windows), BLOCK_SIZE, windows)
    for group, places in named.items():
        pool = ledger.pools[group]
        for place in sorted(places):
            blocks = pool.allocate(1)
            assert blocks is not None
            pool.register(blocks[0], NAMES[place])
            pool.release(blocks)
    return ledger


@pytest.mark.parametrize(
    ("window", "cached", "found"),
    [
        (1, set(), 10),  # the next query reads its own position alone
        (2, {9}, 10),
        (5, {9}, 10),  # positions 36 .. 39
        (6, {9}, 0),  # and 35, in the place before
        (6, {8, 9}, 10),
        (6, {7, 8}, 9),
        (6, {0, 9}, 1),  # place 8 is missing; the first place needs no other
        (9, {2, 3, 4, 8, 9}, 10),
        (10, {2, 3, 4, 8, 9}, 5),
        (64, set(range(9)), 9),
        (-8, set(), 10),  # 40 positions: the next query begins a chunk
        (-12, {9}, 10),  # positions 36 .. 39
        (-12, {0, 1, 2}, 9),
        (-16, {8, 9}, 10),
        (-16, {9}, 8),
        (-6, {9}, 10),  # positions 36 .. 39
        (-7, {8}, 9),  # position 35 alone
    ],
)
def test_a_hit_needs_the_window_before_it(window: int, cached: set[int], found: int) -> None:
    ledger = ledger_with((None, window), {0: set(range(10)), 1: cached})
    hit = ledger.lookup(NAMES[:12])
    assert hit.num_blocks == found
    first = first_seen(window, found * BLOCK_SIZE) // BLOCK_SIZE
    assert [bool(block) for block in hit.blocks[1]] == [place >= first for place in range(found)]


def test_a_hit_is_what_all_groups_have() -> None:
    ledger = ledger_with((None, 5, 9), {0: set(range(10)), 1: {3, 6, 7, 9}, 2: {2, 3, 5, 6, 7, 8}})
    assert ledger.lookup(NAMES[:12]).num_blocks == 8
    assert ledger.lookup(NAMES[:12], 3).num_blocks == 0
    assert ledger.lookup(NAMES[:12], 4).num_blocks == 8


def test_all_or_no_group_allocates() -> None:
    ledger = Ledger((10, 3), BLOCK_SIZE)
    request = make_request("r", range(40))
    ledger.enter(request, Hit(0, ((), ())))
    assert ledger.allocate(request, 3) is None
    assert ledger.num_free == (9, 2)
    assert ledger.allocate(request, 2) == ((1, 2), (1, 2))
    ledger.release(request)
    assert ledger.num_free == (9, 2)


def test_what_is_given_back_is_the_null_block_and_found_until_it_is_used_again() -> None:
    ledger = Ledger((20, 8), BLOCK_SIZE, (None, 5))
    request = make_request("r", range(40))
    ledger.enter(request, Hit(0, ((), ())))
    ledger.allocate(request, 5)
    for place in range(5):
        ledger.register(request, place, NAMES[place])
    ledger.drop_before(request, 15)  # reads from 11 on
    assert [block == NULL_BLOCK for block in request.block_tables[1]] == [True, True, False, False, False]
    assert request.num_held_blocks == (5, 3)
    assert ledger.lookup(NAMES[:2]).num_blocks == 2
    assert ledger.allocate(request, 4) is not None  # the second group has no others
    assert ledger.lookup(NAMES[:2]).num_blocks == 0
    ledger.release(request)
    assert ledger.num_free == (19, 7)


def test_a_shared_prefix_is_computed_once() -> None:
    engine = make_engine(windows=(None, 6), num_blocks=64)
    first = engine.add("first", range(33), max_tokens=4)
    engine.run()
    second = engine.add("second", [*range(33), 1, 2], max_tokens=20)
    engine.run()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    assert engine.tokens["second"] == expected_output([*range(33), 1, 2], 20)


# ---- figures ---------------------------------------------------------------------------------------------------------


def held_and_needed(layers: int, windowed: int, window: int, context: int, block_size: int) -> tuple[float, float]:
    """Return the KV that a request of `context` tokens holds, and what it would hold if windowed layers kept all; both
    in parts of what its layers read."""
    windows, counts = (window, None), (windowed, layers - windowed)
    ledger = Ledger((4 * context // block_size,) * 2, block_size, windows, step_tokens=2048)
    config = SchedulerConfig(
        max_num_seqs=1, max_num_batched_tokens=2048, max_model_len=context + 64, block_size=block_size
    )
    scheduler = Scheduler(config, CacheManager(config, ledger, BlockHasher(b"a model", block_size)))
    runner = FakeRunner(ledger.num_blocks, block_size, windows=windows, check=False)
    loop = EngineLoop(scheduler, runner, deliver=lambda outputs: None)
    request = make_request("r", [i % 100 for i in range(context - 16)], max_tokens=40)
    loop.submit(request)
    while request.num_computed_tokens < context:
        loop.step()
    held = sum(n * blocks * block_size for n, blocks in zip(counts, request.num_held_blocks, strict=True))
    needed = windowed * window + (layers - windowed) * context
    return held / needed, layers * context / needed


@pytest.mark.parametrize("block_size", [16, 64])
def test_a_model_of_gemma_3s_shape_holds_what_it_needs(block_size: int) -> None:
    """52 of 62 layers see 1,024 tokens of 32,768."""
    held, all_kept = held_and_needed(62, 52, 1024, 32_768, block_size)
    assert held <= 1.05
    assert all_kept == pytest.approx(5.33, abs=0.01)
    print(f"held / needed: {held:.3f}; every token kept: {all_kept:.2f}")


def test_a_model_of_gpt_oss_shape_holds_what_it_needs() -> None:
    """12 of 24 layers see 128 tokens of 32,768."""
    held, all_kept = held_and_needed(24, 12, 128, 32_768, 16)
    assert held <= 1.05
    assert all_kept == pytest.approx(1.99, abs=0.01)


# ---- sizes -----------------------------------------------------------------------------------------------------------


def test_the_main_group_keeps_every_token_or_the_most() -> None:
    assert [main_group(w) for w in ((None,), (7, None), (None, 7, None), (5, 9, 9))] == [0, 1, 0, 1]


def test_a_window_may_begin_and_end_inside_a_block() -> None:
    assert held_blocks(10**6, None, 4) == 250_000
    assert held_blocks(10**6, 5, 4) == 3
    assert held_blocks(7, 5, 4) == 2
    assert held_blocks(10**6, 5, 4, 8) == 5
