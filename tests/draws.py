"""The day of a quick run, and how many examples a test draws: all with `scripts/check --slow`, else a quarter."""

import os
from typing import Any

from hypothesis import HealthCheck, settings

DAY = os.environ.get("LOCALLLM_TEST_DAY", "")
"""The number of the day, set by scripts/check for its quick run; empty: every case and every example runs."""
QUICK = bool(DAY)
LEAST = 10


def draws(examples: int, **options: Any) -> settings:
    """Return settings of a test or a walk with this many examples, without a deadline.

    The quick run draws a quarter of them, at least `LEAST`; its seed is the day, so that other days draw others.
    """
    few = max(examples // 4, min(examples, LEAST))
    options = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], **options}
    return settings(max_examples=few if QUICK else examples, **options)


def seeds(count: int) -> range:
    """Return the seeds of a test that walks by itself: all, and in the quick run the quarter of this day."""
    return range(int(DAY) % 4, count, 4) if QUICK else range(count)
