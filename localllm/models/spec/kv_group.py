"""One KV group: layers that share a block table, and how many blocks a request holds in it.

Does not know: the model's spec (kv_groups.py derives its groups), which request holds which block, tensors.
"""

from __future__ import annotations

from typing import NamedTuple


class KVGroup(NamedTuple):
    """Layers that share one block table: the same window, and the same shape of K and V."""

    name: str  # full, or window_1024; with the shape behind it if that alone does not tell two groups apart
    layers: tuple[int, ...]  # ascending; of a pipeline stage its own numbers, and possibly none
    window: int | None  # tokens that the layers see, including the current one; None: all
    num_kv_heads: int
    head_dim: int
    values_are_keys: bool  # one latent is both key and value

    @property
    def numbers_per_token(self) -> int:
        """Numbers in K and V of one token position over the group's layers."""
        return len(self.layers) * self.num_kv_heads * self.head_dim * (1 if self.values_are_keys else 2)


def held_blocks(num_tokens: int, window: int | None, block_size: int, step_tokens: int = 0) -> int:
    """Return the most blocks that a request of `num_tokens` holds in a group while it computes `step_tokens` at once.

    A window needs the positions before the first query, and may begin and end inside a block. One token per step is
    part of the window.
    """
    blocks = -(-num_tokens // block_size)
    return blocks if window is None else min(blocks, -(-(window - 1 + step_tokens) // block_size) + 2)


def main_group(windows: tuple[int | None, ...]) -> int:
    """Return the index of the first group that keeps every token; of the longest window if all have one."""
    return max(range(len(windows)), key=lambda group: (windows[group] is None, windows[group] or 0, -group))
