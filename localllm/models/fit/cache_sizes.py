"""Division of the KV cache's memory among the KV groups of a model, and the number of its recurrent states.

The blocks of the *main* group, which keeps every token, are the size that a plan chooses; the other groups follow:

    full        as many as the main group
    windowed    one window plus one block per context that is served or kept for later, and the tokens of one step (a
                prompt chunk holds them until its window has passed)

Contexts are counted as CONTEXT_LEN tokens of the main group: shorter ones hold less than a window and longer ones are
fewer. They are at most max_num_seqs, or KEPT_CONTEXTS, so that some windows stay in the prefix cache where few requests
run at a time. Requests below CONTEXT_LEN tokens can run out of a windowed group's blocks before the main group's; then
they wait, as they do for the main group.

A state is kept for each request that runs and for each checkpoint:

    1                   the null state
    max_num_seqs        one for each running request; fewer requests rather than a shorter context
    checkpoints         with prefix caching: what the states' share of the memory holds, at most one per KV block;
                        where that is short, as many as requests run at once

States take at most STATE_SHARE of what weights and a step leave, unless MIN_SEQS requests and MIN_CHECKPOINTS
checkpoints need more.
Does not know: bytes of a device, how the main group's size is chosen (plan_attempt.py), what a state consists of
(spec/model_spec.py), which states are saved (engine/memory/state_checkpoints.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from localllm.models.spec.model_spec import KVGroup, held_blocks, main_group

CONTEXT_LEN = 4096
KEPT_CONTEXTS = 16
MOST_BLOCKS = 2**40  # of a rank that holds no layer of a group that grows


class KVSplit(NamedTuple):
    """The sizes that the division depends on."""

    windows: tuple[int | None, ...]  # of each group, as in kernels/kv_format.py
    block_size: int
    step_tokens: int  # max_num_batched_tokens
    max_num_seqs: int

    def blocks(self, main: int) -> tuple[int, ...]:
        """Return the blocks of each group, null blocks included, where the main group has `main`."""
        chosen = main_group(self.windows)
        contexts = -(-(main - 1) * self.block_size // CONTEXT_LEN)
        contexts = max(1, min(contexts, max(self.max_num_seqs, KEPT_CONTEXTS)))
        step = -(-self.step_tokens // self.block_size)
        return tuple(
            main
            if window is None or group == chosen
            else min(main, 1 + contexts * held_blocks(CONTEXT_LEN + abs(window), window, self.block_size) + step)
            for group, window in enumerate(self.windows)
        )

    def needs(self, num_tokens: int) -> int:
        """Return the main group's blocks, its null block included, for one request of this length."""
        window = self.windows[main_group(self.windows)]
        return 1 + held_blocks(num_tokens, window, self.block_size, self.step_tokens)

    def concurrency(self, num_blocks: Sequence[int], num_tokens: int) -> int:
        """Return how many requests of this length such a cache holds at the same time, while one computes a step."""
        step = -(-self.step_tokens // self.block_size)
        fits = []
        for count, window in zip(num_blocks, self.windows, strict=True):
            own = held_blocks(num_tokens, window, self.block_size)
            at_once = held_blocks(num_tokens, window, self.block_size, self.step_tokens)
            fits.append((count - 1 - min(step, at_once - own)) // own)
        return max(0, min(fits))


def split_of(groups: Sequence[KVGroup], block_size: int, step_tokens: int, max_num_seqs: int) -> KVSplit:
    return KVSplit(tuple(group.window for group in groups), block_size, step_tokens, max_num_seqs)


def most_blocks(fits: Callable[[int], bool]) -> int:
    """Return the largest number of blocks that fits, 0 if none does, by bisection (fitting is monotone)."""
    low, high = 0, 1
    while high < MOST_BLOCKS and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


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
    """Divide the memory that weights and a step leave. num_blocks: KV blocks; each may have a checkpoint at its end."""
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
