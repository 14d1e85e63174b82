"""Recurrent states in the engine: walks over random schedules on the fake model's hash chain, then policies by name."""

import random
from collections import Counter
from typing import Any

import pytest

from localllm.engine.request import Request, State
from localllm.engine.step import Row, RowResult, StepPlan
from localllm.errors import StepFailed
from tests.draws import seeds
from tests.engine.harness import BLOCK_SIZE, EveryOther, SmallEngine, check_invariants, make_engine
from tests.fake_runner import CorruptState, FakeRunner, _Slot, expected_output

VOCAB = 4


class Watcher:
    """Checks every plan of an engine, and every named state against the tokens that its name stands for."""

    def __init__(self, engine: SmallEngine) -> None:
        self.engine, self.asked = engine, []
        self.state_of: dict[bytes, int] = {}  # name of a block -> the state after it
        self.first_reads: Counter[bool] = Counter()  # whether a request began at a checkpoint
        self.saves = 0
        plan_step = engine.scheduler.schedule

        def watched() -> StepPlan | None:
            scheduler, states = engine.scheduler, engine.scheduler.cache.states
            assert states is not None
            states.begin_step()
            named = {place: name for name, place in states.pool.checkpoints().items()}
            plan = plan_step()
            if plan is not None:
                entered = {new.request_id: new.num_computed_tokens for new in plan.new_slots}
                for row in plan.rows:
                    self.check_row(row, entered, named, scheduler.requests[row.request_id])
            return plan

        engine.scheduler.schedule = watched  # type: ignore[method-assign]

    def check_row(self, row: Row, entered: dict[str, int], named: dict[int, bytes], request: Request) -> None:
        use, start = row.state, row.num_computed_tokens
        assert use is not None
        assert request.held_state is not None
        assert use.write == request.held_state.slot
        if row.request_id not in entered:
            assert use.read == use.write
        elif not start:
            assert use.read == -1  # H2: nothing is inferred from a row's length
        else:  # H2, and the name was there before the step was planned
            assert start == entered[row.request_id]
            assert start % BLOCK_SIZE == 0
            assert named[use.read] == request.block_hashes[start // BLOCK_SIZE - 1]
        if row.request_id in entered:
            self.first_reads[use.read != -1] += 1
        if use.save:
            self.saves += 1
            assert (start + row.num_scheduled_tokens) % BLOCK_SIZE == 0

    def check(self) -> None:
        """Check H6: the state at a named place comes after the tokens of its name."""
        check_invariants(self.engine)
        if self.engine.loop.runner is not self.engine.runner:  # a pipeline computes later
            return
        for request in self.asked:
            self._learn(request)
        states = self.engine.scheduler.cache.states
        assert states is not None
        for name, place in states.pool.checkpoints().items():
            assert self.engine.runner._states[place] == self.state_of[name]

    def _learn(self, request: Request) -> None:
        names = request.block_hashes
        if not names or names[-1] in self.state_of:
            return
        runner = FakeRunner(2, BLOCK_SIZE)
        slot = _Slot(request.request_id, request.params, request.prompt_len, request.token_ids, [], 0)
        runner._extend_crcs(slot)
        self.state_of |= {name: slot.prefix_crcs[(i + 1) * BLOCK_SIZE - 1] for i, name in enumerate(names)}


class UnsureRunner(FakeRunner):
    """A runner whose sampled rows may be NaN, and whose steps may fail."""

    dice = random.Random(0)
    rate = 0.0

    def _answer(self, slot: Any, row: Row, bits: Any) -> RowResult:
        told = super()._answer(slot, row, bits)
        if row.samples and self.dice.random() < self.rate:
            return RowResult(error="NaN", fault="model")
        return told


def random_engine(dice: random.Random) -> SmallEngine:
    chunk = dice.choice((0, 0, 0, 2 * BLOCK_SIZE))
    seqs = dice.randint(1, 4)
    stages = dice.choice((1, 1, 1, 2))
    fails = dice.choice((0, 0, 0.03))
    windows = dice.choice(((None,), (None,), (None, 6)))
    engine = make_engine(
        depth=dice.randint(1, 3), num_stages=stages, vocab_size=VOCAB, num_blocks=dice.choice((10, 14, 40)),
        windows=windows, max_num_seqs=seqs, num_places=1 + seqs + dice.choice((0, 1, 2, 4, 12)), fixed_chunk=chunk,
        max_num_batched_tokens=dice.choice((12, 16, 64)) if chunk else dice.choice((3, 5, 16, 64)),
        long_prefill_token_threshold=dice.choice((0, 2, 7)), policy=dice.choice(("fcfs", "priority")),
        enable_prefix_caching=dice.random() < 0.85, state_interval=dice.choice((4, 8, 8, 256)),
        output_reserve=dice.choice((0.0, 0.6)), runner_type=UnsureRunner,
        fail_when=(lambda plan: dice.random() < fails) if fails else None,
    )  # fmt: skip
    engine.runner.dice, engine.runner.rate = dice, dice.choice((0, 0, 0.02))  # type: ignore[attr-defined]
    return engine


def walk(number: int, total: Counter[str]) -> None:
    """Run requests through one random engine. Every plan, every name and every answer is checked."""
    dice = random.Random(number)
    engine = random_engine(dice)
    watcher = Watcher(engine)
    shared = [dice.randrange(VOCAB) for _ in range(17)]
    asked: dict[str, tuple[list[int], int, bool]] = {}
    aborted: set[str] = set()
    room = (engine.scheduler.ledger.main_pool.capacity - 1) * BLOCK_SIZE

    def step() -> None:
        engine.loop.step()
        watcher.check()

    for _ in range(dice.randint(3, 8)):
        prompt = shared[: dice.randint(0, 17)] + [dice.randrange(VOCAB) for _ in range(dice.randint(1, 9))]
        max_tokens, priority = dice.randint(1, 14), dice.randint(0, 2)
        if len(prompt) + max_tokens > room:
            continue
        stops = dice.random() < 0.5
        for _ in range(dice.choice((1, 1, 3))):  # choices of one request
            name = f"r{len(asked)}"
            asked[name] = (prompt, max_tokens, stops)
            watcher.asked.append(
                engine.add(
                    name, prompt, max_tokens=max_tokens, priority=priority, stop_token_ids=(3,) if stops else (),
                    prompt_logprobs=dice.choice((None, None, None, 0)),
                )
            )  # fmt: skip
        for _ in range(dice.randint(0, 5)):
            step()
        if dice.random() < 0.3:
            name = dice.choice(sorted(asked))
            aborted.add(name)
            engine.loop.cancel(name)
    for _ in range(3000):
        if not engine.scheduler.has_work and len(engine.endings) == len(asked):
            break
        step()
    else:
        raise AssertionError(f"still at work: {list(engine.scheduler.requests.values())}")
    states, scheduler = engine.scheduler.cache.states, engine.scheduler
    assert states is not None
    states.begin_step()
    assert states.pool.num_held == 0  # H5
    for name, (prompt, max_tokens, stops) in asked.items():
        expected = expected_output(prompt, max_tokens, VOCAB)
        if stops and 3 in expected:
            expected = expected[: expected.index(3) + 1]
        got, (ending,) = engine.tokens.get(name, []), engine.endings[name]
        assert got == expected[: len(got)]  # H10: also after preemptions
        if ending.finish_reason not in ("abort", "error"):
            assert got == expected
        assert ending.finish_reason != "abort" or name in aborted
    total += Counter(
        begun_at_checkpoint=watcher.first_reads[True], saves=watcher.saves, errors=scheduler.recorder.finished["error"],
        preemptions=scheduler.recorder.num_preemptions, lacks_state=scheduler.recorder.prefix_cache_lacks_state > 0,
    )  # fmt: skip


def test_answers_and_places_over_random_schedules() -> None:
    """H2 to H10 and H13: chunks, hits, n > 1, preemption, aborts, failed steps, NaN rows, priorities, pipelines."""
    total: Counter[str] = Counter()
    numbers = seeds(400)
    for number in numbers:
        try:
            walk(number, total)
        except BaseException as error:
            error.add_note(f"walk {number}")
            raise
    least = {"begun_at_checkpoint": 300, "saves": 2000, "errors": 50, "preemptions": 100, "lacks_state": 50}
    assert all(total[what] >= count * len(numbers) // 400 for what, count in least.items()), total


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_answers_and_places_over_many_random_schedules() -> None:
    for number in range(1000, 31_000):
        walk(number, Counter())


def hybrid(**settings: Any) -> SmallEngine:
    return make_engine(**{"num_places": 12, "state_interval": 8, **settings})


def rows_of(engine: SmallEngine, name: str) -> list[tuple[int, int]]:
    """Return (first position, end) of each row of a request."""
    return [
        (row.num_computed_tokens, row.num_computed_tokens + row.num_scheduled_tokens)
        for plan in engine.plans
        for row in plan.rows
        if row.request_id == name
    ]


def checkpoints(engine: SmallEngine) -> list[int]:
    assert engine.scheduler.cache.states is not None
    engine.scheduler.cache.states.begin_step()
    return sorted(engine.scheduler.cache.states.pool.checkpoints().values())


def positions(engine: SmallEngine, request: Request) -> list[int]:
    """Return the positions at which a request's tokens have a checkpoint."""
    assert engine.scheduler.cache.states is not None
    engine.scheduler.cache.states.begin_step()
    names = engine.scheduler.cache.states.pool.checkpoints()
    return [(i + 1) * BLOCK_SIZE for i, name in enumerate(request.block_hashes) if name in names]


@pytest.mark.parametrize("length", [1, 4, 5, 8, 9, 15])
def test_a_prompt_is_cut_at_its_last_block_boundary(length):
    engine = hybrid(state_interval=256)
    request = engine.add("a", list(range(1, 1 + length)), max_tokens=1)
    engine.run()
    boundary = (length - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert rows_of(engine, "a") == ([(0, boundary)] if boundary else []) + [(boundary, length)]
    assert positions(engine, request) == ([boundary] if boundary else [])


def test_the_next_turn_begins_at_the_last_boundary_of_the_turn_before():
    engine = hybrid(state_interval=256)
    prompt = list(range(1, 15))
    first = engine.add("first", prompt, max_tokens=5)
    engine.run()
    second = engine.add("second", [*prompt, *first.token_ids[14:], 9, 9, 9], max_tokens=3)
    engine.run()
    assert second.num_cached_tokens == 12
    assert rows_of(engine, "second")[0][0] == 12
    recorder = engine.scheduler.recorder
    assert recorder.prefix_cache_hits == 12
    assert recorder.prefix_cache_lacks_state == 4  # the KV of one more block is known


def test_the_second_request_with_a_common_start_saves_there_and_the_third_begins_there():
    engine = hybrid(state_interval=8)
    common = list(range(1, 18))
    requests = []
    for index in range(3):
        requests.append(engine.add(str(index), [*common, *range(20 + 7 * index, 26 + 7 * index)], max_tokens=1))
        engine.run()
    assert [request.num_cached_tokens for request in requests] == [0, 0, 16]
    assert rows_of(engine, "1") == [(0, 16), (16, 20), (20, 23)]
    assert engine.scheduler.recorder.prefix_cache_lacks_state == 16


def test_a_common_start_shorter_than_the_interval_is_not_worth_a_checkpoint():
    engine = hybrid(state_interval=20)
    for index in range(2):
        engine.add(str(index), [*range(1, 18), *range(20 + 7 * index, 26 + 7 * index)], max_tokens=1)
        engine.run()
    assert rows_of(engine, "1") == [(0, 20), (20, 23)]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_checkpoint_moves_along_with_an_output_and_stays_when_it_ends(depth):
    engine = hybrid(state_interval=8, depth=depth)
    request = engine.add("a", [1, 2, 3], max_tokens=40)
    seen = set()
    for _ in range(50):
        engine.loop.step()
        check_invariants(engine)
        if request.state is State.RUNNING:
            seen.add(tuple(positions(engine, request)))
    assert seen == {(), (8,), (16,), (24,), (32,), (40,)}
    assert positions(engine, request) == [40]
    assert not engine.scheduler.cache.states.pool._spare


def test_every_block_has_a_checkpoint_where_the_interval_is_a_block():
    engine = hybrid(state_interval=1)
    request = engine.add("a", [1, 2, 3], max_tokens=22)
    engine.run()
    assert positions(engine, request) == [4, 8, 12, 16, 20, 24]


def test_a_checkpoint_of_an_output_that_was_read_stays():
    engine = hybrid(state_interval=8)
    request = engine.add("a", [1, 2, 3], max_tokens=40)
    while request.num_tokens < 12:
        engine.loop.step()
    other = engine.add("b", [*request.token_ids, 1], max_tokens=1)
    engine.run()
    assert other.num_cached_tokens == 8
    assert 8 in positions(engine, request)


def test_chunks_of_a_long_prompt_are_saved_into_free_places_and_evicted_first():
    engine = hybrid(max_num_batched_tokens=16, num_places=7, max_num_seqs=1, state_interval=256)
    long = engine.add("long", list(range(1, 60)), max_tokens=1)
    engine.run()
    assert positions(engine, long) == [16, 32, 48, 56]
    spare = set(engine.scheduler.cache.states.pool._spare)
    assert spare == {long.block_hashes[i] for i in (3, 7, 11)}
    for index in range(3):
        engine.add(f"{index}", [30 + index] * 6, max_tokens=1)
        engine.run()
    assert 56 in positions(engine, long)


def test_chunks_end_at_block_boundaries():
    engine = hybrid(max_num_batched_tokens=10)
    engine.add("a", list(range(1, 36)), max_tokens=2)
    engine.run()
    assert rows_of(engine, "a") == [(0, 8), (8, 16), (16, 24), (24, 32), (32, 35), (35, 36)]


def test_a_name_is_not_visible_in_the_step_that_saves():
    """The second choice of a request waits one step, and begins at the checkpoint of the first one."""
    engine = hybrid()
    for name in "ab":
        engine.add(name, list(range(1, 12)), max_tokens=2)
    engine.run()
    assert [[row.request_id for row in plan.rows] for plan in engine.plans[:2]] == [["a"], ["a", "b"]]
    assert rows_of(engine, "b")[0] == (8, 11)
    save, read = engine.plans[0].rows[0].state.save, engine.plans[1].rows[1].state.read
    assert save == read != 0


def test_the_state_of_one_token_begins_from_zeros_in_a_used_place():
    """A prompt of one token looks like a decode, and its place was another request's."""
    engine = hybrid(max_num_seqs=1, num_places=2)
    for name in "abc":
        engine.add(name, [7], max_tokens=3)
        assert engine.run()[name] == expected_output([7], 3)
    assert [plan.rows[0].state.read for plan in engine.plans if plan.new_slots] == [-1, -1, -1]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_preempted_request_resumes_at_its_checkpoint(depth):
    """H10: of its output, not only of its prompt."""
    engine = hybrid(depth=depth, max_num_seqs=1, policy="priority", state_interval=8)
    patient = engine.add("patient", list(range(1, 10)), max_tokens=30, priority=9)
    while patient.num_tokens < 22:
        engine.loop.step()
    engine.add("urgent", [40, 41], max_tokens=3, priority=0)
    tokens = engine.run()
    assert engine.scheduler.recorder.num_preemptions == 1
    assert [new.num_computed_tokens for plan in engine.plans for new in plan.new_slots] == [0, 0, 16]
    assert tokens["patient"] == expected_output(range(1, 10), 30)


def test_without_prefix_caching_a_place_per_request_is_enough():
    """H15."""
    engine = hybrid(enable_prefix_caching=False, max_num_seqs=3, num_places=4)
    for index in range(9):
        engine.add(str(index), list(range(index, index + 10)), max_tokens=9)
    for name, tokens in engine.run().items():
        assert tokens == expected_output(range(int(name), int(name) + 10), 9)
    assert checkpoints(engine) == []
    assert all(row.state.save == 0 for plan in engine.plans for row in plan.rows)


def test_a_request_takes_over_the_last_checkpoint_as_its_place():
    engine = hybrid(max_num_seqs=2, num_places=3, state_interval=256)
    engine.add("a", list(range(1, 12)), max_tokens=1)
    engine.run()
    (saved,) = checkpoints(engine)
    engine.add("other", [50], max_tokens=30)
    engine.loop.step()
    again = engine.add("again", list(range(1, 12)), max_tokens=4)
    assert engine.run()["again"] == expected_output(range(1, 12), 4)
    assert again.num_cached_tokens == 8
    (first,) = [plan.rows[-1] for plan in engine.plans if any(new.request_id == "again" for new in plan.new_slots)]
    assert first.state.read == first.state.write == saved


def test_prompt_logprobs_begin_from_zeros():
    engine = hybrid()
    for name in "ab":
        engine.add(name, list(range(1, 12)), max_tokens=1, prompt_logprobs=1)
        engine.run()
    assert [plan.rows[0].state.read for plan in engine.plans if plan.new_slots] == [-1, -1]


def test_a_dropped_block_takes_the_checkpoints_after_it():
    """H8."""
    engine = hybrid(num_blocks=8, max_num_seqs=1)
    request = engine.add("a", list(range(1, 14)), max_tokens=1)
    engine.run()
    assert positions(engine, request) == [12]
    engine.add("b", list(range(20, 44)), max_tokens=1)
    engine.run()
    assert positions(engine, request) == []
    again = engine.add("again", list(range(1, 14)), max_tokens=1)
    engine.run()
    assert again.num_cached_tokens == 0


def test_a_hit_needs_the_kv_up_to_the_checkpoint():
    """H7: the state is named before its last block is dropped from the KV."""
    engine = hybrid()
    engine.add("a", list(range(1, 14)), max_tokens=1)
    engine.run()
    (pool,) = engine.scheduler.ledger.pools
    pool.on_dropped.clear()
    for name in list(pool.names())[2:]:
        pool.forget(name)
    again = engine.add("again", list(range(1, 14)), max_tokens=1)
    engine.loop.step()
    assert again.num_cached_tokens == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_after_a_nan_no_state_is_found_and_running_requests_save_none(depth):
    """H9."""
    engine = hybrid(depth=depth, runner_type=UnsureRunner, state_interval=4)
    prompt = list(range(1, 14))
    engine.add("before", prompt, max_tokens=2)
    engine.run()
    running = engine.add("running", [40, 41], max_tokens=30)
    engine.loop.step()
    engine.runner.rate = 1.0  # type: ignore[attr-defined]
    engine.add("nan", [50, 51, 52], max_tokens=3)
    for _ in range(20):
        engine.runner.rate = float(any(row.request_id == "nan" for row in engine.plans[-1].rows))  # type: ignore[attr-defined]
        engine.loop.step()
        if engine.scheduler.recorder.corrupted_requests:
            break
    assert checkpoints(engine) == []
    engine.runner.rate = 0.0  # type: ignore[attr-defined]
    engine.run()
    assert positions(engine, running) == []
    again = engine.add("again", prompt, max_tokens=2)
    engine.run()
    assert again.num_cached_tokens == 0


def test_a_failed_step_frees_every_place():
    failing = []
    engine = hybrid(fail_when=lambda plan: bool(failing))
    for name in "ab":
        engine.add(name, [ord(name)] * 9, max_tokens=9)
    for _ in range(4):
        engine.loop.step()
    failing.append(True)
    engine.loop.step()
    failing.clear()
    check_invariants(engine)
    assert engine.scheduler.cache.states.pool.num_available == engine.scheduler.cache.states.pool.capacity
    assert isinstance(engine.endings["a"][0].error, StepFailed)
    engine.add("c", [1, 2, 3], max_tokens=9)
    assert engine.run()["c"] == expected_output([1, 2, 3], 9)


def test_fixed_chunks_save_where_chunks_end():
    engine = hybrid(fixed_chunk=8, state_interval=8)
    request = engine.add("a", list(range(1, 28)), max_tokens=20)
    engine.run()
    assert rows_of(engine, "a")[:4] == [(0, 8), (8, 16), (16, 24), (24, 27)]
    assert positions(engine, request) == [24]


def test_guesses_are_ignored():
    engine = hybrid(drafter=lambda request: (1, 2, 3))
    engine.add("a", [1, 2, 3], max_tokens=9)
    assert engine.run()["a"] == expected_output([1, 2, 3], 9)
    assert engine.longest_draft == 0


def test_a_grammar_may_follow_a_checkpoint():
    engine = hybrid(depth=2)
    for name in "ab":
        engine.add(name, list(range(1, 12)), max_tokens=9, grammar=EveryOther(7))
        engine.run()
        assert engine.tokens[name] == expected_output(range(1, 12), 9, grammar=EveryOther(7))


def test_the_fake_model_notices_a_wrong_state():
    """The chain is worth what it refuses."""
    engine = hybrid(max_num_batched_tokens=8)
    engine.add("a", list(range(1, 30)), max_tokens=2)
    engine.loop.step()
    held = engine.scheduler.running[0].held_state
    held.read = -1
    with pytest.raises(CorruptState):
        engine.loop.step()
