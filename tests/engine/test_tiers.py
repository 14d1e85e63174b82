"""Blocks outside of the cache: walks on the model made of memory, whose contents prove each copy, then properties."""

import os
import random
import stat
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from localllm.engine.memory.block_stores import (
    HEADER,
    BlocksWritten,
    DiskStore,
    RamStore,
    Transfers,
    delete_kept,
    delete_of_removed,
    kept_models,
)
from localllm.engine.memory.tiers import TierCosts
from localllm.engine.params import SamplingParams
from localllm.engine.request import Request, RequestOptions, State
from localllm.engine.step import HostBlocks
from tests.draws import draws
from tests.engine.harness import BLOCK_SIZE, PlannedTransfers, SmallEngine, check_invariants, make_engine
from tests.engine.walk import EngineMachine
from tests.fake_runner import expected_output

BLOCK_BYTES = 16 * BLOCK_SIZE
PROMPTS = [list(range(start, start + length)) for start in (1, 1, 7) for length in (3, 8, 13, 24, 40)]
FINGERPRINT = bytes(16)


class TierWalk(EngineMachine):
    """Requests come, run, load, are preempted and aborted while threads are late, fail and answer in any order."""

    @initialize(
        depth=st.sampled_from([1, 2, 3]),
        num_blocks=st.sampled_from([(14,), (24,), (40,), (24, 14)]),
        ram_blocks=st.sampled_from([2, 12, 500]),
        budget=st.sampled_from([5, 16, 64]),
        drafts=st.booleans(),
        seed=st.integers(0, 1000),
    )
    def build(self, depth, num_blocks, ram_blocks, budget, drafts, seed):
        dice = random.Random(seed)
        self.transfers = PlannedTransfers([RamStore(ram_blocks * BLOCK_BYTES)], dice)
        self.engine = make_engine(
            depth=depth, num_blocks=num_blocks, windows=(None, 9)[: len(num_blocks)], vocab_size=4, max_num_seqs=4,
            max_num_batched_tokens=budget, policy="priority", output_reserve=0.0, transfers=self.transfers,
            propose=(lambda ids, most: [dice.randrange(4) for _ in range(most)]) if drafts else None,
        )  # fmt: skip

    @rule(
        prompt=st.sampled_from(PROMPTS), max_tokens=st.integers(1, 9), priority=st.integers(0, 2), salted=st.booleans()
    )
    def add(self, prompt, max_tokens, priority, salted):
        if len(prompt) + max_tokens > (self.engine.scheduler.ledger.pools[0].capacity - 1) * BLOCK_SIZE:
            return
        name = f"r{len(self.asked)}"
        self.asked[name] = (prompt, max_tokens)
        self.engine.add(name, prompt, max_tokens=max_tokens, priority=priority, salt="x" if salted else None)

    @rule(count=st.integers(1, 8))
    def advance(self, count):
        for _ in range(count):
            self.transfers.advance()

    def teardown(self):
        super().teardown()
        if hasattr(self, "engine"):
            tiers = self.engine.scheduler.cache.tiers
            while self.transfers.jobs:
                self.transfers.advance()
            self.engine.loop.step()
            assert not tiers._loads
            assert not tiers._leaving
            assert not tiers.swaps._holders
            assert tiers._out_bytes == 0
            assert self.transfers.stores[0].used_bytes <= self.transfers.stores[0].capacity_bytes


TestTierWalk = TierWalk.TestCase
TestTierWalk.settings = draws(80, stateful_step_count=40)


def tiered(stores: Sequence[RamStore | DiskStore] = (), *, num_blocks: int = 40, **config: object) -> SmallEngine:
    return make_engine(num_blocks=num_blocks, transfers=PlannedTransfers(stores or [RamStore(2**20)]), **config)


def computed(engine: SmallEngine) -> int:
    return engine.scheduler.recorder.prompt_tokens


def ask(engine: SmallEngine, name: str, prompt: Sequence[int], **asked: object) -> list[int]:
    """Return an answer, after everything has been written."""
    engine.add(name, prompt, **asked)
    said = engine.run()[name]
    settle(engine)
    return said


def settle(engine: SmallEngine) -> None:
    transfers = engine.scheduler.cache.tiers.transfers
    while transfers.jobs:
        transfers.advance()
    engine.loop.step()


def forget_cache(engine: SmallEngine) -> None:
    """Leave the blocks in the tiers alone."""
    for pool in engine.scheduler.ledger.pools:
        pool.forget_all()


def test_a_cached_start_and_a_loaded_end_are_one_hit() -> None:
    engine = tiered()
    said = ask(engine, "a", PROMPT)
    for name in list(engine.scheduler.ledger.main_pool.names())[3:]:
        engine.scheduler.ledger.main_pool.forget(name)
    assert ask(engine, "b", PROMPT) == said
    assert computed(engine) == 30 + 2
    assert engine.scheduler.cache.tiers.stats().hit_tokens == 28 - 12


def test_windowed_groups_come_back_with_what_their_window_reads() -> None:
    engine = make_engine(
        num_blocks=(40, 30), windows=(None, 9), transfers=PlannedTransfers([RamStore(2**20)]), max_num_batched_tokens=8
    )
    said = ask(engine, "a", PROMPT, max_tokens=4)
    forget_cache(engine)
    assert ask(engine, "b", [*PROMPT, *said], max_tokens=4) == expected_output([*PROMPT, *said], 4)
    assert computed(engine) == 30 + 34 - 32


def test_a_lost_block_ends_the_hit_and_the_rest_is_computed() -> None:
    engine = tiered()
    said, store = ask(engine, "a", PROMPT), engine.scheduler.cache.tiers.transfers.stores[0]
    key = list(store._blocks)[3]
    store._blocks[key] = None  # the index knows it, reading finds nothing
    forget_cache(engine)
    assert ask(engine, "b", PROMPT) == said
    assert computed(engine) == 30 + 30 - 12


def test_a_disk_that_does_not_answer_is_waited_for_only_so_long() -> None:
    engine = tiered()
    said, transfers = ask(engine, "a", PROMPT), engine.scheduler.cache.tiers.transfers
    forget_cache(engine)
    transfers.read = lambda *_: None
    engine.add("b", PROMPT)
    engine.loop.step()
    assert engine.scheduler.requests["b"].state is State.LOADING
    transfers.now_s += 100
    assert engine.run()["b"] == said
    assert computed(engine) == 60


def test_an_abort_while_loading_gives_all_blocks_back() -> None:
    engine = tiered()
    ask(engine, "a", PROMPT)
    forget_cache(engine)
    engine.add("b", PROMPT)
    engine.loop.step()
    assert engine.scheduler.requests["b"].state is State.LOADING
    engine.loop.cancel("b")
    engine.run()
    assert engine.scheduler.ledger.main_pool.num_free == engine.scheduler.ledger.main_pool.capacity
    settle(engine)  # the disk answers late


def test_a_running_request_takes_the_blocks_of_a_load() -> None:
    """Loads make no progress by themselves: where blocks are short, they end first, and nobody is refused."""
    engine = tiered(num_blocks=18, output_reserve=0.0)
    transfers = engine.scheduler.cache.tiers.transfers
    ask(engine, "a", PROMPT)
    forget_cache(engine)
    engine.add("b", [50, 51, 52], max_tokens=60)
    engine.loop.step()
    engine.add("c", PROMPT)
    engine.loop.step()
    assert engine.scheduler.requests["c"].state is State.LOADING
    read, transfers.jobs = transfers.jobs, []
    while engine.scheduler.requests["c"].state is State.LOADING:
        engine.loop.step()
        check_invariants(engine)
    transfers.jobs = read
    told = engine.run()
    assert told["b"] == expected_output([50, 51, 52], 60)
    assert told["c"] == expected_output(PROMPT, 8)


def test_a_request_enters_on_trial_while_another_one_only_loads() -> None:
    """No request runs then, and what the load holds leaves no room for the expected output."""
    engine = tiered(num_blocks=18, output_reserve=1.0)
    ask(engine, "a", PROMPT)
    forget_cache(engine)
    engine.add("b", PROMPT)
    engine.loop.step()
    assert engine.scheduler.requests["b"].state is State.LOADING
    engine.add("c", [50, 51, 52], max_tokens=60)
    engine.loop.step()
    assert engine.scheduler.requests["c"].state is State.RUNNING
    assert engine.run()["c"] == expected_output([50, 51, 52], 60)


def test_a_preempted_request_comes_back_without_computing_again() -> None:
    """Two requests that do not fit together: the younger one's blocks are copied out before they are used again."""

    prompts = {name: range(200 * ord(name), 200 * ord(name) + 60) for name in "abcdef"}

    def recomputed(engine: SmallEngine) -> int:
        for name, prompt in prompts.items():
            engine.add(name, prompt, max_tokens=40)
        tiers = engine.scheduler.cache.tiers
        while len(engine.endings) < len(prompts):
            engine.loop.step()
            check_invariants(engine)
            while tiers is not None and tiers.transfers.jobs:
                tiers.transfers.advance()
        for name, prompt in prompts.items():
            assert engine.tokens[name] == expected_output(prompt, 40)
        return engine.scheduler.recorder.recomputed_tokens

    sizes = {"num_blocks": 100, "output_reserve": 0.0}
    engine = tiered(**sizes)
    without, swapped = recomputed(make_engine(**sizes)), recomputed(engine)
    assert without > 100
    assert swapped <= BLOCK_SIZE * engine.scheduler.recorder.num_preemptions
    assert engine.scheduler.cache.tiers.stats().num_resumed == engine.scheduler.recorder.num_preemptions


def test_what_a_failed_step_copied_out_is_not_kept() -> None:
    fails: list[bool] = []
    engine = make_engine(
        num_blocks=12, transfers=PlannedTransfers([RamStore(2**20)]),
        fail_when=lambda plan: bool(fails and plan.moves),
    )  # fmt: skip
    engine.add("a", PROMPT)
    fails.append(True)
    engine.run()
    fails.clear()
    settle(engine)
    assert not engine.scheduler.cache.tiers.transfers.stores[0].used_bytes
    assert not engine.scheduler.has_work
    assert ask(engine, "b", PROMPT) == expected_output(PROMPT, 8)


def test_names_that_are_forgotten_before_their_copy_is_written_are_not_kept() -> None:
    engine = tiered(depth=2)
    engine.add("a", PROMPT, max_tokens=1)
    scheduler, pool = engine.scheduler, engine.scheduler.ledger.main_pool
    engine.loop.step()
    while scheduler.requests:
        engine.loop.step()
    name = next(iter(pool.names()))
    plan = scheduler.schedule()
    assert plan.moves
    pool.forget(name)
    engine.runner.forward(plan)
    scheduler.update(engine.runner.sample(plan).result())
    settle(engine)
    kept = engine.scheduler.cache.tiers.transfers.stores[0]
    assert (0, name) not in kept
    assert len(kept._blocks) == 6


def test_a_nan_empties_the_tiers(tmp_path) -> None:
    engine = tiered([RamStore(2**20), DiskStore(tmp_path, FINGERPRINT, 2**20)])
    ask(engine, "a", PROMPT)
    assert list(tmp_path.rglob("*.kv"))
    engine.scheduler.cache.forget_all(())
    settle(engine)
    assert not list(tmp_path.rglob("*.kv"))
    assert ask(engine, "b", PROMPT) == expected_output(PROMPT, 8)
    assert computed(engine) == 60


@pytest.mark.parametrize("private", [{"cache_salt": "x"}, {"keeps_no_copy": True}])
def test_private_requests_reach_ram_and_never_the_disk(tmp_path, private) -> None:
    ram = RamStore(2**20)
    engine = tiered([ram, DiskStore(tmp_path, FINGERPRINT, 2**20)])
    request = Request("a", PROMPT, SamplingParams(temperature=0.0), RequestOptions(**private), max_output_tokens=8)
    engine.loop.submit(request)
    engine.run()
    settle(engine)
    assert ram.used_bytes
    assert not list(tmp_path.rglob("*.kv"))


# ---- the cost model --------------------------------------------------------------------------------------------------


def test_a_slow_disk_is_tried_again_now_and_then() -> None:
    costs = TierCosts()
    costs.observe_prompt(1000, 0.1)
    costs.observe_copy("read", 10**6, 1.0)
    tries = [costs.is_worth(0, 1000, 10**8) for _ in range(32)]
    assert 0 < sum(tries) < 4


# ---- stores ----------------------------------------------------------------------------------------------------------


def block(seed: int, size: int = 1000) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, size, np.uint8)


def key(number: int, group: int = 0) -> tuple[int, bytes]:
    return group, number.to_bytes(16, "big")


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_a_store_returns_what_it_got_and_stays_within_its_bound(kind, tmp_path) -> None:
    store = RamStore(10_000) if kind == "ram" else DiskStore(tmp_path, FINGERPRINT, 10_000)
    for number in range(20):
        store.put(key(number), block(number))
        assert store.used_bytes <= 10_000
        store.get(key(0))  # used all the time, so it stays
    assert (store.get(key(0)) == block(0)).all()
    assert key(1) not in store
    assert (store.get(key(19)) == block(19)).all()
    store.put(key(99), block(1, 20_000))
    assert key(99) not in store


def test_files_are_private(tmp_path) -> None:
    folder = tmp_path / "kv"
    DiskStore(folder, FINGERPRINT, 10**6).put(key(1), block(1))
    for path in (folder, *folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def damage(content: bytes) -> list[bytes]:
    return [
        b"", content[:10], content[:-1], content + b"x", content[: HEADER.size] + b"\1" + content[HEADER.size + 1 :],
        b"LLKW" + content[4:], content[:4] + b"\2" + content[5:], content[:8] + b"\1" * 16 + content[24:],
    ]  # fmt: skip


@pytest.mark.parametrize("which", range(8))
def test_a_file_that_is_not_what_was_written_is_a_miss_and_deleted(tmp_path, which) -> None:
    """Empty, cut off, too long, another payload, kind, format or model."""
    store = DiskStore(tmp_path, FINGERPRINT, 10**6)
    store.put(key(1), block(1))
    path = next(tmp_path.rglob("*.kv"))
    path.write_bytes(damage(path.read_bytes())[which])
    assert store.get(key(1)) is None
    assert not path.exists()
    assert key(1) not in store
    assert store.used_bytes == 0


def test_a_write_that_was_killed_leaves_nothing(tmp_path) -> None:
    store = DiskStore(tmp_path, FINGERPRINT, 10**6)
    store.put(key(1), block(1))
    path = next(tmp_path.rglob("*.kv"))
    half = path.with_name(path.name + ".tmp-1-1")
    half.write_bytes(path.read_bytes()[:500])
    store.close()
    again = DiskStore(tmp_path, FINGERPRINT, 10**6)
    assert not half.exists()
    assert (again.get(key(1)) == block(1)).all()


def test_a_second_server_reads_and_does_not_write(tmp_path) -> None:
    first = DiskStore(tmp_path, FINGERPRINT, 10**6)
    first.put(key(1), block(1))
    second = DiskStore(tmp_path, FINGERPRINT, 10**6)
    assert not second.accepts
    second.put(key(2), block(2))
    assert (second.get(key(1)) == block(1)).all()
    assert key(2) not in second
    first.close()
    assert DiskStore(tmp_path, FINGERPRINT, 10**6).accepts


@pytest.mark.parametrize("is_idle", [True, False])
def test_blocks_that_a_user_deletes_are_forgotten_and_kept_again(tmp_path, monkeypatch, is_idle) -> None:
    """An idle server looks now and then, and tells its engine; a busy one looks before it writes."""
    monkeypatch.setattr("localllm.engine.memory.block_stores.LOOK_S", 0.01)
    store = DiskStore(tmp_path, FINGERPRINT, 10**6, "a model")
    transfers, told = Transfers([store]), threading.Event()
    transfers.on_news = told.set
    store.put(key(1), block(1))
    delete_kept(*kept_models(tmp_path))
    if is_idle:
        transfers.start()
        assert told.wait(5)
        transfers.close()
        assert (store.used_bytes, key(1) in store, store.forget_deleted()) == (0, False, False)
        return
    store.put(key(1), block(1))
    assert [(each.name, each.num_blocks) for each in kept_models(tmp_path)] == [("a model", 1)]
    assert (store.get(key(1)) == block(1)).all()


def test_the_blocks_of_a_removed_model_are_deleted_and_no_others(tmp_path) -> None:
    repository = tmp_path / "models--a--b"
    for number, path in enumerate((repository / "snapshots" / "1", repository / "snapshots" / "2", tmp_path / "gone")):
        store = DiskStore(tmp_path / "kv", bytes([number] * 16), 10**6, f"a/b {number}", str(path))
        store.put(key(number), block(number))
        store.close()
    (repository / "snapshots" / "2").mkdir(parents=True)
    num_blocks, num_bytes = delete_of_removed(tmp_path / "kv", repository)
    assert (num_blocks, num_bytes) == (1, 1000 + HEADER.size)
    assert {each.name for each in kept_models(tmp_path / "kv")} == {"a/b 1", "a/b 2"}


def test_the_last_use_is_known_to_the_minute(tmp_path) -> None:
    DiskStore(tmp_path, FINGERPRINT, 10**6).put(key(1), block(1))
    file = next(tmp_path.rglob("*.kv"))
    for age_s, is_touched in ((70, True), (30, False)):
        os.utime(file, (time.time() - age_s,) * 2)
        assert DiskStore(tmp_path, FINGERPRINT, 10**6).get(key(1)) is not None
        [kept] = kept_models(tmp_path)
        assert (time.time() - kept.used_s < 20) == is_touched


def test_models_share_the_bound_and_not_their_blocks(tmp_path) -> None:
    other = DiskStore(tmp_path, bytes(15) + b"x", 3000)
    other.put(key(1), block(1))
    os.utime(next(tmp_path.rglob("*.kv")), (1, 1))
    store = DiskStore(tmp_path, FINGERPRINT, 3000)
    assert key(1) not in store
    for number in (2, 3):
        store.put(key(number), block(number))
    assert len(list(tmp_path.rglob("*.kv"))) == 2
    assert other.get(key(1)) is None


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError(30, "Read-only file system")])
def test_a_full_or_read_only_disk_stops_writing_for_a_while_and_says_so_once(
    tmp_path, monkeypatch, caplog, error
) -> None:
    store = DiskStore(tmp_path, FINGERPRINT, 10**6)
    store.put(key(1), block(1))

    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("localllm.engine.memory.block_stores.write_private", refuse)
    for number in (2, 3):
        store.put(key(number), block(number))
        store._paused_until = 0.0
    assert key(2) not in store
    assert (store.get(key(1)) == block(1)).all()
    assert len([line for line in caplog.messages if "not written to disk" in line]) == 1
    store.put(key(4), block(4))
    assert not store.accepts


def test_a_nearly_full_file_system_is_left_alone(tmp_path, monkeypatch) -> None:
    store = DiskStore(tmp_path, FINGERPRINT, 10**6)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"total": 10**9, "free": 4 * 10**7})())
    store.put(key(1), block(1))
    assert key(1) not in store


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_threads_read_and_write_and_end() -> None:
    transfers, woken = Transfers([RamStore(10**6)]), threading.Event()
    transfers.on_news = woken.set
    transfers.write([(key(1), False), None], HostBlocks(lambda: [block(1), block(2)]), 2000)
    assert woken.wait(10)
    assert transfers.news.popleft().num_bytes == 2000
    woken.clear()
    transfers.read("load", 0, key(1), lambda: True)
    assert woken.wait(10)
    assert (transfers.news.popleft().block == block(1)).all()
    transfers.close()
    assert not any(thread.is_alive() for thread in transfers._threads)


def test_a_copy_that_fails_is_reported_and_the_thread_goes_on() -> None:
    transfers, woken = Transfers([RamStore(10**6)]), threading.Event()
    transfers.on_news = woken.set

    def fail() -> Sequence[np.ndarray]:
        raise RuntimeError("the device is lost")

    transfers.write([(key(1), False)], HostBlocks(fail), 1000)
    assert woken.wait(10)
    assert isinstance(transfers.news.popleft(), BlocksWritten)
    woken.clear()
    transfers.write([(key(2), False)], HostBlocks(lambda: [block(2)]), 1000)
    assert woken.wait(10)
    assert key(2) in transfers
    transfers.close()


def test_an_engine_with_threads_waits_for_a_slow_disk(tmp_path) -> None:
    class Slow(DiskStore):
        def get(self, key):
            time.sleep(0.01)
            return super().get(key)

    def engine() -> SmallEngine:
        made = tiered([Slow(tmp_path, FINGERPRINT, 2**20)])
        tiers = made.scheduler.cache.tiers
        tiers.transfers, tiers._clock = Transfers(tiers.transfers.stores), time.monotonic
        tiers.transfers.on_news = made.loop.wake
        del made.loop._wait_for_tier
        return made

    first = engine()
    first.add("a", PROMPT)
    said = first.run()["a"]
    first.scheduler.cache.tiers.transfers.close()
    second = engine()
    second.add("b", PROMPT)
    assert second.run(max_steps=200)["b"] == said
    assert computed(second) == 2
    second.scheduler.cache.tiers.transfers.close()


PROMPT = list(range(1, 31))


def test_a_restart_is_answered_from_disk(tmp_path) -> None:
    """The second server computes what is not in full blocks, and says the same."""
    first = tiered([DiskStore(tmp_path, FINGERPRINT, 2**20)])
    said = ask(first, "a", PROMPT)
    assert computed(first) == 30
    first.scheduler.cache.tiers.transfers.close()
    second = tiered([DiskStore(tmp_path, FINGERPRINT, 2**20)])
    assert ask(second, "a", PROMPT) == said
    assert computed(second) == 30 - 28
    stats = second.scheduler.cache.tiers.stats()
    assert (stats.hit_tokens, stats.queried_tokens) == (28, 30)
    assert second.scheduler.recorder.recent[0].num_loaded_tokens == 28
