"""Counts of a request's drafts that were right, and the probability that the next one is.

Does not know: where drafts come from, what a step costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

FIRST_RATE = 0.7
"""Probability that a draft is right if its predecessors are, before anything of the request was verified."""
PRIOR_WEIGHT = 1.0
"""Drafts for which `FIRST_RATE` counts."""
REJECTION_DECAY = 0.95
"""Weight that a rejection leaves to what was verified before it."""
HALF_LIFE = 64.0
"""Output tokens after which the verified drafts count half, so that a request without luck is tried again."""


class DraftCounts(NamedTuple):
    """Drafts of a request that were verified so far."""

    checked: int = 0
    accepted: int = 0
    predicted_accepted: int = 0  # of those that came from the request's prediction
    predicted_rejected: int = 0

    def plus(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(*map(sum, zip(self, other, strict=True)))


NO_COUNTS = DraftCounts()


@dataclass(slots=True)
class Acceptance:
    """The verified drafts of one request."""

    counts: DraftCounts = NO_COUNTS
    _accepted: float = 0.0  # weights of the recent ones
    _rejected: float = 0.0

    @property
    def rate(self) -> float:
        """Probability that the next draft is right if those before it are."""
        total = self._accepted + self._rejected + PRIOR_WEIGHT
        return (self._accepted + FIRST_RATE * PRIOR_WEIGHT) / total

    def settle(self, checked: int, accepted: int, *, are_predicted: bool = False) -> None:
        """Record a row that verified `checked` drafts, 0 or more, of which the first `accepted` were right."""
        if checked:
            predicted = (accepted, checked - accepted) if are_predicted else (0, 0)
            self.counts = self.counts.plus(DraftCounts(checked, accepted, *predicted))
        kept = 0.5 ** ((1 + accepted) / HALF_LIFE)
        is_rejected = accepted < checked
        if is_rejected:
            kept *= REJECTION_DECAY
        self._accepted = self._accepted * kept + accepted
        self._rejected = self._rejected * kept + is_rejected

    def expected(self, drafts: int) -> float:
        """Return the expected number of right drafts among `drafts`."""
        rate, power, total = self.rate, 1.0, 0.0
        for _ in range(drafts):
            power *= rate
            total += power
        return total
