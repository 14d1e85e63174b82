"""Preempted requests whose blocks stay in RAM: they continue where they were, and hold nothing after their end."""

import logging
import random
from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest

from localllm.engine.memory.block_stores import RamStore
from localllm.engine.memory.tiers import TierCosts
from localllm.engine.request import State
from localllm.engine.scheduler import _StepBuilder
from localllm.engine.step import StepPlan
from tests.engine.harness import (
    BLOCK_SIZE,
    PlannedTransfers,
    SmallEngine,
    _raise,
    check_invariants,
    make_engine,
    make_request,
)
from tests.fake_runner import expected_output

BLOCK_BYTES = 16 * BLOCK_SIZE
PROMPTS = {name: range(200 * ord(name), 200 * ord(name) + 60) for name in "abcdef"}


def swapping(ram_blocks: int = 1000, **config: object) -> SmallEngine:
    sizes = {"num_blocks": 100, "output_reserve": 0.0}
    return make_engine(transfers=PlannedTransfers([RamStore(ram_blocks * BLOCK_BYTES)]), **{**sizes, **config})


def run(engine: SmallEngine, max_tokens: int = 40, prompts: dict[str, range] = PROMPTS) -> SmallEngine:
    """Answer the prompts, whose outputs do not fit together, while what moves does so within a step."""
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=max_tokens)
    finish(engine, prompts)
    for name, prompt in prompts.items():
        assert engine.tokens[name] == expected_output(prompt, max_tokens)
    return engine


def finish(engine: SmallEngine, names: Collection[str]) -> None:
    """Run until these requests have ended, while what moves does so within a step."""
    tiers = engine.scheduler.cache.tiers
    for _ in range(2000):
        engine.loop.step()
        check_invariants(engine)
        while tiers is not None and tiers.transfers.jobs:
            tiers.transfers.advance()
        if len(engine.endings) == len(names):
            return
    raise AssertionError(f"still at work: {list(engine.scheduler.requests.values())}")


def holds_nothing(engine: SmallEngine) -> bool:
    """Return whether no swapped request holds anything, in RAM or by its names."""
    tiers = engine.scheduler.cache.tiers
    store = tiers.transfers.stores[0]
    tails = [key for key in store._blocks if key[1].startswith(b"tail")]
    tails += [name for pool in engine.scheduler.ledger.pools for name in pool.names() if name.startswith(b"tail")]
    return not (tiers.swaps._swaps or tiers.swaps._holders or tiers.swaps.used_bytes or store._held or tails)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_swapped_request_computes_nothing_again(depth: int) -> None:
    engine = run(swapping(depth=depth))
    stats = engine.scheduler.cache.tiers.stats()
    assert stats.num_swapped_out == stats.num_swapped_in == engine.scheduler.recorder.num_preemptions > 0
    assert engine.scheduler.recorder.recomputed_tokens == 0
    assert holds_nothing(engine)
    assert sum(each.num_swaps for each in engine.scheduler.recorder.recent) == stats.num_swapped_out


def test_a_request_is_swapped_while_its_prompt_is_computed() -> None:
    """Its chunks go on where they were."""
    engine = swapping(num_blocks=40, policy="priority", max_num_batched_tokens=8)
    long = list(range(100))
    engine.add("long", long, priority=2)
    for _ in range(5):
        engine.loop.step()
    assert engine.scheduler.requests["long"].num_computed_tokens == 40
    for name in "ab":
        engine.add(name, PROMPTS[name], max_tokens=30)
    told = engine.run()
    assert told["long"] == expected_output(long, 8)
    assert engine.scheduler.cache.tiers.num_swapped_in == 1
    assert engine.scheduler.recorder.recomputed_tokens == 0


def test_windowed_groups_are_swapped_with_what_their_window_reads() -> None:
    engine = run(swapping(num_blocks=(100, 60), windows=(None, 9)))
    assert engine.scheduler.cache.tiers.num_swapped_in > 0
    assert engine.scheduler.recorder.recomputed_tokens == 0
    assert holds_nothing(engine)


def test_chunks_at_fixed_positions_are_swapped_with_outputs_that_have_no_names() -> None:
    engine = run(swapping(fixed_chunk=16, max_num_batched_tokens=32))
    assert engine.scheduler.cache.tiers.num_swapped_in > 0
    assert engine.scheduler.recorder.recomputed_tokens == 0


def test_prompt_logprobs_are_computed_once() -> None:
    engine = swapping()
    for name, prompt in PROMPTS.items():
        engine.add(name, prompt, max_tokens=40, prompt_logprobs=1)
    told = engine.run()
    assert told == {name: expected_output(prompt, 40) for name, prompt in PROMPTS.items()}
    assert engine.scheduler.cache.tiers.num_swapped_in > 0
    assert engine.scheduler.recorder.recomputed_tokens == 0


@pytest.mark.parametrize("ram_blocks", [2, 30, 60])
def test_swapped_requests_hold_at_most_half_of_the_tier(ram_blocks: int) -> None:
    """A request that does not fit is computed again, or its blocks are found by the names of their content."""
    engine, most = swapping(ram_blocks), 0
    swaps, store = engine.scheduler.cache.tiers.swaps, engine.scheduler.cache.tiers.transfers.stores[0]
    begin = swaps.begin

    def watched(*swap: object) -> None:
        nonlocal most
        begin(*swap)
        most = max(most, swaps.used_bytes)

    swaps.begin = watched
    run(engine)
    assert most <= ram_blocks * BLOCK_BYTES / 2
    assert store.used_bytes <= store.capacity_bytes
    assert (engine.scheduler.cache.tiers.num_swapped_out > 0) == (ram_blocks == 60)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("ram_blocks", [1000, 12, 2])
def test_requests_that_fit_one_at_a_time_with_a_block_to_spare_all_end(ram_blocks: int, depth: int) -> None:
    """S26: none is swapped for ever, whether all of it, a part or nothing fits into RAM."""
    prompts, needed = {name: prompt[:8] for name, prompt in PROMPTS.items()}, -(-(8 + 40) // BLOCK_SIZE)
    engine = run(swapping(ram_blocks, depth=depth, num_blocks=1 + needed + 1), prompts=prompts)
    assert engine.scheduler.recorder.num_preemptions > 0
    assert holds_nothing(engine)


def test_swap_space_0_computes_again() -> None:
    engine = run(swapping(swap_bytes=0))
    assert engine.scheduler.cache.tiers.num_swapped_out == 0
    assert engine.scheduler.recorder.recomputed_tokens > 0


def test_blocks_that_are_held_are_not_evicted() -> None:
    store = RamStore(4 * BLOCK_BYTES)
    blocks = {(0, bytes([number])): block for number, block in enumerate([b"\1" * 64] * 8)}
    keys = list(blocks)
    store.hold(keys[:2])
    for key, content in blocks.items():
        store.put(key, np.frombuffer(content, np.uint8))
    assert all(key in store for key in (*keys[:2], *keys[-2:]))
    store.hold(keys)
    store.put((0, b"more"), np.zeros(BLOCK_BYTES, np.uint8))
    assert (0, b"more") not in store
    store.let_go(keys, forget=keys[:1])
    assert keys[0] not in store
    store.put((0, b"more"), np.zeros(BLOCK_BYTES, np.uint8))
    assert (0, b"more") in store


def preempted(engine: SmallEngine) -> str:
    """Run until a request is swapped out, and return its name."""
    for name, prompt in PROMPTS.items():
        engine.add(name, prompt, max_tokens=40)
    while not engine.scheduler.cache.tiers.num_swapped_out:
        engine.loop.step()
    [name] = [name for name, each in engine.scheduler.requests.items() if each.state is State.PREEMPTED]
    return name


@pytest.mark.parametrize("while_loading", [False, True])
def test_an_abort_while_swapped_or_loading_gives_everything_back(while_loading: bool) -> None:
    engine = swapping()
    name = preempted(engine)
    others = sorted(engine.scheduler.requests.keys() - {name})
    if while_loading:
        transfers = engine.scheduler.cache.tiers.transfers
        for pool in engine.scheduler.ledger.pools:  # nothing of it is in the cache any more
            for each in engine.scheduler.cache.tiers.swaps.names(engine.scheduler.requests[name]):
                if (block := pool.find(each)) is not None and not pool.ref_count[block]:
                    engine.scheduler.cache.tiers._on_evicted(0, each, block)
                    pool.forget(each)
        while engine.scheduler.requests[name].state is not State.LOADING:
            engine.loop.step()
            while engine.scheduler.requests[name].state is not State.LOADING and transfers.jobs:
                transfers.advance()
    engine.loop.cancel(name)
    told = engine.run()
    while engine.scheduler.cache.tiers.transfers.jobs:
        engine.scheduler.cache.tiers.transfers.advance()
    engine.loop.step()
    assert holds_nothing(engine)
    assert all(told[each] == expected_output(PROMPTS[each], 40) for each in others)


def test_a_lost_block_of_a_swapped_request_is_computed_again() -> None:
    engine = swapping()
    tiers = engine.scheduler.cache.tiers
    put, lost = tiers.transfers.stores[0].put, []

    def forgetful(key, block):
        if key[1].startswith(b"tail") and not lost:
            lost.append(key)
        else:
            put(key, block)

    tiers.transfers.stores[0].put = forgetful
    run(engine)
    assert lost
    assert tiers.num_swapped_in < tiers.num_swapped_out
    assert 0 < engine.scheduler.recorder.recomputed_tokens <= 2 * BLOCK_SIZE
    assert holds_nothing(engine)


def test_a_nan_and_a_failed_step_end_all_swaps() -> None:
    engine = swapping()
    preempted(engine)
    engine.scheduler.cache.forget_all(engine.scheduler.running)
    assert holds_nothing(engine)
    told = engine.run()
    assert told == {name: expected_output(prompt, 40) for name, prompt in PROMPTS.items()}


def test_each_preemption_gives_the_tail_names_of_its_own() -> None:
    """Also of a request that is preempted twice, and of another one that has the id of one that has ended."""
    engine = swapping()
    swaps, names = engine.scheduler.cache.tiers.swaps, list[bytes]()
    for _ in range(2):
        request = engine.add("a", PROMPTS["a"], max_tokens=40)
        while request.state is not State.RUNNING or request.num_computed_tokens % BLOCK_SIZE != 2:
            engine.loop.step()
        for request.num_preemptions in range(2):
            swap = swaps.plan(request)
            assert swap is not None
            assert len(swap.tail) == 1
            names += swap.tail
        engine.loop.cancel("a")
        engine.loop.step()
        engine.endings.clear()
    assert len(set(names)) == 4


def test_drafts_that_were_in_flight_at_a_preemption_and_are_refused_are_void() -> None:
    """What was computed behind them is not resumed: the last accepted token is computed again."""
    engine = swapping(depth=2, propose=lambda ids, most: [31] * most, num_blocks=100)
    request, prompt = engine.add("a", PROMPTS["a"], max_tokens=40), PROMPTS["a"]
    scheduler = engine.scheduler
    while request.num_computed_tokens <= request.num_tokens + 1:  # the newest step has drafts, and is not settled
        engine.loop.step()
    scheduler._preempt(request, _StepBuilder(budget=0))
    assert request in scheduler.cache.tiers.swaps
    finish(engine, "a")
    assert engine.tokens["a"] == expected_output(prompt, 40)
    assert scheduler.cache.tiers.num_swapped_in == 1


def test_a_copy_is_written_when_its_step_is_settled_and_not_before() -> None:
    engine = swapping()
    tiers, pool = engine.scheduler.cache.tiers, engine.scheduler.ledger.main_pool
    [block] = pool.take(1)
    pool.register(block, bytes(16))
    tiers._queued[0, bytes(16)] = block
    tiers.begin_step()
    [move] = tiers.take_moves(8)
    move.host.result = lambda: [np.zeros(BLOCK_BYTES, np.uint8)]
    tiers.settle(StepPlan(7, ()), 0.0)
    assert not tiers.transfers.jobs
    tiers.settle(StepPlan(8, ()), 0.0)
    assert len(tiers.transfers.jobs) == 1


def test_a_preemption_keeps_a_block_for_each_running_request_for_two_steps() -> None:
    engine = swapping()
    preempted(engine)
    preemption, running = engine.scheduler._preemption, len(engine.scheduler.running)
    spare = []
    for _ in range(3):
        spare.append(preemption.spare_blocks(None)[0])
        preemption.on_step()
    spare.append(preemption.spare_blocks(None)[0])
    assert spare[0] + running == spare[-1]


# ---- the cost model --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bandwidth", [1e8, 1e9, 1e10, 1e11])
@pytest.mark.parametrize("num_tokens", [500, 30_000])
def test_the_faster_way_is_taken(bandwidth: float, num_tokens: int) -> None:
    """A simulated machine: 8B, 128 KiB and 1/9400 s a token, more with the context."""
    costs, token_bytes = TierCosts(), 128 * 1024

    def token_s(position: int) -> float:
        return (1 + position / 20_000) / 9400

    assert costs.swap_pays(0, num_tokens, token_bytes * num_tokens, 0)  # nothing is known
    for position in range(0, num_tokens, 250):
        costs.observe_prompt(250, 250 * token_s(position), position)
    for kind in ("read", "write", "copy in", "copy out"):
        costs.observe_copy(kind, 10**9, 10**9 / bandwidth)
    compute_s = sum(token_s(position) for position in range(num_tokens))
    assert costs.compute_s(0, num_tokens) == pytest.approx(compute_s, rel=0.25)
    num_bytes = token_bytes * num_tokens
    swap_s = 2 * num_bytes / bandwidth + 0.2 * 2 * num_bytes / bandwidth
    assert costs.swap_pays(0, num_tokens, num_bytes, num_bytes) == (swap_s < compute_s)
    assert costs.is_worth(0, num_tokens, num_bytes) == (2 * num_bytes / bandwidth < compute_s)


def test_what_a_context_costs_is_known_from_the_nearest_one() -> None:
    costs = TierCosts()
    assert costs.compute_s(0, 100) == 0.0
    costs.observe_prompt(1000, 1.0, 500)
    costs.observe_prompt(1000, 5.0, 9000)
    assert costs.compute_s(0, 1000) == pytest.approx(1.0)
    assert costs.compute_s(9000, 10_000) == pytest.approx(5.0)
    assert costs.compute_s(40_000, 41_000) == pytest.approx(5.0)


def test_no_swap_where_it_does_not_pay() -> None:
    engine = swapping()
    tiers = engine.scheduler.cache.tiers
    tiers.costs.observe_prompt(1000, 1e-6)
    tiers.costs.observe_copy("copy in", 1, 1.0)
    run(engine)
    assert tiers.num_swapped_out == 0


def test_any_mix_of_swaps_and_computing_again_gives_the_same_text() -> None:
    for seed in range(4):
        dice = random.Random(seed)
        engine = swapping(dice.choice([20, 80, 400]), depth=dice.choice([1, 2]), num_blocks=dice.choice([60, 100]))
        costs = engine.scheduler.cache.tiers.costs
        costs.swap_pays = lambda *_, dice=dice: dice.random() < 0.5
        run(engine)
        assert holds_nothing(engine)


# ---- walks -----------------------------------------------------------------------------------------------------------


class Walk:
    """Requests of all kinds come, also while a step runs, are preempted, swapped, taken back and aborted, while threads
    are late, fail and answer in any order. A step that fails may end requests, and what remains is right all the same.
    """

    def __init__(self, seed: int, *, fails: bool = False) -> None:
        self.dice = dice = random.Random(seed)
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.aborted: set[str] = set()
        self.depth, self.fails, self.num_taken_back = dice.choice([1, 1, 2, 3]), fails, 0
        windows = dice.choice([(None,), (None,), (None, 9)])
        self.transfers = PlannedTransfers([RamStore(dice.choice([2, 20, 80, 500]) * BLOCK_BYTES)], dice)
        drafts = self.depth > 1 and dice.random() < 0.5
        self.engine = make_engine(
            depth=self.depth, num_blocks=tuple(dice.choice([18, 30, 50]) for _ in windows), windows=windows,
            vocab_size=4, max_num_seqs=4, max_num_batched_tokens=dice.choice([8, 16, 64]), policy="priority",
            output_reserve=dice.choice([0.0, 0.5]), transfers=self.transfers, fail_when=self.on_forward,
            propose=(lambda ids, most: [dice.randrange(4) for _ in range(most)]) if drafts else None,
        )  # fmt: skip
        take_back = self.engine.scheduler.take_back

        def counted() -> None:
            self.num_taken_back += 1
            take_back()

        self.engine.scheduler.take_back = counted
        if not fails:
            self.engine.loop._recover = _raise
        costs = self.engine.scheduler.cache.tiers.costs
        costs.swap_pays = lambda *_: dice.random() < 0.8

    def on_forward(self, plan: object) -> bool:
        if self.dice.random() < 0.1:
            self.add()
        return self.fails and self.dice.random() < 0.01

    def add(self) -> None:
        dice, name = self.dice, f"r{len(self.asked)}"
        start = dice.choice([1, 1, 7, 100 * len(self.asked)])
        prompt = list(range(start, start + dice.choice([3, 8, 13, 24, 34])))
        max_tokens = dice.choice([1, 3, 9, 20])
        smallest = min(pool.capacity for pool in self.engine.scheduler.ledger.pools)
        if len(prompt) + max_tokens + 8 > smallest * BLOCK_SIZE:
            return
        self.asked[name] = (prompt, max_tokens)
        priority = dice.randrange(3)
        request = make_request(name, prompt, max_tokens=max_tokens, priority=priority, salt=dice.choice([None, "x"]))
        if dice.random() < 0.3:
            request.options = replace(request.options, is_background=True)
        self.engine.loop.submit(request)

    def step(self) -> None:
        dice, engine = self.dice, self.engine
        if dice.random() < 0.25 and len(engine.scheduler.requests) < 12:
            self.add()
        if self.asked and dice.random() < 0.02:
            name = dice.choice(list(self.asked))
            self.aborted.add(name)
            engine.loop.cancel(name)
        if dice.random() < 0.002:
            engine.scheduler.cache.forget_all(engine.scheduler.running)
        for _ in range(dice.choice([0, 0, 1, 2, 8])):
            self.transfers.advance()
        engine.loop.step()
        check_invariants(engine)
        check_swaps(engine)

    def end(self) -> None:
        """Finish what is left, and find nothing lost, nothing wrong and nothing held."""
        engine = self.engine
        self.add, steps = lambda: None, 0
        while engine.scheduler.has_work or engine.loop._inbox:
            engine.loop.step()
            check_invariants(engine)
            self.transfers.advance()
            steps += 1
            assert steps < 20_000, "requests wait for ever"
        while self.transfers.jobs:
            self.transfers.advance()
        engine.loop.step()
        for name, (prompt, max_tokens) in self.asked.items():
            [ending], expected = engine.endings[name], expected_output(prompt, max_tokens, vocab_size=4)
            got = engine.tokens.get(name, [])
            assert got == expected[: len(got)], name
            cut = (ending.finish_reason == "error" and self.fails) or name in self.aborted
            assert cut or len(got) == len(expected), (name, ending)
        tiers = engine.scheduler.cache.tiers
        assert holds_nothing(engine)
        assert (tiers._loads, tiers._leaving, tiers._out_bytes) == ([], set(), 0)
        assert tiers._private <= set(named(engine))
        for pool in engine.scheduler.ledger.pools:
            assert pool.num_free == pool.capacity


def named(engine: SmallEngine) -> list[tuple[int, bytes]]:
    return [(group, name) for group, pool in enumerate(engine.scheduler.ledger.pools) for name in pool.names()]


def check_swaps(engine: SmallEngine) -> None:
    """Check what is held in RAM: the blocks of waiting requests alone, counted once each, within both bounds."""
    swaps = engine.scheduler.cache.tiers.swaps
    waiting = {request.sequence for request in engine.scheduler.waiting}
    assert swaps._swaps.keys() <= waiting
    keys = {key for swap in swaps._swaps.values() for key in swap.keys}
    assert keys == swaps._holders.keys() == swaps._store._held
    assert swaps.used_bytes == len(keys) * BLOCK_BYTES <= swaps.capacity_bytes
    assert swaps._store.used_bytes == sum(block.nbytes for block in swaps._store._blocks.values())
    assert swaps._store.used_bytes <= swaps._store.capacity_bytes


def walked(seed: int, num_steps: int, *, fails: bool = False) -> Walk:
    walk = Walk(seed, fails=fails)
    for _ in range(num_steps):
        walk.step()
    walk.end()
    return walk


def test_walks_with_swaps_steps_taken_back_and_failures() -> None:
    logging.disable(logging.CRITICAL)
    try:
        walks = [walked(seed, 120, fails=seed % 3 == 2) for seed in range(6)]
    finally:
        logging.disable(logging.NOTSET)
    tiers = [walk.engine.scheduler.cache.tiers for walk in walks]
    assert sum(each.num_swapped_in for each in tiers) > 5
    assert sum(each.num_swapped_out - each.num_swapped_in for each in tiers) > 0
    assert sum(each.num_resumed for each in tiers) > 0
    assert sum(walk.num_taken_back for walk in walks) > 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nothing_is_lost_in_a_hundred_thousand_steps() -> None:
    logging.disable(logging.CRITICAL)
    try:
        for seed in range(1000, 1200):
            walked(seed, 500, fails=seed % 4 == 3)
    finally:
        logging.disable(logging.NOTSET)
