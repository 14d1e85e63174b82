"""Why a prompt was not found in the prefix cache: what is said, to whom, and with what bounds."""

import random
import time
from array import array
from collections.abc import Sequence
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.engine import prompt_history
from localllm.engine.memory.block_names import BlockHasher
from localllm.engine.params import SamplingParams
from localllm.engine.prompt_history import NUM_SHOWN, OFF, RUN, CacheMiss, Prefix, PromptHistory
from localllm.engine.request import Request, RequestOptions
from tests.engine.harness import BLOCK_SIZE, SmallEngine, make_engine

HASHER = BlockHasher(b"model", BLOCK_SIZE)
REST = list(range(100, 300))


def prefix_of(token_ids: Sequence[int], name: str = "new", owner: str = "", salt: str = "") -> Prefix:
    root, names = HASHER.root([("salt", salt)] if salt else []), list[bytes]()
    ids = array("i", token_ids)
    HASHER.extend(names, root, ids)
    return Prefix(name, owner, root, ids.tobytes(), names)


def history_of(*prompts: Sequence[int], owner: str = "") -> PromptHistory:
    """Return a history of prompts that are named by their place."""
    history = PromptHistory(BLOCK_SIZE, BLOCK_SIZE)
    for place, prompt in enumerate(prompts):
        history.remember(place, prefix_of(prompt, str(place), owner))
    return history


def num_common(some: Sequence[int], others: Sequence[int]) -> int:
    """The naive longest common prefix."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(some, others, strict=False))))


alike = st.lists(st.integers(0, 1), min_size=1, max_size=40)  # two tokens, so that many prompts begin alike


@given(st.lists(alike, min_size=1, max_size=8), alike)
def test_the_difference_is_where_a_naive_comparison_finds_it(earlier, prompt):
    for each in earlier:
        assert prefix_of(prompt).num_common(prefix_of(each), BLOCK_SIZE) == num_common(prompt, each)
    deepest = max(num_common(prompt, each) for each in earlier)
    miss = history_of(*earlier).explain(prefix_of(prompt), deepest // BLOCK_SIZE * BLOCK_SIZE, 0)
    if miss is None or miss.reason == "new":
        return
    assert miss.reason == "changed"
    other = earlier[int(miss.request_id)]
    at = miss.position
    assert at == num_common(prompt, other)
    assert list(miss.before) == prompt[max(0, at - NUM_SHOWN) : at]
    assert (list(miss.here), list(miss.earlier)) == (prompt[at : at + NUM_SHOWN], other[at : at + NUM_SHOWN])
    assert miss.num_tokens or at == deepest, "another one is only named if it had more of the prompt"


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=60), max_size=5), st.integers(0, 3))
def test_what_is_the_same_again_is_never_overstated(pieces, drop):
    """Every counted token is in both prompts, in the same order, so a count is a common subsequence."""
    prompt = [token for piece in pieces for token in [*piece, *REST[:20]]]
    other = [token for piece in pieces[drop:] for token in [*REST[:20], *piece]]
    runs = prompt_history._runs(prefix_of(prompt), prefix_of(other), 0)
    after = end = 0
    for begin, stop in runs:
        assert end <= begin <= stop - RUN
        piece, end = prompt[begin:stop], stop
        after = next(at for at in range(after, len(other)) if other[at : at + len(piece)] == piece) + len(piece)


@pytest.mark.parametrize("width", [1, 3, 40])
def test_a_change_at_the_head_costs_what_follows_it(width: int) -> None:
    earlier = [*range(6), *[7] * 3, *REST]
    prompt = [*range(6), *[8] * width, *REST]
    miss = history_of(earlier).explain(prefix_of(prompt), BLOCK_SIZE, BLOCK_SIZE)
    assert miss is not None
    assert (miss.reason, miss.position, miss.num_tokens, miss.request_id) == ("changed", 6, len(REST), "0")
    assert miss.here[:width] == tuple([8] * width)[:NUM_SHOWN]
    assert miss.earlier[:4] == (7, 7, 7, REST[0])


def test_a_prompt_that_differs_early_is_compared_with_the_one_that_has_most_of_it() -> None:
    """A side request that begins like the prompt for longer is not why the rest was computed again."""
    main, side = [*range(6), 7, *REST], [*range(6), 8, 9, 10, 11, 12]
    prompt = [*range(6), 8, 9, *REST]
    miss = history_of(main, side).explain(prefix_of(prompt), 2 * BLOCK_SIZE, 2 * BLOCK_SIZE)
    assert miss is not None
    assert (miss.request_id, miss.position, miss.num_tokens) == ("0", 6, len(REST))


def test_nothing_is_explained_where_nothing_was_lost() -> None:
    history = history_of(REST)
    cached = len(REST) // BLOCK_SIZE * BLOCK_SIZE
    assert history.explain(prefix_of([*REST, *range(30)]), cached, cached) is None, "it continues the prompt"
    assert history.explain(prefix_of(REST[:50]), 48, 48) is None, "it is the start of the prompt"
    assert history.explain(prefix_of(REST), cached - BLOCK_SIZE, 0) is None, "the last token is always computed"


def test_only_prompts_of_the_same_owner_and_salt_are_compared() -> None:
    history = history_of(REST, owner="#1")
    for asked in (prefix_of(REST), prefix_of(REST, owner="#2"), prefix_of(REST, owner="#1", salt="x")):
        assert history.explain(asked, 0, 0) == CacheMiss("new")
    mine = history.explain(prefix_of(REST, owner="#1"), 0, 0)
    assert mine is not None
    assert (mine.reason, mine.num_tokens) == ("evicted", 196)
    history.keep_miss("a", "#1", mine)
    assert history.miss_of("a", "#1") == mine
    assert [history.miss_of("a", other) for other in ("", "#2")] == [None, None]


def test_memory_is_bounded_by_requests_and_by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_history, "MOST_REQUESTS", 10)
    monkeypatch.setattr(prompt_history, "MOST_TOKENS", 100)
    monkeypatch.setattr(prompt_history, "MOST_MISSES", 10)
    history, lengths = PromptHistory(BLOCK_SIZE, BLOCK_SIZE), [9, 40, 5, 130, 20, *[3] * 30]
    for place, length in enumerate(lengths):
        prompt = prefix_of([place * 1000 + at for at in range(length)], str(place))
        history.remember(place, prompt)
        history.keep_miss(str(place), "", None)
        kept = [len(each.token_ids) for each in history._requests.values()]
        assert history.num_tokens == sum(kept)
        assert len(kept) == 1 or (history.num_tokens <= 100 and len(kept) <= 10)
        assert len(history._misses) <= 10
        assert history.explain(prompt, 0, 0) in (None, CacheMiss("new")) or length >= BLOCK_SIZE


def test_a_conversation_is_remembered_once() -> None:
    """Each turn replaces the one before, whose tokens it begins with; another conversation stays."""
    history = history_of(*[REST[:length] for length in (50, 90, 90, 160)], [1, 2, 3])
    assert [len(each.token_ids) for each in history._requests.values()] == [160, 3]
    history.remember(3, prefix_of(REST[:120], "3"))  # it ended before it had computed everything
    assert history.num_tokens == 123


def ask(engine: SmallEngine, name: str, prompt: Sequence[int], owner: str = "", **params: object) -> Request:
    asked = SamplingParams(temperature=0.0, max_tokens=3, **params)  # type: ignore[arg-type]
    request = Request(name, prompt, asked, RequestOptions(owner=owner), max_output_tokens=3)
    engine.loop.submit(request)
    engine.run()
    return request


def test_the_engine_explains_each_reason() -> None:
    engine = make_engine(num_blocks=40, max_model_len=400)
    prompt = [*range(6), 7, *REST[:60]]
    assert ask(engine, "a", prompt).cache_miss == CacheMiss("new")
    again = ask(engine, "b", prompt)
    assert again.cache_miss is None
    assert again.num_cached_tokens == 64
    changed = ask(engine, "c", [*range(6), 8, *REST[:60]])
    miss = changed.cache_miss
    assert miss is not None
    assert (miss.reason, miss.position, miss.num_tokens, miss.request_id) == ("changed", 6, 60, "b")
    assert engine.endings["c"][0].cache_miss == miss
    assert engine.loop.cache_miss("c", "") == miss
    line = changed.timeline()
    assert (line.miss_reason, line.miss_position, line.num_missed_tokens) == ("changed", 6, 60)
    for place in range(4):  # other prompts take all blocks
        ask(engine, f"other {place}", [1000 * place + at for at in range(120)])
    evicted = ask(engine, "d", prompt).cache_miss
    assert evicted is not None
    assert (evicted.reason, evicted.position, evicted.num_tokens) == ("evicted", 0, 64)
    assert ask(engine, "e", prompt, prompt_logprobs=1).cache_miss is OFF
    off = make_engine(num_blocks=40, enable_prefix_caching=False)
    assert [ask(off, name, prompt).cache_miss for name in "ab"] == [OFF, OFF]
    assert not off.scheduler.table.history.num_tokens


def test_the_output_counts_as_a_part_of_the_earlier_request() -> None:
    """A client that leaves something out of an answer, such as reasoning, is told where."""
    engine = make_engine(num_blocks=60, max_model_len=400)
    prompt = REST[:30]
    ask(engine, "a", prompt)
    answer = engine.tokens["a"]
    miss = ask(engine, "b", [*prompt, answer[0], answer[1] + 1, *range(30)]).cache_miss
    assert miss is not None
    assert (miss.reason, miss.position) == ("changed", 31)


def test_a_failure_to_explain_ends_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    monkeypatch.setattr(PromptHistory, "explain", lambda *args: 1 / 0)
    monkeypatch.setattr(PromptHistory, "remember", lambda *args: 1 / 0)
    assert ask(engine, "a", REST[:20]).finish_reason == "length"


def test_a_long_prompt_is_explained_quickly() -> None:
    """The median of many, by this thread's own time; the bound is far above what it takes."""
    draw = random.Random(0)
    base = [draw.randrange(50_000) for _ in range(32_000)]
    history = history_of(*[[*base[:16], 60_000 + place, *base[17:]] for place in range(20)])
    prompt, taken = prefix_of([*base[:16], 1, 2, 3, *base[17:]]), list[float]()
    for _ in range(21):
        started = time.thread_time()
        miss = history.explain(prompt, 16, 16)
        taken.append(time.thread_time() - started)
    assert miss is not None
    assert (miss.position, miss.num_tokens) == (16, 31_983)
    assert sorted(taken)[10] < 0.02
