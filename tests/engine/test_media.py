"""Pictures in the engine, on the model made of memory: what is encoded, where rows end, and what is shared."""

from itertools import pairwise
from statistics import median

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from localllm.engine import recorder as recorder_module
from localllm.engine.media import EncoderPrompt, EncoderStore, MediaSpan, spans_of
from localllm.engine.recorder import StatsRecorder
from localllm.engine.stats import StepComposition
from localllm.engine.step import RunnerStats, StepTimings
from localllm.errors import InvalidParameter
from tests.draws import draws
from tests.engine.harness import SmallEngine, make_engine
from tests.engine.walk import EngineMachine
from tests.fake_runner import expected_output

PAD = 9


class Picture:
    """A picture of some rows. Its digest tells it apart."""

    def __init__(self, name: str, rows: int, *, both_ways: bool = False) -> None:
        self.digest, self.rows, self.grid, self.both_ways = name.encode().ljust(16), rows, None, both_ways

    def pixels(self) -> dict[str, object]:
        return {}


def prompt_of(parts: list[int | Picture]) -> tuple[list[int], tuple[MediaSpan, ...]]:
    """Return token ids, the numbers among the parts being text tokens, and the spans of the pictures."""
    ids: list[int] = []
    for part in parts:
        ids += [part] if isinstance(part, int) else [PAD] * part.rows
    return ids, spans_of(ids, PAD, [part for part in parts if isinstance(part, Picture)])


def ask(engine: SmallEngine, name: str, parts: list[int | Picture], max_tokens: int = 3) -> list[int]:
    ids, media = prompt_of(parts)
    engine.add(name, ids, max_tokens=max_tokens, media=media)
    return expected_output(ids, max_tokens, vocab_size=32)


def seeing(**settings: object) -> SmallEngine:
    return make_engine(**{"encoder_rows": 12, "encoder_budget": 12, **settings})


def test_pictures_take_their_number_of_placeholders_in_order() -> None:
    one, two = Picture("one", 2), Picture("two", 3)
    ids = [1, PAD, PAD, 2, PAD, 3, PAD, PAD, 4]
    first, second = spans_of(ids, PAD, [one, two])
    assert (first.start, first.end, first.places) == (1, 3, None)
    assert (second.start, second.end, second.places) == (4, 8, (0, 2, 3))
    salted = spans_of(ids, PAD, [one, two], salt="a")
    assert salted[0].digest != first.digest
    assert len(salted[0].digest) == 16
    with pytest.raises(InvalidParameter, match="The prompt has 5 picture tokens; its pictures have 2"):
        spans_of(ids, PAD, [one])


def test_a_row_may_end_inside_a_picture() -> None:
    engine = seeing(max_num_batched_tokens=8)
    expected = ask(engine, "a", [1, 2, 3, Picture("p", 10), 4])
    assert engine.run()["a"] == expected
    assert [row.num_scheduled_tokens for plan in engine.plans for row in plan.rows][:2] == [8, 6]


def test_a_row_never_ends_inside_a_picture_that_attends_both_ways() -> None:
    engine = seeing(max_num_batched_tokens=12)
    expected = ask(engine, "a", [1, 2, 3, Picture("p", 10, both_ways=True), 4])
    assert engine.run()["a"] == expected
    assert [row.num_scheduled_tokens for plan in engine.plans for row in plan.rows][:2] == [3, 11]


def test_one_picture_is_encoded_in_a_step_while_others_decode() -> None:
    engine = seeing()
    ask(engine, "stream", [1, 2], max_tokens=30)
    for _ in range(3):
        engine.loop.step()
    ask(engine, "a", [1, Picture("p", 4), 2, Picture("q", 4), 3])
    engine.run()
    assert max(len(plan.encodes) for plan in engine.plans) == 1
    assert engine.runner.num_encoded == 2


def test_the_same_picture_is_encoded_once_and_its_blocks_are_shared() -> None:
    engine = seeing()
    parts: list[int | Picture] = [1, 2, 3, 4, 5, Picture("p", 10), 6]
    cached = []
    for name, asked in (("a", parts), ("b", parts), ("c", [1, 2, 3, 4, 5, Picture("q", 10), 6])):
        ask(engine, name, asked)
        engine.run()
        cached.append(engine.endings[name][0].num_cached_tokens)
    assert engine.runner.num_encoded == 2
    assert cached == [0, 12, 4]


def test_pictures_that_do_not_fit_together_wait_for_each_other() -> None:
    """Ten requests whose pictures fill the store alone: all end, oldest first."""
    engine = seeing(max_num_batched_tokens=9)
    expected = {f"r{i}": ask(engine, f"r{i}", [i, Picture(f"p{i}", 12), 7, Picture(f"q{i}", 11), 8]) for i in range(8)}
    assert engine.run() == expected
    assert engine.runner.num_encoded == 16


def test_a_failed_step_forgets_the_pictures() -> None:
    engine = seeing(fail_when=lambda plan: plan.step_id == 2, max_num_batched_tokens=6)
    ask(engine, "a", [1, Picture("p", 10), 2])
    for _ in range(3):
        engine.loop.step()
    assert engine.scheduler.table.encoded.num_rows == 0
    expected = ask(engine, "b", [1, Picture("p", 10), 2])
    assert engine.run()["b"] == expected


def test_the_store_evicts_the_oldest_that_nobody_reads() -> None:
    store = EncoderStore(10)
    spans = [prompt_of([Picture(name, 4)])[1][0] for name in "abc"]
    assert [store.take(span, "r") for span in spans] == ["encode", "encode", "full"]
    assert [encode.digest for encode in store.changes()[1]] == [span.digest for span in spans[:2]]
    store.release_all("r")
    assert store.take(spans[0], "s") == "there"
    assert store.take(spans[2], "s") == "encode"
    dropped, encodes = store.changes()
    assert (dropped, [encode.digest for encode in encodes]) == ((spans[1].digest,), [spans[2].digest])
    store.check_invariants(["s"])


class Pictures(EngineMachine):
    """Requests with pictures from few texts and few pictures, in a small pool and a small store."""

    @initialize(
        blocks=st.integers(16, 40), tokens=st.integers(12, 24), rows=st.integers(6, 14), depth=st.integers(1, 2)
    )
    def begin(self, blocks: int, tokens: int, rows: int, depth: int) -> None:
        self.engine = make_engine(
            num_blocks=blocks, depth=depth, max_num_batched_tokens=tokens, max_num_seqs=4, vocab_size=4,
            encoder_rows=rows, encoder_budget=6,
        )  # fmt: skip

    @rule(
        text=st.lists(st.integers(0, 2), min_size=2, max_size=9),
        pictures=st.lists(st.tuples(st.sampled_from("pqr"), st.integers(1, 6), st.booleans()), max_size=3),
        max_tokens=st.integers(1, 12),
        data=st.data(),
    )
    def arrive(self, text, pictures, max_tokens, data) -> None:
        cuts = sorted(data.draw(st.integers(0, len(text))) for _ in pictures)
        parts: list[int | Picture] = []
        for (first, end), given in zip(pairwise([0, *cuts, len(text)]), [*pictures, None], strict=True):
            parts += text[first:end]
            if given is not None:
                name, rows, both_ways = given
                parts.append(Picture(f"{name}{rows}{both_ways}", rows, both_ways=both_ways))
        ids, media = prompt_of(parts)
        name = f"r{len(self.asked)}"
        self.engine.add(name, ids, max_tokens=max_tokens, media=media)
        self.asked[name] = ids, max_tokens


TestPictures = Pictures.TestCase
TestPictures.settings = draws(60, stateful_step_count=40)


def test_equal_sources_share_blocks_and_unlike_ones_none() -> None:
    engine = make_engine(encoder_rows=24, encoder_budget=8, block_size=4)
    answer, cached = [1, 2, 3, 4, 5, 6], []
    for name, source, salt in (("a", [7] * 5, None), ("b", [7] * 5, None), ("c", [8] * 5, None), ("d", [7] * 5, "s")):
        engine.add(name, answer, max_tokens=3, salt=salt, source=EncoderPrompt.of(source, 4, salt))
        assert engine.run()[name] == expected_output(answer, 3, vocab_size=32)
        cached.append(engine.endings[name][0].num_cached_tokens)
    assert cached == [0, 4, 0, 0]
    assert engine.runner.num_encoded == 3
    assert engine.scheduler.table.encoded.num_rows == 24


def test_requests_wait_for_room_for_their_sources() -> None:
    engine = make_engine(encoder_rows=8, encoder_budget=8, block_size=4)
    for i in range(5):
        engine.add(f"r{i}", [1, 2], max_tokens=4, source=EncoderPrompt.of([i] * 7, 4))
    assert engine.run() == {f"r{i}": expected_output([1, 2], 4, vocab_size=32) for i in range(5)}
    assert max(len(plan.rows) for plan in engine.plans) == 1


class Sources(EngineMachine):
    """Requests of an encoder-decoder with few sources, in a small pool and a small store."""

    @initialize(blocks=st.integers(12, 30), rows=st.integers(2, 4), depth=st.integers(1, 2))
    def begin(self, blocks: int, rows: int, depth: int) -> None:
        self.engine = make_engine(
            num_blocks=blocks, depth=depth, max_num_batched_tokens=16, max_num_seqs=4, vocab_size=4,
            encoder_rows=4 * rows, encoder_budget=8, block_size=4,
        )  # fmt: skip

    @rule(
        source=st.tuples(st.integers(0, 4), st.integers(1, 8)),
        begun=st.lists(st.integers(0, 2), min_size=1, max_size=5),
        max_tokens=st.integers(1, 14),
    )
    def arrive(self, source, begun, max_tokens) -> None:
        name = f"r{len(self.asked)}"
        read = EncoderPrompt.of([source[0]] * source[1], 4)
        self.engine.add(name, begun, max_tokens=max_tokens, source=read)
        self.asked[name] = begun, max_tokens


TestSources = Sources.TestCase
TestSources.settings = draws(24, stateful_step_count=30)


def test_the_seconds_of_a_picture_come_from_the_last_steps() -> None:
    """A step that encodes took the time of its prompt tokens, and the rest for its rows."""
    recorder = StatsRecorder()
    for step_id, (tokens, seconds, rows) in enumerate(((100, 1.0, 0), (100, 5.0, 40), (8, 9.0, 0))):
        recorder.on_step(StepComposition(step_id, tokens, prefill_requests=1), tokens)
        recorder.on_settled(step_id, 0, StepTimings(seconds), 0.0, rows)
    seen = recorder._with_times(RunnerStats(picture_row_s=7.0))
    assert (seen.prompt_token_s, seen.picture_row_s) == (0.01, 0.1)


def test_the_speed_of_an_answer_is_measured_in_steps_that_it_has_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of the time between 200 such steps in a row; prompts, drafts and other answers do not count."""
    recorder, clock = StatsRecorder(), iter(range(10**6))
    monkeypatch.setattr(recorder_module, "now_s", lambda: next(clock) * 0.01)

    def run(count: int, **held: int) -> None:
        for _ in range(count):
            step_id = recorder.num_steps
            recorder.on_step(StepComposition(step_id, **held), 0)
            recorder.on_settled(step_id, 1, StepTimings(), 0.0)

    alone = {"decode_tokens": 1, "decode_requests": 1}
    for held in ({"decode_tokens": 4, "decode_requests": 4}, {"decode_tokens": 3, "decode_requests": 1},
                 {"prefill_tokens": 9, "prefill_requests": 1}):  # fmt: skip
        run(1, **alone)
        run(3, **held)
    assert len(recorder._lone_s) == 0
    run(200, **alone)
    assert len(recorder._lone_s) == 199
    run(1, **alone)
    assert median(recorder._lone_s) == pytest.approx(0.03)  # the clock is read three times a step
