"""The crossing between asyncio and the engine's thread, on the model made of memory."""

import asyncio
import threading
import time
from contextlib import aclosing

import pytest

from localllm.engine.admission import Admission, GenerationRequest, ModelLimits
from localllm.engine.client import EngineClient
from localllm.engine.outputs import GenerationEvent
from localllm.engine.params import SamplingParams
from localllm.engine.step import RankStats, RunnerStats
from localllm.engine.streams import joined
from localllm.errors import (
    ContextTooLong,
    DeviceLost,
    EngineCrashed,
    EngineStopped,
    InvalidParameter,
    QueueFull,
    StepFailed,
)
from localllm.text.structured import StructuredOutputsParams
from localllm.text.tokenizer import load_tokenizer
from tests.engine.harness import make_engine
from tests.fake_runner import expected_output


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_path):
    return load_tokenizer(tiny_llama_path)


def make_client(tokenizer, **config):
    engine = make_engine(**{"num_blocks": 200, **config})
    limits = ModelLimits(max_model_len=200, vocab_size=32)
    return EngineClient(engine.loop, Admission(limits, tokenizer), tokenizer), engine


def slow_down(engine):
    """Steps of a few milliseconds, as a model has, so that a test can act before the answer is over."""
    forward = engine.runner.forward

    def slow(plan):
        time.sleep(0.005)
        forward(plan)

    engine.runner.forward = slow


def ask(name, prompt, **params):
    return GenerationRequest(name, prompt, SamplingParams(temperature=0.0, **params))


async def collect(client, request):
    return [event async for event in client.generate(request)]


async def streaming(tokenizer, depth):
    """A client whose engine is about to fail, and three streams that have begun."""
    client, engine = make_client(tokenizer, depth=depth, fail_when=lambda plan: False)
    slow_down(engine)
    await client.start()
    streams = [client.generate(ask(f"r{i}", [1, 2, i], max_tokens=190)) for i in range(3)]
    for stream in streams:
        await anext(stream)
    return client, engine, streams


def ids(events, index=0):
    return [token for event in events if event.index == index for token in event.token_ids]


@pytest.mark.parametrize("depth", [1, 2])
async def test_many_streams_at_once_each_get_their_own_tokens(tokenizer, depth):
    client, _ = make_client(tokenizer, depth=depth)
    await client.start()
    asked = {f"r{i}": list(range(1, 3 + i)) for i in range(20)}
    answers = await asyncio.gather(*(collect(client, ask(n, p, max_tokens=9)) for n, p in asked.items()))
    await client.stop()
    for prompt, events in zip(asked.values(), answers, strict=True):
        assert ids(events) == expected_output(prompt, 9)
        assert [event.finish_reason for event in events if event.finish_reason] == ["length"]
        assert events[-1].usage.completion_tokens == 9
        assert events[-1].usage.prompt_tokens == len(prompt)


async def test_closing_the_stream_frees_the_blocks(tokenizer):
    client, engine = make_client(tokenizer)
    slow_down(engine)
    await client.start()
    async with aclosing(client.generate(ask("gone", [1, 2, 3], max_tokens=150))) as events:
        await anext(events)
        assert client.num_open == 1
    assert client.num_open == 0
    done = await collect(client, ask("next", [4], max_tokens=2))
    assert ids(done) == expected_output([4], 2)
    assert client.stats().used_blocks == 0
    assert client.stats().finished == {"abort": 1, "length": 1}
    await client.stop()


async def test_stop_string_ends_the_request_in_the_engine_too(tokenizer):
    client, engine = make_client(tokenizer)
    slow_down(engine)
    await client.start()
    whole = await collect(client, ask("whole", [1, 2], max_tokens=40))
    text = "".join(event.text for event in whole)
    stop = text[5:7]
    cut = await collect(client, ask("cut", [1, 2], max_tokens=40, stop=[stop]))
    assert "".join(event.text for event in cut) == text[: text.index(stop)]
    assert (cut[-1].finish_reason, cut[-1].stop_reason) == ("stop", stop)
    assert cut[-1].usage.completion_tokens < 40
    await collect(client, ask("after", [5], max_tokens=1))
    assert client.stats().used_blocks == 0
    assert client.stats().finished == {"length": 2, "stop": 1}  # an abort is what a client gave up
    await client.stop()


async def test_choices_come_interleaved_and_share_the_prompt(tokenizer):
    client, _ = make_client(tokenizer)
    await client.start()
    events = await collect(client, ask("n", list(range(16)), max_tokens=4, n=3))
    await client.stop()
    for index in range(3):
        assert ids(events, index) == expected_output(range(16), 4)
    cached = [event.usage.cached_tokens for event in events if event.usage]
    assert sorted(cached) == [0, 12, 12]


async def test_refusal_comes_before_the_first_event(tokenizer):
    client, _ = make_client(tokenizer)
    await client.start()
    with pytest.raises(ContextTooLong):
        await collect(client, ask("long", [1] * 300))
    await client.stop()


async def test_stopping_the_engine_ends_open_streams_with_an_error(tokenizer):
    client, engine = make_client(tokenizer)
    slow_down(engine)
    await client.start()
    stream = client.generate(ask("open", [1, 2], max_tokens=190))
    await anext(stream)
    await client.stop()
    last = [event async for event in stream][-1]
    assert last.finish_reason == "error"
    assert isinstance(last.error, EngineStopped)
    with pytest.raises(EngineStopped):
        await collect(client, ask("late", [1]))


async def test_idle_engine_sleeps(tokenizer):
    """I30: no wake-ups without work."""
    client, engine = make_client(tokenizer)
    await client.start()
    await collect(client, ask("r", [1], max_tokens=2))
    steps = 0
    step = engine.loop.step

    def counted():
        nonlocal steps
        steps += 1
        step()

    engine.loop.step = counted
    await asyncio.sleep(0.2)
    assert steps == 0
    await client.stop()


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_lost_device_ends_every_stream_and_then_the_engine(tokenizer, depth):
    client, engine, streams = await streaming(tokenizer, depth)
    lost = asyncio.create_task(client.ended())
    touched = []

    def broken(plan):
        raise DeviceLost("The GPU is gone.")

    engine.runner.forward, engine.runner.reset = broken, lambda: touched.append("reset")
    for stream in streams:
        last = [event async for event in stream][-1]
        assert last.finish_reason == "error"
        assert isinstance(last.error, DeviceLost)
    assert str(await lost) == "The GPU is gone."
    assert isinstance(client.why_ended, DeviceLost)
    assert touched == []  # every further call on the device would fail as well
    with pytest.raises(EngineStopped):
        await collect(client, ask("late", [1]))
    await client.stop()


def broken_stats(engine):
    engine.runner.stats = failing(ZeroDivisionError("stats"))


def broken_reset(engine):
    engine.runner.forward = failing(ValueError("forward"))
    engine.runner.reset = failing(ValueError("reset"))


def broken_idle_time(engine):
    engine.runner.use_idle_time = failing(ValueError("idle"))


def broken_thread(engine):
    engine.runner.forward = failing(SystemExit("gone"))


def broken_recovery(engine):
    engine.runner.forward = failing(ValueError("forward"))
    engine.scheduler.fail_step = failing(ValueError("recovery"))


def failing(error):
    def fail(*args):
        raise error

    return fail


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("breaks", [broken_reset, broken_thread, broken_recovery])
async def test_an_engine_that_cannot_go_on_ends_every_stream_and_says_why(tokenizer, depth, breaks):
    client, engine, streams = await streaming(tokenizer, depth)
    ended = asyncio.create_task(client.ended())
    breaks(engine)
    for stream in streams:
        last = [event async for event in stream][-1]
        assert last.finish_reason == "error"
    error = await ended
    assert isinstance(error, EngineCrashed)
    assert client.why_ended is error
    assert error.why
    with pytest.raises(EngineStopped, match="crashed"):
        await collect(client, ask("late", [1]))
    await client.stop()
    assert not engine.loop.is_running


@pytest.mark.parametrize("breaks", [broken_stats, broken_idle_time])
async def test_figures_and_idle_work_that_fail_harm_nobody(tokenizer, breaks):
    client, engine = make_client(tokenizer, fail_when=lambda plan: False)
    slow_down(engine)
    await client.start()
    stream = client.generate(ask("r", [1, 2, 3], max_tokens=20))
    seen = [await anext(stream)]
    breaks(engine)
    seen += [event async for event in stream]
    assert ids(seen) == expected_output([1, 2, 3], 20)
    await asyncio.sleep(0.01)
    assert ids(await collect(client, ask("next", [4], max_tokens=5))) == expected_output([4], 5)
    assert engine.loop.is_running
    assert client.why_ended is None
    await client.stop()


async def test_outputs_that_are_not_taken_are_offered_again_and_then_the_engine_gives_up(tokenizer):
    client, engine = make_client(tokenizer, fail_when=lambda plan: False)
    await client.start()
    deliver, refused = engine.loop.deliver, []

    def refuse_twice(outputs):
        refused.append(len(outputs))
        if len(refused) < 3:
            raise MemoryError("no room")
        deliver(outputs)

    engine.loop.deliver = refuse_twice
    assert ids(await collect(client, ask("r", [1, 2], max_tokens=9))) == expected_output([1, 2], 9)
    engine.loop.deliver = failing(MemoryError("no room"))
    last = (await collect(client, ask("s", [1, 2], max_tokens=9)))[-1]
    assert isinstance(last.error, EngineCrashed)
    assert "no room" in str(await client.ended())
    await client.stop()


async def test_text_that_cannot_be_made_ends_its_own_stream(tokenizer):
    client, engine = make_client(tokenizer)
    slow_down(engine)
    await client.start()
    process = client._processor.process

    def fails(output):
        if output.request_id == "bad":
            raise ZeroDivisionError("no text")
        return process(output)

    client._processor.process = fails
    bad, good = await asyncio.gather(*(collect(client, ask(n, [1, 2], max_tokens=9)) for n in ("bad", "good")))
    assert isinstance(bad[-1].error, StepFailed)
    assert "no text" in str(bad[-1].error)
    assert ids(good) == expected_output([1, 2], 9)
    while client.stats().num_running:
        await asyncio.sleep(0.01)
    assert client.stats().used_blocks == 0
    assert client.num_open == 0
    await client.stop()


def test_a_rank_that_is_lost_while_the_engine_is_idle_is_seen(tokenizer):
    _, engine = make_client(tokenizer)
    assert engine.loop.stats().runner.ranks == ()
    state = RunnerStats(ranks=(RankStats(0, 0, 0, "cpu"),))
    engine.runner.stats = lambda: state
    engine.loop._refresh_stats(0.0)
    before = engine.loop.stats()
    state = RunnerStats(ranks=(RankStats(0, 0, 0, "cpu", is_up=False, last_words="Signal 9."),))
    after = engine.loop.stats()
    assert (before.runner.ranks[0].is_up, after.runner) == (True, state)
    assert after.num_steps == before.num_steps


async def test_an_id_belongs_to_one_running_request(tokenizer):
    client, engine = make_client(tokenizer)
    slow_down(engine)
    await client.start()
    first = client.generate(ask("same", [1, 2], max_tokens=30))
    seen = [await anext(first)]
    with pytest.raises(InvalidParameter, match="'same' is already running"):
        await collect(client, ask("same", [3]))
    seen += [event async for event in first]
    assert ids(seen) == expected_output([1, 2], 30)
    await client.stop()


async def test_a_grammar_that_waits_to_be_compiled_hears_of_the_stop(tokenizer):
    client, _ = make_client(tokenizer)
    await client.start()
    may_go_on = threading.Event()
    client.admission.prepare = lambda params: may_go_on.wait(20)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))
    compiling = [asyncio.create_task(client.prepare(params)) for _ in range(3)]  # by two threads
    given_up = asyncio.create_task(client.prepare(params))
    await asyncio.sleep(0.05)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    await client.stop()
    with pytest.raises(EngineStopped):
        await compiling[-1]
    may_go_on.set()
    await asyncio.gather(*compiling[:-1])
    with pytest.raises(EngineStopped):
        await client.prepare(params)


async def test_idle_time_is_used_until_nothing_is_left_and_requests_come_first(tokenizer):
    client, engine = make_client(tokenizer)
    pieces = []

    def piece():
        pieces.append(engine.scheduler.has_work)
        time.sleep(0.002)
        return len(pieces) < 40

    engine.runner.use_idle_time = piece
    await client.start()
    await asyncio.sleep(0.02)
    assert ids(await collect(client, ask("r", [1], max_tokens=3))) == expected_output([1], 3)
    assert len(pieces) < 40  # it came in between
    while len(pieces) < 40:
        await asyncio.sleep(0.01)
    assert not any(pieces)
    await client.stop()


@pytest.mark.parametrize("n", [1, 2])
async def test_a_reader_that_falls_behind_finds_each_choice_in_one_event(tokenizer, n):
    client, _ = make_client(tokenizer)
    await client.start()
    prompt = ask("slow", [1, 2, 3], max_tokens=30, n=n, logprobs=0, prompt_logprobs=0)
    whole = await collect(client, prompt)
    async with aclosing(client.generate_batches(prompt)) as batches:
        seen = await anext(batches)
        while client.stats().finished["length"] < 2 * n:
            await asyncio.sleep(0.01)
        seen += [event for batch in [batch async for batch in batches] for event in batch]
    await client.stop()
    for index in range(n):
        events = [event for event in seen if event.index == index]
        asked = [event for event in whole if event.index == index]
        assert len(events) <= 2
        assert ids(events, index) == ids(asked, index) == expected_output([1, 2, 3], 30)
        assert "".join(event.text for event in events) == "".join(event.text for event in asked)
        assert sum(len(event.logprobs) for event in events) == 30
        assert [event.prompt_logprobs for event in events if event.prompt_logprobs] == [asked[0].prompt_logprobs]
        assert events[-1].finish_reason == "length"
        assert events[-1].usage.completion_tokens == 30


def test_an_error_does_not_swallow_the_text_before_it():
    said = [GenerationEvent(0, text="a", token_ids=(1,)), GenerationEvent(0, text="b", token_ids=(2,))]
    failed = GenerationEvent(0, finish_reason="error", error=StepFailed("It failed."))
    assert joined([*said, failed]) == [GenerationEvent(0, text="ab", token_ids=(1, 2)), failed]


class StuckGrammars:
    """Compiles nothing until it is let go."""

    def __init__(self):
        self.go_on = threading.Event()

    def is_large(self, asked):
        return asked.choice == ["large"]

    def start(self, asked):
        if asked.choice != ["easy"]:
            self.go_on.wait(20)

    def close(self):
        self.go_on.set()


@pytest.mark.parametrize("stuck", ["large", "small"])
async def test_compilers_that_are_stuck_harm_only_those_who_need_them(tokenizer, monkeypatch, stuck):
    monkeypatch.setattr("localllm.engine.client.COMPILE_S", 0.5)
    monkeypatch.setattr("localllm.engine.client.LARGE_COMPILE_S", 0.5)
    engine = make_engine()
    grammars = StuckGrammars()
    admission = Admission(ModelLimits(max_model_len=200, vocab_size=32), tokenizer, grammars=grammars)
    client = EngineClient(engine.loop, admission, tokenizer)

    def prepared(choice):
        return client.prepare(SamplingParams(structured_outputs=StructuredOutputsParams(choice=[choice])))

    await client.start()
    refusals = await asyncio.gather(*[prepared(stuck) for _ in range(4)], return_exceptions=True)
    [easy] = await asyncio.gather(prepared("easy"), return_exceptions=True)
    await client.stop()
    free = 1 if stuck == "large" else 2
    assert [type(each) for each in refusals] == [InvalidParameter] * free + [QueueFull] * (4 - free)
    assert refusals[-1].status == 503
    assert (easy is None) == (stuck == "large")
