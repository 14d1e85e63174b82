"""Random numbers that are a pure function of (seed, position, token id): no state, no batch, no row.

The same request draws the same noise alone or among 255 others, in any row, after any preemption. The generator is
SplitMix64 (Steele, Lea & Flood 2014, doi:10.1145/2660193.2660195) read by counter: the key of a row is its seed and
the absolute position of the token to be sampled, the counter is the token id.
Does not know: logits.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localllm.engine.params import SamplingParams

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
GROUP_STREAM = 1 << 40  # counters of token groups start here, far above any token id


def seed_of(params: SamplingParams, request_id: str) -> int:
    """The request's seed as 64 bits; from its id where it brought none and nobody drew one."""
    if params.seed is not None:
        return params.seed % 2**64
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little")


def row_keys(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[S] keys, on the host: both halves are known before the forward runs."""
    keys = _mix_numpy(seeds) + positions.astype(np.uint64) * np.uint64(_GOLDEN)
    return _mix_numpy(keys).view(np.int64)


def gumbel(keys: Tensor, counters: Tensor) -> Tensor:
    """Standard Gumbel noise in float64 for keys [S, 1] int64 and counters broadcastable to [S, n] int64."""
    return -torch.log(-torch.log(uniform(keys, counters)))


def uniform(keys: Tensor, counters: Tensor) -> Tensor:
    """float64 strictly between 0 and 1: 52 random bits and a half, so that neither logarithm sees 0."""
    return unit(_mix(keys + (counters + 1) * _signed(_GOLDEN)))


def unit(bits: Tensor) -> Tensor:
    """64 random bits as a float64 inside (0, 1). `.double()` first: an int64 plus 0.5 would be float32 in torch."""
    return ((bits >> 12 & (1 << 52) - 1).double() + 0.5) * 2.0**-52


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser. int64 products wrap; `>>` keeps the sign, hence the masks."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _signed(_MIX_1)
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _signed(_MIX_2)
    return x ^ (x >> 31 & (1 << 33) - 1)


def _mix_numpy(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return x ^ (x >> np.uint64(31))


def _signed(constant: int) -> int:
    return constant - 2**64 if constant >= 2**63 else constant
