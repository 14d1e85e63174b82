"""Random numbers that are a pure function of (seed, position, token id): no state, no dependence on batch or row.

A request draws the same noise alone or among 255 others, in any row, after any preemption. The generator is SplitMix64
(Steele, Lea & Flood 2014, doi:10.1145/2660193.2660195) used as a counter-based generator: the key of a row is its seed
and the absolute position of the sampled token, the counter is the token id.

Both implementations use the same 52 bits. The twin's noise is float64; a kernel's is float32, because most GPUs have
few float64 units. It keeps both tails (1 - u is computed from the bits, not from u), so the difference is rounding:
about 1e-6 in a number between -3.6 and 36.7. A draw differs only if its two best scores are that close.
Does not know: logits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localllm.kernels.launch import tl, triton

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
GROUP_STREAM = 1 << 40  # counters of token groups start here, far above any token id


def mix_seeds(seeds: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the part of a key that depends on the seed alone; kept per slot."""
    return _mix_numpy(seeds)


def row_keys(mixed_seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return [S] keys on the host, where seeds and positions are known before the forward runs."""
    return _mix_numpy(mixed_seeds + positions.astype(np.uint64) * np.uint64(_GOLDEN)).view(np.int64)


def row_keys_of(mixed_seeds: Tensor, positions: Tensor) -> Tensor:
    """Return the same keys from int64 tensors [S]."""
    return _mix(mixed_seeds + positions.long() * _signed(_GOLDEN))


def gumbel(keys: Tensor, counters: Tensor) -> Tensor:
    """Return standard Gumbel noise in float64 for keys [S, 1] int64 and counters broadcastable to [S, n] int64."""
    return -torch.log(-torch.log(uniform(keys, counters)))


def uniform(keys: Tensor, counters: Tensor) -> Tensor:
    """Return float64 numbers strictly between 0 and 1: 52 random bits and a half, so that neither logarithm sees 0."""
    return unit(_mix(keys + (counters + 1) * _signed(_GOLDEN)))


def unit(bits: Tensor) -> Tensor:
    """Return 64 random bits as a float64 inside (0, 1).
    `.double()` first: an int64 plus 0.5 would be float32 in torch."""
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


# ---- inside kernels --------------------------------------------------------------------------------------------------


@triton.jit
def row_key(mixed_seed, position):
    """Return the uint64 key of a row from its slot's mixed seed (int64) and the sampled position."""
    return mix(mixed_seed.to(tl.uint64) + position.to(tl.uint64) * 0x9E3779B97F4A7C15)


@triton.jit
def gumbel_noise(key, counters):
    """Return fp32 Gumbel noise for a row's key and int64 counters of any shape."""
    bits = mix(key + (counters + 1).to(tl.uint64) * 0x9E3779B97F4A7C15) >> 12
    below = (bits.to(tl.float32) + 0.5) * 2.220446049250313e-16  # u = (bits + 0.5) / 2**52
    above = ((4503599627370495 - bits).to(tl.float32) + 0.5) * 2.220446049250313e-16  # 1 - u, exact where u is near 1
    small = below < 0.5
    # log(1 - above) to full relative precision (Kahan): the rounding error of 1 - above is divided out again
    rest = 1.0 - tl.where(small, 0.0, above)
    same = rest == 1.0
    log_rest = tl.where(same, -above, tl.log(rest) * (above / tl.where(same, 1.0, 1.0 - rest)))
    return -tl.log(-tl.where(small, tl.log(below), log_rest))


@triton.jit
def mix(x):
    """SplitMix64's finaliser on uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)
