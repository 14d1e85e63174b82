"""Noise is a function of seed, position and token id, and looks like noise in each of them."""

import math

import numpy as np
import pytest
import torch

from localllm.engine.params import SamplingParams
from localllm.kernels.sampling import noise
from localllm.runner.sampling import seed_of
from tests.runner import naive


def keys_of(seeds: list[int], positions: list[int]) -> torch.Tensor:
    wrapped = np.array([seed % 2**64 for seed in seeds], np.uint64)
    return torch.from_numpy(noise.row_keys(noise.mix_seeds(wrapped), np.array(positions)))[:, None]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 123456789])
def test_matches_the_definition(seed: int) -> None:
    counters = torch.tensor([0, 1, 63, 151_935, noise.GROUP_STREAM, noise.GROUP_STREAM + 7])
    for position in (1, 17, 131_071):
        got = noise.uniform(keys_of([seed], [position]), counters)[0].tolist()
        assert got == [naive.uniform(naive.row_key(seed, position), c) for c in counters.tolist()]


def test_uniform_is_never_0_or_1() -> None:
    for bits in (0, -1, 2**63 - 1, -(2**63)):
        u = noise.unit(torch.tensor([bits])).item()
        assert 0 < u < 1
        assert math.isfinite(-math.log(-math.log(u)))


@pytest.mark.parametrize("vary", ["seed", "position", "token"])
def test_looks_uniform_along_each_axis(vary: str) -> None:
    n = 40_000
    if vary == "token":
        u = noise.uniform(keys_of([5], [9]), torch.arange(n)).flatten()
    else:
        axis = list(range(n))
        keys = keys_of(axis if vary == "seed" else [5] * n, axis if vary == "position" else [9] * n)
        u = noise.uniform(keys, torch.tensor([3])).flatten()
    counts = torch.histc(u, 100, 0, 1)
    chi_square = float(((counts - n / 100) ** 2 / (n / 100)).sum())
    assert 50 < chi_square < 165  # 99 degrees of freedom: 1 in 10,000 on either side
    centred = u - u.mean()
    assert abs(float((centred[1:] * centred[:-1]).mean() * 12)) < 4 / math.sqrt(n)  # neighbours are uncorrelated


def test_request_without_seed_takes_its_id() -> None:
    params = SamplingParams()
    assert seed_of(params, "a") == seed_of(params, "a") != seed_of(params, "b")
    assert seed_of(SamplingParams(seed=-1), "a") == 2**64 - 1
