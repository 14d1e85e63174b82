"""Prefill and decode apart: the same text whatever happens between two engines, and nothing that stays behind."""

import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import psutil
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from localllm.config.settings import EngineConfig, ServerConfig, Settings
from localllm.engine.outputs import EngineOutput
from localllm.engine.request import State
from localllm.engine.speculation import Speculation
from localllm.errors import ConfigError, LocalLLMError, RanksLost, UnsupportedOption
from localllm.fleet.handover import LeasedBlocks, Leases, PrefillApart, Timer
from localllm.fleet.replicas import ReplicaLoops, build_replicas, merged
from tests.draws import draws
from tests.engine.harness import (
    BLOCK_SIZE,
    EveryOther,
    PlannedTransfers,
    SmallEngine,
    check_invariants,
    make_engine,
    make_request,
)
from tests.fake_runner import expected_output
from tests.serving import Server

PROMPT = list(range(1, 31))
VOCAB = 4


def right(known: Sequence[int], most: int) -> list[int]:
    return expected_output(known, most, vocab_size=VOCAB)


def wrong(known: Sequence[int], most: int) -> list[int]:
    return [(token + 1) % VOCAB for token in right(known, most)]


class Widest(Speculation):
    """Verifies as many drafts as there are."""

    def width(self, decoding: Sequence[int], ready: Sequence[int], limit: int) -> int:
        return self.most if len(decoding) + sum(ready) <= limit else 0


class Timers:
    """Deadlines that pass when the test says so."""

    def __init__(self) -> None:
        self.waiting: dict[int, Callable[[], None]] = {}

    def start(self, seconds: float, act: Callable[[], None]) -> Timer:
        number = len(self.waiting) and max(self.waiting) + 1
        self.waiting[number] = act
        return cast("Timer", SimpleNamespace(cancel=lambda: self.waiting.pop(number, None)))

    def fire(self, which: int = 0) -> None:
        """Let one deadline pass."""
        if self.waiting:
            self.waiting.pop(sorted(self.waiting)[which % len(self.waiting)])()


class Pair:
    """Replicas made of memory, stepped by the test: the first `num_prefill` compute prompts."""

    def __init__(
        self, num_prefill: int = 1, num_replicas: int = 2, dice: random.Random | None = None, *,
        capacity_bytes: int = 2**20, **config: Any,
    ) -> None:  # fmt: skip
        self.config, self.dice, self.timers = config, dice, Timers()
        self.apart = PrefillApart(num_prefill, Leases(capacity_bytes, self.timers.start), least_tokens=8)
        self.engines = [self.build(number) for number in range(num_replicas)]
        models = [self.model(engine) for engine in self.engines]
        self.loops = ReplicaLoops(models, lambda number: self.model(self.engines[number]), apart=self.apart)
        self.loops._replace = lambda replica: None  # type: ignore[method-assign]
        self.loops.deliver = self.receive
        self.loops.start()
        self.tokens: dict[str, list[int]] = {}
        self.endings: dict[str, EngineOutput] = {}

    def build(self, number: int) -> SmallEngine:
        transfers = PlannedTransfers([self.apart.store_of(number)], self.dice)
        engine = make_engine(transfers=transfers, **self.config)
        engine.loop.start = lambda: None  # type: ignore[method-assign]
        return engine

    def model(self, engine: SmallEngine) -> Any:
        return SimpleNamespace(engine=(engine.loop, None), close=lambda: None)

    def receive(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.endings, f"news of {output.request_id} after its end"
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                assert output.finish_reason != "handed_over"
                self.endings[output.request_id] = output

    def add(self, name: str, prompt: list[int], **asked: Any) -> None:
        self.loops.submit(make_request(name, prompt, **asked))

    def step(self, number: int) -> None:
        if self.loops.replicas[number].is_up:
            self.engines[number].loop.step()
            check_invariants(self.engines[number])

    def advance(self, number: int) -> None:
        cast("PlannedTransfers", self.tiers(number).transfers).advance()

    def tiers(self, number: int) -> Any:
        return self.engines[number].scheduler.cache.tiers

    def run(self, until: Callable[[], bool] = lambda: False, max_rounds: int = 600) -> None:
        """Run all engines until nothing is left to do, or until a condition holds."""
        for _ in range(max_rounds):
            for number in range(len(self.engines)):
                self.step(number)
                self.advance(number)
                if until():
                    return
            ups = [engine for engine, replica in zip(self.engines, self.loops.replicas, strict=True) if replica.is_up]
            if not any(engine.scheduler.has_work or engine.loop._inbox for engine in ups):
                return
        raise AssertionError("still at work")

    def kill(self, number: int) -> None:
        """Lose a replica's processes: its engine ends as after a step that raised `RanksLost`."""
        loop, replica = self.engines[number].loop, self.loops.replicas[number]
        if replica.is_up:
            loop.lose(RanksLost("Rank 0 was killed by signal 9."))
            loop._end_everything()
            loop.on_ended()

    def replace(self, number: int) -> None:
        replica = self.loops.replicas[number]
        self.engines[number] = self.build(number)
        replica.model, replica.is_up = self.model(self.engines[number]), True
        replica.open.clear()
        replica.names.clear()
        replica.late.clear()
        self.loops._start(replica)

    def state(self, name: str) -> State:
        return next(e.scheduler.requests[name].state for e in self.engines if name in e.scheduler.requests)

    def computed(self) -> list[int]:
        """Return the prompt tokens that each engine has computed, again or for the first time."""
        recorders = [engine.scheduler.recorder for engine in self.engines]
        return [each.prompt_tokens + each.recomputed_tokens for each in recorders]

    def check_end(self) -> None:
        """Check that nothing is held for a request: no lease, no byte, no block, no count."""
        assert (self.apart.leases.num_open, self.apart.leases.used_bytes) == (0, 0)
        assert not self.timers.waiting
        assert not self.loops._where
        for engine in self.engines:
            assert all(pool.num_free == pool.capacity for pool in engine.scheduler.ledger.pools)
            assert not engine.scheduler.cache.tiers._handing


class HandOverWalk(RuleBasedStateMachine):
    """Requests travel between engines whose copies are late, fail and are answered twice, while replicas are killed,
    deadlines pass, and clients leave."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.aborted: set[str] = set()

    @initialize(
        sizes=st.sampled_from([(1, 2), (1, 3), (2, 3)]), depth=st.sampled_from([1, 2]),
        num_blocks=st.sampled_from([(24,), (60,), (60, 24)]), ram_blocks=st.sampled_from([3, 500]),
        budget=st.sampled_from([5, 64]), seed=st.integers(0, 1000),
    )  # fmt: skip
    def build(self, sizes, depth, num_blocks, ram_blocks, budget, seed):
        self.pair = Pair(
            *sizes, random.Random(seed), capacity_bytes=ram_blocks * 16 * BLOCK_SIZE, depth=depth,
            num_blocks=num_blocks, windows=(None, 9)[: len(num_blocks)], vocab_size=VOCAB, max_num_seqs=4,
            max_num_batched_tokens=budget, output_reserve=0.0,
        )  # fmt: skip

    @rule(start=st.sampled_from([1, 1, 7]), length=st.sampled_from([3, 8, 13, 24, 40]), max_tokens=st.integers(1, 9))
    def add(self, start, length, max_tokens):
        name, prompt = f"r{len(self.asked)}", list(range(start, start + length))
        self.asked[name] = prompt, max_tokens
        try:
            self.pair.add(name, prompt, max_tokens=max_tokens)
        except RanksLost:
            del self.asked[name]

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 30))
    def abort(self, which):
        name = sorted(self.asked)[which % len(self.asked)]
        self.aborted.add(name)
        self.pair.loops.cancel(name)

    @rule(number=st.integers(0, 2), count=st.integers(1, 6))
    def step(self, number, count):
        for _ in range(count):
            self.pair.step(number % len(self.pair.engines))

    @rule(number=st.integers(0, 2), count=st.integers(1, 8))
    def advance(self, number, count):
        for _ in range(count):
            self.pair.advance(number % len(self.pair.engines))

    @rule(which=st.integers(0, 9))
    def pass_a_deadline(self, which):
        self.pair.timers.fire(which)

    @rule(number=st.integers(0, 2))
    def kill(self, number):
        number %= len(self.pair.engines)
        if sum(each.is_up for each in self.pair.loops.replicas) > 1:
            self.pair.kill(number)
            self.pair.replace(number)

    @invariant()
    def what_is_kept_has_a_lease(self):
        if hasattr(self, "pair"):
            leases = self.pair.apart.leases
            assert leases.used_bytes <= leases.capacity_bytes
            assert leases._blocks.keys() <= leases._num_wanting.keys()

    def teardown(self):
        if not hasattr(self, "pair"):
            return
        self.pair.run()
        for name, (prompt, max_tokens) in self.asked.items():
            ending, got = self.pair.endings[name], self.pair.tokens.get(name, [])
            expected = expected_output(prompt, max_tokens, vocab_size=VOCAB)
            if ending.finish_reason == "error":  # its only replica was killed after it had answered
                assert isinstance(ending.error, RanksLost)
                assert got
            if ending.finish_reason == "length":
                assert got == expected
            else:
                assert got == expected[: len(got)]
                assert name in self.aborted or ending.finish_reason == "error"
        self.pair.check_end()


TestHandOverWalk = HandOverWalk.TestCase
TestHandOverWalk.settings = draws(40, stateful_step_count=30)


# ---- the ordinary way ------------------------------------------------------------------------------------------------


def test_a_long_prompt_is_computed_once_and_answered_by_the_other_engine() -> None:
    pair = Pair()
    pair.add("a", PROMPT, max_tokens=9)
    pair.run()
    assert pair.tokens["a"] == expected_output(PROMPT, 9)
    assert pair.computed() == [30, 30 - 28]
    assert pair.apart.ended == {"continued": 1}
    assert [dict(each.routed) for each in pair.loops.replicas] == [{"load": 1}, {"handover": 1}]
    pair.check_end()


def test_the_first_token_comes_before_the_blocks_have_left() -> None:
    pair = Pair()
    pair.add("a", PROMPT)
    pair.run(until=lambda: bool(pair.tokens.get("a")))
    assert pair.tokens["a"] == expected_output(PROMPT, 1)
    assert not pair.apart.leases.used_bytes
    pair.run()
    pair.check_end()


def test_short_prompts_and_cached_ones_stay_whole() -> None:
    pair = Pair()
    pair.add("short", [1, 2, 3, 4, 5, 6, 7])
    pair.run()
    pair.add("long", PROMPT, max_tokens=3)
    pair.run()
    pair.add("next turn", [*PROMPT, *pair.tokens["long"], 9, 9])
    pair.run()
    assert [sum(each.routed.values()) for each in pair.loops.replicas] == [1, 3]


@pytest.mark.parametrize(
    "asked", [{"max_tokens": 1}, {"prompt_logprobs": 1}, {"grammar": EveryOther(5)}, {"presence_penalty": 0.5}]
)
def test_each_kind_of_request_has_its_answer(asked: dict[str, Any]) -> None:
    pair, alone = Pair(), make_engine()
    grammar = {"grammar": EveryOther(5)} if "grammar" in asked else {}
    alone.add("a", PROMPT, **asked)
    pair.add("a", PROMPT, **{**asked, **grammar})
    pair.run()
    assert pair.tokens == alone.run()
    assert pair.endings["a"].finish_reason == alone.endings["a"][0].finish_reason
    is_whole = "max_tokens" in asked or "prompt_logprobs" in asked
    assert pair.apart.ended == ({} if is_whole else {"continued": 1})
    pair.check_end()


def test_counts_are_those_of_one_request() -> None:
    pair = Pair()
    pair.add("a", PROMPT, max_tokens=5)
    pair.run()
    stats = [engine.loop.stats() for engine in pair.engines]
    assert [each.finished for each in stats] == [{"handed_over": 1}, {"length": 1}]
    assert sum(each.generation_tokens for each in stats) == 5
    assert sum(each.prompt_tokens for each in stats) == 30
    assert [each.ttft.count for each in stats] == [1, 0]
    assert [each.e2e.count for each in stats] == [0, 1]


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_an_abort_in_each_state_leaves_nothing_behind() -> None:
    reached = set()
    for rounds in range(1, 26, 2):
        pair = Pair(max_num_batched_tokens=16)
        pair.add("a", PROMPT, max_tokens=4)
        for _ in range(rounds):
            for number in (0, 1):
                pair.step(number)
            pair.advance(rounds % 2)
        where = [name for name, engine in zip("pd", pair.engines, strict=True) if "a" in engine.scheduler.requests]
        reached.add("".join(where) + (pair.state("a") if where else "writing" if pair.tiers(0)._handing else ""))
        pair.loops.cancel("a")
        pair.run()
        assert pair.endings["a"].finish_reason in ("abort", "length")
        pair.check_end()
    assert {"prunning", "writing", "dloading", "drunning"} <= reached


@pytest.mark.parametrize("phase", ["prompt", "writing", "loading"])
def test_a_killed_replica_costs_time_and_no_answer(phase: str) -> None:
    """The first replica in the middle of the prompt and of its blocks, then the second one before its first token."""
    pair = Pair(1, 3, max_num_batched_tokens=16)
    pair.add("a", PROMPT, max_tokens=6)
    if phase == "prompt":
        pair.step(0)
    elif phase == "writing":
        pair.run(until=lambda: bool(pair.tiers(0)._handing))
    else:
        pair.run(until=lambda: any(State.LOADING in [r.state for r in e.scheduler.waiting] for e in pair.engines))
    victim = next(number for number, each in enumerate(pair.loops.replicas) if each.open)
    assert (victim > 0) == (phase == "loading")
    pair.kill(victim)
    pair.run()
    assert pair.tokens["a"] == expected_output(PROMPT, 6)
    assert pair.endings["a"].finish_reason == "length"
    assert pair.apart.ended == {"continued" if phase == "loading" else "failed": 1}


def test_a_lease_that_runs_out_ends_in_computing_the_prompt() -> None:
    pair = Pair()
    pair.add("a", PROMPT, max_tokens=6)
    pair.run(until=lambda: bool(pair.tiers(0)._handing))
    pair.timers.fire()
    assert not pair.apart.leases.num_open
    pair.run()
    assert pair.tokens["a"] == expected_output(PROMPT, 6)
    assert pair.computed()[1] == 30
    assert pair.apart.ended == {"expired": 1}
    pair.check_end()


@pytest.mark.parametrize("drafter", [right, wrong], ids=["right", "wrong"])
@pytest.mark.parametrize("kills", [False, True])
def test_drafts_do_not_change_what_is_handed_over(drafter: Any, kills: bool) -> None:
    """Right drafts are accepted behind the hand-over, and wrong ones change nothing, also if a replica dies in it."""
    pair = Pair(propose=drafter, speculation_type=Widest, vocab_size=VOCAB)
    pair.add("a", PROMPT, max_tokens=24)
    if kills:
        pair.run(until=lambda: bool(pair.tokens.get("a")))
        pair.kill(0)
    pair.run()
    assert pair.tokens["a"] == expected_output(PROMPT, 24, vocab_size=VOCAB)
    assert pair.apart.ended == ({"failed": 1} if kills else {"continued": 1})
    counts = merged([engine.loop.stats() for engine in pair.engines]).speculation
    assert counts.num_draft_tokens > 0
    assert counts.num_accepted_tokens == (counts.num_draft_tokens if drafter is right else 0)
    pair.check_end()


def test_a_lease_is_renewed_while_its_request_waits_for_the_second_engine() -> None:
    pair = Pair(max_num_seqs=1)
    pair.add("first", [5, 6, 7], max_tokens=60)
    pair.step(1)
    pair.add("a", PROMPT, max_tokens=4)
    pair.run(until=lambda: "a" in pair.engines[1].scheduler.requests)
    for _ in range(3):
        pair.timers.fire()
        assert pair.apart.leases.used_bytes
    pair.run()
    assert pair.tokens["a"] == expected_output(PROMPT, 4)
    assert pair.computed()[1] == 3 + 2
    pair.check_end()


def test_a_step_that_fails_at_the_first_engine_is_not_the_clients_business() -> None:
    fails = [True]
    pair = Pair(fail_when=lambda plan: fails and plan.rows and plan.rows[0].num_scheduled_tokens > 8 and fails.pop())
    pair.add("a", PROMPT, max_tokens=4)
    pair.run()
    assert not fails
    assert pair.tokens["a"] == expected_output(PROMPT, 4)
    assert pair.apart.ended == {"failed": 1}
    pair.check_end()


def test_without_a_decode_replica_the_others_answer_whole() -> None:
    pair = Pair()
    pair.kill(1)
    pair.add("a", PROMPT, max_tokens=4)
    pair.run()
    assert pair.tokens["a"] == expected_output(PROMPT, 4)
    pair.add("b", PROMPT, max_tokens=4)
    pair.kill(0)
    assert isinstance(pair.endings["b"].error, LocalLLMError)
    pair.check_end()


def test_blocks_that_find_no_room_are_computed() -> None:
    pair = Pair(capacity_bytes=3 * 16 * BLOCK_SIZE)
    pair.add("a", PROMPT, max_tokens=4)
    pair.run()
    assert pair.tokens["a"] == expected_output(PROMPT, 4)
    assert pair.computed()[1] == 30 - 12
    pair.check_end()


# ---- leases ----------------------------------------------------------------------------------------------------------


def test_a_block_is_kept_as_long_as_a_lease_names_it() -> None:
    leases, block = Leases(1000, Timers().start), np.zeros(100, np.uint8)
    store = LeasedBlocks(leases, accepts=True)
    store.put((0, b"a"), block)
    assert (0, b"a") not in store
    first, second = leases.open([b"a", b"b"]), leases.open([b"b", b"c"])
    for name in (b"a", b"b", b"c"):
        store.put((0, name), block)
    assert store.used_bytes == 300
    leases.end(first)
    leases.end(first)
    assert [(0, name) in store for name in (b"a", b"b", b"c")] == [False, True, True]
    leases.end(second)
    assert (leases.num_open, store.used_bytes, leases._num_wanting) == (0, 0, {})


# ---- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_real_ranks_hand_blocks_over(tmp_path: Path) -> None:
    """The demo in two rank processes: the same text as the prefill replica's own, also after that one was killed."""
    words = ("--device", "cpu", "--dtype", "float32", "--data-parallel-size", "2", "--prefill-replicas", "1", "--no-ui")
    with (
        Server(tmp_path, "serve", "demo", *words) as server,
        httpx.Client(base_url=server.wait_for("ready")["url"], timeout=120) as http,
    ):

        def said(prompt: str, **headers: str) -> str:
            body = {"model": "demo", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
            answer = http.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])

        prompts = [f"{number} " + "Name three colours of the rainbow. " * 180 for number in range(2)]
        apart = said(prompts[0])
        assert 'localllm:handovers_total{model_name="demo",outcome="continued"} 1.0' in http.get("/metrics").text
        assert apart == said(prompts[0], **{"x-data-parallel-rank": "0"})
        children = psutil.Process(server.process.pid).children(recursive=True)
        ranks = [each for each in children if "localllm.ranks" in " ".join(each.cmdline())]
        threading.Timer(0.3, min(ranks, key=lambda each: each.create_time()).kill).start()
        assert said(prompts[1]) == said(prompts[1], **{"x-data-parallel-rank": "1"})
        assert 'localllm:handovers_total{model_name="demo",outcome="failed"} 1.0' in http.get("/metrics").text


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"data_parallel_size": 1}, "leaves no replica"),
        ({"prefill_replicas": 2}, "leaves no replica"),
        ({"tensor_parallel_size": 2}, "-tp and -pp"),
        ({"pipeline_parallel_size": 2}, "-tp and -pp"),
        ({"enable_prefix_caching": False}, "--no-enable-prefix-caching"),
        ({"kv_disk_gib": 1.0}, "--kv-disk-gib"),
    ],
)
def test_what_cannot_be_handed_over_is_refused_by_name(asked: dict[str, Any], why: str) -> None:
    config = EngineConfig(**{"data_parallel_size": 2, "prefill_replicas": 1, "device": "cpu", **asked})
    with pytest.raises((ConfigError, UnsupportedOption), match=why):
        build_replicas(Settings(config, ServerConfig()))
