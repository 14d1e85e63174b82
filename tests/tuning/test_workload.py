"""Workloads are what they say, and the same every time."""

import pytest

from localllm.errors import ConfigError
from localllm.tuning.workload import Workload, chat_lengths, fixed_lengths, repeated_prompt, uniform_lengths


def make(kind: str, seed: int, vocab_size: int = 1000) -> Workload:
    if kind == "chat":
        return chat_lengths(12, seed=seed, vocab_size=vocab_size)
    if kind == "uniform":
        return uniform_lengths(12, 10, 20, seed=seed, vocab_size=vocab_size)
    if kind == "repeated":
        return repeated_prompt(3, 40, 4, seed=seed, vocab_size=vocab_size)
    return fixed_lengths(12, 64, 16, seed=seed, vocab_size=vocab_size)


KINDS = ("fixed", "uniform", "chat", "repeated")


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_same_requests_and_another_seed_others(kind: str) -> None:
    assert make(kind, 7) == make(kind, 7)
    assert make(kind, 7).requests != make(kind, 8).requests


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_size", [8, 64, 1000, 150_000])
def test_token_ids_stay_inside_the_vocabulary(kind: str, vocab_size: int) -> None:
    ids = [i for request in make(kind, 1, vocab_size).requests for i in request.prompt_token_ids]
    assert min(ids) >= min(100, vocab_size // 4)
    assert max(ids) < vocab_size


def test_fixed_lengths_are_exact_and_prompts_unlike_from_the_start() -> None:
    workload = fixed_lengths(100, 64, 16)
    assert {(len(r.prompt_token_ids), r.max_tokens) for r in workload.requests} == {(64, 16)}
    assert len({r.prompt_token_ids[:16] for r in workload.requests}) == 100
    assert (workload.prompt_tokens, workload.output_tokens) == (6400, 1600)


def test_chat_lengths_have_the_means_of_chat_logs() -> None:
    workload = chat_lengths(4000)
    assert 185 < workload.prompt_tokens / 4000 < 235
    assert 170 < workload.output_tokens / 4000 < 210
    assert all(4 <= len(r.prompt_token_ids) <= 2048 and 1 <= r.max_tokens <= 1024 for r in workload.requests)


def test_a_repeated_prompt_is_the_very_same() -> None:
    assert len({r.prompt_token_ids for r in repeated_prompt(5, 100, 1).requests}) == 1


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, -3)])
def test_sizes_below_one_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        fixed_lengths(*sizes)


def test_a_vocabulary_of_specials_only_is_refused() -> None:
    with pytest.raises(ConfigError, match="too small"):
        fixed_lengths(1, 1, 1, vocab_size=4)
