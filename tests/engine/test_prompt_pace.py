"""Prompts beside streams: by measured times, how long a step may take, and that a prompt is read nevertheless."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.engine.media import MediaSpan
from localllm.engine.prefill import FIRST, LEAST, PromptPace
from localllm.engine.step import StepPlan, StepTimings, TokenMasks
from tests.draws import draws
from tests.engine.harness import SmallEngine, make_engine
from tests.fake_runner import FakeRunner, _Ready

TARGET_S = 0.1


@dataclass(frozen=True)
class Machine:
    """What a step costs: a sum of seconds for the step, for each stream, prompt token and picture to encode."""

    step_s: float
    stream_s: float
    token_s: float
    picture_s: float = 0.0

    def seconds(self, plan: StepPlan) -> float:
        lengths = [row.num_scheduled_tokens for row in plan.rows]
        tokens = sum(length for length in lengths if length > 1)
        prompts_s = self.token_s * tokens + self.picture_s * len(plan.encodes)
        return self.step_s + self.stream_s * (len(lengths) - bool(tokens)) + prompts_s


class Timed(FakeRunner):
    machine = Machine(0, 0, 0)

    def sample(self, plan: StepPlan, masks: TokenMasks | None = None) -> _Ready:
        return _Ready(replace(super().sample(plan, masks).step, timings=StepTimings(self.machine.seconds(plan), 0.0)))


def make(machine: Machine, **config: Any) -> SmallEngine:
    given = {"max_num_batched_tokens": 512, "max_model_len": 4000, "num_blocks": 1500, "target_step_s": TARGET_S}
    engine = make_engine(runner_type=type("OnMachine", (Timed,), {"machine": machine}), **{**given, **config})  # type: ignore[arg-type]
    return engine


def run_streams_and_prompt(engine: SmallEngine, num_streams: int, prompt_len: int) -> list[StepPlan]:
    """Let streams run alone, then read one prompt beside them; the steps with its tokens."""
    for index in range(num_streams):
        engine.add(f"stream {index}", [index] * 20, max_tokens=400)
    for _ in range(12):
        engine.loop.step()
    return steps_of_prompt(engine, "prompt", prompt_len)


def steps_of_prompt(engine: SmallEngine, name: str, prompt_len: int, **given: Any) -> list[StepPlan]:
    """Read one more prompt; the steps with its tokens."""
    engine.add(name, [1 + (i + len(name)) % 7 for i in range(prompt_len)], max_tokens=1, **given)
    while name not in engine.endings:
        engine.loop.step()
    return [plan for plan in engine.plans if any(row.request_id == name for row in plan.rows)]


machines = st.builds(Machine, st.floats(0.001, 0.2), st.floats(0.0001, 0.02), st.floats(0.00005, 0.02))


@draws(40)
@given(machine=machines, num_streams=st.integers(1, 6), prompt_len=st.sampled_from([90, 400, 900]))
def test_steps_stay_within_their_time_and_the_prompt_gets_its_half(
    machine: Machine, num_streams: int, prompt_len: int
) -> None:
    engine = make(machine)
    steps = run_streams_and_prompt(engine, num_streams, prompt_len)
    alone_s = machine.step_s + machine.stream_s * num_streams
    longest_s = max(TARGET_S, 2 * alone_s)
    for plan in steps[2:]:  # the first ones may have learned from one large chunk
        seconds, tokens = (
            machine.seconds(plan),
            sum(r.num_scheduled_tokens for r in plan.rows if r.request_id == "prompt"),
        )
        assert seconds <= 1.3 * longest_s + machine.stream_s or tokens <= LEAST
    reading_s = machine.token_s * prompt_len
    assert sum(map(machine.seconds, steps)) <= 3.5 * reading_s + 5 * longest_s  # the first steps learn


def test_a_prompt_alone_uses_whole_steps() -> None:
    machine = Machine(0.01, 0.001, 0.01)
    engine = make(machine)
    engine.add("prompt", [1] * 1500, max_tokens=2)
    engine.run()
    assert [plan.num_tokens for plan in engine.plans[:3]] == [512, 512, 476]


def test_beside_streams_it_takes_what_the_target_leaves() -> None:
    """10 ms for a step with four streams leave 90 ms, which are 90 tokens of a millisecond each."""
    machine = Machine(0.006, 0.001, 0.001)
    steps = run_streams_and_prompt(make(machine), 4, 1500)
    middle = [plan.num_tokens - 4 for plan in steps[5:-1]]
    assert all(80 <= tokens <= 96 for tokens in middle), middle


def test_encoding_a_picture_is_not_a_cost_of_prompt_tokens() -> None:
    """After pictures that took two seconds each, a text prompt has the 90 tokens of a step that it had before."""
    engine = make(Machine(0.006, 0.001, 0.001, picture_s=2.0), encoder_rows=40, encoder_budget=40)
    run_streams_and_prompt(engine, 4, 900)
    for index in range(5):
        span = MediaSpan(1, 41, None, 40, bytes([index]) * 16, None, False, SimpleNamespace(pixels=dict))
        steps_of_prompt(engine, f"picture {index}", 42, media=(span,))
    counts = [plan.num_tokens - 4 for plan in steps_of_prompt(engine, "text", 900)]
    assert all(80 <= count <= 96 for count in counts[:-1]), counts


def test_a_prompt_in_the_background_takes_a_quarter_of_the_time() -> None:
    """A request that arrives waits for one layer of its step."""
    engine = make(Machine(0.001, 0.001, 0.0005))
    engine.add("prompt", [1] * 1500, max_tokens=1, is_background=True)
    engine.run()
    middle = [plan.num_tokens for plan in engine.plans[5:-2]]
    assert len(middle) > 10
    assert all(40 <= tokens <= 56 for tokens in middle), middle


def test_a_slow_machine_doubles_its_steps_and_no_more() -> None:
    machine = Machine(1.0, 0.0, 0.01)
    steps = run_streams_and_prompt(make(machine), 2, 600)
    assert 80 <= steps[4].num_tokens <= 104
    assert machine.seconds(steps[4]) <= 2.05


def test_a_fixed_chunk_is_read_however_long_it_takes() -> None:
    engine = make(Machine(0.01, 0.001, 0.1), fixed_chunk=32)
    steps = run_streams_and_prompt(engine, 2, 100)
    assert [plan.num_tokens - 2 for plan in steps] == [32, 32, 32, 4]


def test_an_asked_limit_of_tokens_holds_beside_the_target() -> None:
    steps = run_streams_and_prompt(make(Machine(0.001, 0.0, 1e-6), long_prefill_token_threshold=40), 2, 200)
    assert max(plan.num_tokens for plan in steps) == 42


def test_one_delayed_step_changes_nothing() -> None:
    pace = PromptPace(TARGET_S)
    for _ in range(5):
        pace.observe(0, 0.02)
        pace.observe(100, 0.12)
    before = pace.num_tokens()
    pace.observe(0, 3.0)
    pace.observe(100, 3.0)
    assert pace.num_tokens() == before == 80


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_what_was_not_measured_teaches_nothing(seconds: float) -> None:
    pace = PromptPace(TARGET_S)
    pace.observe(100, seconds)
    pace.observe(0, seconds)
    assert (pace.num_tokens(), pace.decode_s) == (FIRST, 0.0)


@dataclass(frozen=True)
class Streaming(Machine):
    """A machine that copies weights for `copy_s` in each step from `from_tokens` tokens on; below, a token costs its
    share of the copy."""

    copy_s: float = 1.0
    from_tokens: int = 200

    def seconds(self, plan: StepPlan) -> float:
        tokens = plan.num_tokens
        prompts = sum(row.num_scheduled_tokens for row in plan.rows if row.num_scheduled_tokens > 1)
        if tokens >= self.from_tokens:
            return self.step_s + max(self.copy_s, self.token_s * tokens)
        return self.step_s + self.copy_s * prompts / self.from_tokens


@draws(30)
@given(
    copy_s=st.floats(0.2, 2.0), step_s=st.floats(0.01, 0.1), num_streams=st.integers(1, 4),
    lengths=st.lists(st.sampled_from([30, 199, 201, 700, 1500]), min_size=1, max_size=4), depth=st.sampled_from([1, 2]),
)  # fmt: skip
def test_a_stream_waits_for_one_copy_at_most_and_has_half_of_the_time(
    copy_s: float, step_s: float, num_streams: int, lengths: list[int], depth: int
) -> None:
    machine = Streaming(step_s, 0, 0.0001, copy_s=copy_s)
    engine = make(machine, target_step_s=0.0, stream_from=machine.from_tokens, depth=depth)
    for index in range(num_streams):
        engine.add(f"stream {index}", [index] * 20, max_tokens=1500)
    for _ in range(12):
        engine.loop.step()
    before = len(engine.plans)
    for index, length in enumerate(lengths):
        engine.add(f"prompt {index}", [1 + (i + index) % 7 for i in range(length)], max_tokens=1)
    while not all(f"prompt {index}" in engine.endings for index in range(len(lengths))):
        engine.loop.step()
    plans = engine.plans[before:]
    longest_s = step_s + max(copy_s, machine.token_s * 512)
    prompts = [sum(r.num_scheduled_tokens for r in plan.rows if r.num_scheduled_tokens > 1) for plan in plans]
    between_s, owed_s = 0.0, 0.0
    for plan, tokens in zip(plans, prompts, strict=True):
        assert sum(row.request_id.startswith("stream") for row in plan.rows) == num_streams, "a stream missed a step"
        seconds = machine.seconds(plan)
        assert seconds <= longest_s + 2 * step_s
        if not tokens:
            between_s += seconds
            continue
        assert between_s >= owed_s - 1e-9
        between_s, owed_s = 0.0, seconds
    long = [tokens for tokens in prompts if tokens]
    assert sum(long) == sum(lengths)
    assert len(long) <= sum(-(-length // (512 - num_streams)) for length in lengths) + 1


def test_prompts_alone_are_not_held_back_by_the_time_of_others() -> None:
    machine = Streaming(0.01, 0, 0.0001)
    engine = make(machine, target_step_s=0.0, stream_from=machine.from_tokens)
    engine.add("prompt", [1] * 1500, max_tokens=2)
    engine.run()
    assert [plan.num_tokens for plan in engine.plans[:3]] == [512, 512, 476]
