"""The fast sampler equals its definition, whatever a row asks and whoever its neighbours are."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from localllm.engine.params import SamplingParams
from localllm.runner.sampling import MAX_CANDIDATES
from tests.draws import draws
from tests.runner.harness import VOCAB, cases
from tests.runner.naive import Case, naive_edits, naive_token, naive_weights, random_logits, run, tokens

assert VOCAB > MAX_CANDIDATES


@draws(60)
@given(st.lists(cases, min_size=1, max_size=9), st.integers(0, 1000))
def test_equals_the_definition_row_by_row(batch: list[Case], seed: int) -> None:
    logits = random_logits(len(batch), VOCAB, seed=seed)
    usable = [np.isfinite(naive_edits(x.double().numpy(), case).max()) for x, case in zip(logits, batch, strict=True)]
    got = run(logits, batch)
    assert got.best.isfinite().tolist() == usable
    for row, case in enumerate(batch):
        if usable[row]:
            assert got.token_ids[row] == naive_token(logits[row], case), case


@draws(25)
@given(st.lists(cases, min_size=2, max_size=7), st.randoms(use_true_random=False))
def test_same_seed_same_token_in_any_row_slot_and_company(batch: list[Case], random: Any) -> None:
    logits = random_logits(len(batch), VOCAB)
    together = run(logits, batch)
    order = random.sample(range(len(batch)), len(batch))
    slots = random.sample(range(20), len(batch))
    shuffled = run(logits[order], [batch[i] for i in order], slots)
    assert shuffled.token_ids.tolist() == together.token_ids[order].tolist()
    for row, case in enumerate(batch):
        assert tokens(logits[row : row + 1], [case]) == [together.token_ids[row]]


def test_the_short_and_the_long_way_give_the_same_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few candidates, many, or the whole row (as always on CUDA): the draw does not depend on how it was found."""
    asked: list[dict[str, Any]] = [{"top_k": 30, "top_p": 0.9}, {"top_p": 0.6}, {"top_k": 5}, {"top_p": 0.99}]
    batch = [Case(SamplingParams(seed=i, **asked[i % 4])) for i in range(80)]
    logits = random_logits(80, VOCAB, seed=3)
    usual = tokens(logits, batch)
    monkeypatch.setattr("localllm.runner.sampler.FIRST_TRY", 1)
    assert tokens(logits, batch) == usual
    monkeypatch.setattr("localllm.runner.sampling.MAX_CANDIDATES", 0)
    assert tokens(logits, batch) == usual


def test_seed_and_position_both_matter() -> None:
    logits = random_logits(1, VOCAB, scale=0.1).expand(40, -1)
    by_seed = tokens(logits, [Case(SamplingParams(seed=i)) for i in range(40)])
    by_position = tokens(logits, [Case(SamplingParams(seed=1), [1] * (1 + i)) for i in range(40)])
    assert len(set(by_seed)) > 30
    assert len(set(by_position)) > 30


# ---- distributions ---------------------------------------------------------------------------------------------------

SHAPES: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 2.0, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 60, "top_p": 0.9, "min_p": 0.01},
]


@pytest.mark.parametrize("asked", SHAPES, ids=str)
def test_frequencies_and_support_are_those_of_the_distribution(asked: dict[str, Any]) -> None:
    draws, logits = 30_000, random_logits(1, 150, 1.5)
    params = SamplingParams(seed=11, **asked)
    weights = naive_weights(logits[0].double().numpy(), params)
    expected = weights / weights.sum() * draws
    counts = np.bincount(_many(logits, params, draws), minlength=150)
    assert not counts[weights == 0].any()  # nothing outside the support
    rare = expected < 5  # pooled, as the chi-square test wants it
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    chi_square = float(((observed - wanted) ** 2 / wanted).sum())
    assert chi_square < _chi_square_limit(len(wanted) - 1)


def _many(logits: torch.Tensor, params: SamplingParams, draws: int) -> list[int]:
    """Many positions of one request: only the noise differs."""
    from localllm.engine.step import NewSlot
    from localllm.runner.sampler import sample
    from localllm.runner.sampling import SamplingState

    state = SamplingState(1, logits.shape[-1], torch.device("cpu"))
    state.enter(NewSlot(0, "r", [1], 1, params, (), 0))
    batch = state.batch(np.zeros(draws, np.int64), np.arange(1, draws + 1))
    with torch.inference_mode():
        return list(sample(logits.repeat(draws, 1), batch, torch.zeros(1, 1, dtype=torch.int32)).token_ids.tolist())


def _chi_square_limit(degrees: int) -> float:
    """The value that one in 10,000 exceeds (Wilson & Hilferty 1931)."""
    if degrees == 0:
        return 1e-6
    return degrees * (1 - 2 / (9 * degrees) + 3.72 * math.sqrt(2 / (9 * degrees))) ** 3


SINGLE: list[dict[str, Any]] = [
    {"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 2e-5},
    {"top_k": 9, "min_p": 1.0}, {"top_k": 9, "top_p": 1e-9}, {"top_p": 0.9, "min_p": 1.0},
    {"top_k": 500, "top_p": 1e-9},
]  # fmt: skip


# ---- corners ---------------------------------------------------------------------------------------------------------


def test_greedy_never_divides_and_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(1, 130)
    logits[0, [70, 100]] = 5.0
    assert tokens(logits, [Case(SamplingParams(temperature=0.0))]) == [70]
    assert tokens(logits, [Case(SamplingParams(temperature=1e-5))]) == [70]


@pytest.mark.parametrize("asked", SINGLE, ids=str)
def test_a_support_of_one_is_the_argmax(asked: dict[str, Any]) -> None:
    logits = random_logits(30, VOCAB)
    batch = [Case(SamplingParams(seed=i, **asked)) for i in range(30)]
    assert tokens(logits, batch) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("asked", [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.9}], ids=str)
def test_unusable_logits_are_seen_in_their_row_only(value: float, asked: dict[str, Any]) -> None:
    logits = random_logits(3, VOCAB)
    batch = [Case(SamplingParams(**{"seed": 1, **asked}), logits) for logits in ([1], [2], [3])]
    clean = tokens(logits, batch)
    logits[1, 500] = value
    got = run(logits, batch)
    assert got.best.isfinite().tolist() == [True, False, True]
    assert [got.token_ids[0], got.token_ids[2]] == [clean[0], clean[2]]
    assert 0 <= got.token_ids[1] < VOCAB  # still an id: it is written where ids are


def test_one_token_vocabulary() -> None:
    for asked in ({"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}):
        assert tokens(torch.zeros(1, 1), [Case(SamplingParams(**{"seed": 1, **asked}), [0])]) == [0]
