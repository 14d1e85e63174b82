"""The scheduler and the loop on the model made of memory: walks over the whole state, then properties by name."""

import random
import sys
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from localllm.engine import scheduler as scheduler_module
from localllm.engine.recorder import SHOWN_WAITING
from localllm.engine.request import State
from localllm.engine.scheduler import _StepBuilder
from localllm.engine.step import RowResult, RunnerStats
from localllm.errors import KVCacheExhausted, QueueFull, RequestError, StepFailed
from tests.draws import draws
from tests.engine.harness import BLOCK_SIZE, EveryOther, check_invariants, make_engine, make_request
from tests.engine.walk import EngineMachine
from tests.fake_runner import expected_output

PROMPTS = [list(range(start, start + length)) for start in (1, 1, 7) for length in (1, 3, 4, 5, 8, 13, 24)]


def last_tokens_again(request):
    """A drafter that is sometimes right: repeats what followed the same token before."""
    ids = request.token_ids.tolist()
    for index in range(len(ids) - 2, -1, -1):
        if ids[index] == ids[-1]:
            return tuple(ids[index + 1 : index + 4])
    return ()


class EngineWalk(EngineMachine):
    """Requests come, run, are preempted and aborted in any order; every step is checked, every output compared."""

    @initialize(
        depth=st.sampled_from([1, 2, 3]),
        stages=st.sampled_from([(1, 0), (1, 0), (2, 0), (2, 1), (3, 0)]),
        num_blocks=st.sampled_from([9, 14, 40]),
        budget=st.sampled_from([5, 16, 64]),
        cap=st.sampled_from([0, 2, 7]),
        policy=st.sampled_from(["fcfs", "priority"]),
        caching=st.booleans(),
        drafts=st.booleans(),
        reserve=st.sampled_from([0.0, 0.6, 1.0]),
    )
    def build(self, depth, stages, num_blocks, budget, cap, policy, caching, drafts, reserve):
        self.engine = make_engine(
            depth=depth,
            num_stages=stages[0],
            num_extra_cohorts=stages[1],
            num_blocks=num_blocks,
            drafter=last_tokens_again if drafts else None,
            vocab_size=4,  # so that guesses are often right and stops often hit
            max_num_seqs=4,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=cap,
            policy=policy,
            enable_prefix_caching=caching,
            output_reserve=reserve,
        )

    @rule(
        prompt=st.sampled_from(PROMPTS),
        max_tokens=st.integers(1, 9),
        priority=st.integers(0, 2),
        stop=st.booleans(),
        salt=st.sampled_from([None, "a"]),
        grammar=st.sampled_from([None, None, 2, 5, 99]),
    )
    def add(self, prompt, max_tokens, priority, stop, salt, grammar):
        if len(prompt) + max_tokens > (self.engine.scheduler.ledger.main_pool.capacity - 1) * BLOCK_SIZE:
            return
        name = f"r{len(self.asked)}"
        self.asked[name] = (prompt, max_tokens, stop, grammar)
        self.engine.add(
            name, prompt, max_tokens=max_tokens, priority=priority, salt=salt, stop_token_ids=(3,) if stop else (),
            grammar=grammar and EveryOther(grammar),
        )  # fmt: skip

    def expected(self, prompt, max_tokens, stop, grammar):
        tokens = expected_output(prompt, max_tokens, vocab_size=4, grammar=grammar and EveryOther(grammar))
        return tokens[: tokens.index(3) + 1] if stop and 3 in tokens else tokens

    def teardown(self):
        super().teardown()
        if hasattr(self, "engine"):
            free = sorted(self.engine.scheduler.table.free_slots)
            assert free == list(range(len(free)))


EngineWalk.TestCase.settings = draws(200, stateful_step_count=50)
TestEngineWalk = EngineWalk.TestCase


@draws(60)
@given(
    seed=st.integers(0, 10_000),
    depth=st.sampled_from([1, 2, 3]),
    stages=st.sampled_from([1, 1, 2, 4]),
    budget=st.sampled_from([3, 8, 64]),
    num_blocks=st.sampled_from([12, 20, 80]),
    caching=st.booleans(),
    drafts=st.booleans(),
)
def test_output_never_depends_on_how_it_was_scheduled(seed, depth, stages, budget, num_blocks, caching, drafts):
    """I21, I22: chunk size, neighbours, prefix cache, preemption, depth, stages, drafts and grammars leave no trace."""
    rng = random.Random(seed)
    engine = make_engine(
        depth=depth,
        num_stages=stages,
        num_blocks=num_blocks,
        drafter=last_tokens_again if drafts else None,
        vocab_size=5,
        max_num_batched_tokens=budget,
        max_num_seqs=6,
        enable_prefix_caching=caching,
    )
    shared = [rng.randrange(5) for _ in range(12)]
    asked = {}
    for index in range(rng.randint(2, 9)):
        prompt = shared[: rng.randint(0, 12)] + [rng.randrange(5) for _ in range(rng.randint(1, 9))]
        grammar = rng.choice([None, 20])
        asked[f"r{index}"] = (prompt, rng.randint(1, 16), grammar)
        engine.add(f"r{index}", prompt, max_tokens=asked[f"r{index}"][1], grammar=grammar and EveryOther(grammar))
        for _ in range(rng.randint(0, 3)):
            engine.loop.step()
            check_invariants(engine)
    engine.run()
    for name, (prompt, max_tokens, grammar) in asked.items():
        expected = expected_output(prompt, max_tokens, vocab_size=5, grammar=grammar and EveryOther(grammar))
        assert engine.tokens[name] == expected
        assert engine.endings[name][0].finish_reason == "length"


def scheduler_step():
    return _StepBuilder(budget=0)


def test_first_scheduling_follows_arrival():
    """I18."""
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=8)
    for index in range(6):
        engine.add(f"r{index}", list(range(1, 10)), max_tokens=3)
    engine.run()
    order = [new.request_id for plan in engine.plans for new in plan.new_slots]
    assert list(dict.fromkeys(order)) == [f"r{index}" for index in range(6)]


def test_urgent_requests_run_first_under_priority():
    engine = make_engine(policy="priority", max_num_seqs=1)
    for index, priority in enumerate([5, 1, 3, 1]):
        engine.add(f"r{index}", [1, 2, 3], priority=priority)
    engine.run()
    order = [new.request_id for plan in engine.plans for new in plan.new_slots]
    assert order == ["r1", "r3", "r2", "r0"]


def test_a_late_but_urgent_request_may_displace_a_running_one():
    engine = make_engine(policy="priority", num_blocks=10, watermark=0.0)
    engine.add("patient", list(range(1, 13)), max_tokens=20, priority=9)
    engine.loop.step()
    engine.add("urgent", list(range(20, 32)), max_tokens=20, priority=0)
    tokens = engine.run()
    assert engine.scheduler.recorder.num_preemptions >= 1
    assert tokens["urgent"] == expected_output(range(20, 32), 20)
    assert tokens["patient"] == expected_output(range(1, 13), 20)
    assert list(engine.endings) == ["urgent", "patient"]


@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_request_resumes_with_the_same_output(depth):
    engine = make_engine(depth=depth, num_blocks=12, watermark=0.0)
    prompts = {f"r{index}": list(range(index, index + 9)) for index in range(3)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=16)
    tokens = engine.run()
    assert engine.scheduler.recorder.num_preemptions > 0
    for name, prompt in prompts.items():
        assert tokens[name] == expected_output(prompt, 16)


def test_preemption_never_livelocks():
    """I17: with room for one and a half, everyone still finishes, in bounded steps."""
    engine = make_engine(num_blocks=11, max_num_batched_tokens=16)
    for index in range(8):
        engine.add(f"r{index}", list(range(index, index + 12)), max_tokens=20)
    engine.run(max_steps=600)
    assert len(engine.endings) == 8


def test_long_prompt_does_not_stall_running_streams():
    engine = make_engine(max_num_batched_tokens=32, long_prefill_token_threshold=6, num_blocks=80)
    engine.add("stream", [1, 2], max_tokens=60)
    engine.loop.step()
    engine.add("long", list(range(100)), max_tokens=2)
    engine.run()
    shared = [plan for plan in engine.plans if {row.request_id for row in plan.rows} == {"stream", "long"}]
    assert len(shared) >= 16  # 100 tokens in chunks of 6
    assert all(plan.num_tokens <= 7 for plan in shared)
    streamed = [plan for plan in engine.plans if any(row.request_id == "stream" for row in plan.rows)]
    assert len(streamed) == 60  # one token in every step of its life


def test_long_prompt_alone_uses_the_whole_step():
    engine = make_engine(max_num_batched_tokens=32, long_prefill_token_threshold=6, num_blocks=80)
    engine.add("long", list(range(100)), max_tokens=1)
    engine.run()
    assert [plan.num_tokens for plan in engine.plans] == [32, 32, 32, 4]


def test_admission_waits_until_the_whole_prompt_fits():
    engine = make_engine(num_blocks=16, max_num_batched_tokens=8, watermark=0.0)
    engine.add("first", list(range(40)), max_tokens=2)  # 10 blocks, five chunks
    engine.add("second", list(range(100, 124)), max_tokens=2)  # 6 blocks: 5 are left
    engine.loop.step()
    assert engine.scheduler.requests["second"].state is State.WAITING
    engine.run()
    assert engine.scheduler.recorder.num_preemptions == 0


def test_admission_keeps_what_running_prefills_still_need():
    """A prompt in chunks holds few blocks at first; whoever comes behind it must not take the others."""
    engine = make_engine(num_blocks=13, max_num_batched_tokens=8)  # 12 usable blocks of 4
    engine.add("long", range(36), max_tokens=2)
    engine.loop.step()
    engine.add("short", [7] * 14, max_tokens=2)
    engine.loop.step()
    assert [request.request_id for request in engine.scheduler.running] == ["long"]
    engine.run()
    assert engine.scheduler.recorder.num_preemptions == 0


def test_a_row_that_gives_way_gives_its_tokens_back_to_the_step():
    engine = make_engine(
        num_blocks=14, policy="priority", max_num_batched_tokens=5, enable_prefix_caching=False, output_reserve=0.0
    )
    engine.add("patient", [1] * 4, max_tokens=30, priority=9)
    engine.loop.step()
    engine.add("urgent", [2] * 4, max_tokens=30, priority=0)
    engine.loop.step()
    engine.add("long", [3] * 32, max_tokens=2, priority=1)
    while not engine.scheduler.recorder.num_preemptions:
        engine.loop.step()
    assert sorted(row.num_scheduled_tokens for row in engine.plans[-1].rows) == [1, 4]


def test_nobody_enters_in_a_step_that_preempted():
    """What was just taken from one request is for those that run."""
    engine = make_engine(num_blocks=13, policy="priority", enable_prefix_caching=False, output_reserve=0.0)
    engine.add("patient", range(24), max_tokens=16, priority=9)
    engine.add("urgent", [5] * 8, max_tokens=30, priority=1)
    engine.loop.step()
    engine.add("next", [6] * 9, max_tokens=2, priority=1)
    while not engine.scheduler.recorder.num_preemptions:
        engine.loop.step()
    assert not engine.plans[-1].new_slots
    engine.run()
    assert engine.tokens["next"] == expected_output([6] * 9, 2)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    ("num_blocks", "asked"), [(10, ((4, 7), (3, 9), (5, 16))), (13, ((5, 17), (1, 10), (1, 8), (4, 13)))]
)
def test_a_preempted_request_comes_back_after_its_late_outputs(num_blocks, asked, caching):
    """With three steps in flight two of them may still carry a request that the third preempted, while another one's
    end leaves it room to come back at once."""
    engine = make_engine(num_blocks=num_blocks, depth=3, enable_prefix_caching=caching)
    for index, (length, max_tokens) in enumerate(asked):
        engine.add(f"r{index}", [index] * length, max_tokens=max_tokens)
    engine.run()
    assert engine.scheduler.recorder.num_preemptions
    for index, (length, max_tokens) in enumerate(asked):
        assert engine.tokens[f"r{index}"] == expected_output([index] * length, max_tokens)


def test_repeated_prompt_is_found_in_the_prefix_cache():
    engine = make_engine()
    prompt = list(range(30))
    engine.add("cold", prompt)
    engine.run()
    engine.add("warm", prompt)
    tokens = engine.run()
    assert tokens["warm"] == tokens["cold"]
    assert engine.endings["cold"][0].num_cached_tokens == 0
    assert engine.endings["warm"][0].num_cached_tokens == 28  # 7 full blocks


def test_hit_never_covers_the_whole_prompt():
    """I12: one token is always computed, for its logits."""
    engine = make_engine()
    for name in ("cold", "warm"):
        engine.add(name, list(range(32)))
        engine.run()
    assert engine.endings["warm"][0].num_cached_tokens == 28


def test_prefix_cache_can_be_switched_off():
    engine = make_engine(enable_prefix_caching=False)
    for name in ("cold", "warm"):
        engine.add(name, list(range(32)))
        engine.run()
    assert engine.endings["warm"][0].num_cached_tokens == 0
    assert engine.scheduler.ledger.main_pool.num_cached == 0


def test_neighbours_in_the_same_step_share_a_prefix():
    engine = make_engine()
    engine.add("left", list(range(20)))
    engine.add("right", [*range(16), 90, 91])
    engine.run()
    assert len(engine.plans[0].rows) == 2
    assert engine.endings["right"][0].num_cached_tokens == 16


class Embeds(NamedTuple):
    num_tokens: int
    digest: str


def test_the_same_zeros_under_different_embeddings_never_share():
    engine = make_engine(max_num_batched_tokens=24)
    for name, digest in (("a", "x"), ("b", "y"), ("c", "x"), ("d", None)):
        request = make_request(name, [0] * 20, max_tokens=4, embeds=None if digest is None else Embeds(20, digest))
        engine.loop.submit(request)
    engine.run()
    cached = {name: endings[0].num_cached_tokens for name, endings in engine.endings.items()}
    assert cached == {"a": 0, "b": 0, "c": 16, "d": 0}


def test_different_salts_never_share():
    engine = make_engine()
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        engine.add(name, list(range(20)), salt=salt)
        engine.run()
    assert [engine.endings[name][0].num_cached_tokens for name in "abc"] == [0, 0, 16]


def test_prompt_logprobs_are_whole_whatever_the_chunks_and_the_cache():
    answers = []
    for budget in (64, 5):
        engine = make_engine(max_num_batched_tokens=budget)
        engine.add("warm", list(range(20)))
        engine.run()
        engine.add("scored", list(range(20)), prompt_logprobs=0)
        seen = []
        receive = engine.loop.deliver

        def keep(outputs, seen=seen, receive=receive):
            seen.extend(o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None)
            receive(outputs)

        engine.loop.deliver = keep
        engine.run()
        assert len(seen) == 1
        assert len(seen[0]) == 19
        answers.append(seen[0])
    assert answers[0] == answers[1]


def test_prompt_logprobs_are_not_doubled_by_a_preemption():
    engine = make_engine(num_blocks=12, watermark=0.0, max_num_batched_tokens=6, output_reserve=0.0)
    for index in range(3):
        engine.add(f"r{index}", list(range(index, index + 12)), max_tokens=16, prompt_logprobs=0)
    lengths = {}
    receive = engine.loop.deliver

    def keep(outputs):
        lengths.update({o.request_id: len(o.prompt_logprobs) for o in outputs if o.prompt_logprobs is not None})
        receive(outputs)

    engine.loop.deliver = keep
    engine.run()
    assert engine.scheduler.recorder.num_preemptions > 0
    assert lengths == {"r0": 11, "r1": 11, "r2": 11}


def test_lone_request_that_cannot_grow_ends_with_an_error():
    engine = make_engine(num_blocks=4)
    engine.add("lone", list(range(10)), max_tokens=50)
    engine.run()
    (ending,) = engine.endings["lone"]
    assert ending.finish_reason == "error"
    assert isinstance(ending.error, KVCacheExhausted)
    assert "12 tokens" in str(ending.error)
    assert engine.tokens["lone"] == expected_output(range(10), 3)  # what it had said stays said
    assert engine.scheduler.recorder.num_preemptions == 0  # giving way to itself would help nobody


def test_prompt_larger_than_the_pool_ends_with_an_error_and_others_go_on():
    engine = make_engine(num_blocks=4)
    engine.add("giant", list(range(50)))
    engine.add("small", [1, 2], max_tokens=3)
    engine.run()
    assert engine.endings["giant"][0].finish_reason == "error"
    assert engine.tokens["small"] == expected_output([1, 2], 3)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("steps", range(8))
def test_abort_returns_all_blocks_at_every_point(depth, steps):
    """I20: queued, mid-chunk, decoding, in flight, after the stop."""
    engine = make_engine(depth=depth, max_num_batched_tokens=6)
    engine.add("gone", list(range(14)), max_tokens=3)
    for _ in range(steps):
        engine.loop.step()
    engine.loop.cancel("gone")
    engine.loop.cancel("gone")
    engine.loop.step()
    assert engine.scheduler.ledger.main_pool.num_used == 0
    engine.run()
    assert len(engine.endings["gone"]) == 1
    engine.add("next", [5, 6], max_tokens=2)  # its slot is usable again
    assert engine.run()["next"] == expected_output([5, 6], 2)
    assert engine.runner.freed.count("gone") == (1 if steps else 0)  # I19


def test_an_id_may_come_back_while_its_old_step_is_in_flight():
    engine = make_engine(depth=2)
    engine.add("x", [1, 2, 3], max_tokens=5)
    engine.loop.step()
    engine.loop.cancel("x")
    engine.loop._receive()
    engine.loop._hand_over()
    assert engine.endings.pop("x")[0].finish_reason == "abort"
    engine.tokens.clear()
    engine.add("x", [4, 5, 6, 7], max_tokens=5)
    assert engine.run()["x"] == expected_output([4, 5, 6, 7], 5)


def test_two_steps_are_in_flight_at_depth_two():
    engine = make_engine(depth=2)
    engine.add("r", [1, 2, 3], max_tokens=6)
    seen = []
    forward = engine.runner.forward

    def watch(plan):
        seen.append(len(engine.scheduler.launched))
        forward(plan)

    engine.runner.forward = watch
    engine.run()
    assert max(seen) == 2
    assert len(engine.plans) == 6  # the length limit is foreseen: no wasted step


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_leave_while_the_device_is_busy(depth):
    """What they wake up would take the interpreter from the launch of the next step. Only the last have none to wait
    for, and where the launch is the step, waiting would cost a step."""
    engine = make_engine(depth=depth)
    in_flight = []
    receive, runner_waits = engine.loop.deliver, engine.scheduler.launched

    def deliver(outputs):
        in_flight.append(len(runner_waits))
        receive(outputs)

    engine.loop.deliver = deliver
    engine.add("a", [1, 2, 3], max_tokens=4)
    assert engine.run()["a"] == expected_output([1, 2, 3], 4, 32)
    assert in_flight == ([0, 0, 0, 0] if depth == 1 else [2, 2, 1, 0])


def test_stop_token_at_depth_two_wastes_one_row_and_shows_nothing_of_it():
    engine = make_engine(depth=2)
    stop = expected_output([1, 2, 3], 4)[3]
    engine.add("r", [1, 2, 3], max_tokens=30, stop_token_ids=(stop,))
    tokens = engine.run()
    assert tokens["r"] == expected_output([1, 2, 3], 4)
    assert engine.endings["r"][0].stop_reason == stop
    assert len(engine.plans) == 5


def test_steps_that_wait_for_a_drafter_are_counted():
    engine = make_engine(depth=2, drafter=lambda request: ())
    engine.add("r", [1, 2, 3], max_tokens=6)
    engine.run()
    assert engine.loop.stats().degraded_steps == 5  # all but the first
    assert engine.tokens["r"] == expected_output([1, 2, 3], 6)


def test_a_request_that_must_see_its_tokens_waits_alone():
    engine = make_engine(depth=2, long_prefill_token_threshold=4)
    engine.add("waits", [1, 2, 3], max_tokens=4).most_unseen = 0
    engine.add("free", [4, 5, 6], max_tokens=8)
    engine.run()
    rows = [{row.request_id for row in plan.rows} for plan in engine.plans]
    assert rows == [{"waits", "free"}, {"free"}] * 4
    assert engine.scheduler.recorder.degraded_steps == 0
    assert engine.tokens == {"waits": expected_output([1, 2, 3], 4), "free": expected_output([4, 5, 6], 8)}


def rows_of_steps(engine):
    return [[row.request_id for row in plan.rows] for plan in engine.plans]


@pytest.mark.parametrize(("num_stages", "extra"), [(2, 0), (2, 1), (4, 0)])
def test_requests_of_a_pipeline_take_turns_in_equal_cohorts(num_stages, extra):
    engine = make_engine(num_stages=num_stages, num_extra_cohorts=extra, num_blocks=99)
    for index in range(7):
        engine.add(f"r{index}", [index], max_tokens=12)
    engine.run()
    cohorts = num_stages + extra
    assert engine.loop.depth == cohorts
    rows = rows_of_steps(engine)
    assert len(rows[0]) == 7  # the prompts
    for turn in range(1, 1 + 11 * cohorts, cohorts):
        assert sorted(chain(*rows[turn : turn + cohorts])) == [f"r{index}" for index in range(7)]
        assert max(len(step) for step in rows[turn : turn + cohorts]) == -(-7 // cohorts)
    assert rows[1 : 1 + cohorts] == rows[1 + cohorts : 1 + 2 * cohorts]  # in order of arrival
    assert engine.tokens == {f"r{index}": expected_output([index], 12) for index in range(7)}


def test_fewer_requests_than_stages_do_not_wait_for_each_other():
    engine = make_engine(num_stages=4)
    engine.add("a", [1, 2, 3], max_tokens=9)
    engine.loop.step()
    engine.add("b", [4, 5, 6], max_tokens=9)
    forward, in_flight = engine.loop.runner.forward, []
    engine.loop.runner.forward = lambda plan: (in_flight.append(len(engine.loop._pending)), forward(plan))[1]
    engine.run()
    assert {len(plan.rows) for plan in engine.plans} == {1}
    assert in_flight[:8] == [1] * 8


def test_a_grammar_waits_for_no_other_cohort():
    engine = make_engine(num_stages=2)
    for name in ("a", "b"):
        engine.add(name, [1, 2, 3], max_tokens=9, grammar=EveryOther(20))
    sample, in_flight = engine.loop.runner.sample, []
    engine.loop.runner.sample = lambda plan, masks=None: (
        in_flight.append(len(engine.loop._pending)),
        sample(plan, masks),
    )[1]
    engine.run()
    assert in_flight[:4] == [0, 0, 1, 1]  # both prompts in one step, then a cohort each
    assert engine.tokens == {name: expected_output([1, 2, 3], 9, grammar=EveryOther(20)) for name in ("a", "b")}


def test_chunks_of_a_prompt_follow_each_other_through_the_stages():
    engine = make_engine(num_stages=3, max_num_batched_tokens=8)
    engine.add("r", list(range(30)), max_tokens=2)
    in_flight = []
    settle = engine.loop._settle
    engine.loop._settle = lambda: (in_flight.append(len(engine.loop._pending)), settle())[1]
    assert engine.run()["r"] == expected_output(range(30), 2)
    assert [plan.num_tokens for plan in engine.plans] == [8, 8, 8, 6, 1]
    assert in_flight == [3, 3, 2, 1, 1]
    assert [plan.known_token_ids for plan in engine.plans] == [
        (),
        (),
        (),
        (),
        ((0, (expected_output(range(30), 1)[0],)),),
    ]


def test_a_chunk_beside_cohorts_that_decode_is_limited_in_every_step():
    engine = make_engine(num_stages=3, max_num_batched_tokens=32, long_prefill_token_threshold=4, num_blocks=99)
    engine.add("stream", [1], max_tokens=20)
    engine.loop.step()
    engine.add("long", list(range(30)), max_tokens=1)
    engine.run()
    assert max(plan.num_tokens for plan in engine.plans) <= 4 + 1


def test_no_request_of_a_pipeline_waits_for_longer_than_two_turns():
    """P13: requests come and end at any time, and the share of a step changes with them."""
    for seed in range(12):
        dice, stages = random.Random(seed), 2 + seed % 3
        engine = make_engine(num_stages=stages, num_blocks=300, max_num_seqs=32)
        for index in range(30):
            engine.add(f"r{index}", [dice.randrange(9) for _ in range(dice.randint(1, 30))],
                       max_tokens=dice.randint(1, 30))  # fmt: skip
            for _ in range(dice.randint(0, 4)):
                engine.loop.step()
        engine.run()
        last, rows = {}, rows_of_steps(engine)
        for step, names in enumerate(rows):
            for name in names:
                assert step - last.get(name, step) <= 2 * stages, (seed, name, step)
                last[name] = step


def test_a_prompt_beside_a_request_that_waits_gets_the_share_of_a_step_with_decodes():
    engine = make_engine(depth=2, long_prefill_token_threshold=4)
    engine.add("waits", [1, 2, 3], max_tokens=8).most_unseen = 0
    engine.loop.step()
    engine.add("prompt", list(range(10)), max_tokens=1)
    engine.run()
    chunks = [row.num_scheduled_tokens for plan in engine.plans for row in plan.rows if row.request_id == "prompt"]
    assert chunks == [4, 4, 2]


def test_a_grammar_settles_only_steps_of_its_own_requests():
    """The first token of a prompt needs no other request's token."""
    engine = make_engine(depth=2)
    engine.add("plain", [1, 2, 3], max_tokens=4)
    engine.loop.step()
    engine.add("grammar", [4, 5, 6], max_tokens=4, grammar=EveryOther(9))
    calls = []
    sample, settle = engine.runner.sample, engine.loop._settle
    engine.runner.sample = lambda plan, masks: (calls.append(plan.step_id), sample(plan, masks))[1]
    engine.loop._settle = lambda: (calls.append("settle"), settle())[1]
    engine.run()
    assert calls[:4] == [2, "settle", "settle", 3]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_grammar_that_is_over_ends_the_request(depth):
    engine = make_engine(depth=depth)
    engine.add("a", [1, 2, 3], max_tokens=9, grammar=EveryOther(4))
    engine.add("b", [1, 2, 3], max_tokens=9)
    engine.run()
    assert engine.tokens["a"] == expected_output([1, 2, 3], 9, grammar=EveryOther(4))
    assert len(engine.tokens["a"]) == 4
    assert (engine.endings["a"][0].finish_reason, engine.endings["a"][0].stop_reason) == ("stop", None)
    assert engine.tokens["b"] == expected_output([1, 2, 3], 9)


def test_a_grammar_keeps_two_steps_in_flight():
    """The next forward is launched before the host has read the token that its mask depends on."""
    engine = make_engine(depth=2)
    engine.add("a", [1, 2, 3], max_tokens=9, grammar=EveryOther(20))
    calls = []
    for name in ("forward", "sample"):
        call = getattr(engine.runner, name)
        setattr(engine.runner, name, lambda *args, call=call, name=name: (calls.append(name), call(*args))[1])
    settle = engine.loop._settle
    engine.loop._settle = lambda: (calls.append("settle"), settle())[1]
    engine.run()
    assert calls[:8] == ["forward", "sample", *["forward", "settle", "sample"] * 2]
    assert engine.scheduler.recorder.degraded_steps == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_grammar_that_gives_up_ends_its_request_alone(depth):
    engine = make_engine(depth=depth)
    engine.add("a", [1, 2, 3], grammar=EveryOther(9, fails_after=3))
    engine.add("b", [1, 2, 3])
    engine.run()
    assert isinstance(engine.endings["a"][0].error, StepFailed)
    assert engine.tokens["a"] == expected_output([1, 2, 3], 3, grammar=EveryOther(9))
    assert engine.tokens["b"] == expected_output([1, 2, 3], 8)
    assert engine.scheduler.ledger.main_pool.num_free == engine.scheduler.ledger.main_pool.capacity


def test_min_tokens_holds_back_the_stop():
    ids = expected_output([9, 9], 6, vocab_size=2)
    engine = make_engine(vocab_size=2)
    engine.add("r", [9, 9], max_tokens=6, stop_token_ids=(0, 1), min_tokens=4)
    assert engine.run()["r"] == ids[:4]


def test_eos_has_no_stop_reason_and_can_be_ignored():
    eos = expected_output([1], 1)[0]
    engine = make_engine()
    engine.add("stops", [1], eos=(eos,))
    engine.add("goes on", [1], eos=(eos,), ignore_eos=True)
    tokens = engine.run()
    assert tokens["stops"] == [eos]
    assert engine.endings["stops"][0].stop_reason is None
    assert tokens["goes on"] == expected_output([1], 8)


def test_drafts_save_steps_and_change_nothing():
    plain, drafted = make_engine(vocab_size=2), make_engine(vocab_size=2, drafter=last_tokens_again)
    for engine in (plain, drafted):
        engine.add("r", [1, 0, 1, 0], max_tokens=24)
        engine.run()
    assert drafted.tokens == plain.tokens
    assert len(drafted.plans) < len(plain.plans)


def test_failed_step_ends_its_requests_and_spares_the_waiting():
    engine = make_engine(max_num_seqs=2, fail_when=lambda plan: plan.step_id == 3)
    for index in range(4):
        engine.add(f"r{index}", [index, 1, 2], max_tokens=5)
    engine.run()
    reasons = {name: ending[0].finish_reason for name, ending in engine.endings.items()}
    assert reasons == {"r0": "error", "r1": "error", "r2": "length", "r3": "length"}
    assert isinstance(engine.endings["r0"][0].error, StepFailed)
    assert engine.tokens["r3"] == expected_output([3, 1, 2], 5)
    assert engine.loop.stats().num_failed_steps == 1


def test_cached_blocks_are_not_trusted_after_a_failed_step():
    engine = make_engine(fail_when=lambda plan: plan.step_id == 2)
    engine.add("fails", list(range(20)), max_tokens=5)
    engine.run()
    engine.add("again", list(range(20)), max_tokens=5)
    assert engine.run()["again"] == expected_output(range(20), 5)
    assert engine.endings["again"][0].num_cached_tokens == 0


class Breaks(EveryOther):
    """A grammar with a mistake in it, from a certain token on."""

    def __init__(self, where, after=0):
        super().__init__(99)
        self.where, self.after = where, after

    def _break(self, where):
        if where == self.where and len(self.taken) >= self.after:
            raise ZeroDivisionError(f"mistake in {where}")

    def fill(self, bits):
        self._break("fill")
        super().fill(bits)

    def accept(self, token_id):
        self._break("accept")
        super().accept(token_id)

    def refuses(self, token_id):
        return False

    def may_forbid(self, num_unseen):
        self._break("may_forbid")
        return super().may_forbid(num_unseen)

    @property
    def is_over(self):
        self._break("is_over")
        return super().is_over


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("where", ["fill", "accept", "may_forbid", "is_over"])
def test_a_mistake_in_one_requests_grammar_is_its_own(depth, where, after):
    engine = make_engine(depth=depth)
    engine.add("before", [1, 2, 3], max_tokens=9)
    engine.add("bad", [4, 5, 6], max_tokens=9, grammar=Breaks(where, after))
    engine.add("behind", [1, 2, 3, 4], max_tokens=9)
    engine.run(100)
    assert isinstance(engine.endings["bad"][0].error, StepFailed)
    assert f"mistake in {where}" in str(engine.endings["bad"][0].error)
    assert engine.tokens["before"] == expected_output([1, 2, 3], 9)
    assert engine.tokens["behind"] == expected_output([1, 2, 3, 4], 9)
    assert engine.scheduler.ledger.main_pool.num_used == 0
    assert engine.scheduler.recorder.num_failed_steps == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_runner_that_gives_no_token_ends_that_request(depth):
    engine = make_engine(depth=depth)
    answer = engine.runner._answer

    def forgets(slot, row, bits):
        told = answer(slot, row, bits)
        return RowResult() if slot.request_id == "bad" and row.num_computed_tokens > 3 else told

    engine.runner._answer = forgets
    engine.add("bad", [1, 2, 3], max_tokens=9)
    engine.add("good", [4, 5, 6], max_tokens=9)
    engine.run(100)
    assert isinstance(engine.endings["bad"][0].error, StepFailed)
    assert engine.tokens["good"] == expected_output([4, 5, 6], 9)


@pytest.mark.parametrize("depth", [1, 2])
def test_blocks_that_may_hold_nan_are_found_by_nobody(depth):
    """Neither those of the request that ended with NaN, nor what others computed beside and over them."""
    engine = make_engine(depth=depth, max_num_batched_tokens=12)
    answer, poisoned = engine.runner._answer, set()

    def poisons(slot, row, bits):
        told = answer(slot, row, bits)
        return RowResult(error="NaN", fault="model") if slot.request_id in poisoned else told

    engine.runner._answer = poisons
    engine.add("other", list(range(50, 70)), max_tokens=3)
    engine.run()
    poisoned.add("first")
    engine.add("first", list(range(20)), max_tokens=3)
    engine.loop.step()
    engine.add("over it", list(range(40)), max_tokens=3)
    while "first" not in engine.endings:
        engine.loop.step()
    assert isinstance(engine.endings["first"][0].error, StepFailed)
    engine.loop.cancel("over it")
    engine.run()
    assert not engine.scheduler.ledger.main_pool.names()
    for name, prompt in (("again", range(20)), ("longer", range(44)), ("other again", range(50, 70))):
        engine.add(name, list(prompt), max_tokens=3)
        engine.run()
        assert engine.tokens[name] == expected_output(prompt, 3)
    assert [engine.endings[name][0].num_cached_tokens for name in ("again", "longer", "other again")] == [0, 20, 0]
    assert engine.loop.stats().corrupted_requests == 1


def test_constraints_that_leave_no_token_are_the_requests_own_fault():
    engine = make_engine()
    answer = engine.runner._answer
    engine.runner._answer = lambda *given: (answer(*given), RowResult(error="Nothing left.", fault="request"))[1]
    engine.add("r", list(range(20)), max_tokens=3)
    engine.run()
    assert isinstance(engine.endings["r"][0].error, RequestError)
    assert engine.loop.stats().corrupted_requests == 0
    assert len(engine.scheduler.ledger.main_pool.names()) == 5  # its KV is sound


def test_a_failure_that_keeps_coming_and_is_nobodys_ends_everybody():
    engine = make_engine(fail_when=lambda plan: False)
    schedule, broken = engine.scheduler.schedule, [True, True]
    engine.scheduler.schedule = lambda: schedule() if not broken else broken.pop() / 0
    engine.add("r", [1, 2, 3], max_tokens=5)
    engine.add("s", [1, 2, 4], max_tokens=5)
    engine.run(10)
    assert {ending[0].finish_reason for ending in engine.endings.values()} == {"error"}
    assert len(engine.endings) == 2
    engine.add("next", [1, 2, 3], max_tokens=5)
    engine.run()
    assert engine.tokens["next"] == expected_output([1, 2, 3], 5)
    broken.append(True)  # once: it is tried again
    engine.add("last", [1, 2, 3], max_tokens=5)
    engine.run()
    assert engine.tokens["last"] == expected_output([1, 2, 3], 5)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_interrupt_at_any_line_leaves_an_engine_that_works(depth):
    """Ctrl-C in a script that steps the engine itself. What was under way ends; nothing of it stays."""
    at = 0
    while True:
        at += 1 + at // 40
        engine = make_engine(depth=depth, num_blocks=12, fail_when=lambda plan: False)
        for index in range(3):
            engine.add(f"r{index}", [index, *range(8)], max_tokens=6, grammar=EveryOther(9) if index else None)
        if not interrupted_at(at, engine.run):
            assert at > 500
            return
        for index in range(3):
            engine.loop.cancel(f"r{index}")
        engine.loop.step()
        assert not engine.scheduler.has_work
        check_invariants(engine)
        assert engine.scheduler.ledger.main_pool.num_used == 0
        engine.tokens.clear()
        engine.add("next", list(range(9)), max_tokens=6)
        assert engine.run()["next"] == expected_output(range(9), 6)


def interrupted_at(at, work):
    """Run `work` with a KeyboardInterrupt at this line of the engine. False where it ended sooner."""
    left, frames = at, ("loop.py", "scheduler.py", "block_pool.py", "recorder.py", "request.py")

    def trace(frame, event, arg):
        nonlocal left
        if not frame.f_code.co_filename.endswith(frames) or frame.f_code.co_name in ("_recover", "_recovering"):
            return None
        if event == "line":
            left -= 1
            if not left:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def test_full_queue_refuses():
    engine = make_engine(max_num_queued_reqs=2)
    for index in range(3):
        engine.add(f"r{index}", [1])
    engine.loop.step()
    assert isinstance(engine.endings["r2"][0].error, QueueFull)
    engine.run()
    assert engine.endings["r0"][0].finish_reason == "length"


def test_a_step_admits_few_long_hits(monkeypatch):
    """Each block of a hit takes the host time, which streams wait for. The others enter in the next steps."""
    monkeypatch.setattr(scheduler_module, "MOST_HIT_BLOCKS", 20)
    engine = make_engine(num_blocks=200, max_num_seqs=32)
    document = list(range(32))
    engine.add("first", [*document, 99], max_tokens=1)
    engine.run()
    looked, find = [], engine.scheduler.cache.find
    monkeypatch.setattr(engine.scheduler.cache, "find", lambda request: looked.append(request) or find(request))
    for index in range(9):
        engine.add(f"r{index}", [*document, index, 7, 8], max_tokens=2)
    entered = []
    while len(entered) < 9:
        looked.clear()
        plans = len(engine.plans)
        engine.loop.step()
        new = [slot.request_id for plan in engine.plans[plans:] for slot in plan.new_slots]
        assert len(new) == (2 if len(entered) < 8 else 1)  # of eight blocks each
        assert len(looked) <= 4
        entered += new
    engine.run()
    assert entered == [f"r{index}" for index in range(9)]
    assert engine.loop.stats().prefix_cache_hits == 9 * 32


def test_a_hit_longer_than_the_bound_enters_alone(monkeypatch):
    monkeypatch.setattr(scheduler_module, "MOST_HIT_BLOCKS", 2)
    engine = make_engine(num_blocks=200)
    for index in range(3):
        engine.add(f"r{index}", [*range(32), 50 + index], max_tokens=2)
        if not index:
            engine.run()
    engine.run()
    assert [len(plan.new_slots) for plan in engine.plans if plan.new_slots] == [1, 1, 1]


@pytest.mark.parametrize("change", ["evicted", "registered"])
def test_a_hit_is_looked_up_again_after_the_cache_has_changed(change):
    """What `_admissible` found is handed on unless a request that entered before it took or named blocks."""
    engine = make_engine(num_blocks=12, max_num_seqs=4, watermark=0.0, output_reserve=0.0)
    engine.add("first", list(range(17)), max_tokens=1)
    engine.run()
    long = list(range(100, 120)) if change == "evicted" else list(range(16, 30))
    engine.add("a", long, max_tokens=2)
    engine.add("b", [*range(16), 77], max_tokens=2)
    engine.add("c", [*long, 78], max_tokens=2)
    engine.run()  # checks the invariants of blocks and tables after every step
    assert {name: len(tokens) for name, tokens in engine.tokens.items()} == {"first": 1, "a": 2, "b": 2, "c": 2}


def test_a_snapshot_does_not_grow_with_the_queue():
    engine = make_engine(max_num_seqs=2, max_num_queued_reqs=500)
    for index in range(300):
        engine.add(f"r{index}", [1, 2, 3], max_tokens=4)
    engine.loop.step()
    stats = engine.scheduler.stats(1, RunnerStats())
    assert (stats.num_running, stats.num_waiting) == (2, 298)
    assert [line.request_id for line in stats.requests] == [f"r{index}" for index in range(2 + SHOWN_WAITING)]


def test_a_prompt_preempted_in_its_middle_is_counted_once():
    engine = make_engine(max_num_batched_tokens=8, max_num_seqs=1, policy="priority", enable_prefix_caching=False)
    engine.add("late", list(range(40)), max_tokens=2, priority=5)
    engine.loop.step()
    engine.loop.step()
    engine.add("urgent", list(range(4)), max_tokens=2)
    engine.run()
    stats = engine.loop.stats()
    assert (stats.num_preemptions, stats.recomputed_tokens) == (1, 16)
    assert stats.prompt_tokens == 40 + 4


def test_hit_rate_counts_each_request_once():
    engine = make_engine(num_blocks=12, watermark=0.0)
    for index in range(3):
        engine.add(f"r{index}", list(range(index, index + 9)), max_tokens=16)
    engine.run()
    stats = engine.loop.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_queries == 27
    assert stats.generation_tokens == 48
    assert stats.prompt_tokens + stats.prompt_tokens_cached == 27


def test_resting_engine_shows_no_rate_and_a_clock_that_goes_on():
    engine = make_engine()
    engine.add("r", [1, 2, 3], max_tokens=6)
    engine.run()
    stats = engine.loop.stats()
    assert stats.decode_tokens_per_s > 0
    later = stats.as_of(stats.taken_s + 10)
    assert (later.decode_tokens_per_s, later.uptime_s) == (0.0, stats.uptime_s + 10)
    assert stats.as_of(stats.taken_s + 0.5).decode_tokens_per_s == stats.decode_tokens_per_s
    busy = replace(stats, num_running=1)
    assert busy.as_of(stats.taken_s + 10) is busy


def enter_order(engine):
    """Request ids in the order in which they first entered a step."""
    return list(dict.fromkeys(new.request_id for plan in engine.plans for new in plan.new_slots))


def steps_until_first_token(engine, name, most=200):
    for step in range(most):
        engine.loop.step()
        check_invariants(engine)
        if engine.tokens.get(name):
            return step + 1
    raise AssertionError(f"{name} has no token after {most} steps")


@pytest.mark.parametrize("num_streams", [0, 2])
def test_a_short_prompt_does_not_wait_for_a_long_one(num_streams):
    engine = make_engine(num_blocks=200, max_num_batched_tokens=16, long_prefill_token_threshold=8)
    for index in range(num_streams):
        engine.add(f"stream{index}", [index], max_tokens=180)
    engine.add("long", range(400), max_tokens=2)
    engine.loop.step()
    engine.add("short", [7, 8, 9], max_tokens=2)
    assert steps_until_first_token(engine, "short") <= 2
    assert not engine.tokens.get("long")
    tokens = engine.run()
    assert tokens["long"] == expected_output(range(400), 2)
    assert tokens["short"] == expected_output([7, 8, 9], 2)


def test_a_short_prompt_does_not_wait_for_two_long_ones():
    engine = make_engine(num_blocks=250, max_num_batched_tokens=16)
    for start in (0, 1000):
        engine.add(f"long{start}", range(start, start + 400), max_tokens=2)
    engine.loop.step()
    engine.add("short", [7, 8, 9], max_tokens=2)
    assert steps_until_first_token(engine, "short") <= 2
    engine.run()


def test_long_prompts_of_like_length_finish_one_after_the_other():
    engine = make_engine(num_blocks=250, max_num_batched_tokens=16)
    for start in (0, 1000, 2000):
        engine.add(f"long{start}", range(start, start + 160), max_tokens=1)
    engine.run()
    assert len(engine.plans) == 30
    assert list(engine.endings) == ["long0", "long1000", "long2000"]


def test_a_stream_of_short_prompts_does_not_starve_a_long_one():
    engine = make_engine(num_blocks=250, max_num_batched_tokens=16, enable_prefix_caching=False)
    engine.add("long", range(320), max_tokens=1)
    for step in range(40):
        for index in range(4):
            engine.add(f"short{step}.{index}", [step, index, 1, 2, 3, 4], max_tokens=1)
        engine.loop.step()
    assert "long" in engine.endings  # it has at least 8 of the 16 tokens of a step
    engine.run()


def test_a_waiting_long_prompt_does_not_starve_either():
    """Behind a long prompt, short ones overtake a second long one; then it is the oldest and has its half."""
    engine = make_engine(num_blocks=250, max_num_batched_tokens=16, enable_prefix_caching=False)
    for start in (0, 1000):
        engine.add(f"long{start}", range(start, start + 160), max_tokens=1)
    for step in range(45):
        for index in range(4):
            engine.add(f"short{step}.{index}", [step, index, 1, 2, 3, 4], max_tokens=1)
        engine.loop.step()
    assert "long1000" in engine.endings
    engine.run()


@draws(100)
@given(lengths=st.lists(st.integers(1, 60), min_size=2, max_size=8), budget=st.sampled_from([8, 16, 32]))
def test_nobody_overtakes_a_prompt_that_needs_no_more_than_it_does(lengths, budget):
    """I18 by length: an earlier prompt enters later only where the other needs at most half of an earlier one."""
    engine = make_engine(num_blocks=200, max_num_batched_tokens=budget, enable_prefix_caching=False)
    for index, length in enumerate(lengths):
        engine.add(f"r{index}", [index] * length, max_tokens=1)
    engine.run()
    order = [int(name[1:]) for name in enter_order(engine)]
    for place, late in enumerate(order):
        for early in order[place + 1 :]:
            if early < late:
                assert 2 * lengths[late] <= max(lengths[:late])


def test_a_second_prompt_waits_for_the_running_one_that_computes_its_beginning():
    engine = make_engine(num_blocks=200, max_num_batched_tokens=16)
    shared = list(range(64))
    for index in range(4):
        engine.add(f"r{index}", [*shared, 100 + index], max_tokens=1)
    engine.run()
    assert sum(plan.num_tokens for plan in engine.plans) <= 65 + 3 * 5
    assert all(engine.endings[f"r{index}"][0].num_cached_tokens == 64 for index in (1, 2, 3))


def test_others_pass_a_prompt_that_waits_for_a_shared_beginning():
    engine = make_engine(num_blocks=200, max_num_batched_tokens=16)
    for name in ("first", "same"):
        engine.add(name, list(range(160)), max_tokens=1)
    engine.loop.step()
    engine.add("other", [200, 201], max_tokens=1)
    assert steps_until_first_token(engine, "other") <= 2
    assert "same" not in {row.request_id for plan in engine.plans for row in plan.rows}
    engine.run()
    assert engine.endings["same"][0].num_cached_tokens == 156


def test_late_outputs_of_a_preempted_request_hold_nobody_else_back():
    engine = make_engine(depth=3, num_blocks=40, policy="priority", max_num_seqs=2)
    engine.add("a", [1, 2, 3], max_tokens=30, priority=1)
    engine.add("b", [4, 5, 6], max_tokens=30, priority=1)
    for _ in range(4):
        engine.loop.step()
    scheduler = engine.scheduler
    scheduler._preempt(scheduler.requests["b"], scheduler_step())
    assert scheduler.requests["b"].num_in_flight_tokens
    engine.add("c", [7, 8], max_tokens=2, priority=2)
    engine.loop.step()
    assert scheduler.requests["c"].state is State.RUNNING
    tokens = engine.run()
    assert tokens["b"] == expected_output([4, 5, 6], 30)
    assert tokens["c"] == expected_output([7, 8], 2)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_urgent_request_takes_the_slot_of_a_patient_one(depth):
    engine = make_engine(depth=depth, policy="priority", max_num_seqs=1)
    engine.add("patient", [1, 2, 3], max_tokens=50, priority=9)
    for _ in range(3):
        engine.loop.step()
    engine.add("urgent", [4, 5], max_tokens=1, priority=-5)
    assert steps_until_first_token(engine, "urgent") <= 2 + depth
    assert engine.scheduler.recorder.num_preemptions == 1
    assert engine.run()["patient"] == expected_output([1, 2, 3], 50)


def test_first_come_first_served_keeps_slots_whatever_the_priority():
    engine = make_engine(max_num_seqs=1)
    engine.add("first", [1, 2, 3], max_tokens=20, priority=9)
    engine.loop.step()
    engine.add("second", [4, 5], max_tokens=1, priority=-5)
    engine.run()
    assert list(engine.endings) == ["first", "second"]
    assert engine.scheduler.recorder.num_preemptions == 0


def test_an_urgent_request_that_would_not_fit_takes_no_slot():
    engine = make_engine(policy="priority", max_num_seqs=2, num_blocks=21, enable_prefix_caching=False)
    engine.add("other", [1] * 40, max_tokens=30, priority=0)
    engine.add("patient", [2] * 4, max_tokens=9, priority=9)
    engine.loop.step()
    engine.add("urgent", [3] * 48, max_tokens=1, priority=-5)
    engine.loop.step()
    assert engine.scheduler.recorder.num_preemptions == 0
    engine.run()


def test_cached_tokens_are_of_the_prompt_whatever_a_preemption_finds_again():
    engine = make_engine(num_blocks=20, output_reserve=0.0)
    for index in range(3):
        engine.add(f"r{index}", [index] * 5, max_tokens=40)
    engine.run()
    assert engine.scheduler.recorder.num_preemptions
    assert [engine.endings[f"r{index}"][0].num_cached_tokens for index in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("caching", [True, False])
def test_recomputed_tokens_are_what_was_computed_beyond_need(caching):
    engine = make_engine(num_blocks=20, output_reserve=0.0, enable_prefix_caching=caching)
    for index in range(3):
        engine.add(f"r{index}", [index] * 5, max_tokens=40)
    engine.run()
    stats = engine.loop.stats()
    assert stats.recomputed_tokens > 0
    assert sum(plan.num_tokens for plan in engine.plans) == 3 * (5 + 40 - 1) + stats.recomputed_tokens


def test_room_for_outputs_spares_preemptions():
    """A pool for two whole requests of eight: few are preempted, and more than two run at a time."""
    engines = [make_engine(num_blocks=45, output_reserve=share, enable_prefix_caching=False) for share in (0.0, 0.6)]
    for engine in engines:
        for index in range(8):
            engine.add(f"r{index}", [index] * 8, max_tokens=72)
        engine.run()
    eager, careful = [engine.loop.stats() for engine in engines]
    assert careful.recomputed_tokens < eager.recomputed_tokens / 2


def test_aborted_waiting_requests_leave_nothing_behind():
    engine = make_engine(max_num_seqs=1)
    engine.add("runs", [1], max_tokens=100)
    engine.loop.step()
    for index in range(50):
        engine.add(f"r{index}", [2, 3])
        engine.loop.cancel(f"r{index}")
    engine.loop.step()
    assert list(engine.scheduler.waiting) == []
    assert engine.scheduler.waiting._entries == []
