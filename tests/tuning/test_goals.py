"""Goals and what is searched for them: the same work for every trial, and only settings that may matter."""

from dataclasses import replace
from typing import Any

import pytest

from localllm.config.settings import EngineConfig, ModelTable, Settings, Source
from localllm.models.fit import MemoryPlan
from localllm.tuning.figures import flags_of
from localllm.tuning.goals import GOALS, ROUNDS, SHORTEST, GoalLimits, goal_of
from localllm.tuning.profile import as_flags, as_toml
from localllm.tuning.space import TUNABLE, fixed_by, space_of, start_of
from localllm.tuning.workload import own_text

PLAN = MemoryPlan(
    device="cpu", dtype="float32", kv_dtype="float32", max_model_len=8192, max_num_seqs=64, max_num_batched_tokens=1024,
    long_prefill_token_threshold=256, num_blocks=(513,), block_size=16, weights_bytes=1 << 30, kv_bytes=1 << 28,
    activation_bytes=1 << 26, reserve_bytes=1 << 29, free_bytes=1 << 33, async_depth=1,
)  # fmt: skip
CONFIG = EngineConfig()


@pytest.mark.parametrize("name", GOALS)
def test_the_work_is_the_same_whatever_the_settings(name: str) -> None:
    goal = GOALS[name]
    one, other = (goal.workload(1.0, 4096, seed=3, vocab_size=500) for _ in range(2))
    assert one == other
    for request in one.requests:
        assert len(request.prompt_token_ids) + request.max_tokens <= 4096
    if not goal.fills_context:
        brief = goal.workload(0.25, 4096, seed=3, vocab_size=500)
        assert brief.requests == one.requests[: len(brief.requests)]
        assert len(one.requests) == ROUNDS * goal.streams


@pytest.mark.parametrize("context", [64, 256, 2048])
@pytest.mark.parametrize("name", GOALS)
def test_requests_fit_a_short_context(name: str, context: int) -> None:
    for request in GOALS[name].workload(1.0, context, seed=0, vocab_size=500).requests:
        assert 0 < len(request.prompt_token_ids) + request.max_tokens <= context


def test_a_slow_machine_gets_shorter_requests_and_a_fast_one_more() -> None:
    chat = GOALS["chat"]
    slow, slowest, fast = chat.scaled_to(20.0, 12.0), chat.scaled_to(1e6, 12.0), chat.scaled_to(0.1, 12.0)
    assert (slow.prompt_len, slow.output_len, slow.rounds) == (77, 19, ROUNDS)
    assert slowest.prompt_len == chat.prompt_len * SHORTEST
    assert (fast.prompt_len, fast.rounds) == (512, 32)


def test_agents_share_beginnings() -> None:
    requests = GOALS["agents"].workload(1.0, 8192, seed=0, vocab_size=500).requests
    beginnings = {request.prompt_token_ids[:4096] for request in requests}
    assert len(beginnings) == GOALS["agents"].streams < len(requests)
    assert len({request.prompt_token_ids for request in requests}) == len(requests)


def test_an_edit_begins_its_text_again() -> None:
    text = [1000 + place for place in range(4000)]
    for text_ids in (text, ()):
        requests = GOALS["edit"].workload(1.0, 8192, seed=0, vocab_size=500, text_ids=text_ids).requests
        for request in requests:
            prompt = request.prompt_token_ids
            again = round(len(prompt) / 8)
            assert prompt[-again:] == prompt[:again]
            assert request.max_tokens < len(prompt) - 2 * again, "the text goes on"
            if text_ids:
                assert list(prompt[:-again]) == text[prompt[0] - 1000 :][: len(prompt) - again]
        assert len({request.prompt_token_ids for request in requests}) == len(requests)
    assert len(own_text()) > 40_000


def test_drafts_are_searched_only_where_they_may_pay() -> None:
    def names(goal: str, config: EngineConfig = CONFIG, fixed: frozenset[str] = frozenset()) -> list[str]:
        return [axis.name for axis in space_of(GOALS[goal], PLAN, config, fixed, 8192).axes]

    assert [goal for goal in GOALS if "speculative" in names(goal)] == ["edit"]
    assert "speculative" not in names("edit", fixed=frozenset({"speculative"}))
    assert "speculative" not in names("edit", replace(CONFIG, speculative_config='{"method": "ngram"}'))


def test_ram_for_kv_blocks_is_searched_only_where_prompts_share_prefixes_on_a_gpu() -> None:
    def sizes(goal: str, device: str = "cuda:0", ram: int = 4 * 2**30) -> list[object]:
        plan = replace(PLAN, device=device, kv_ram_bytes=ram)
        axes = space_of(GOALS[goal], plan, CONFIG, (), 8192).axes
        return [value for axis in axes if axis.name == "kv_offloading_size" for value in axis.values]

    assert sizes("agents") == [None, 0.0, 8.0]
    assert not any(sizes(goal) for goal in GOALS if goal != "agents")
    assert not sizes("agents", "cpu")
    assert not sizes("agents", ram=0)


def test_limits_go_over_a_goals_own() -> None:
    assert goal_of("long-context").limits.max_ttft_s == 60.0
    assert goal_of("long-context", GoalLimits(max_ttft_s=5.0)).limits.max_ttft_s == 5.0
    assert goal_of("long-context", GoalLimits(min_context=4096)).limits.max_ttft_s == 60.0


@pytest.mark.parametrize("people", [1, 6, 100])
def test_so_many_people_find_a_slot_each(people: int) -> None:
    goal = goal_of("share", people=people)
    space = space_of(goal, PLAN, CONFIG, (), 8192)
    seqs = next(axis for axis in space.axes if axis.name == "max_num_seqs")
    assert goal.streams == people <= min(seqs.values)


@pytest.mark.parametrize("name", GOALS)
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_what_is_searched_can_be_asked(name: str, device: str) -> None:
    """Every value on every axis is one that a flag takes, and the planner's guess stands among them."""
    plan = replace(PLAN, device=device, max_num_batched_tokens=1024 if device == "cpu" else 2048)
    space = space_of(GOALS[name], plan, CONFIG, (), 131_072)
    assert {axis.name for axis in space.axes} <= set(TUNABLE)
    for axis in space.axes:
        for value in axis.values:
            replace(CONFIG, **{axis.name: value})
    guess = start_of(space, plan, CONFIG)
    assert space.settings(space.point(guess)) == guess


def test_what_was_set_is_not_searched() -> None:
    sources: dict[str, Source] = {"max_num_seqs": "flag", "max_num_batched_tokens": "default", "port": "flag"}
    tables = {"demo": ModelTable("demo", {"kv_cache_dtype": "auto"})}
    fixed = fixed_by(Settings(sources=sources, models=tables))
    assert fixed == {"max_num_seqs", "kv_cache_dtype"}
    space = space_of(GOALS["chat"], PLAN, CONFIG, fixed, 8192)
    assert [axis.name for axis in space.axes] == ["max_num_batched_tokens"]


@pytest.mark.parametrize(
    ("settings", "flags", "toml"),
    [
        ({"max_num_seqs": 64, "kv_cache_dtype": "auto", "max_model_len": None}, "", ""),
        ({"max_num_seqs": 8, "enforce_eager": True}, " --max-num-seqs 8 --enforce-eager",
         "\nmax_num_seqs = 8\nenforce_eager = true"),
        ({"kv_cache_dtype": "int8"}, " --kv-cache-dtype int8", '\nkv_cache_dtype = "int8"'),
    ],
)  # fmt: skip
def test_settings_are_exported_as_they_are_typed(settings: dict[str, Any], flags: str, toml: str) -> None:
    assert as_flags("org/m", settings) == f"localllm up org/m{flags}"
    assert as_toml("org/m", settings) == f'[models."org/m"]{toml}'
    assert flags_of({"enforce_eager": False, "max_model_len": None}) == ""
