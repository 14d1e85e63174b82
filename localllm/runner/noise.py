"""The seed of a request, from which all its randomness is derived (see kernels/sampling/noise.py)."""

from __future__ import annotations

import hashlib

from localllm.engine.params import SamplingParams


def seed_of(params: SamplingParams, request_id: str) -> int:
    """Return the request's seed as 64 bits; derived from its id if the parameters have no seed."""
    if params.seed is not None:
        return params.seed % 2**64
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little")
