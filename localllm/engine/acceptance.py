"""How many of a request's drafts were right: totals, and the probability that the next one is.

Does not know: where drafts come from, what a step costs.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_RATE = 0.7
"""Probability that a draft is right if its predecessors are, before anything of the request was verified."""
PRIOR_WEIGHT = 1.0
"""Drafts for which `FIRST_RATE` counts."""
REJECTION_DECAY = 0.95
"""Weight that a rejection leaves to what was verified before it."""
HALF_LIFE = 64.0
"""Output tokens after which the verified drafts count half, so that a request without luck is tried again."""


@dataclass(slots=True)
class Acceptance:
    """The verified drafts of one request."""

    num_checked: int = 0  # drafts
    num_accepted: int = 0
    _accepted: float = 0.0  # weights of the recent ones
    _rejected: float = 0.0

    @property
    def rate(self) -> float:
        """Probability that the next draft is right if those before it are."""
        total = self._accepted + self._rejected + PRIOR_WEIGHT
        return (self._accepted + FIRST_RATE * PRIOR_WEIGHT) / total

    def settle(self, checked: int, accepted: int) -> None:
        """Record a row that verified `checked` drafts, 0 or more, of which the first `accepted` were right."""
        self.num_checked += checked
        self.num_accepted += accepted
        kept = 0.5 ** ((1 + accepted) / HALF_LIFE)
        is_rejected = accepted < checked
        if is_rejected:
            kept *= REJECTION_DECAY
        self._accepted = self._accepted * kept + accepted
        self._rejected = self._rejected * kept + is_rejected

    def expected(self, drafts: int) -> float:
        """Return the expected number of right drafts among so many."""
        rate, power, total = self.rate, 1.0, 0.0
        for _ in range(drafts):
            power *= rate
            total += power
        return total
