"""Drafts on the model made of memory: whatever is guessed, the tokens are those of a run without drafts."""

import random
import zlib
from array import array
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from localllm.engine.request import Acceptance
from localllm.engine.speculation import LOOK_BACK, LOOK_EVERY, Speculation, StepCosts
from localllm.engine.stats import OFF_REASONS
from localllm.engine.step import DraftSupport
from tests.draws import draws
from tests.engine.harness import EveryOther, SmallEngine, make_engine, make_request
from tests.engine.walk import EngineMachine
from tests.fake_runner import expected_output, next_token

VOCAB = 4
Propose = Callable[[Sequence[int], int], list[int]]


def right(known: Sequence[int], most: int) -> list[int]:
    return expected_output(known, most, vocab_size=VOCAB)


def wrong(known: Sequence[int], most: int) -> list[int]:
    return [(token + 1) % VOCAB for token in right(known, most)]


def adversarial(known: Sequence[int], most: int) -> list[int]:
    """Right up to a place that changes with the text, then wrong, then right again."""
    drafts, at = right(known, most), zlib.crc32(array("i", known).tobytes()) % 5
    return [(token + 1) % VOCAB if place == at else token for place, token in enumerate(drafts)]


def ragged(known: Sequence[int], most: int) -> list[int]:
    """As many drafts as a number that changes with the text, often none."""
    return right(known, zlib.crc32(array("i", known).tobytes(), 7) % (most + 1))


def repeated(known: Sequence[int], most: int) -> list[int]:
    """What followed the last token before."""
    ids = list(known)
    for place in range(len(ids) - 2, -1, -1):
        if ids[place] == ids[-1]:
            return ids[place + 1 : place + 1 + most]
    return []


def nothing(known: Sequence[int], most: int) -> list[int]:
    return []


DRAFTERS: dict[str, Propose] = {each.__name__: each for each in (right, wrong, adversarial, ragged, repeated, nothing)}


class AnyWidth(Speculation):
    """Uses any width that fits, in an order that looks random."""

    def width(self, decoding, ready, limit):
        self._dice = getattr(self, "_dice", random.Random(1))
        width = self._dice.randint(0, self.most)
        tokens = len(decoding) + sum(min(width, drafts) for drafts in ready)
        return width if tokens <= limit else 0


class Widest(Speculation):
    def width(self, decoding, ready, limit):
        tokens = len(decoding) + sum(ready)
        return self.most if tokens <= limit else 0


class DraftWalk(EngineMachine):
    """S1, S5, S6, S7, S10: requests come, run, are preempted and aborted in any order while drafts are verified."""

    @initialize(
        depth=st.sampled_from([1, 2, 3]),
        stages=st.sampled_from([(1, 0), (1, 0), (2, 0), (3, 1)]),
        drafter=st.sampled_from(sorted(DRAFTERS)),
        most=st.sampled_from([1, 3, 8]),
        windows=st.sampled_from([(None,), (None,), (None, 5)]),
        num_blocks=st.sampled_from([9, 14, 40]),
        budget=st.sampled_from([5, 16, 64]),
        policy=st.sampled_from(["fcfs", "priority"]),
        caching=st.booleans(),
    )
    def build(self, depth, stages, drafter, most, windows, num_blocks, budget, policy, caching):
        self.engine = make_engine(
            depth=depth, num_stages=stages[0], num_extra_cohorts=stages[1], propose=DRAFTERS[drafter],
            most_drafts=most, speculation_type=AnyWidth, vocab_size=VOCAB,
            windows=windows, num_blocks=num_blocks, max_num_seqs=4, max_num_batched_tokens=budget, policy=policy,
            enable_prefix_caching=caching,
        )  # fmt: skip

    @rule(
        start=st.sampled_from([1, 1, 7]),
        length=st.sampled_from([1, 3, 4, 5, 8, 13]),
        max_tokens=st.integers(1, 24),
        priority=st.integers(0, 2),
        stop=st.booleans(),
        salt=st.sampled_from([None, "a"]),
        grammar=st.sampled_from([None, None, 3, 99]),
    )
    def add(self, start, length, max_tokens, priority, stop, salt, grammar):
        prompt = [token % VOCAB for token in range(start, start + length)]
        needed = self.engine.scheduler.ledger.needs_alone(len(prompt) + max_tokens + 1)
        if any(need >= room for need, room in zip(needed, self.engine.scheduler.ledger.capacity, strict=True)):
            return
        name = f"r{len(self.asked)}"
        self.asked[name] = (prompt, max_tokens, stop, grammar)
        self.engine.add(
            name, prompt, max_tokens=max_tokens, priority=priority, salt=salt, stop_token_ids=(3,) if stop else (),
            grammar=grammar and EveryOther(grammar),
        )  # fmt: skip

    def expected(self, prompt, max_tokens, stop, grammar):
        tokens = expected_output(prompt, max_tokens, vocab_size=VOCAB, grammar=grammar and EveryOther(grammar))
        return tokens[: tokens.index(3) + 1] if stop and 3 in tokens else tokens

    def teardown(self):
        """Every step without drafts has a reason that pages have words for; a step with drafts has none."""
        super().teardown()
        if hasattr(self, "engine"):
            stats = self.engine.scheduler.speculation.stats()
            assert dict(stats.off_steps).keys() <= OFF_REASONS.keys()
            assert not (stats.last_width and stats.last_reason)


DraftWalk.TestCase.settings = draws(120, stateful_step_count=40)
TestDraftWalk = DraftWalk.TestCase


def run_one(max_tokens: int = 60, **options: object) -> SmallEngine:
    engine = make_engine(vocab_size=VOCAB, speculation_type=Widest, **options)
    engine.add("r", [1, 2, 3], max_tokens=max_tokens)
    engine.run()
    assert engine.tokens["r"] == expected_output([1, 2, 3], max_tokens, vocab_size=VOCAB)
    return engine


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("drafter", sorted(DRAFTERS))
def test_drafts_never_add_steps(drafter, depth):
    """S11: one more at most, where a request waits at its length limit for launched drafts."""
    plain, drafted = run_one(depth=depth), run_one(depth=depth, propose=DRAFTERS[drafter])
    assert len(drafted.plans) <= len(plain.plans)


@pytest.mark.parametrize("most", [1, 3, 7])
def test_right_drafts_are_all_accepted(most):
    """S11: prompt and first token, then 1 + k tokens a step."""
    engine = run_one(propose=right, most_drafts=most)
    assert len(engine.plans) <= -(-60 // (1 + most)) + 2
    stats = engine.scheduler.speculation.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0
    assert stats.num_decode_tokens == 59
    assert len(stats.accepted_by_place) == most


def test_wrong_drafts_are_counted_and_never_accepted():
    stats = run_one(propose=wrong).scheduler.speculation.stats()
    assert stats.num_draft_tokens > 0
    assert stats.num_accepted_tokens == 0
    assert stats.num_decode_tokens == stats.num_decode_rows == 59


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_drafts_that_a_grammar_allows_are_accepted(depth):
    """S8: the masks of all places are those of a run without drafts."""
    wanted = expected_output([1, 2, 3], 40, vocab_size=VOCAB, grammar=EveryOther(99))

    def knows(known: Sequence[int], most: int) -> list[int]:
        return wanted[len(known) - 3 :][:most]

    engine = make_engine(vocab_size=VOCAB, speculation_type=Widest, propose=knows, depth=depth)
    engine.add("r", [1, 2, 3], max_tokens=40, grammar=EveryOther(99))
    assert engine.run()["r"] == wanted
    assert len(engine.plans) < 20
    assert engine.scheduler.speculation.stats().num_accepted_tokens > 20


@pytest.mark.parametrize("depth", [1, 2])
def test_a_grammar_that_gives_up_behind_a_draft_gives_up_where_it_would_without(depth):
    wanted = expected_output([1, 2, 3], 6, vocab_size=VOCAB, grammar=EveryOther(99))

    def knows(known: Sequence[int], most: int) -> list[int]:
        return (wanted + [0] * 9)[len(known) - 3 :][:most]

    engine = make_engine(vocab_size=VOCAB, speculation_type=Widest, propose=knows, depth=depth)
    engine.add("r", [1, 2, 3], max_tokens=40, grammar=EveryOther(99, fails_after=6))
    assert engine.run()["r"] == wanted
    assert engine.endings["r"][0].finish_reason == "error"
    assert "gives up" in str(engine.endings["r"][0].error)


def test_drafts_do_not_preempt():
    """Two requests that fit into the cache without drafts: the first one's drafts would need a block of the second."""
    engine = make_engine(vocab_size=VOCAB, speculation_type=Widest, propose=wrong, most_drafts=8, num_blocks=5,
                         output_reserve=0.0, watermark=0.0)  # fmt: skip
    for name, max_tokens in (("long", 12), ("short", 5)):
        engine.add(name, [1, 2, 3], max_tokens=max_tokens)
    engine.run()
    assert {row.request_id for row in engine.plans[1].rows} == {"long", "short"}
    assert engine.scheduler.recorder.num_preemptions == 0
    assert dict(engine.scheduler.speculation.stats().off_steps)["memory"] > 0


def test_drafts_of_the_host_take_no_token_of_another_request():
    """S10: each row has its token before any has drafts."""
    engine = make_engine(drafter=lambda request: (1, 2, 3), vocab_size=VOCAB, max_num_batched_tokens=4, max_num_seqs=3)
    for name in ("a", "b", "c"):
        engine.add(name, [1], max_tokens=12)
    engine.run()
    assert [len(plan.rows) for plan in engine.plans[1:5]] == [3] * 4
    assert any(row.num_drafts for row in engine.plans[2].rows)
    assert engine.tokens["c"] == expected_output([1], 12, vocab_size=VOCAB)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_in_the_slot_of_a_failed_one_has_none_of_its_drafts(depth):
    """S5: the step that fails verifies drafts, and the next request takes the same slot."""
    engine = make_engine(
        vocab_size=VOCAB, speculation_type=Widest, propose=wrong, depth=depth, max_num_seqs=1,
        fail_when=lambda plan: plan.step_id == 6,
    )  # fmt: skip
    engine.add("fails", [1, 2, 3], max_tokens=40)
    engine.add("next", [3, 2, 1, 0], max_tokens=12)
    engine.run()
    assert engine.endings["fails"][0].finish_reason == "error"
    (failed,) = [row for plan in engine.plans if plan.step_id == 6 for row in plan.rows]
    assert (failed.request_id, failed.num_drafts > 0) == ("fails", True)
    assert engine.tokens["next"] == expected_output([3, 2, 1, 0], 12, vocab_size=VOCAB)


def test_a_request_may_refuse_drafts():
    engine = make_engine(vocab_size=VOCAB, speculation_type=Widest, propose=right)
    for name, most in (("none", 0), ("one", 1), ("all", None)):
        request = make_request(name, [1, 2, 3], max_tokens=30, max_drafts=most)
        engine.loop.submit(request)
    engine.run()
    widths = {name: max(row.num_drafts for plan in engine.plans for row in plan.rows if row.request_id == name)
              for name in ("none", "one", "all")}  # fmt: skip
    assert widths == {"none": 0, "one": 1, "all": 3}


def test_a_step_with_prompt_tokens_has_no_drafts():
    engine = make_engine(vocab_size=VOCAB, speculation_type=Widest, propose=right)
    engine.add("first", [1, 2, 3], max_tokens=30)
    for _ in range(4):
        engine.loop.step()
    engine.add("second", list(range(3)) * 8, max_tokens=3)
    engine.run()
    mixed = [plan for plan in engine.plans if {row.request_id for row in plan.rows} == {"first", "second"}]
    assert any(row.num_scheduled_tokens > 8 for plan in mixed for row in plan.rows)
    for plan in mixed:
        if any(row.num_scheduled_tokens > 1 + row.num_drafts for row in plan.rows):
            assert not any(row.num_drafts for row in plan.rows)


# ---- the policy ------------------------------------------------------------------------------------------------------


def simulated(slope: float, rate: float, *, rows: int = 1, steps: int = 400, most: int = 7, seed: int = 0) -> float:
    """Return tokens per second with the policy, as a multiple of those without, on a simulated machine: a step of T
    tokens takes 1 + slope * (T - 1) seconds, and each draft is right with probability `rate` if those before are."""
    dice, seconds, tokens = random.Random(seed), 0.0, 0
    policy = Speculation(DraftSupport(most, 8 * rows, proposes=True))
    requests = [make_request(f"r{row}", [1]) for row in range(rows)]
    for _ in range(steps):
        width = policy.width(requests, [most] * rows, 8 * rows)
        total = rows * (1 + width)
        cost = 1 + slope * (total - 1)
        policy.costs.observe(total, cost * dice.uniform(0.9, 1.1))
        seconds += cost
        for request in requests:
            accepted = 0
            while accepted < width and dice.random() < rate:
                accepted += 1
            request.acceptance.settle(width, accepted)
            tokens += 1 + accepted
    plain = (1 + slope * (rows - 1)) / rows
    return tokens * plain / seconds


@pytest.mark.parametrize("slope", [0.0, 0.03, 0.13, 0.35, 1.0])
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.8, 0.97])
@pytest.mark.parametrize("rows", [1, 4])
def test_the_policy_never_loses_much_and_finds_most_of_the_gain(slope, rate, rows):
    """S12: whatever drafts cost, and however often they are right."""
    gain = simulated(slope, rate, rows=rows)
    best = max(
        sum(rate**i for i in range(width + 1)) * (1 + slope * (rows - 1)) / (1 + slope * (rows * (1 + width) - 1))
        for width in range(8)
    )
    assert gain > 0.94
    assert gain > 0.85 * best


def test_no_drafts_where_they_cost_what_they_bring():
    policy = Speculation(DraftSupport(7, 8, proposes=True))
    request = make_request("r", [1])
    for tokens in range(1, 9):
        for _ in range(4):
            policy.costs.observe(tokens, float(tokens))  # a token costs a step
    assert policy.width([request], [7], 8) == 0
    cheap = Speculation(DraftSupport(7, 8, proposes=True))
    for tokens in range(1, 9):
        for _ in range(4):
            cheap.costs.observe(tokens, 1.0)
    assert cheap.width([request], [7], 8) == 7


@pytest.mark.parametrize(("rows", "width"), [(1, 15), (4, 15), (5, 7), (8, 7), (9, 3), (16, 3), (17, 0)])
def test_a_padded_step_is_no_larger_than_a_step_with_drafts_may_be(rows, width):
    policy = Speculation(DraftSupport(15, 64, proposes=True, widths=(3, 7, 15)))
    for tokens in (*range(1, 17), *range(24, 65, 8)):
        policy.costs.observe(tokens, 1.0)
    requests = [make_request(f"r{row}", [1]) for row in range(rows)]
    assert policy.width(requests, [15] * rows, 64) == width


ON_A_DEVICE = DraftSupport(3, 32, proposes=True, widths=(3,))


def looked_up(propose: Propose, support: DraftSupport = ON_A_DEVICE) -> list[bool]:
    """Return for each step of one request of 300 tokens whether drafts were looked up behind it."""
    engine = make_engine(vocab_size=VOCAB, propose=propose, num_blocks=200)
    assert engine.scheduler.speculation is not None
    engine.scheduler.speculation.support = support
    engine.add("r", [1, 2, 3], max_tokens=300)
    engine.run()
    assert engine.tokens["r"] == expected_output([1, 2, 3], 300, vocab_size=VOCAB)
    return [plan.propose > 0 for plan in engine.plans if plan.rows]


def test_a_device_looks_for_drafts_rarely_where_it_finds_none():
    steps = looked_up(nothing)
    assert all(steps[:LOOK_BACK])
    later = steps[LOOK_BACK + 2 :]
    assert len(later) // LOOK_EVERY <= sum(later) <= len(later) // LOOK_EVERY + 1


def test_a_device_looks_for_drafts_in_each_step_where_it_finds_some():
    assert all(looked_up(right))


def test_a_device_finds_a_text_that_begins_to_repeat_itself():
    """From the first step that looks on, each step does."""
    steps = looked_up(lambda known, most: right(known, most) if len(known) > 160 else [])
    assert 0 < steps.count(False) < 100
    last = len(steps) - 1 - steps[::-1].index(False)
    assert all(steps[last + 1 :])
    assert last < 160 + LOOK_EVERY


def test_a_host_looks_for_drafts_in_each_step():
    """It costs microseconds there, and no step has to be launched for it."""
    assert all(looked_up(nothing, DraftSupport(3, 32, proposes=True)))


def test_costs_that_were_not_measured_for_long_are_measured_again():
    costs = StepCosts()
    costs.observe(1, 1.0)
    assert not costs.is_stale(1)
    for _ in range(StepCosts.STALE_STEPS):
        costs.observe(8, 2.0)
    assert costs.is_stale(1)
    costs.observe(1, 1.0)
    assert not costs.is_stale(1)
    assert costs.ratio(8, 1) == pytest.approx(2.0)


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=60))
def test_a_rate_is_a_probability(rows):
    acceptance = Acceptance()
    for checked, accepted in rows:
        acceptance.settle(checked, min(checked, accepted))
        assert 0 < acceptance.rate < 1
        assert 0 < acceptance.expected(4) < 4
        assert acceptance.expected(0) == 0


def test_a_request_without_luck_is_tried_again():
    acceptance = Acceptance()
    for _ in range(20):
        acceptance.settle(4, 0)
    low = acceptance.rate
    for _ in range(400):
        acceptance.settle(0, 0)
    assert low < 0.2 < acceptance.rate


def test_the_fake_model_is_one_token_at_a_time():
    assert right([1, 2], 3)[0] == next_token([1, 2], VOCAB)
