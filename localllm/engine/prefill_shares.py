"""Divides the prefill tokens of a step among the prompts that want some.

Prompts are served in order, except that a prompt that takes more than one step leaves up to half of each step to later
ones that need at most half as much. The same rule applies among those. A short prompt therefore never waits for all of
a long one, the long one keeps at least half of its share, and prompts of similar length finish one after the other.
Does not know: requests, blocks.
"""

from __future__ import annotations

from collections.abc import Sequence


def prefill_shares(wanted: Sequence[int], classes: Sequence[int], budget: int) -> list[int]:
    """Return the tokens of `budget` for each prompt, which still wants `wanted` tokens; most urgent and oldest first.

    classes: a prompt leaves tokens only to prompts of its own class. The budget is used up unless all prompts are
    served.
    """
    shares = [0] * len(wanted)

    def divide(order: Sequence[int], left: int) -> int:
        """Serve these prompts and return the unused tokens."""
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
