"""How the prefill tokens of a step are divided among the prompts that want some.

Whoever came first is served first, except that a prompt that takes more than one step leaves up to half of each step
to those behind it that need at most half as much. The same holds among those. So a short prompt never waits for all of
a long one, the long one keeps at least half of what it had, and prompts of like length finish one after the other.
Does not know: requests, blocks.
"""

from __future__ import annotations

from collections.abc import Sequence


def prefill_shares(wanted: Sequence[int], classes: Sequence[int], budget: int) -> list[int]:
    """Tokens of `budget` for each prompt that still wants `wanted` tokens, most urgent and oldest first.

    classes: a prompt leaves tokens to prompts of its own class alone. Nothing is left over that a prompt wants.
    """
    shares = [0] * len(wanted)

    def divide(order: Sequence[int], left: int) -> int:
        """Serve these prompts and return what is left over."""
        for place, first in enumerate(order):
            if not left:
                break
            if wanted[first] > left:
                behind = order[place + 1 :]
                short = [i for i in behind if 2 * wanted[i] <= wanted[first] and classes[i] == classes[first]]
                left -= left // 2 - divide(short, left // 2)
            shares[first] = min(wanted[first], left)
            left -= shares[first]
        return left

    divide(range(len(wanted)), budget)
    return shares
