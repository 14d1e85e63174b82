"""Memory of the recurrent states of a model: places for the requests that run at once, and for checkpoints.

    1                   the null place
    max_num_seqs        one for each running request; fewer requests rather than a shorter context
    checkpoints         with prefix caching: what the states' share of the memory holds, at most one per KV block;
                        where that is short, as many as requests run at once

States take at most STATE_SHARE of what weights and a step leave, unless MIN_SEQS requests and MIN_CHECKPOINTS
checkpoints need more.
Does not know: bytes of a device, what a state consists of (spec/states.py), what is saved (engine/checkpoints.py).
"""

from __future__ import annotations

from typing import NamedTuple

STATE_SHARE = 0.25
MIN_SEQS, MIN_CHECKPOINTS = 2, 4
COPIED_STATES = 4
"""Most rows with drafts of a step on a CPU, whose states are copied: each has 2 of the 8 tokens of a native step."""
SMALL_STATE_BYTES = 1024**2
INTERVAL = 256
"""Tokens of an output from one checkpoint to the next, where a state is not small."""


class StatePlaces(NamedTuple):
    """The places of recurrent states, and the requests that have one at once."""

    num_places: int  # with the null place
    max_num_seqs: int


def state_places(
    left_bytes: int, bytes_per_place: int, max_num_seqs: int, num_blocks: int, *, caches_prefixes: bool
) -> StatePlaces:
    """Divide what weights and a step leave. num_blocks: KV blocks, each of which may have a checkpoint at its end."""
    checkpoints = MIN_CHECKPOINTS if caches_prefixes else 0
    affordable = int(left_bytes * STATE_SHARE) // bytes_per_place
    running = (affordable - 1) // 2 if caches_prefixes else affordable - 1  # rather a checkpoint for each of fewer
    seqs = min(max_num_seqs, max(MIN_SEQS, running))
    if caches_prefixes:
        checkpoints = max(checkpoints, min(affordable - 1 - seqs, num_blocks))
    return StatePlaces(1 + seqs + checkpoints, seqs)


def state_interval(bytes_per_place: int, block_size: int) -> int:
    """Return the tokens of an output from one checkpoint to the next: a block where a state is small."""
    return block_size if bytes_per_place < SMALL_STATE_BYTES else INTERVAL
